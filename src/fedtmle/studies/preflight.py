"""The cohort before a study runs: Table 1 by arm, missing values, cohort flow and overlap.

The view of several silos is made of thresholded tables only. Every silo first hides the cells below the
strictest of the silos' floors, which their own files state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from fedtmle.data import Schema, load_all
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.model.table import Table
from fedtmle.programs.preflight import PreflightProgram, SitesProgram, propensity_histograms, site_tests
from fedtmle.programs.study import Study
from fedtmle.programs.target import AbstractTarget
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.results.document import histogram_document, site_warnings
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import policy_of, session_policy
from fedtmle.studies.table1 import (
    STEPS,
    Lost,
    SiloTable,
    Table1Columns,
    complete,
    describe_silo,
    table1_columns,
    thresholded,
)
from fedtmle.studyfile.schema import first_period, in_memory, schema_of
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect


@dataclass(frozen=True, kw_only=True)
class Characteristic:
    """One row of Table 1: the mean and standard deviation, or the share (``sd`` is None), in each arm.

    It is computed from the ``silos`` that disclose it in all arms, so that the arms are comparable; the
    tuples are empty if there are none. ``difference`` is the largest standardised difference to the
    reference arm. With ``constant``, each silo has a single value, which is not disclosed.
    """

    name: str
    level: str | None
    mean: tuple[float, ...]
    sd: tuple[float, ...] | None
    difference: float | None
    silos: int
    constant: bool = False


@dataclass(frozen=True, kw_only=True)
class Count:
    """A count over the ``silos`` that disclose it, which have ``of`` records; None if no silo does."""

    name: str
    count: int | None
    of: int
    silos: int


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
        difference=_difference(means, variances),
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
        difference=_difference(shares, [share * (1 - share) for share in shares]),
        silos=len(shown),
    )


def _difference(means: Sequence[float], variances: Sequence[float]) -> float | None:
    """Return the largest standardised difference to arm 0, (m_a - m_0) / sqrt((v_a + v_0) / 2)."""
    differences = []
    for mean, variance in zip(means[1:], variances[1:], strict=True):
        scale = math.sqrt((variance + variances[0]) / 2)
        gap = mean - means[0]
        if gap == 0 or scale > 0:
            differences.append(gap / scale if gap else 0.0)
    return max(differences, key=abs, default=None)


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
