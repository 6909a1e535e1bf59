"""Small pieces of HTML; whatever comes from a user or a file is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

Cells = Sequence[str]


def element(tag: str, content: str, **attributes: str) -> str:
    """``content`` is HTML already; attribute values are escaped, `_` in their names is `-`."""
    named = "".join(f' {name.strip("_").replace("_", "-")}="{escape(v)}"' for name, v in attributes.items())
    return f"<{tag}{named}>{content}</{tag}>"


def text(tag: str, content: str, **attributes: str) -> str:
    """An element that holds plain text."""
    return element(tag, escape(content), **attributes)


def table(head: Cells, rows: Iterable[Cells], *, caption: str = "") -> str:
    """Plain text in cells; the first column names its row, the others are set to the right."""
    titles = "".join(text("th", title, scope="col") for title in head)
    body = "".join(
        element("tr", text("th", first, scope="row") + "".join(text("td", cell) for cell in rest))
        for first, *rest in rows
    )
    said = text("caption", caption) if caption else ""
    return element("table", f"{said}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>")
