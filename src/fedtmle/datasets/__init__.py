"""Data shipped with the package; `README.md` beside it states where each file comes from."""

from __future__ import annotations

import csv
import math
from importlib import resources

import numpy as np

from fedtmle.initial.variables import Variables
from fedtmle_core.types import Array


def ihdp() -> dict[str, Array]:
    """The Infant Health and Development Program: 985 infants, 8 hospitals; NaN where missing."""
    text = resources.files(__name__).joinpath("ihdp.csv").read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    columns = zip(*rows, strict=True)
    return {
        name: np.array([float(cell) if cell else math.nan for cell in column])
        for name, column in zip(header, columns, strict=True)
    }


def ihdp_variables() -> Variables:
    """The dictionary of the columns of `ihdp` that the demonstrations use."""
    return Variables(
        {
            "iqsb_36": {"kind": "number", "range": (40, 160), "label": "IQ at 36 months", "unit": "points"},
            "treat": {
                "kind": "binary",
                "levels": {"0": "follow-up only", "1": "early intervention"},
                "label": "Early intervention",
            },
            "bw": {"kind": "number", "range": (300, 2500), "label": "Birth weight", "unit": "g"},
            "nnhealth": {"kind": "number", "range": (0, 200), "label": "Neonatal health index"},
            "sex": {"kind": "binary", "label": "Male infant"},
            "mlt_birt": {"kind": "count", "range": (0, 4), "label": "Twins or more at this birth"},
            "momage": {"kind": "number", "range": (10, 60), "label": "Mother's age", "unit": "years"},
            "b_marr": {"kind": "binary", "label": "Mother married at birth"},
            "mom_lths": {"kind": "binary", "label": "Mother did not finish high school"},
            "mom_hs": {"kind": "binary", "label": "Mother finished high school"},
            "mom_scoll": {"kind": "binary", "label": "Mother had some college"},
            "momblack": {"kind": "binary", "label": "Mother is Black"},
            "momhisp": {"kind": "binary", "label": "Mother is Hispanic"},
            "cigs": {
                "kind": "number",
                "range": (0, 100),
                "label": "Cigarettes in pregnancy",
                "unit": "per day",
            },
            "site": {
                "kind": "category",
                "levels": {str(site): f"hospital {site}" for site in range(1, 9)},
                "label": "Hospital",
            },
        }
    )
