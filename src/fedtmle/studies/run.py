"""Running a study in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedtmle.data import SiloFile, load_all
from fedtmle.initial.crossfit import POOLED_SILO
from fedtmle.model.arguments import expect
from fedtmle.model.table import AnyTable, Factor, Table
from fedtmle.programs.study import Study
from fedtmle.protocol.clusters import ClustersQuery
from fedtmle.protocol.tables import sort_levels
from fedtmle.results.result import StudyResult
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.session import Progress
from fedtmle.solver import check_silos, run_in_process
from fedtmle.studies.home import disclosure_limit, released, session_policy, silo_file
from fedtmle.studies.over import check_release, conclude
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import check_streams, in_memory, schema_of


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
    check_silos(silos, study.algorithm)
    check_release(release, silos)
    tables = load_all(silos, schema_of(study))
    check_streams(study, tables)
    files = {name: silo_file(source) for name, source in silos.items()}
    policies = {name: None if file is None else file.policy for name, file in files.items()}
    release = released(policies, release)
    purpose = "algorithm Central" if study.algorithm.pools_rows else "observe"

    def pool(parts: Mapping[str, AnyTable]) -> AnyTable:
        return pooled_rows(study, in_memory(parts, purpose))

    completed = run_in_process(
        lambda members: study_plan(study, members),
        tables,
        algorithm=study.algorithm,
        pool=pool,
        keeper=lambda name: _keeper(study, files.get(name)),
        threads=threads,
        progress=progress,
        observe=observe,
    )
    return conclude(completed, release=release)


def _keeper(study: Study, file: SiloFile | None) -> Keeper:
    """What a silo file states guards its rows in one's own session too."""
    policy = session_policy() if file is None else file.policy
    return Keeper(policy=policy, floor=disclosure_limit(study, file))


# All silos' rows in one table, for the centralised comparator.


def pooled_rows(study: Study, tables: Mapping[str, Table]) -> Table:
    """All rows in one table; clusters are within silos, or the same in all, as the study declares."""
    own = study.cluster if study.cluster_scope == "silo" else None
    if study.cluster is not None and study.cluster_scope == "shared":
        query = ClustersQuery(column=study.cluster, spanning=False)
        query.pool({name: query.of(table) for name, table in tables.items()}, {})
    return pool_tables(tables, own)


def pool_tables(silos: Mapping[str, Table], cluster: str | None = None) -> Table:
    """All rows in one table, for the centralised comparator; factors by the union of their levels.

    Folds stay within silos, as they are when the rows do, and so does a ``cluster`` of the silos' own.
    """
    tables = list(silos.values())
    silo = np.repeat(np.arange(len(tables)), [table.n_rows for table in tables])
    factors = {POOLED_SILO: Factor(silo, tuple(silos))}
    for name in tables[0].factors:
        own = [table.factors[name] for table in tables]
        if name == cluster:
            levels = tuple(f"{m}:{level}" for m, factor in enumerate(own) for level in factor.levels)
            first = np.cumsum([0, *(len(factor.levels) for factor in own)])
            codes = [factor.codes + start for factor, start in zip(own, first, strict=False)]
        else:
            levels = sort_levels({level for factor in own for level in factor.levels})
            codes = [factor.recode(levels) for factor in own]
        factors[name] = Factor(np.concatenate(codes), levels)
    return Table(
        n_rows=sum(table.n_rows for table in tables),
        numeric={name: np.concatenate([t.numeric[name] for t in tables]) for name in tables[0].numeric},
        factors=factors,
    )
