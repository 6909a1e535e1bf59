"""Emulating a target trial: a cohort per silo, then the trial's study over the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from fedtmle.data import SiloFile
from fedtmle.errors import InputError
from fedtmle.layout import GAP, WIDTH, aligned, wrapped
from fedtmle.protocol.guard import Policy
from fedtmle.results.result import StudyResult
from fedtmle.runtime.session import Progress
from fedtmle.studies.run import run
from fedtmle.trials.cohort import ArmCounts, Attrition, Cdm, Cohort, read_cohort
from fedtmle.trials.trial import TargetTrial


@final
@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The result of a trial's study, and each silo's attrition as people other than its owner may see it."""

    trial: TargetTrial
    attrition: Mapping[str, Attrition]
    result: StudyResult


def emulate(
    trial: TargetTrial,
    silos: Mapping[str, Cdm],
    *,
    threads: int = 1,
    progress: Progress | None = None,
    cohorts: Mapping[str, Cohort] | None = None,
) -> Emulation:
    """Read the cohort of every silo and run the trial's study over the tables, in one process.

    ``cohorts`` are those of `read_cohort`, where they were read before. The result's document has the
    trial and the attrition under the key ``emulation``.
    """
    if not silos:
        raise InputError("silos: expected at least one silo")
    if cohorts is None:
        cohorts = {name: read_cohort(trial, cdm) for name, cdm in silos.items()}
    attrition = shown_attrition(cohorts, silos)
    sources = {name: _source(cohorts[name], cdm) for name, cdm in silos.items()}
    result = run(trial.study, sources, threads=threads, progress=progress)
    document = {**result.document, "emulation": document_of(trial, attrition)}
    return Emulation(trial=trial, attrition=attrition, result=StudyResult(document=document, run=result.run))


def _source(cohort: Cohort, cdm: Cdm) -> object:
    """Return what `run` reads: the table, guarded by the owner's policy where there is one."""
    if cdm.policy is None:
        return cohort.columns
    return SiloFile(
        path=cdm.path or Path(cdm.name),
        name=cdm.name,
        data=cohort.columns,  # type: ignore[arg-type]  # `load` reads a mapping of columns as well
        columns={},
        policy=cdm.policy,
    )


def shown_attrition(cohorts: Mapping[str, Cohort], silos: Mapping[str, Cdm]) -> dict[str, Attrition]:
    """Return every silo's attrition above the strictest of the silos' floors (``min_cell``)."""
    floor = max((silos[name].policy or Policy()).min_cell for name in cohorts)
    return {name: cohort.attrition.for_others(floor) for name, cohort in cohorts.items()}


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
