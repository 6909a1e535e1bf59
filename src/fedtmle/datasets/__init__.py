"""Data shipped with the package; `README.md` beside it states where each file comes from."""

from __future__ import annotations

import csv
import math
from importlib import resources

import numpy as np

from fedtmle.model.types import Array


def ihdp() -> dict[str, Array]:
    """The Infant Health and Development Program: 985 infants, 8 hospitals; NaN where missing."""
    text = resources.files(__name__).joinpath("ihdp.csv").read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    columns = zip(*rows, strict=True)
    return {
        name: np.array([float(cell) if cell else math.nan for cell in column])
        for name, column in zip(header, columns, strict=True)
    }
