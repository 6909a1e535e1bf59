"""The cohort before a study runs: Table 1 by arm, missing values, cohort flow and overlap.

The view of several silos is of totals over all of them, rounded so that nothing is said about fewer people
than the strictest of the silos' floors, which their own files state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from fedtmle.data import Schema, load_all
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.estimation.diagnostics.cohort import Baseline, missing_in
from fedtmle.estimation.diagnostics.covariates import number_of
from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import formulas
from fedtmle.model.table import Table
from fedtmle.programs.preparation import PreflightProgram, SitesProgram, propensity_histograms, site_tests
from fedtmle.programs.study import Study
from fedtmle.programs.target import AbstractTarget
from fedtmle.protocol.plan import Plan, roster
from fedtmle.results.document import histogram_document, site_warnings
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import policy_of, session_policy
from fedtmle.studyfile.schema import first_period, in_memory, schema_of
from fedtmle.targets.diagnostics import Bin, Characteristic, Count, Histogram
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle_core.publish.counts import cells
from fedtmle_core.types import Bools


def baseline(study: Study) -> Baseline:
    """Return covariates, strata and the columns that rules read; not predictions, weights or identifiers."""
    target = study.target
    predictions = {c for m in study.models.values() if isinstance(m, Supplied) for c in m.columns}
    excluded = {target.outcome, target.treatment, study.weights, study.cluster, *predictions}
    if isinstance(target, AbstractTimeEffect):
        excluded |= {target.time, target.entry}
    names = list(dict.fromkeys(_shown(study, column) for column in schema_of(study).names))
    if isinstance(target, AbstractRegimeEffect):
        excluded |= {target.censoring}
    names = [name for name in names if name not in excluded]
    categories = {
        study.declared_name(n) for m in study.models.values() for f in formulas(m) for n in f.factor_names
    }
    factors = {name: study.levels[name] for name in names if name in {*study.factors, *categories}}
    return Baseline(
        arms=("all",) if target.is_modified else target.arms,
        treatment=None if target.is_modified else target.treatment,
        outcome=target.outcome,
        numbers=tuple(number_of(study, name) for name in names if name not in factors),
        factors=factors,
    )


def _shown(study: Study, column: str) -> str:
    """Return the name by which Table 1 shows a column: that of the variable over time, in period 1."""
    timeline = study.timeline
    names = {} if timeline is None else {c: name for name, each in timeline.over_time.items() for c in each}
    return names.get(column, column)


def complete(columns: Baseline, table: Table) -> Bools:
    """Mark the rows with a treatment and all covariates."""
    known = np.ones(table.n_rows, dtype=bool)
    for name in (*(each.name for each in columns.numbers), *columns.factors):
        known &= ~missing_in(table, name)
    if columns.treatment is not None:
        known &= ~missing_in(table, columns.treatment)
    return known


@dataclass(frozen=True, kw_only=True)
class FittedOverlap:
    """Histograms of the propensity score by arm (`histogram_document`), or the ``problem`` of its fit.

    ``n_rows`` counts the records with a treatment and all covariates, on which the model is fitted.
    """

    histograms: tuple[dict[str, object], ...] = ()
    problem: str | None = None
    n_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The cohort of several silos together, or of one in full.

    ``lost`` counts the records that drop out, step by step. ``floor`` is the smallest count that is shown,
    None if nothing is hidden. ``overlap`` is None if there is only one arm. ``warnings`` say if treatment or
    outcome differs between silos beyond what the models explain, and the silo is in none of them. ``labels``
    are the dictionary's for variables, with their units, and ``words`` for their levels.
    """

    silos: tuple[str, ...]
    n_rows: int
    arms: tuple[str, ...]
    arm_counts: tuple[Count, ...]
    lost: tuple[Count, ...]
    missing: tuple[Count, ...]
    lines: tuple[Characteristic, ...]
    floor: int | None
    overlap: FittedOverlap | None = None
    warnings: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    treatment: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the view as plain data."""
        return asdict(self)


def preflight(study: Study, silos: Mapping[str, object], *, silo: str | None = None) -> Preflight:
    """Describe the cohort of a study before it runs: Table 1 by arm, missing values and overlap.

    The view of all silos is of their totals. It is rounded, so that nothing is said about fewer people than
    the strictest ``min_cell`` of their silo files, and shows no outcome by arm. Missing values are counted.

    Parameters
    ----------
    study
        The study.
    silos
        Each silo's table by name, as for `run`.
    silo
        If given, this silo alone is described in full, for its owner.

    Returns
    -------
    Preflight
        The description. `to_dict` gives plain data; `fedtmle preflight` prints it.

    Raises
    ------
    DataErrors
        A table has defects other than missing values.

    Examples
    --------
    >>> [(arm.name, arm.count) for arm in ft.preflight(study, silos).arm_counts]
    [('0', 169), ('1', 181)]
    """
    if silo is not None and silo not in silos:
        raise InputError(f"silo: expected one of {', '.join(silos)}, not {silo!r}")
    if silo is None and study.privacy is not None:
        raise InputError(
            "privacy: the preflight of all silos discloses tables without noise, which no budget covers; "
            "describe one silo for its owner"
        )
    sources = silos if silo is None else {silo: silos[silo]}
    tables = first_period(study, in_memory(load_all(sources, _lenient(schema_of(study))), "preflight"))
    floor = None
    if silo is None:
        floor = max((policy_of(source) or session_policy()).min_cell for source in sources.values())
    columns = baseline(study)
    table = columns.described(list(tables.values()), floor)
    view = Preflight(
        silos=tuple(tables),
        n_rows=table.n,
        arms=columns.arms,
        arm_counts=table.arms,
        lost=table.lost,
        missing=table.missing,
        lines=table.lines,
        floor=floor,
        overlap=fitted_overlap(study, columns, tables, floor),
        labels={name: study.variables.heading(name) for name in study.variables},
        words={name: study.variables.words(name) for name in study.variables},
        treatment=columns.treatment,
    )
    if silo is not None:
        return view
    return replace(view, warnings=tuple(differing_silos(study, complete_rows(columns, tables))))


def differing_silos(study: Study, tables: Mapping[str, Table]) -> list[str]:
    """Return a warning if treatment or outcome differs between silos and the silo is in no model.

    The tables are those of all silos, without missing covariates; nothing but the pooled test leaves this
    function. Models that cannot be fitted give no warning here: `run` says why.
    """
    own = AbstractTimeEffect | AbstractRegimeEffect | AbstractTarget
    if study.uses_silo or len(tables) < 2 or isinstance(study.target, own):
        return []
    plan = Plan(program=SitesProgram(study=study), roster=roster(list(tables)))
    try:
        finished = run_embedded(plan, [Silo(name, plan, table) for name, table in tables.items()])
    except FedTMLEError:
        return []
    return site_warnings(study, site_tests(finished.outcome))


def complete_rows(columns: Baseline, tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return the rows with a treatment and all covariates, of the silos that have any."""
    usable = {}
    for name, table in tables.items():
        rows = np.flatnonzero(complete(columns, table))
        if len(rows):
            usable[name] = table if len(rows) == table.n_rows else table.take(rows)
    return usable


def _lenient(schema: Schema) -> Schema:
    """Return the schema with missing values allowed everywhere, so that they can be counted."""
    return Schema(tuple(replace(column, may_be_missing=True) for column in schema.columns))


def fitted_overlap(
    study: Study, columns: Baseline, tables: Mapping[str, Table], floor: int | None
) -> FittedOverlap | None:
    """Fit the study's treatment model across silos; a model that cannot be fitted is reported, not raised."""
    if study.target.treatment is None or study.target.is_modified or isinstance(study.target, AbstractTarget):
        return None  # the treatment model of a target with a problem of its own is no propensity score
    usable = complete_rows(columns, tables)
    if not usable:
        return FittedOverlap(problem="no record has both its treatment and its covariates")
    plan = Plan(program=PreflightProgram.of(study, list(usable)), roster=roster(list(usable)))
    try:
        finished = run_embedded(plan, [Silo(name, plan, table) for name, table in usable.items()])
    except FedTMLEError as error:
        return FittedOverlap(problem=str(error))
    return FittedOverlap(
        histograms=tuple(
            histogram_document(_rounded(each, floor), len(usable))
            for each in propensity_histograms(finished.outcome)
        ),
        n_rows=finished.n,
    )


def _rounded(histogram: Histogram, floor: int | None) -> Histogram:
    """Return a histogram that says nothing about fewer people than the floor, if there is one."""
    if floor is None:
        return histogram
    counts = [cell.count for cell in histogram.bins]
    silos = histogram.bins[0].silos
    rounded = cells(counts, sum(counts), floor)
    return replace(histogram, bins=tuple(Bin(silos=silos, count=count) for count in rounded))
