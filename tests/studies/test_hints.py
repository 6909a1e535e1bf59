"""What the owner of a table is told where it does not fit the dictionary; never a record's value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.data.convert import CONVERSIONS, fitting_units, is_at_edge, is_outside, near_level
from fedtmle.studies.validate import Validation

STUDY = """\
[target]
kind = "ATE"
outcome = "y"
treatment = "a"
[variables]
y = {kind = "binary"}
a = {kind = "binary"}
sex = {kind = "category", levels = ["f", "m"]}
ward = {kind = "category", levels = ["1", "2"]}
creatinine = {kind = "number", range = [20, 1500], unit = "umol/L"}
[models.outcome]
formula = "a + C(sex) + C(ward) + creatinine"
[models.treatment]
formula = "C(sex)"
[silos]
"""


def frame(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "y": rng.integers(0, 2, n),
            "a": rng.integers(0, 2, n),
            "sex": rng.choice(["f", "m"], n),
            "ward": rng.choice(["1", "2"], n),
            "creatinine": rng.uniform(50.5, 140.5, n).round(1),
        }
    )


def checked(folder: Path, **frames: pd.DataFrame) -> Validation:
    for name, data in frames.items():
        data.to_parquet(folder / f"{name}.parquet")
    lines = "".join(f'{name} = "{name}.parquet"\n' for name in frames)
    (folder / "study.toml").write_text(STUDY + lines, encoding="utf-8")
    return ft.validate(folder / "study.toml")


def test_values_at_the_edge_of_a_wide_range_are_a_warning(tmp_path: Path) -> None:
    low = frame(200, 2)
    low["creatinine"] = 20.5 + low.creatinine / 88.42
    result = checked(tmp_path, north=frame(200, 1), south=low)
    assert result.defects == ()
    (warning,) = result.warnings
    assert (warning.silo, warning.column) == ("south", "creatinine")
    assert "nearly all values are at the edge of the declared range" in warning.text


@pytest.mark.parametrize(
    ("label", "meant"),
    [
        ("f", None),
        ("F", ("f", "in upper and lower case")),
        (" f", ("f", "in blanks around it")),
        ("f\u00a0", ("f", "in blanks around it")),
        ("x", None),
        ("01", ("1", "in how the number is written, such as 01 for 1")),
        ("1.0", ("1", "in how the number is written, such as 01 for 1")),
        ("nan", None),
    ],
)
def test_near_levels(label: str, meant: tuple[str, str] | None) -> None:
    assert near_level(label, ("f", "m", "1") if label != "f" else ("m",)) == meant


@pytest.mark.parametrize(("scale", "shift", "words"), CONVERSIONS)
def test_every_conversion_is_found_where_it_was_forgotten(scale: float, shift: float, words: str) -> None:
    """Values in the declared unit, written in the other one: the hint brings them back."""
    low, high = 100.0, 103.0  # so narrow that no other conversion of the list fits as well
    right = np.random.default_rng(1).uniform(low + 0.3, high - 0.3, 500)
    wrong = (right - shift) / scale
    assert is_outside(wrong, low, high)
    (hint,) = fitting_units(wrong, low, high)
    assert words in hint
    assert not is_outside(right, low, high)


def test_few_values_and_zeros_say_nothing_about_the_unit() -> None:
    assert fitting_units(np.full(19, 1.0), 50, 200) == ()
    assert not is_at_edge(np.r_[np.zeros(500), np.linspace(1, 99, 50)], 0, 100)
    assert is_at_edge(np.r_[np.zeros(500), np.linspace(0.1, 1.5, 50)], 0, 100)
