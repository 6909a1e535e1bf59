"""The attrition of an emulated trial: the owner's view, the view of others, and both as text and data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.layout import GAP, WIDTH, aligned, wrapped
from fedtmle.trials.trial import TargetTrial


@final
@dataclass(frozen=True, kw_only=True)
class ArmCounts:
    """People of one arm: with the event, without it, and with an unknown outcome; None is not shown."""

    name: str
    people: int | None
    events: int | None
    unknown: int | None


@final
@dataclass(frozen=True, kw_only=True)
class Attrition:
    """How many people remain after each step, and the arms of the cohort; None is not shown.

    ``floor`` is the smallest number that is shown, None in the owner's own view.
    """

    silo: str
    steps: tuple[str, ...]
    people: tuple[int | None, ...]
    arms: tuple[ArmCounts, ...]
    floor: int | None = None

    def for_others(self, floor: int) -> Attrition:
        """Return the view for people other than the owner.

        A count is shown if it, and its difference to the next one shown, is 0 or at least ``floor``. The
        cohort's size is decided first, because a study discloses it anyway.
        """
        shown: list[int | None] = []
        later: int | None = None
        for count in reversed(self.people):
            gaps = [] if count is None else [count, *([] if later is None else [count - later])]
            told = count if count is not None and all(_tellable(gap, floor) for gap in gaps) else None
            later = later if told is None else told
            shown.append(told)
        arms = tuple(_arm_for_others(arm, floor) for arm in self.arms)
        if any(arm.people is None for arm in arms):  # the others and the total would tell it
            arms = tuple(ArmCounts(name=arm.name, people=None, events=None, unknown=None) for arm in arms)
        return Attrition(
            silo=self.silo, steps=self.steps, people=tuple(reversed(shown)), arms=arms, floor=floor
        )


def _tellable(count: int, floor: int) -> bool:
    return count == 0 or count >= floor


def _arm_for_others(arm: ArmCounts, floor: int) -> ArmCounts:
    people, events, unknown = arm.people or 0, arm.events or 0, arm.unknown or 0
    without = people - events - unknown
    if not _tellable(people, floor):
        return ArmCounts(name=arm.name, people=None, events=None, unknown=None)
    # If all or none had the event, a count would disclose everybody's outcome.
    if min(events, without) < floor or not _tellable(unknown, floor):
        return ArmCounts(name=arm.name, people=people, events=None, unknown=None)
    return arm


def document_of(trial: TargetTrial, attrition: Mapping[str, Attrition]) -> dict[str, object]:
    """Return the trial and its attrition as plain data, for the saved result."""
    first = next(iter(attrition.values()))
    return {
        "trial": trial.name,
        "days": trial.outcome.days,
        "censoring": [reason.value for reason in trial.censoring],
        "steps": list(first.steps),
        "floor": first.floor,
        "silos": {
            name: {
                "people": list(silo.people),
                "arms": [
                    {"name": a.name, "people": a.people, "events": a.events, "unknown": a.unknown}
                    for a in silo.arms
                ],
            }
            for name, silo in attrition.items()
        },
    }


# The attrition as a person reads it.


def render_attrition(trial: TargetTrial, attrition: Mapping[str, Attrition]) -> str:
    """Return the attrition as plain text: one line per step and one per arm, over the silos and by silo."""
    views = list(attrition.values())
    floor = views[0].floor
    lines = [*wrapped(trial.name), ""]
    lines += _numbered_steps(views[0].steps, _table(views))
    lines += ["", *aligned(list(_arms(views)))]
    if floor is not None and any(map(_hides, views)):
        hidden = f"Counts and losses of fewer than {floor} people are not shown (-; +: in some silos)."
        lines += ["", *wrapped(hidden)]
    return "\n".join(lines)


def _hides(view: Attrition) -> bool:
    return None in view.people or any(None in (arm.people, arm.events) for arm in view.arms)


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


def _table(views: Sequence[Attrition]) -> list[list[str]]:
    """Return one row of counts per step: over all silos, and by silo where these fit into the width."""
    by_silo = len(views) > 1 and sum(max(len(view.silo), 7) + len(GAP) for view in views) < WIDTH - 16
    head = ["all", *(view.silo for view in views)] if by_silo else ["all"]
    rows = [head]
    for k in range(len(views[0].steps)):
        counts = [view.people[k] for view in views]
        each = [_total([count]) for count in counts] if by_silo else []
        rows.append([_total(counts), *each])
    return rows


def _arms(views: Sequence[Attrition]) -> Iterator[list[str]]:
    yield ["arm", "people", "events", "without", "unknown"]
    for arms in zip(*(view.arms for view in views), strict=True):
        without = [_without(arm) for arm in arms]
        yield [
            arms[0].name,
            _total([arm.people for arm in arms]),
            _total([arm.events for arm in arms]),
            _total(without),
            _total([arm.unknown for arm in arms]),
        ]


def _without(arm: ArmCounts) -> int | None:
    if arm.people is None or arm.events is None or arm.unknown is None:
        return None
    return arm.people - arm.events - arm.unknown


def _total(counts: Sequence[int | None]) -> str:
    """Return the sum of the counts that are shown, with a + where some are not."""
    shown = [count for count in counts if count is not None]
    return f"{sum(shown):,}{'+' if len(shown) < len(counts) else ''}" if shown else "-"
