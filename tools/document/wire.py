"""`docs/wire.md`: the protocol on the wire, with the state diagram drawn from the transition table."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import get_args

from fedtmle.protocol import messages
from fedtmle.protocol.messages import TABLE, Event, Open, Request, State

HEAD = """\
# The protocol on the wire

Written from the code by `python -m tools.document`; a test compares the two.

One run is one session. The server sends a request to each silo, waits for all replies, and sends the
next. Messages are canonical msgpack around bit strings: decoding re-encodes and compares, so that each
message has exactly one form. There is no pickle and nothing is evaluated.

**A query never crosses the wire.** The server and every silo run the same generator (the algorithm's
`flow`) on the same broadcasts, so each derives the next question itself. Only answers go up, and only
what was pooled comes down.

"""
WIDTH, BOX, TALL, GAP = 118, 92, 40, 34  # of a column, a box and the room between boxes, in pixels
FLAT = 150  # y of the main row
INK, SOFT = "#24292f", "#57606a"


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join([*_diagram(), *_table(), *_requests()]) + "\n"


def _diagram() -> Iterator[str]:
    yield "## What a silo does when"
    yield ""
    yield "A request that has no arrow from the silo's state is refused and changes nothing."
    yield ""
    yield f"<figure>{drawing()}</figure>"
    yield ""


def chain() -> list[State]:
    """Return the states of a run that goes well: from each, the next one that a reply leads to."""
    way = [State.NEW]
    while True:
        replied = (t.leads_to[Event.REPLIED] for t in TABLE if t.state is way[-1])
        ahead = [state for state in replied if state not in way]
        if not ahead:
            return way
        way.append(ahead[0])


def drawing() -> str:
    """The table as a drawing: the chain in a row, every other state as a bar above or below it."""
    way = chain()
    sides = [state for state in State if state not in way]
    parts: list[str] = []
    for k, state in enumerate(way):
        parts += _box(_left(k), FLAT, BOX, state.value)
    for t in TABLE:
        at, name = way.index(t.state), t.request.__name__.lower()
        for event, to in t.leads_to.items():
            if to is t.state and event is Event.REPLIED:
                parts += _loop(at, name)
            elif to in way and to is not t.state:
                parts += _ahead(at, way.index(to), name)
    for number, side in enumerate(sides):
        columns = sorted({way.index(t.state) for t in TABLE if side in t.leads_to.values()})
        parts += _side(side, columns, above=number % 2 == 0)
    width, height = WIDTH * len(way) + 8, 2 * FLAT + TALL
    transitions = "; ".join(
        f"{t.state.value}: {t.request.__name__.lower()} leads to {' or '.join(t.leads_to.values())}"
        for t in TABLE
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="State diagram of a silo. {transitions}" '
        f'style="max-width:{width}px;font:13px sans-serif">'
        f'<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>{"".join(parts)}</svg>'
    )


def _left(column: int) -> int:
    return 4 + WIDTH * column


def _box(x: int, y: int, width: int, name: str) -> list[str]:
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{TALL}" rx="8" fill="#eef4fb" stroke="{INK}"/>',
        f'<text x="{x + width / 2:.0f}" y="{y + 25}" text-anchor="middle" fill="{INK}">{name}</text>',
    ]


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
    return f'<line {ends} stroke="{INK}" marker-end="url(#tip)"/>'


def _ahead(start: int, end: int, name: str) -> list[str]:
    x, y = _left(start) + BOX, FLAT + TALL / 2
    return [_arrow(x, y, _left(end), y), _label(x + 13, FLAT - 6, name, "middle")]


def _loop(at: int, name: str) -> list[str]:
    x, y = _left(at) + BOX / 2, FLAT + TALL
    path = f"M{x + 8:.0f} {y}c0 34 34 34 34 0"
    arrow = f'<path d="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)"/>'
    return [arrow, _label(x + 46, y + 26, name, "start")]


def _label(x: float, y: float, name: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{SOFT}" font-size="12">{name}</text>'


def _side(state: State, columns: Sequence[int], *, above: bool) -> list[str]:
    """A bar over or under the states that lead to it."""
    x, width = _left(min(columns)), WIDTH * (max(columns) - min(columns)) + BOX
    y = 50 if above else 2 * FLAT - TALL
    parts = _box(x, y, width, state.value)
    for column in columns:
        at = _left(column) + BOX / 2 - 14
        parts.append(_arrow(at, FLAT, at, y + TALL) if above else _arrow(at, FLAT + TALL, at, y))
    return parts


def _table() -> Iterator[str]:
    yield "| in state | request | the silo replies with | and is then |"
    yield "|---|---|---|---|"
    for t in TABLE:
        then = ", ".join(to.value for to in t.leads_to.values())
        yield f"| {t.state.value} | `{t.request.__name__.lower()}` | {t.reply} | {then} |"
    yield ""


def _requests() -> Iterator[str]:
    yield "## Every request"
    yield ""
    yield "| request | fields | says |"
    yield "|---|---|---|"
    for kind in get_args(Request):
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        yield f"| `{kind.__name__.lower()}` | {fields} | {' '.join((inspect.getdoc(kind) or '').split())} |"
    yield ""
    yield "The replies are on [the page for site admins](messages.md#every-reply)."
    yield ""
    example = messages.encode(Open(messages.WIRE_FORMAT, b"session", bytes(32)))
    yield f"An `open` request of {len(example)} bytes, with a plan of zeros:"
    yield ""
    yield "```text"
    text = example.hex(" ")
    yield from (text[k : k + 72].rstrip() for k in range(0, len(text), 72))
    yield "```"
    yield ""
    yield "## Bits"
    yield ""
    yield (
        "The bits that are counted are the bits of the payload's code: signed Elias-gamma differences or "
        "fixed-width integers for `Coded`, fixed-width exact sums elsewhere. Fixed "
        "widths follow from public bounds; the length of a gamma code tells the size of the difference it "
        "codes. Byte padding and envelopes are counted apart."
    )
