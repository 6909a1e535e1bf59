"""The pages that the code writes are current and complete; names in the glossary exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from tools.document import api, wire
from tools.document.__main__ import DOCS, PAGES, PARTS, with_part
from tools.document.examples import classes
from tools.document.messages import RISKS

from fedtmle.protocol.messages import TABLE, State
from fedtmle.protocol.policy import Policy
from fedtmle.targets.effects.estimands import ESTIMANDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    kept = (DOCS / name).read_text(encoding="utf-8")
    assert kept == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("name", PARTS)
def test_generated_parts_of_pages_are_current(name: str) -> None:
    kept = (ROOT / name).read_text(encoding="utf-8")
    assert kept == with_part(name), "run `make docs`"
    for estimand in ESTIMANDS:
        assert f"`{estimand.__name__}`" in kept


def test_every_kind_of_answer_is_on_the_page_with_its_risk() -> None:
    kinds = {kind.__name__ for kind in classes()}
    assert kinds == set(RISKS)
    page = (DOCS / "messages.md").read_text(encoding="utf-8")
    assert page.count("**Example**") == page.count("**What it may disclose**") == len(kinds)
    for key, *_ in Policy.limits():
        assert f"| `{key}` |" in page


def test_the_diagram_is_the_table() -> None:
    drawn = wire.drawing()
    for state in State:
        assert f">{state.value}</text>" in drawn
    for line in TABLE:
        assert f">{line.request.__name__.lower()}</text>" in drawn
    arrows = len({(line.state, to) for line in TABLE for to in line.leads_to})
    assert drawn.count("marker-end") == arrows


def test_the_reference_names_everything() -> None:
    import fedtmle as ft

    listed = set(re.findall(r"^   fedtmle\.(\w+)$|^\* `ft\.(\w+)`", api.page(), flags=re.MULTILINE))
    assert {listing or value for listing, value in listed} == set(ft.__all__)
    page = api.page()
    assert "## More" not in page  # every name has its group


def test_names_in_the_glossary_exist() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    names = re.findall(r"`(fedtmle\.[\w.]+)`", text)
    assert len(names) > 30
    for name in names:
        assert resolves(name), name


def resolves(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_navigation_has_every_page() -> None:
    """Every page is in one table of contents, and the gallery in the first."""
    listed = ["index"]
    for page in written_pages():
        text = (DOCS / page).with_suffix(".md").read_text(encoding="utf-8")
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", text, flags=re.DOTALL):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed += [(Path(page).parent / name).as_posix() for name in names]
    assert sorted(listed) == sorted([*written_pages(), "studies/index"])


def written_pages() -> list[str]:
    pages = (path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
    return [page for page in pages if not page.startswith(("generated/", "studies/"))]


def test_pages_keep_to_one_word_per_concept() -> None:
    """The glossary names phrases that no page, help text or message uses."""
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    table = glossary.partition("## One word per concept")[2]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    banned = [phrase.strip() for *_, phrases in rows for phrase in phrases.split(",")]
    assert len(banned) > 10
    texts = {page: (DOCS / page).with_suffix(".md") for page in written_pages() if page != "glossary"}
    texts |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md")}
    texts |= {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "src").rglob("*.py")}
    core = (ROOT / "core/src").rglob("*.py")
    texts |= {path.relative_to(ROOT).as_posix(): path for path in core}
    for name, path in texts.items():
        text = " ".join(path.read_text(encoding="utf-8").split()).lower()
        assert [phrase for phrase in banned if phrase in text] == [], name
