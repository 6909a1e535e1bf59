"""Table 1 of one silo by arm, in additive sums, and what of it may leave the silo.

A count may leave if it and what is left of its total are at least the silo's floor; a sum may
leave if the count behind it may, and if it does not tell a small count by itself. A factor's level
is named if some silo may name it: if enough of that silo's people have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedtmle.initial.glm import Supplied
from fedtmle.model.table import Factor, Table
from fedtmle.model.types import Array, IntArray
from fedtmle.programs.study import Study
from fedtmle.protocol.bins import visible
from fedtmle.studyfile.schema import schema_of

Bools = NDArray[np.bool_]
FEW = 10  # so many different values are told apart by a sum and a sum of squares, or nearly
STEPS = ("without treatment or a covariate", "of the rest, without an outcome")


@dataclass(frozen=True, kw_only=True)
class Characteristics:
    """Which columns a study's Table 1 describes: not the outcome, which is nobody's baseline."""

    arms: tuple[str, ...]
    treatment: str | None
    outcome: str
    numeric: tuple[str, ...]
    factors: Mapping[str, tuple[str, ...]]  # with the levels that some silo may name
    unnamed: Mapping[str, frozenset[str]] = field(default_factory=dict)  # those that none may, if any


@dataclass(frozen=True)
class Moments:
    """Of the known values of a column in one arm: their number, sum and sum of squares."""

    count: int
    total: float
    squares: float
    smallest_cell: int | None = None  # of the rarest value, where there are few; 0 where there is one
    zero_one: bool = False  # all are 0 or 1, so that the mean is a share


@dataclass(frozen=True)
class Lost:
    """Rows lost to a missing value; ``fewest`` of them in one arm, where there are any: with a
    column's sums by arm the total would tell that number as well."""

    count: int
    fewest: int = 0


@dataclass(frozen=True, kw_only=True)
class SiloTable:
    """One silo's sums; None is a cell that may not leave it."""

    n_rows: int
    arms: tuple[int | None, ...]
    lost: tuple[Lost | None, ...]  # at each of STEPS
    missing: Mapping[str, Lost | None]
    numeric: Mapping[str, tuple[Moments | None, ...]]
    levels: Mapping[tuple[str, str], tuple[int | None, ...]]
    constant: frozenset[str] = frozenset()  # numeric columns with one value in each arm, which is not told


def characteristics(
    study: Study, tables: Sequence[Table], least: Sequence[int] | None = None
) -> Characteristics:
    """Covariates, strata and the columns that rules read; no predictions, weights or identifiers.

    ``least`` has the number of people of each silo that a level needs for the silo to name it.
    """
    target = study.target
    predictions = {c for m in study.models.values() if isinstance(m, Supplied) for c in m.columns}
    apart = {target.outcome, target.treatment, study.weights, study.cluster, *predictions}
    names = [name for name in schema_of(study).names if name not in apart]
    least = [0] * len(tables) if least is None else least
    factors: dict[str, tuple[str, ...]] = {}
    unnamed: dict[str, frozenset[str]] = {}
    for name in names:
        held = [
            (table.factors[name], k) for table, k in zip(tables, least, strict=True) if name in table.factors
        ]
        found = {level for factor, _ in held for level in factor.levels}
        if found:
            named = {level for factor, k in held for level in _held_by(factor, k)}
            factors[name] = tuple(sorted(named))
            if found > named:
                unnamed[name] = frozenset(found - named)
    return Characteristics(
        arms=target.arms,
        treatment=target.treatment,
        outcome=target.outcome,
        numeric=tuple(name for name in names if name not in factors),
        factors=factors,
        unnamed=unnamed,
    )


def _held_by(factor: Factor, least: int) -> list[str]:
    counts = np.bincount(factor.codes[factor.codes >= 0], minlength=len(factor.levels))
    return [level for level, count in zip(factor.levels, counts, strict=True) if count >= least]


def _codes(factor: Factor, levels: tuple[str, ...]) -> IntArray:
    """Codes into ``levels``; -1 for a value that is missing or not named."""
    position = {level: code for code, level in enumerate(levels)}
    lookup = np.array([position.get(level, -1) for level in factor.levels] + [-1], dtype=np.int64)
    return np.asarray(lookup[factor.codes])


def describe_silo(what: Characteristics, table: Table) -> SiloTable:
    """Everything, for the silo's own eyes."""
    if what.treatment is None:
        arm = np.zeros(table.n_rows, dtype=np.int64)
    else:
        arm = table.factors[what.treatment].recode(what.arms)
    taken = [arm == code for code in range(len(what.arms))]
    unknown = {
        **{name: np.isnan(table.numeric[name]) for name in what.numeric},
        **{name: table.factors[name].codes < 0 for name in what.factors},
    }
    known = complete(what, table)
    seen = ~np.isnan(table.numeric[what.outcome])
    codes = {name: _codes(table.factors[name], levels) for name, levels in what.factors.items()}
    missing = {**unknown, **({what.treatment: arm < 0} if what.treatment else {}), what.outcome: ~seen}

    def lost(rows: Bools) -> Lost:
        parts = [int((rows & group).sum()) for group in (*taken, arm < 0)]
        return Lost(sum(parts), min((part for part in parts if part), default=0))

    return SiloTable(
        n_rows=table.n_rows,
        arms=tuple(int(rows.sum()) for rows in taken),
        lost=(lost(~known), lost(known & ~seen)),
        missing={name: lost(rows) for name, rows in missing.items()},
        numeric={name: tuple(_moments(table.numeric[name][rows]) for rows in taken) for name in what.numeric},
        levels={
            (name, level): tuple(int((codes[name][rows] == code).sum()) for rows in taken)
            for name, levels in what.factors.items()
            for code, level in enumerate(levels)
        },
    )


def complete(what: Characteristics, table: Table) -> Bools:
    """The rows that have their treatment and all covariates."""
    known = np.ones(table.n_rows, dtype=bool)
    for name in what.numeric:
        known &= ~np.isnan(table.numeric[name])
    for name in (*what.factors, *([what.treatment] if what.treatment else [])):
        known &= table.factors[name].codes >= 0
    return known


def _moments(values: Array) -> Moments:
    values = values[~np.isnan(values)]
    distinct, counts = np.unique(values, return_counts=True)
    # Of a few values the sums tell how many have each; of one value they tell everyone's.
    few = None if len(distinct) > FEW else int(counts.min()) if len(distinct) > 1 else 0
    shared = bool(np.isin(distinct, (0.0, 1.0)).all())
    return Moments(len(values), float(values.sum()), float((values**2).sum()), few, shared)


def thresholded(silo: SiloTable, floor: int) -> SiloTable:
    """What of a silo's table may leave it."""
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
        missing={name: _tellable(lost, silo.n_rows, floor) for name, lost in silo.missing.items()},
        numeric={
            name: tuple(_releasable(m, arm, floor) for m, arm in zip(by_arm, arms, strict=True))
            for name, by_arm in silo.numeric.items()
        },
        levels={cell: tuple(counts) for cell, counts in levels.items()},
        constant=frozenset(
            name
            for name, by_arm in silo.numeric.items()
            if all(_one_value(m, arm, floor) for m, arm in zip(by_arm, arms, strict=True))
        ),
    )


def _counts(values: Iterable[int | None]) -> list[int]:
    """Counts as numbers, of a table in which nothing is hidden yet."""
    return [value or 0 for value in values]


def _tellable(lost: Lost | None, total: int, floor: int) -> Lost | None:
    if lost is None or (lost.count and (lost.fewest < floor or total - lost.count < floor)):
        return None
    return Lost(lost.count)


def _flow(silo: SiloTable, floor: int) -> tuple[Lost | None, ...]:
    """The losses up to the first that may not be told: a later one would be told with it."""
    shown: list[Lost | None] = []
    left = silo.n_rows
    for lost in silo.lost:
        told = None if None in shown else _tellable(lost, left, floor)
        shown.append(told)
        left -= 0 if told is None else told.count
    return tuple(shown)


def _releasable(moments: Moments | None, arm: int | None, floor: int) -> Moments | None:
    if moments is None or arm is None or _too_few(moments, arm, floor):
        return None
    telling = moments.smallest_cell is not None and moments.smallest_cell < floor
    return None if telling else moments


def _one_value(moments: Moments | None, arm: int | None, floor: int) -> bool:
    """Whether everybody in an arm that may be seen has the same value, so that a sum would tell it."""
    if moments is None or arm is None or _too_few(moments, arm, floor):
        return False
    return moments.smallest_cell == 0


def _too_few(moments: Moments, arm: int, floor: int) -> bool:
    unknown = arm - moments.count
    return moments.count < floor or 0 < unknown < floor
