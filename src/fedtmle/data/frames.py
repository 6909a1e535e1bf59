"""Tables already in memory: pandas frames, polars frames, mappings of arrays."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from fedtmle.data.convert import DATES, OTHER, AbstractReader, Cells, Numbers, UnreadableError, Unusable
from fedtmle.model.table import Factor
from fedtmle.model.types import Array

# What pandas' `infer_dtype` may call a column.
_NUMBERS = {"empty", "boolean", "integer", "floating", "mixed-integer-float", "decimal"}
_DATES = {"datetime64", "datetime", "date", "timedelta64", "timedelta", "time", "period", "interval"}


def frame_reader(source: object, *, copy: bool) -> AbstractReader | None:
    """A reader of an in-memory table, or None if ``source`` is none.

    Without ``copy``, columns of a pandas frame or of arrays may be the owner's own: not to be written to,
    and not to be kept when the call that they were given to is over.
    """
    # A frame can only be given by someone who has imported its library; another thread may be at it.
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    if isinstance(source, getattr(pandas, "DataFrame", ())):
        return _PandasReader(source, copy)
    if polars is not None and isinstance(source, getattr(polars, "DataFrame", ())):
        return _PolarsReader(source, polars)
    if isinstance(source, Mapping):
        return _ArraysReader(source, copy)
    return None


class _PandasReader(AbstractReader):
    """A pandas frame; its index is ignored."""

    def __init__(self, frame: Any, copy: bool) -> None:
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

    def __init__(self, frame: Any, polars: Any) -> None:
        self._frame = frame
        self._polars = polars

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._frame.columns)

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        return self._frame.height, {name: self._cells(self._frame[name]) for name in names}

    def _cells(self, series: Any) -> Cells:
        pl, dtype = self._polars, series.dtype
        if dtype.is_numeric() or dtype in (pl.Boolean, pl.Null):
            return Numbers(np.array(series.cast(pl.Float64).fill_null(np.nan).to_numpy(), dtype=np.float64))
        if dtype in (pl.String, pl.Categorical, pl.Enum):
            return text(series.cast(pl.String).to_numpy())
        return DATES if dtype.is_temporal() else OTHER


class _ArraysReader(AbstractReader):
    """A mapping of column names to one-dimensional arrays or lists."""

    def __init__(self, arrays: Mapping[Any, Any], copy: bool) -> None:
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


def _cells(series: Any, copy: bool) -> Cells:
    """The cells of a pandas series, by its type rather than by trial."""
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
    return DATES if kind in _DATES else OTHER


def _floats(series: Any, copy: bool) -> Array:
    """A series of numbers as a contiguous column, NaN where missing; the series' own memory if it may be."""
    if not isinstance(series.dtype, np.dtype) or series.dtype.kind not in "biuf":
        return np.array(series.to_numpy(dtype=np.float64, na_value=np.nan), order="C")
    values: Array = series.to_numpy()
    if copy or values.dtype != np.float64 or not values.flags.c_contiguous:
        return np.array(values, dtype=np.float64, order="C")
    own = values.view()
    try:
        own.flags.writeable = (
            True  # pandas 3 says no; compiled loops are of writeable arrays, and write to none
        )
    except ValueError:
        return values.copy()
    return own


def _categorical(series: Any) -> Cells:
    """A categorical series is whatever its categories are."""
    import pandas

    codes = series.cat.codes.to_numpy().astype(np.int64)
    match _cells(pandas.Series(series.cat.categories), copy=True):
        case Numbers(values=values):
            return Numbers(np.append(values, np.nan)[codes])
        case Factor() as labels:
            return Factor(np.append(labels.codes, -1)[codes], labels.levels)
        case Unusable() as unusable:
            return unusable


def _mixed(series: Any) -> Cells:
    """Numbers among text: all of it is text, so that the stray cells can be counted."""
    values, missing = series.to_numpy(dtype=object), series.isna().to_numpy()
    plain = (str, int, float, np.number, np.bool_, Decimal)  # str() of anything else is its own business
    if not all(isinstance(value, plain) for value in values[~missing]):
        return OTHER
    return text(np.array([None if gone else str(value) for value, gone in zip(values, missing, strict=True)]))


def text(values: Any) -> Factor:
    """Text cells as a factor of their distinct labels; None, NaN and what is masked are missing."""
    import pandas

    codes, labels = pandas.factorize(np.asarray(values, dtype=object))
    codes[np.ma.getmaskarray(values)] = -1
    return Factor(codes.astype(np.int64, copy=False), tuple(str(label) for label in labels))
