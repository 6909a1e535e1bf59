"""A silo's counts as a file: the part of the attrition that its owner shares in a deployed emulation.

The owner of a silo writes the file with the table (`trials.write`). The counts in it are those above the
owner's floor, so that the file may be sent to the coordinator, who adds it to the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from fedtmle.errors import InputError
from fedtmle.protocol.policy import Policy
from fedtmle.results.result import StudyResult
from fedtmle.runtime.documents import write_document
from fedtmle.trials.attrition import ArmCounts, Attrition, document_of
from fedtmle.trials.cohort import Cdm, Cohort
from fedtmle.trials.compile import compile_trial
from fedtmle.trials.trial import TargetTrial

FORMAT = "fedtmle trial counts 1"


class _Arm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    people: int | None
    events: int | None
    unknown: int | None


class _Counts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: str
    trial: str  # the trial's digest
    silo: str
    floor: int
    people: list[int | None]
    arms: list[_Arm]


def write_counts(path: Path, trial: TargetTrial, cohort: Cohort, cdm: Cdm) -> None:
    """Write a silo's counts above its owner's floor (``min_cell``)."""
    floor = (cdm.policy or Policy()).min_cell
    view = cohort.attrition.for_others(floor)
    document = {
        "format": FORMAT,
        "trial": trial.digest,
        "silo": cdm.name,
        "floor": floor,
        "people": list(view.people),
        "arms": [
            {"name": arm.name, "people": arm.people, "events": arm.events, "unknown": arm.unknown}
            for arm in view.arms
        ],
    }
    write_document(path, document)


def read_counts(paths: Iterable[Path], trial: TargetTrial, silos: Sequence[str]) -> dict[str, Attrition]:
    """Return the attrition in the files by silo, above the strictest of their floors.

    A file of another trial, or of a silo that is not one of ``silos``, is refused.
    """
    views = [_read(path, trial, silos) for path in paths]
    for view in views:
        if [other.silo for other in views].count(view.silo) > 1:
            raise InputError(f"counts: two files are for silo '{view.silo}'; give only one of them")
    floor = max((view.floor or 0 for view in views), default=0)
    return {view.silo: view.for_others(floor) for view in sorted(views, key=lambda v: silos.index(v.silo))}


def _read(path: Path, trial: TargetTrial, silos: Sequence[str]) -> Attrition:
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=_Counts)
    except (OSError, msgspec.MsgspecError):
        raise InputError(
            f"{path}: this is not a readable file of a silo's counts; its owner writes one with "
            "`fedtmle emulate trial.toml --silo ... --write folder`"
        ) from None
    steps = compile_trial(trial).steps
    arms = [strategy.name for strategy in trial.strategies]
    if counts.format != FORMAT or counts.trial != trial.digest:
        raise InputError(
            f"{path}: these counts belong to another trial or another version of it; the silo's owner "
            "must emulate the same trial file"
        )
    if counts.silo not in silos:
        raise InputError(f"{path}: the trial lists no silo '{counts.silo}'; it lists {', '.join(silos)}")
    if len(counts.people) != len(steps) or [arm.name for arm in counts.arms] != arms or counts.floor < 1:
        raise InputError(f"{path}: the counts are damaged; ask the silo's owner for them again")
    return Attrition(
        silo=counts.silo,
        steps=steps,
        people=tuple(counts.people),
        arms=tuple(ArmCounts(**msgspec.structs.asdict(arm)) for arm in counts.arms),
        floor=counts.floor,
    )


def with_counts(
    result: StudyResult, trial: TargetTrial, silos: Sequence[str], attrition: Mapping[str, Attrition]
) -> StudyResult:
    """Return the result of a deployed run of the trial's study, with the trial added to its document."""
    absent = [silo for silo in silos if silo not in attrition]
    emulation = {**document_of(trial, attrition), "not_shared": absent}
    return StudyResult(document={**result.document, "emulation": emulation}, run=result.run)
