"""Columns of dates as days, for the difference of two of them.

Dates come typed (Parquet, databases, data frames), or as text in a stated format. Times of the day are left
out: the difference of two dates is a number of whole days.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime

import numpy as np
from numpy.typing import NDArray

from fedtmle.model.table import Factor
from fedtmle.model.types import Array

EPOCH = date(1970, 1, 1).toordinal()
ISO = "YYYY-MM-DD"


def days_of(label: str, written: str) -> float | None:
    """Return the days from 1970 to the date of a label, or None if it is not a date.

    ``written`` is a format of `datetime.strptime`, or empty for ISO dates, with a time or without.
    """
    try:
        read = datetime.strptime(label, written) if written else datetime.fromisoformat(label)
    except ValueError:
        return None
    return float(read.date().toordinal() - EPOCH)


def days_of_labels(labels: Factor, written: str, missing: Sequence[str]) -> tuple[Array, NDArray[np.bool_]]:
    """Return the days of each cell (NaN if missing), and a mask of the cells that are not dates."""
    known = [None if label.strip() in missing else days_of(label.strip(), written) for label in labels.levels]
    bad = [
        day is None and label.strip() not in missing for day, label in zip(known, labels.levels, strict=True)
    ]
    days = np.array([np.nan if day is None else day for day in known] + [np.nan])
    return days[labels.codes], np.array([*bad, False])[labels.codes]


def without_missing(days: Array, missing: Sequence[str]) -> Array:
    """Return days with the dates of the codes for a missing value, such as 9999-12-31, removed."""
    codes = [day for day in (days_of(code, "") for code in missing) if day is not None]
    return np.where(np.isin(days, codes), np.nan, days)
