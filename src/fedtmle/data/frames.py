"""Tables in memory (pandas and polars frames, mappings of arrays), and long tables read as wide ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard, final

import numpy as np

from fedtmle.data.convert import (
    DATES,
    OTHER,
    AbstractReader,
    Cells,
    Numbers,
    UnreadableError,
    Unusable,
    dates,
)
from fedtmle.data.silofile import LongTable
from fedtmle.model.table import Factor
from fedtmle_core.types import Array, Bools, IntArray

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from numpy.typing import NDArray


# Names that pandas' `infer_dtype` may give to a column.
_NUMBERS = {"empty", "boolean", "integer", "floating", "mixed-integer-float", "decimal"}
_DATES = {"datetime64", "datetime", "date", "timedelta64", "timedelta", "time", "period", "interval"}


def frame_reader(source: object, *, copy: bool) -> AbstractReader | None:
    """Return a reader of an in-memory table, or None if ``source`` is not one.

    Without ``copy``, columns of a pandas frame or of arrays may be shared with their owner. They must not be
    written to, and not be kept beyond the call that they were given to.
    """
    if _is_pandas(source):
        return _PandasReader(source, copy)
    if _is_polars(source):
        return _PolarsReader(source)
    if isinstance(source, Mapping):
        return _ArraysReader(source, copy)
    return None


# Only someone who has imported a library can pass its frame; another thread may be importing it right now.
def _is_pandas(source: object) -> TypeGuard[pd.DataFrame]:
    return isinstance(source, getattr(sys.modules.get("pandas"), "DataFrame", ()))


def _is_polars(source: object) -> TypeGuard[pl.DataFrame]:
    return isinstance(source, getattr(sys.modules.get("polars"), "DataFrame", ()))


class _PandasReader(AbstractReader):
    """A pandas frame; its index is ignored."""

    def __init__(self, frame: pd.DataFrame, copy: bool) -> None:
        self._frame = frame
        self._copy = copy

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(name) for name in self._frame.columns)

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        position = {name: index for index, name in enumerate(self.names)}
        columns = {name: self._frame.iloc[:, position[name]] for name in names}
        return len(self._frame), {name: _cells(column, self._copy) for name, column in columns.items()}


class _PolarsReader(AbstractReader):
    """A polars frame."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._frame.columns)

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        return self._frame.height, {name: self._cells(self._frame[name]) for name in names}

    def _cells(self, series: pl.Series) -> Cells:
        import polars as pl

        dtype = series.dtype
        if dtype.is_numeric() or dtype in (pl.Boolean, pl.Null):
            return Numbers(np.array(series.cast(pl.Float64).fill_null(np.nan).to_numpy(), dtype=np.float64))
        if dtype in (pl.String, pl.Categorical, pl.Enum):
            return text(series.cast(pl.String).to_numpy())
        if dtype == pl.Date or (isinstance(dtype, pl.Datetime) and dtype.time_zone is None):
            days = series.cast(pl.Date).to_physical().cast(pl.Float64)
            return dates(days.fill_null(np.nan).to_numpy())
        return DATES if dtype.is_temporal() else OTHER


class _ArraysReader(AbstractReader):
    """A mapping from column names to one-dimensional arrays or lists."""

    def __init__(self, arrays: Mapping[object, object], copy: bool) -> None:
        self._copy = copy
        self._arrays = {str(name): array for name, array in arrays.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        import pandas

        columns = {}
        for name in names:
            try:
                columns[name] = pandas.Series(self._arrays[name], copy=False)
            except Exception:  # a library's message may quote what it could not take
                columns[name] = None
        if any(column is None for column in columns.values()):
            raise UnreadableError(
                "a column is not a one-dimensional array", "give one array or list per name"
            )
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            raise UnreadableError("the columns have different lengths", "give arrays of one length")
        cells = {name: _cells(column, self._copy) for name, column in columns.items()}
        return lengths.pop() if lengths else 0, cells


def _cells(series: pd.Series, copy: bool) -> Cells:
    """Return the cells of a pandas series, converted by its type."""
    import pandas
    from pandas.api import types

    if isinstance(series.dtype, pandas.CategoricalDtype):
        return _categorical(series)
    typed = types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype)
    kind = "floating" if typed else types.infer_dtype(series, skipna=True)
    if kind in _NUMBERS:
        return Numbers(_floats(series, copy))
    if kind == "string":
        return text(series.to_numpy(dtype=object))
    if kind.startswith("mixed"):
        return _mixed(series)
    if kind in ("datetime64", "datetime", "date"):
        return _days(series)
    return DATES if kind in _DATES else OTHER


def _days(series: pd.Series) -> Cells:
    """Return dates as days from 1970. Times with a zone are unusable: their date depends on the zone."""
    import pandas

    stamps = pandas.to_datetime(series, errors="coerce")
    if stamps.dt.tz is not None or (stamps.isna() & series.notna()).any():
        return DATES
    days = stamps.to_numpy().astype("datetime64[D]").astype(np.float64)
    return dates(np.where(stamps.isna(), np.nan, days))


def _floats(series: pd.Series, copy: bool) -> Array:
    """Return numbers as a contiguous column with NaN for missing values; memory is shared unless ``copy``."""
    if not isinstance(series.dtype, np.dtype) or series.dtype.kind not in "biuf":
        return np.array(series.to_numpy(dtype=np.float64, na_value=np.nan), order="C")
    values: Array = series.to_numpy()
    if copy or values.dtype != np.float64 or not values.flags.c_contiguous:
        return np.array(values, dtype=np.float64, order="C")
    shared = values.view()
    try:
        # Arrays of pandas 3 are read-only. The compiled loops require writeable arrays, but do not write.
        shared.flags.writeable = True
    except ValueError:
        return values.copy()
    return shared


def _categorical(series: pd.Series) -> Cells:
    """Return the cells of a categorical series, converted by the type of its categories."""
    import pandas

    codes = series.cat.codes.to_numpy().astype(np.int64)
    match _cells(pandas.Series(series.cat.categories), copy=True):
        case Numbers(values=values):
            return Numbers(np.append(values, np.nan)[codes])
        case Factor() as labels:
            return Factor(np.append(labels.codes, -1)[codes], labels.levels)
        case Unusable() as unusable:
            return unusable


def _mixed(series: pd.Series) -> Cells:
    """Return numbers among text as text, so that the stray cells can be counted."""
    values, missing = series.to_numpy(dtype=object), series.isna().to_numpy()
    plain = (str, int, float, np.number, np.bool_, Decimal)  # anything else has no well-defined text
    if not all(isinstance(value, plain) for value in values[~missing]):
        return OTHER
    return text(np.array([None if gone else str(value) for value, gone in zip(values, missing, strict=True)]))


def text(values: NDArray[np.generic]) -> Factor:
    """Return text cells as a factor of their distinct labels; None, NaN and masked cells are missing."""
    import pandas

    codes, labels = pandas.factorize(np.asarray(values, dtype=object))
    codes[np.ma.getmaskarray(values)] = -1
    return Factor(codes.astype(np.int64, copy=False), tuple(str(label) for label in labels))


# Long tables, with one row per person and period, read as wide ones with one row per person.
#
# The hospital's column sev gives the wide columns sev1, ..., sevK, its value in each period; sev, if it is
# the same in all rows of a person that have it; and sev_last, its value in the person's last row. People are
# in the order of their identifiers, so that the order of rows in the source does not matter.

LAST = "_last"
ANY, LATEST = 0, -1  # stand for any period, and for a person's last row
MOST_PERIODS = 1_000  # more are probably dates or identifiers


@final
@dataclass(frozen=True)
class _Layout:
    """The ``person`` and the ``period`` of each row of a long table, both counted from 0."""

    person: IntArray
    period: IntArray
    people: int
    periods: int

    @cached_property
    def last(self) -> IntArray:
        """The last row of each person."""
        rows = np.lexsort((self.period, self.person))
        ends = np.flatnonzero(np.diff(self.person[rows], append=self.people))
        return rows[ends]


class LongReader(AbstractReader):
    """Reads a long table as a wide one."""

    def __init__(self, long: LongTable, rows: AbstractReader) -> None:
        self._long = long
        self._rows = rows
        for part, name in (("person", long.person), ("period", long.period)):
            if rows.names.count(name) != 1:
                raise UnreadableError(
                    f"the table must have exactly one column '{name}' for the {part} of each row",
                    f"correct {part}",
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._columns)

    @property
    def quotable(self) -> tuple[str, ...]:
        return self.names if self._rows.quotable else ()

    def read(self, names: Sequence[str]) -> tuple[int, dict[str, Cells]]:
        layout, places = self._layout, dict(self._columns)
        return layout.people, {
            name: _placed(self._cells[places[name][0]], *places[name], layout) for name in names
        }

    @cached_property
    def _cells(self) -> Mapping[str, Cells]:
        """The cells of all columns, read together because a database sends its rows once."""
        return self._rows.read(self._rows.names)[1]

    @cached_property
    def _columns(self) -> list[tuple[str, tuple[str, int]]]:
        """The wide columns by name: the long column that each comes from, and the period of its value."""
        places = [("", ANY), (LAST, LATEST), *((str(t), t) for t in range(1, self._layout.periods + 1))]
        keys = (self._long.person, self._long.period)
        columns = [
            (f"{column}{suffix}", (column, where))
            for column in self._rows.names
            if column not in keys
            for suffix, where in places
        ]
        last = (f"{self._long.period}{LAST}", (self._long.period, LATEST))
        return [*columns, last, (self._long.person, (self._long.person, ANY))]

    @cached_property
    def _layout(self) -> _Layout:
        """The person and period of each row; refuse rows that lack either, and two rows for one period."""
        period = _whole(self._cells[self._long.period], self._long.period)
        person = _identified(self._cells[self._long.person], self._long.person)
        periods = int(period.max(initial=0))
        layout = _Layout(person, period - 1, int(person.max(initial=-1)) + 1, periods)
        twice = len(person) - len(np.unique(person * max(periods, 1) + layout.period))
        if twice:
            raise UnreadableError(
                f"{_rows(twice)} with the person and the period of another row",
                "give one row for each person and period",
            )
        return layout


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _whole(cells: Cells, name: str) -> IntArray:
    """Return the numbers of the periods, which are 1, 2, and so on."""
    fix = "number the periods 1, 2, ... in every row"
    if not isinstance(cells, Numbers):
        raise UnreadableError(f"column '{name}' does not hold numbers of periods", fix)
    values = cells.values
    good = (values >= 1) & (values <= MOST_PERIODS) & (values == np.floor(values))  # NaN is not good
    bad = int(np.count_nonzero(~good))
    if bad:
        raise UnreadableError(f"column '{name}' is not the number of a period in {_rows(bad)}", fix)
    return values.astype(np.int64)


def _identified(cells: Cells, name: str) -> IntArray:
    """Return the position of each row's person among all people, who are in the order of identifiers."""
    if isinstance(cells, Numbers):
        missing = np.isnan(cells.values)
        people = np.unique(cells.values, return_inverse=True)[1]
    elif isinstance(cells, Factor):
        missing = cells.codes < 0
        rank = np.empty(len(cells.levels), dtype=np.int64)
        rank[np.argsort(np.array(cells.levels, dtype=object), kind="stable")] = np.arange(len(cells.levels))
        people = np.unique(rank[cells.codes], return_inverse=True)[1] if len(rank) else cells.codes
    else:
        raise UnreadableError(
            f"column '{name}' does not hold identifiers of people", "give numbers or text there"
        )
    count = int(np.count_nonzero(missing))
    if count:
        raise UnreadableError(
            f"column '{name}' is missing in {_rows(count)}", "give an identifier of the person in every row"
        )
    return people.reshape(-1).astype(np.int64)


def _placed(cells: Cells, column: str, where: int, layout: _Layout) -> Cells:
    """Return one value per person: from a period, from the last row, or the one that all rows agree on."""
    if isinstance(cells, Numbers):
        rows = _chosen(cells.values, np.isnan(cells.values), column, where, layout)
        return Numbers(np.append(cells.values, np.nan)[rows])
    if isinstance(cells, Factor):
        rows = _chosen(cells.codes, cells.codes < 0, column, where, layout)
        return Factor(np.append(cells.codes, -1)[rows], cells.levels)
    return cells


def _chosen(values: Array | IntArray, missing: Bools, name: str, where: int, layout: _Layout) -> IntArray:
    """Return the row that holds each person's value, or -1 if there is none."""
    if where == LATEST:
        return layout.last
    rows = np.flatnonzero(~missing if where == ANY else layout.period == where - 1)
    chosen = np.full(layout.people, -1, dtype=np.int64)
    chosen[layout.person[rows]] = rows
    if where == ANY:
        differs = values[chosen[layout.person[rows]]] != values[rows]
        people = len(np.unique(layout.person[rows][differs]))
        if people:
            raise UnreadableError(
                f"column '{name}' differs between the rows of {people} of the people",
                f"map a column of one period, as '{name}1', or '{name}{LAST}'",
            )
    return chosen
