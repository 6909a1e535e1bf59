"""Write the generated pages into `docs/`, and the generated parts of pages that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedtmle.targets.effects import estimands
from tools.document import api, messages, proved, published, wire

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "messages.md": messages.page,
    "wire.md": wire.page,
    "api.md": api.page,
    "proved.md": proved.page,
    "published.md": published.page,
}


def _estimand_table() -> str:
    return "\n".join(api.estimand_table())


def _estimand_list() -> str:
    return "\n".join(f"* `{estimand.__name__}`: {estimand.description}" for estimand in estimands.ESTIMANDS)


# Text between `<!-- estimands -->` and `<!-- end -->`.
PARTS: dict[str, Callable[[], str]] = {"docs/statistician.md": _estimand_table, "README.md": _estimand_list}


def with_part(name: str) -> str:
    """Return a page with its generated part written anew."""
    start, end = "<!-- estimands -->\n\n", "\n\n<!-- end -->"
    before, _, rest = (ROOT / name).read_text(encoding="utf-8").partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}{PARTS[name]()}{end}{after}"


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    for name in PARTS:
        (ROOT / name).write_text(with_part(name), encoding="utf-8")
