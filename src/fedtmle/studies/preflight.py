"""The cohort before a study runs: Table 1 by arm, missing values, cohort flow and overlap.

The view of several silos is made of thresholded tables only. Every silo first hides the cells below the
strictest of the silos' floors, which their own files state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedtmle.data import Schema, load_all
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import formulas
from fedtmle.model.table import Table
from fedtmle.programs.preparation import PreflightProgram, SitesProgram, propensity_histograms, site_tests
from fedtmle.programs.study import Study
from fedtmle.programs.target import AbstractTarget
from fedtmle.protocol.bins import visible
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.results.document import histogram_document, site_warnings
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import policy_of, session_policy
from fedtmle.studyfile.schema import first_period, in_memory, schema_of
from fedtmle.targets.diagnostics import Characteristic, Count, largest_difference
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle_core.types import Array

# Table 1 of one silo by arm, as additive sums, and the part of it that the silo may disclose.
#
# A count may be disclosed if it, and the rest of its total, are at least the silo's floor. A sum may be
# disclosed if the count behind it may, and if it does not reveal a small count by itself. The levels of
# factors are the dictionary's.

Bools = NDArray[np.bool_]
DISTINGUISHED_VALUES = 10  # up to this many different values, a sum and a sum of squares reveal the counts
STEPS = ("without treatment or a covariate", "of the rest, without an outcome")


@dataclass(frozen=True, kw_only=True)
class Table1Columns:
    """The columns that a study's Table 1 describes; the outcome is not among them, as it is no baseline."""

    arms: tuple[str, ...]
    treatment: str | None
    outcome: str
    numeric: tuple[str, ...]
    factors: Mapping[str, tuple[str, ...]]
    labels: Mapping[str, str] = field(default_factory=dict)  # variable to its label, with the unit
    words: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict
    )  # variable to the labels of its levels


@dataclass(frozen=True)
class Moments:
    """The number, sum and sum of squares of the known values of a column in one arm.

    ``smallest_cell`` is the count of the rarest value if there are few different ones, 0 if there is only
    one, and None if there are many. With ``zero_one`` all values are 0 or 1, so that the mean is a share.
    """

    count: int
    total: float
    squares: float
    smallest_cell: int | None = None
    zero_one: bool = False


@dataclass(frozen=True)
class Lost:
    """The number of rows lost to a missing value.

    ``fewest`` is the smallest nonzero number in one arm: with the sums by arm, the total would reveal it.
    """

    count: int
    fewest: int = 0


@dataclass(frozen=True, kw_only=True)
class SiloTable:
    """One silo's sums; None is a cell that the silo does not disclose."""

    n_rows: int
    arms: tuple[int | None, ...]
    lost: tuple[Lost | None, ...]  # at each of STEPS
    missing: Mapping[str, Lost | None]
    numeric: Mapping[str, tuple[Moments | None, ...]]
    levels: Mapping[tuple[str, str], tuple[int | None, ...]]
    constant: frozenset[str] = frozenset()  # numeric columns with one value in each arm, not disclosed


def table1_columns(study: Study) -> Table1Columns:
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
    return Table1Columns(
        arms=("all",) if target.is_modified else target.arms,
        treatment=None if target.is_modified else target.treatment,
        outcome=target.outcome,
        numeric=tuple(name for name in names if name not in factors),
        factors=factors,
        labels={name: study.variables.heading(name) for name in study.variables},
        words={name: study.variables.words(name) for name in study.variables},
    )


def _shown(study: Study, column: str) -> str:
    """Return the name by which Table 1 shows a column: that of the variable over time, in period 1."""
    timeline = study.timeline
    names = {} if timeline is None else {c: name for name, each in timeline.over_time.items() for c in each}
    return names.get(column, column)


def describe_silo(columns: Table1Columns, table: Table) -> SiloTable:
    """Return the whole table of one silo, for its owner."""
    if columns.treatment is None:
        arm = np.zeros(table.n_rows, dtype=np.int64)
    else:
        arm = table.factors[columns.treatment].recode(columns.arms)
    in_arm = [arm == code for code in range(len(columns.arms))]
    unknown = {
        **{name: np.isnan(table.numeric[name]) for name in columns.numeric},
        **{name: table.factors[name].codes < 0 for name in columns.factors},
    }
    known = complete(columns, table)
    if columns.outcome in table.numeric:
        observed = ~np.isnan(table.numeric[columns.outcome])
    else:  # an event
        observed = table.factors[columns.outcome].codes >= 0
    codes = {name: table.factors[name].recode(levels) for name, levels in columns.factors.items()}
    missing = {
        **unknown,
        **({columns.treatment: arm < 0} if columns.treatment else {}),
        columns.outcome: ~observed,
    }

    def lost(rows: Bools) -> Lost:
        parts = [int((rows & group).sum()) for group in (*in_arm, arm < 0)]
        return Lost(sum(parts), min((part for part in parts if part), default=0))

    return SiloTable(
        n_rows=table.n_rows,
        arms=tuple(int(rows.sum()) for rows in in_arm),
        lost=(lost(~known), lost(known & ~observed)),
        missing={name: lost(rows) for name, rows in missing.items()},
        numeric={
            name: tuple(_moments(table.numeric[name][rows]) for rows in in_arm) for name in columns.numeric
        },
        levels={
            (name, level): tuple(int((codes[name][rows] == code).sum()) for rows in in_arm)
            for name, levels in columns.factors.items()
            for code, level in enumerate(levels)
        },
    )


def complete(columns: Table1Columns, table: Table) -> Bools:
    """Mark the rows with a treatment and all covariates."""
    known = np.ones(table.n_rows, dtype=bool)
    for name in columns.numeric:
        known &= ~np.isnan(table.numeric[name])
    for name in (*columns.factors, *([columns.treatment] if columns.treatment else [])):
        known &= table.factors[name].codes >= 0
    return known


def _moments(values: Array) -> Moments:
    values = values[~np.isnan(values)]
    distinct, counts = np.unique(values, return_counts=True)
    # The sums of a few different values reveal the count of each, and those of one value reveal it.
    smallest: int | None = int(counts.min()) if len(distinct) > 1 else 0
    return Moments(
        len(values),
        float(values.sum()),
        float((values**2).sum()),
        smallest_cell=None if len(distinct) > DISTINGUISHED_VALUES else smallest,
        zero_one=bool(np.isin(distinct, (0.0, 1.0)).all()),
    )


def thresholded(silo: SiloTable, floor: int) -> SiloTable:
    """Return the part of a silo's table that may be disclosed."""
    arms = visible(_counts(silo.arms), silo.n_rows, floor)
    levels: dict[tuple[str, str], list[int | None]] = {cell: [None] * len(arms) for cell in silo.levels}
    for a, count in enumerate(arms):
        for name in {name for name, _ in silo.levels} if count is not None else ():
            cells = [cell for cell in silo.levels if cell[0] == name]
            shown = visible(_counts(silo.levels[cell][a] for cell in cells), count or 0, floor)
            for cell, value in zip(cells, shown, strict=True):
                levels[cell][a] = value
    return SiloTable(
        n_rows=silo.n_rows,
        arms=arms,
        lost=_flow(silo, floor),
        missing={name: _disclosable_count(lost, silo.n_rows, floor) for name, lost in silo.missing.items()},
        numeric={
            name: tuple(_disclosable_moments(m, arm, floor) for m, arm in zip(by_arm, arms, strict=True))
            for name, by_arm in silo.numeric.items()
        },
        levels={cell: tuple(counts) for cell, counts in levels.items()},
        constant=frozenset(
            name
            for name, by_arm in silo.numeric.items()
            if all(_is_constant(m, arm, floor) for m, arm in zip(by_arm, arms, strict=True))
        ),
    )


def _counts(values: Iterable[int | None]) -> list[int]:
    """Return the counts of a table in which nothing is hidden yet."""
    return [value or 0 for value in values]


def _disclosable_count(lost: Lost | None, total: int, floor: int) -> Lost | None:
    if lost is None or (lost.count and (lost.fewest < floor or total - lost.count < floor)):
        return None
    return Lost(lost.count)


def _flow(silo: SiloTable, floor: int) -> tuple[Lost | None, ...]:
    """Return the losses up to the first that may not be disclosed, which a later one would reveal."""
    shown: list[Lost | None] = []
    remaining = silo.n_rows
    for lost in silo.lost:
        disclosed = None if None in shown else _disclosable_count(lost, remaining, floor)
        shown.append(disclosed)
        remaining -= 0 if disclosed is None else disclosed.count
    return tuple(shown)


def _disclosable_moments(moments: Moments | None, arm: int | None, floor: int) -> Moments | None:
    if moments is None or arm is None or _too_few(moments, arm, floor):
        return None
    reveals_few = moments.smallest_cell is not None and moments.smallest_cell < floor
    return None if reveals_few else moments


def _is_constant(moments: Moments | None, arm: int | None, floor: int) -> bool:
    """Return whether all records of a disclosed arm have one value, which a sum would reveal."""
    if moments is None or arm is None or _too_few(moments, arm, floor):
        return False
    return moments.smallest_cell == 0


def _too_few(moments: Moments, arm: int, floor: int) -> bool:
    unknown = arm - moments.count
    return moments.count < floor or 0 < unknown < floor


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

    The view of all silos is made of thresholded tables: no cell below the strictest ``min_cell`` of their
    silo files is shown, and no outcome by arm. Missing values are counted.

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
    if silo is not None:
        columns = table1_columns(study)
        full = {name: describe_silo(columns, table) for name, table in tables.items()}
        overlap = fitted_overlap(study, columns, tables, dict.fromkeys(tables, UNGUARDED))
        return pool(columns, full, floor=None, overlap=overlap)
    policies = {name: policy_of(source) or session_policy() for name, source in sources.items()}
    floor = max(policy.min_cell for policy in policies.values())
    strict = {name: replace(policy, min_cell=floor) for name, policy in policies.items()}
    columns = table1_columns(study)
    overlap = fitted_overlap(study, columns, tables, strict)
    hidden = {name: thresholded(describe_silo(columns, table), floor) for name, table in tables.items()}
    view = pool(columns, hidden, floor=floor, overlap=overlap)
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


def complete_rows(columns: Table1Columns, tables: Mapping[str, Table]) -> dict[str, Table]:
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


def pool(
    columns: Table1Columns,
    silos: Mapping[str, SiloTable],
    *,
    floor: int | None,
    overlap: FittedOverlap | None = None,
) -> Preflight:
    """Pool the cells that the silos disclose."""
    tables = list(silos.values())
    names = (
        *columns.factors,
        *columns.numeric,
        *([columns.treatment] if columns.treatment else []),
        columns.outcome,
    )
    return Preflight(
        silos=tuple(silos),
        n_rows=sum(table.n_rows for table in tables),
        arms=columns.arms,
        arm_counts=tuple(
            _count(arm, [table.arms[a] for table in tables], tables) for a, arm in enumerate(columns.arms)
        ),
        lost=tuple(
            _count(step, [_count_of(table.lost[k]) for table in tables], tables)
            for k, step in enumerate(STEPS)
        ),
        missing=tuple(
            _count(name, [_count_of(table.missing[name]) for table in tables], tables) for name in names
        ),
        lines=(
            *(_mean(name, tables) for name in columns.numeric),
            *(_share(name, level, tables) for name, levels in columns.factors.items() for level in levels),
        ),
        floor=floor,
        overlap=overlap,
        labels=columns.labels,
        words=columns.words,
        treatment=columns.treatment,
    )


def _count(name: str, counts: Sequence[int | None], tables: Sequence[SiloTable]) -> Count:
    shown = [(count, t.n_rows) for count, t in zip(counts, tables, strict=True) if count is not None]
    return Count(
        name=name,
        count=sum(count for count, _ in shown) if shown else None,
        of=sum(rows for _, rows in shown),
        silos=len(shown),
    )


def _count_of(lost: Lost | None) -> int | None:
    return None if lost is None else lost.count


def _mean(name: str, tables: Sequence[SiloTable]) -> Characteristic:
    silos = [table.numeric[name] for table in tables]
    shown = [[m for m in by_arm if m is not None] for by_arm in silos if None not in by_arm]
    means, deviations = [], []
    for arm in zip(*shown, strict=True):
        count, total = sum(m.count for m in arm), sum(m.total for m in arm)
        mean = total / count if count else math.nan
        spread = sum(m.squares for m in arm) - count * mean**2
        means.append(mean)
        deviations.append(math.sqrt(max(spread, 0.0) / (count - 1)) if count > 1 else math.nan)
    zero_one = bool(shown) and all(m.zero_one for by_arm in shown for m in by_arm)
    variances = [m * (1 - m) for m in means] if zero_one else [sd**2 for sd in deviations]
    return Characteristic(
        name=name,
        level="1" if zero_one else None,
        mean=tuple(means),
        sd=None if zero_one else tuple(deviations),
        difference=largest_difference(means, variances),
        silos=len(shown),
        constant=all(name in table.constant for table in tables),
    )


def _share(name: str, level: str, tables: Sequence[SiloTable]) -> Characteristic:
    """Return a level's share of each arm."""
    silos = [(table.levels[name, level], table.arms) for table in tables]
    shown = [(cells, arms) for cells, arms in silos if None not in cells]
    shares = []
    for a in range(len(tables[0].arms) if shown else 0):
        count, total = (sum(pair[k][a] or 0 for pair in shown) for k in (0, 1))
        shares.append(count / total if total else math.nan)
    return Characteristic(
        name=name,
        level=level,
        mean=tuple(shares),
        sd=None,
        difference=largest_difference(shares, [share * (1 - share) for share in shares]),
        silos=len(shown),
    )


def fitted_overlap(
    study: Study, columns: Table1Columns, tables: Mapping[str, Table], policies: Mapping[str, Policy]
) -> FittedOverlap | None:
    """Fit the study's treatment model across silos; a model that cannot be fitted is reported, not raised."""
    if study.target.treatment is None or study.target.is_modified or isinstance(study.target, AbstractTarget):
        return None  # the treatment model of a target with a problem of its own is no propensity score
    usable = complete_rows(columns, tables)
    if not usable:
        return FittedOverlap(problem="no record has both its treatment and its covariates")
    plan = Plan(program=PreflightProgram.of(study, list(usable)), roster=roster(list(usable)))
    silos = [Silo(name, plan, table, keeper=Keeper(policy=policies[name])) for name, table in usable.items()]
    try:
        finished = run_embedded(plan, silos)
    except FedTMLEError as error:
        return FittedOverlap(problem=str(error))
    return FittedOverlap(
        histograms=tuple(
            histogram_document(each, len(usable)) for each in propensity_histograms(finished.outcome)
        ),
        n_rows=finished.n,
    )
