"""The tables of docs/threats.md, made from the attacks: ``python -m tests.attacks.threats`` rewrites them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.attacks.test_attacks import ATTACKS

PAGE = Path(__file__).parents[2] / "docs" / "threats.md"
START, STOP = "<!-- attacks -->\n", "<!-- end of attacks -->\n"


def table() -> str:
    lines = [
        "| attack | what the server does | what it would get | what stops it | the silo says |",
        "|---|---|---|---|---|",
    ]
    for name, attack in ATTACKS.items():
        does = (type(attack).__doc__ or "").strip().splitlines()[0].removesuffix(".")
        stops = ", ".join(f"`{key}`" for key in attack.keys) or attack.check
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower()
        lines.append(f"| {words} | {does} | {attack.yields} | {stops} | `{attack.reason.name}` |")
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    head, rest = page.split(START)
    return head + START + table() + STOP + rest.split(STOP)[1]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
