"""Running a study in one process, and pooling the rows of all silos for the centralised comparator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedtmle.data import SiloFile, load_all
from fedtmle.defects import expect
from fedtmle.errors import InputError
from fedtmle.model.table import SILO, AnyTable, Factor, Table
from fedtmle.programs.study import Study
from fedtmle.protocol.clusters import ClustersQuery
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import Policy
from fedtmle.results.inference import reporting_progress
from fedtmle.results.result import StudyResult
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Progress
from fedtmle.solver import check_silos, run_in_process
from fedtmle.studies.home import disclosure_limit, examine_target, released, session_policy, silo_file
from fedtmle.studies.over import check_release, conclude
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import check_follow_up, check_streams, in_memory, schema_of

UNUSABLE = "its data cannot be used for this study"  # a deployed silo says the same


def run(
    study: Study,
    silos: Mapping[str, object],
    *,
    threads: int = 1,
    progress: Progress | None = None,
    release: Sequence[str] = (),
    observe: bool = False,
    policy: Policy | None = None,
    colluders: int = 1,
) -> StudyResult:
    """Run a study over silos in this process, and return its result.

    Parameters
    ----------
    study
        The study.
    silos
        Each silo's table by name: a data frame, a mapping of columns, or a path. The columns of a frame are
        not copied, so it must not be changed while the study runs. A silo with a silo file is guarded by
        the policy that the file states.
    threads
        The number of silos that compute at the same time.
    progress
        Called after every round.
    release
        The silos that consent to having their own estimate shown. A silo with a silo file consents there.
    observe
        Whether to read the rows outside the protocol, to add the pooled loss to the trajectory and
        constants to the certificate of a coded run.
    policy
        The policy that guards the silos without a silo file. By default nothing does.
    colluders
        How many silos of a masked study may lie about their rows, or share what they know, while the limits
        of the others hold.

    Returns
    -------
    StudyResult
        The estimates, their intervals, diagnostics, certificate and cost.

    Raises
    ------
    InputError
        An argument is wrong.
    DataErrors
        A table has defects. All of them are listed.
    RefusedError
        A silo's policy refused.
    FitError
        A model cannot be fitted.

    Examples
    --------
    >>> ft.run(study, silos).table().shape
    (1, 7)
    """
    expect("study", study, Study, "a Study")
    check_silos(silos, study.algorithm)
    check_release(release, silos)
    tables, absent = _loaded(study, silos)
    check_streams(study, tables)
    check_follow_up(study, tables)
    files = {name: silo_file(silos[name]) for name in tables}
    policies = {name: None if file is None else file.policy for name, file in files.items()}
    release = released(policies, [name for name in release if name in tables])
    purpose = "algorithm Central" if study.algorithm.pools_rows else "observe"

    def pool(parts: Mapping[str, AnyTable]) -> AnyTable:
        return pooled_rows(study, in_memory(parts, purpose))

    with reporting_progress(study):
        completed = run_in_process(
            lambda members: replace(study_plan(study, members, silos=tuple(silos)), colluders=colluders),
            tables,
            algorithm=study.algorithm,
            pool=pool,
            keeper=lambda plan, name: _keeper(plan, files.get(name), policy, release=name in release),
            threads=threads,
            progress=progress,
            observe=observe,
            is_masked=study.aggregation == "masked",
            silos=tuple(silos),
            absent=absent,
        )
    return conclude(completed, release=release)


def _loaded(study: Study, silos: Mapping[str, object]) -> tuple[dict[str, AnyTable], dict[str, str]]:
    """Return the table of each silo, and why silos have none that the study goes on without."""
    schema = schema_of(study)
    if study.on_refusal == "stop":
        return load_all(silos, schema), {}
    tables: dict[str, AnyTable] = {}
    absent: dict[str, str] = {}
    for name, source in silos.items():
        try:
            tables |= load_all({name: source}, schema)
        except InputError:
            absent[name] = UNUSABLE
    return tables or load_all(silos, schema), absent


def _keeper(plan: Plan, file: SiloFile | None, policy: Policy | None, *, release: bool) -> Keeper:
    """Return what guards a silo's rows: the policy of its silo file, in one's own session too."""
    guarding = replace(policy or session_policy(), release=release) if file is None else file.policy
    return Keeper(policy=guarding, limit=disclosure_limit(plan, file), examines=examine_target)


def pooled_rows(study: Study, tables: Mapping[str, Table]) -> Table:
    """Return all rows in one table; the study declares whether clusters are those of a silo or of all."""
    of_silo = study.cluster if study.cluster_scope == "silo" else None
    if study.cluster is not None and study.cluster_scope == "shared":
        query = ClustersQuery(column=study.cluster, spanning=False)
        query.pool({name: query.of(table) for name, table in tables.items()}, {})
    return pool_tables(tables, of_silo)


def pool_tables(silos: Mapping[str, Table], cluster: str | None = None) -> Table:
    """Return all rows in one table; the levels of an identifier are the union over the silos.

    Folds stay within silos, as in a federated run, and so do the identifiers of ``cluster``.
    """
    tables = list(silos.values())
    silo = np.repeat(np.arange(len(tables)), [table.n_rows for table in tables])
    factors = {SILO: Factor(silo, tuple(silos))}
    for name in tables[0].factors:
        by_silo = [table.factors[name] for table in tables]
        if name == cluster:
            levels = tuple(f"{m}:{level}" for m, factor in enumerate(by_silo) for level in factor.levels)
            first = np.cumsum([0, *(len(factor.levels) for factor in by_silo)])
            codes = [factor.codes + start for factor, start in zip(by_silo, first, strict=False)]
        else:
            levels = tuple(dict.fromkeys(level for factor in by_silo for level in factor.levels))
            codes = [factor.recode(levels) for factor in by_silo]
        factors[name] = Factor(np.concatenate(codes), levels)
    return Table(
        n_rows=sum(table.n_rows for table in tables),
        numeric={name: np.concatenate([t.numeric[name] for t in tables]) for name in tables[0].numeric},
        factors=factors,
    )
