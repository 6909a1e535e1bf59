"""Running a study in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedtmle.algorithms.study import Study
from fedtmle.data import SiloFile, load_all
from fedtmle.errors import InputError
from fedtmle.model.arguments import expect
from fedtmle.protocol.plan import roster
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.session import Progress, run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.solver import check_silo_weights, local_outcomes
from fedtmle.studies.floors import floor_of
from fedtmle.studies.over import check_release, conclude
from fedtmle.studies.plan import study_plan
from fedtmle.studies.policies import released, session_policy, silo_file
from fedtmle.studies.pooled import pooled_rows
from fedtmle.studies.result import StudyResult
from fedtmle.studies.schema import schema_of
from fedtmle.studies.streams import check_streams, in_memory


def run(
    study: Study,
    silos: Mapping[str, object],
    *,
    threads: int = 1,
    progress: Progress | None = None,
    release: Sequence[str] = (),
    observe: bool = False,
) -> StudyResult:
    """Runs ``study`` over ``silos``: name -> data frame, mapping of columns, or path.

    A frame's columns are read where they are, so that it must not be changed while the study runs.
    ``release`` names silos that consent to having their own estimate shown; one that has a silo file
    consents there, and is guarded by the policy that it states. ``observe`` adds the pooled loss to the
    trajectory, and to a coded run's certificate its constants, by reading the rows outside the protocol.
    """
    expect("study", study, Study, "a Study")
    if not silos or not isinstance(silos, Mapping):
        raise InputError("silos: expected a mapping of at least one name to data, such as {'north': frame}")
    check_release(release, silos)
    check_silo_weights(study.algorithm, silos)
    tables = load_all(silos, schema_of(study))
    check_streams(study, tables)
    files = {name: silo_file(source) for name, source in silos.items()}
    policies = {name: None if file is None else file.policy for name, file in files.items()}
    release = released(policies, release)
    if study.algorithm.pools_rows:
        tables = {"pooled": pooled_rows(study, in_memory(tables, "algorithm Central"))}
    plan = study_plan(study, roster(list(tables)))
    parties = [
        Silo(name, plan, table, keeper=_keeper(study, files.get(name))) for name, table in tables.items()
    ]
    finished = run_embedded(plan, parties, threads=threads, progress=progress)
    rows = in_memory(tables, "observe") if observe else None
    pooled = None
    if rows is not None:
        pooled = rows["pooled"] if study.algorithm.pools_rows else pooled_rows(study, rows)
    return conclude(plan, finished, release=release, local=local_outcomes(parties), rows=rows, pooled=pooled)


def _keeper(study: Study, file: SiloFile | None) -> Keeper:
    """What a silo file states guards its rows in one's own session too."""
    policy = session_policy() if file is None else file.policy
    return Keeper(policy=policy, floor=floor_of(study, file))
