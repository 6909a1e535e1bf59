"""The attrition of an emulated trial: the owner's view, the view of others, and both as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import final

from fedtmle.trials.compile import compile_trial
from fedtmle.trials.protocol import protocol
from fedtmle.trials.trial import TargetTrial


@final
@dataclass(frozen=True, kw_only=True)
class ArmCounts:
    """The people of one arm, those with the event, and those with an unknown outcome; None is not shown."""

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

        A count is shown if the count and its difference from the next shown count are each 0 or at least
        ``floor``. The last count, the size of the cohort, is decided first: a study discloses it anyway.
        """
        shown: list[int | None] = []
        later: int | None = None
        for count in reversed(self.people):
            gaps = [] if count is None else [count, *([] if later is None else [count - later])]
            may_show = count is not None and all(_may_show(gap, floor) for gap in gaps)
            later = count if may_show else later
            shown.append(count if may_show else None)
        arms = tuple(_arm_for_others(arm, floor) for arm in self.arms)
        if any(arm.people is None for arm in arms):  # the other arms and the total would disclose it
            arms = tuple(ArmCounts(name=arm.name, people=None, events=None, unknown=None) for arm in arms)
        return Attrition(
            silo=self.silo, steps=self.steps, people=tuple(reversed(shown)), arms=arms, floor=floor
        )


def _may_show(count: int, floor: int) -> bool:
    return count == 0 or count >= floor


def _arm_for_others(arm: ArmCounts, floor: int) -> ArmCounts:
    people, events, unknown = arm.people or 0, arm.events or 0, arm.unknown or 0
    without = people - events - unknown
    if not _may_show(people, floor):
        return ArmCounts(name=arm.name, people=None, events=None, unknown=None)
    # If all or none had the event, a count would disclose everybody's outcome.
    if min(events, without) < floor or not _may_show(unknown, floor):
        return ArmCounts(name=arm.name, people=people, events=None, unknown=None)
    return arm


def document_of(trial: TargetTrial, attrition: Mapping[str, Attrition]) -> dict[str, object]:
    """Return the trial's protocol and its attrition as plain data, for the saved result."""
    steps = next((view.steps for view in attrition.values()), compile_trial(trial).steps)
    floors = [view.floor for view in attrition.values() if view.floor is not None]
    return {
        "trial": trial.name,
        "days": trial.outcome.days,
        "censoring": [reason.value for reason in trial.censoring],
        "protocol": [asdict(component) for component in protocol(trial)],
        "labels": {name: variable.label for name, variable in trial.variables.items()},
        "steps": list(steps),
        "floor": max(floors, default=None),
        "silos": {
            name: {"people": list(silo.people), "arms": [asdict(arm) for arm in silo.arms]}
            for name, silo in attrition.items()
        },
    }
