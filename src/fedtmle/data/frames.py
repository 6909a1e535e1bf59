"""Tables already in memory: pandas frames, polars frames, mappings of arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, TypeGuard

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
from fedtmle.model.table import Factor
from fedtmle.model.types import Array

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
