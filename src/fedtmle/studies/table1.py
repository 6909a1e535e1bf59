"""Table 1 of one silo by arm, as additive sums, and the part of it that the silo may disclose.

A count may be disclosed if it, and the rest of its total, are at least the silo's floor. A sum may be
disclosed if the count behind it may, and if it does not reveal a small count by itself. The levels of factors
are the dictionary's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import formulas
from fedtmle.model.table import Table
from fedtmle.model.types import Array
from fedtmle.programs.study import Study
from fedtmle.protocol.bins import visible
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect

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
