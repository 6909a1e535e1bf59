"""The attrition of an emulated trial as 80 columns of text, from the key `emulation` of its document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedtmle.layout import GAP, WIDTH, Document, aligned, wrapped


def render(emulation: Document) -> str:
    """Return the attrition: one line per step and one per arm, over the silos and by silo."""
    silos = emulation["silos"]
    if not silos:
        return "\n".join([*wrapped(emulation["trial"]), "", "No silo has shared its counts."])
    lines = [*wrapped(emulation["trial"]), ""]
    lines += _numbered_steps(emulation["steps"], _table(emulation))
    lines += ["", *aligned([["arm", "people", "events", "without", "unknown"], *arms(emulation)])]
    if emulation["floor"] is not None and any(map(_hides, silos.values())):
        floor = emulation["floor"]
        hidden = f"Counts and losses of fewer than {floor} people are not shown (-; +: in some silos)."
        lines += ["", *wrapped(hidden)]
    if emulation.get("not_shared"):
        lines += ["", *wrapped(f"Without the counts of {', '.join(emulation['not_shared'])}.")]
    return "\n".join(lines)


def total(counts: Sequence[int | None]) -> str:
    """Return the sum of the counts that are shown, with a + where some are not."""
    shown = [count for count in counts if count is not None]
    return f"{sum(shown):,}{'+' if len(shown) < len(counts) else ''}" if shown else "-"


def arms(emulation: Document) -> Iterator[list[str]]:
    """Yield a row per arm over all silos: its name, people, events, people without, and unknown outcomes."""
    for by_silo in zip(*(silo["arms"] for silo in emulation["silos"].values()), strict=True):
        yield [
            by_silo[0]["name"],
            total([arm["people"] for arm in by_silo]),
            total([arm["events"] for arm in by_silo]),
            total([_without(arm) for arm in by_silo]),
            total([arm["unknown"] for arm in by_silo]),
        ]


def _without(arm: Document) -> int | None:
    if None in (arm["people"], arm["events"], arm["unknown"]):
        return None
    return int(arm["people"] - arm["events"] - arm["unknown"])


def _hides(silo: Document) -> bool:
    return None in silo["people"] or any(None in (arm["people"], arm["events"]) for arm in silo["arms"])


def _numbered_steps(steps: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the table with a number per step, and the steps' words below where they do not fit beside it."""
    rows = [["people", *cells[0]], *([step, *row] for step, row in zip(steps, cells[1:], strict=True))]
    width = max(len(row[0]) for row in rows) + sum(
        max(map(len, column)) for column in zip(*cells, strict=True)
    )
    if width + len(GAP) * len(cells[0]) <= WIDTH:
        return aligned(rows)
    short = [["step", *cells[0]], *([str(k), *row] for k, row in enumerate(cells[1:]))]
    return [*aligned(short), "", *(line for k, step in enumerate(steps) for line in wrapped(f"{k}  {step}"))]


def _table(emulation: Document) -> list[list[str]]:
    """Return one row of counts per step: over all silos, and by silo where these fit into the width."""
    silos = emulation["silos"]
    by_silo = len(silos) > 1 and sum(max(len(name), 7) + len(GAP) for name in silos) < WIDTH - 16
    rows = [["all", *silos] if by_silo else ["all"]]
    for k in range(len(emulation["steps"])):
        counts = [silo["people"][k] for silo in silos.values()]
        rows.append([total(counts), *([total([count]) for count in counts] if by_silo else [])])
    return rows
