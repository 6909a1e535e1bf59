"""Writes the generated pages into `docs/`."""

from __future__ import annotations

from pathlib import Path

from fedtmle.theory.registry import table
from tools.document import api, messages, wire

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"messages.md": messages.page, "wire.md": wire.page, "api.md": api.page, "proved.md": table}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
