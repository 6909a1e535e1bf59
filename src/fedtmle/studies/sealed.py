"""A study of several hospitals, run sealed in one process as a deployment runs it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from fedtmle.data import load_all
from fedtmle.errors import InputError
from fedtmle.estimation.diagnostics.effects import EFFECT_DIAGNOSIS
from fedtmle.estimation.flow import Asked, Flow, blocks_of, named_by
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.planned import plan_of
from fedtmle.estimation.study import effect_flow
from fedtmle.estimation.times import time_flow
from fedtmle.layout import Document
from fedtmle.model.table import Table
from fedtmle.programs.flow import Details, StudyDetails, study_details
from fedtmle.programs.study import Study
from fedtmle.programs.time import TimeDetails
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Phase
from fedtmle.results.document import document
from fedtmle.results.result import StudyResult
from fedtmle.runtime.ledger import Transcript
from fedtmle.runtime.session import Account, Finished
from fedtmle.sealed.session import Account as Carried
from fedtmle.sealed.session import consortium_of, run_sealed
from fedtmle.solver import CompletedRun
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect

FLOOR = 5  # the policy's own; a deployment takes the largest of its hospitals


@final
@dataclass(frozen=True, kw_only=True)
class SealedStudy:
    """What the hospitals hold, what everybody may read, and what crossed the wire."""

    exact: StudyResult
    published: StudyResult
    carried: Carried


def run_study(study: Study, silos: Mapping[str, object], *, floor: int = FLOOR) -> SealedStudy:
    """Run a study over hospitals in this process, sealed, and return its exact and its published result.

    Every hospital judges its own people, and whoever carries the messages reads none of them: the bytes are
    those of a deployed run. `RefusedError` says with a code why a study was refused.
    """
    _refuse(study)
    names = tuple(sorted(silos))
    declared, old = Declared(study), study_plan(study, roster(list(names)))
    tables = load_all({name: silos[name] for name in names}, schema_of(study))
    sheets = {name: declared.sheet(_in_memory(name, table)) for name, table in tables.items()}
    plan = plan_of(declared, consortium_of(names).members, study=old.digest, author="", floor=floor)
    ran = run_sealed(
        _concluded(declared, old, names),
        sheets,
        plan,
        lambda exact: json.dumps(exact, allow_nan=False).encode(),
    )
    return SealedStudy(
        exact=StudyResult(document=ran.result),
        published=StudyResult(document=json.loads(ran.published.document)),
        carried=ran.account,
    )


def _refuse(study: Study) -> None:
    """Refuse what is not expressed in the closed language yet."""
    target = study.target
    found = {
        "target": isinstance(target, AbstractRegimeEffect) and "treatment over time",
        "missing": study.imputes and "imputed covariates",
        "privacy": study.privacy is not None and "noise",
        "algorithm": study.algorithm.fits_locally and "fits of a hospital's own",
    }
    for key, what in found.items():
        if what:
            raise InputError(f"{key}: a sealed study cannot have {what} yet; run it in one process, unsealed")


def _in_memory(name: str, table: object) -> Table:
    if not isinstance(table, Table):
        raise InputError(f"silo '{name}': a streamed table cannot be in a sealed study yet")
    return table


def _concluded(declared: Declared, plan: Plan, names: tuple[str, ...]) -> Flow[Document]:
    """Return the exact document of a study, which every hospital derives from the same totals."""
    hospitals = len(names)
    if isinstance(declared.study.target, AbstractTimeEffect):
        flow = time_flow(declared, hospitals=hospitals)
    else:
        flow = effect_flow(declared, hospitals=hospitals, diagnosis=EFFECT_DIAGNOSIS)
    account = Account()
    outcome = yield from _counted(flow, account)
    details = study_details(outcome)
    finished = Finished(
        outcome=outcome,
        account=account,
        transcript=Transcript(session=b""),
        n=_people(details),
        sizes=dict.fromkeys(names),
        absent={},
        lowered={},
        retired_at={},
        closing=None,
    )
    run = CompletedRun(plan=plan, finished=finished)
    result = run.result(law=details.start, algorithm=declared.study.algorithm)
    return document(plan, finished, result, ())


def _people(details: Details) -> int:
    """Return the number of people: everybody is in an arm."""
    return sum(details.arm_counts) if isinstance(details, StudyDetails | TimeDetails) else 0


def _counted(flow: Flow[Targeted], account: Account) -> Flow[Targeted]:
    """Count the rounds of a flow: those of the models, and those after the columns of its end were named."""
    phase, asked = Phase.NUISANCE, _started(flow)
    try:
        while True:
            if named_by(asked):
                phase = Phase.TARGETING
            account.rounds.update(Counter({phase: int(bool(blocks_of(asked)))}))
            asked = flow.send((yield asked))
    except StopIteration as stop:
        outcome: Targeted = stop.value
        return outcome


def _started(flow: Flow[Targeted]) -> Asked:
    return next(flow)
