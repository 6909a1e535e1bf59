"""A draft of a study's dictionary, from one table, for a person to edit.

The draft is made from records and so belongs to their owner: levels are labels that occur, and ranges are
rounded outward from the least and the largest value. Both must be replaced by what is possible before the
study is shared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtmle.data.convert import Cells, Numbers, in_order
from fedtmle.data.silofile import ColumnMap, read_silo_file
from fedtmle.data.source import read_cells
from fedtmle.errors import InputError
from fedtmle.initial.variables import MOST_LEVELS, Variable, Variables
from fedtmle.model.table import Factor
from fedtmle.model.types import Array

FEW_CODES = 8  # whole numbers with at most this many distinct values may be codes
LARGEST_COUNT = 30  # whole numbers up to this are drafted as counts, others as numbers
MOST_REPEATED = 0.5  # text with a larger share of distinct labels identifies records or clusters


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """A column with its guessed declaration (None if there is no guess) and a note to the table's owner."""

    name: str
    variable: Variable | None
    note: str = ""
    has_missing: bool = False


def draft(table: object) -> Variables:
    """Return a draft of a dictionary for the columns of ``table``, for a person to edit.

    Kinds are guessed and ranges are rounded outward: both are yours to correct. A range says what is
    possible, for every silo, and not what occurs in one table. Columns of dates, and columns without
    values, are left out.

    Parameters
    ----------
    table
        A pandas or polars frame, a mapping of arrays, or the path of a .csv, .parquet or silo file.

    Returns
    -------
    Variables
        The draft.

    Raises
    ------
    DataErrors
        The table cannot be read.
    InputError
        ``table`` is of another type.

    Examples
    --------
    >>> ft.draft({"age": np.array([34.0, 71.5]), "sex": np.array(["f", "m"])})["age"].kind
    'number'
    """
    return Variables({each.name: each.variable for each in drafted(table) if each.variable is not None})


def drafted(table: object) -> list[Drafted]:
    """Return what each column of a table seems to be, in the table's order.

    The columns that a silo file maps have the study's names, units and levels.
    """
    if isinstance(table, str | os.PathLike) and Path(table).suffix.lower() == ".toml":
        silo = read_silo_file(Path(table))
        _, theirs = read_cells(silo.data)
        cells = dict(_mapped(theirs, silo.columns))
    else:
        _, read = read_cells(table)
        cells = dict(read)
    return [replace(_of(name, each), has_missing=_has_missing(each)) for name, each in cells.items()]


def _mapped(theirs: Mapping[str, Cells], columns: Mapping[str, ColumnMap]) -> Iterator[tuple[str, Cells]]:
    """Yield the hospital's columns as the study sees them, by the study's names."""
    by_theirs = {column.column: (name, column) for name, column in columns.items() if column.column}
    for name, cells in theirs.items():
        ours, column = by_theirs.get(name, (name, ColumnMap(column=name)))
        yield ours, _converted(cells, column)


def _converted(cells: Cells, column: ColumnMap) -> Cells:
    if isinstance(cells, Numbers):
        codes = [float(code) for code in column.missing if _is_number(code)]
        values = np.where(np.isin(cells.values, codes), np.nan, cells.values)
        return Numbers(values * column.scale + column.shift)
    if isinstance(cells, Factor):
        given = column.levels or {level: level for level in cells.levels}
        kept = {
            level: given[level] for level in cells.levels if level in given and level not in column.missing
        }
        levels = tuple(dict.fromkeys(kept.values()))
        place = [levels.index(kept[level]) if level in kept else -1 for level in cells.levels]
        return Factor(np.array([*place, -1], dtype=np.int64)[cells.codes], levels)
    return cells


def _is_number(code: str) -> bool:
    try:
        float(code)
    except ValueError:
        return False
    return True


def _has_missing(cells: Cells) -> bool:
    if isinstance(cells, Numbers):
        return bool(np.isnan(cells.values).any())
    return isinstance(cells, Factor) and bool((cells.codes < 0).any())


def _of(name: str, cells: Cells) -> Drafted:
    match cells:
        case Numbers():
            return _numbers(name, cells.values[~np.isnan(cells.values)])
        case Factor():
            return _labels(name, cells)
        case _:
            return Drafted(name=name, variable=None, note=f"has {cells.contents}: derive numbers from it")


def _numbers(name: str, values: Array) -> Drafted:
    if not len(values):
        return Drafted(name=name, variable=None, note="has no values")
    if not np.isfinite(values).all():
        return Drafted(name=name, variable=None, note="has infinite values: correct them")
    low, high = float(values.min()), float(values.max())
    distinct = np.unique(values)
    if np.isin(distinct, (0.0, 1.0)).all():
        return Drafted(name=name, variable=Variable(kind="binary"))
    is_whole = bool((values == np.floor(values)).all())
    if is_whole and len(distinct) == len(values) > MOST_LEVELS:
        return Drafted(name=name, variable=Variable(kind="identifier"), note="differs in every row")
    ends = rounded_out(low, high)
    codes = "or a category with these codes as levels" if is_whole and len(distinct) <= FEW_CODES else ""
    if is_whole and low >= 0 and high <= LARGEST_COUNT:
        return Drafted(name=name, variable=Variable(kind="count", range=(0.0, ends[1])), note=codes)
    return Drafted(name=name, variable=Variable(kind="number", range=ends), note=codes)


def _labels(name: str, factor: Factor) -> Drafted:
    used = in_order(level for level, count in zip(factor.levels, factor.counts, strict=True) if count)
    if not used:
        return Drafted(name=name, variable=None, note="has no values")
    if len(used) > max(MOST_REPEATED * sum(factor.counts), 2) or len(used) > MOST_LEVELS:
        return Drafted(name=name, variable=Variable(kind="identifier"), note="labels that hardly repeat")
    if len(used) == 1:
        return Drafted(name=name, variable=None, note="has one level: list the others that are possible")
    try:
        variable = Variable(kind="category", levels=tuple((level, "") for level in used))
    except InputError:
        return Drafted(name=name, variable=None, note="has labels that cannot be codes: map them")
    return Drafted(name=name, variable=variable, note="add levels that other silos may have")


def rounded_out(low: float, high: float) -> tuple[float, float]:
    """Return ends at one significant digit that enclose both, so that neither is a record's value."""
    unit = 10.0 ** math.floor(math.log10(max(abs(low), abs(high)) or 1.0))
    below, above = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    if below == low and below != 0.0:
        below -= unit
    if above == high:
        above += unit
    return below, above
