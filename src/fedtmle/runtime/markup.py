"""Small pieces of HTML; text from a user or a file is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

Cells = Sequence[str]
FEW_COLUMNS = 3  # columns that fit on the narrowest screen


def element(tag: str, content: str, **attributes: str) -> str:
    """Return an element; ``content`` is HTML, attributes are escaped, `_` in their names becomes `-`."""
    named = "".join(f' {name.strip("_").replace("_", "-")}="{escape(v)}"' for name, v in attributes.items())
    return f"<{tag}{named}>{content}</{tag}>"


def text(tag: str, content: str, **attributes: str) -> str:
    """Return an element that holds plain text."""
    return element(tag, escape(content), **attributes)


def scrolling(content: str, name: str, style: str = "") -> str:
    """Return a wide table in a region of its own, which the keyboard can scroll."""
    classes = f"scroll {style}".strip()
    return element("div", content, class_=classes, role="region", aria_label=name, tabindex="0")


def table(head: Cells, rows: Iterable[Cells], *, caption: str = "") -> str:
    """Return a table of plain text; the first cell of a row is its header.

    A table of many columns becomes a list of records on a narrow screen (`.many` in the style sheet), where
    each cell shows the title of its column.
    """
    is_wide = len(head) > FEW_COLUMNS
    titles = "".join(text("th", title, scope="col") for title in head)
    body = "".join(
        element("tr", text("th", first, scope="row") + "".join(_cells(rest, head[1:], named=is_wide)))
        for first, *rest in rows
    )
    title = text("caption", caption) if caption else ""
    content = f"{title}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return element("table", content, class_="many") if is_wide else element("table", content)


def _cells(cells: Cells, titles: Cells, *, named: bool) -> Iterator[str]:
    for cell, title in zip(cells, titles, strict=True):
        yield text("td", cell, data_title=title) if named else text("td", cell)
