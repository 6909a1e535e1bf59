"""Functions of the theory and the audit, scaled by 1/2 and by 2: a test notices."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tools.scalings import FACTORS, ROOT, WITHOUT_NUMBERS, chosen, functions, scaled, table

from fedtmle.theory.path import Basis
from tests.theory.arguments import bounds
from tests.theory.test_transcription import NAMES, disagreement


@pytest.mark.parametrize("factor", FACTORS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_bound_differs_from_its_second_transcription(name: str, factor: Fraction) -> None:
    function: Callable[..., Any] = bounds()[name]

    def changed(**arguments: Any) -> Any:
        return scaled(function(**arguments), factor)

    assert disagreement(name, changed) > 0.4


def test_every_public_function_is_scaled_or_has_no_numbers() -> None:
    names = functions()
    assert len(names) == len(set(names)) > 110
    assert {f"{f.__module__}.{name}" for name, f in bounds().items()} <= set(names)
    for name in WITHOUT_NUMBERS:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_the_table_has_every_function_and_nothing_passes() -> None:
    """A new function: `python -m tools.scalings NAME` adds its rows, and says which test is missing."""
    rows = table()
    found = [(row["function"], row["factor"]) for row in rows]
    assert found == [(scaling.name, str(scaling.factor)) for scaling in chosen(())]
    assert [row["function"] for row in rows if row["caught_by"] == "NOTHING"] == []
    for test in {row["caught_by"].partition("[")[0] for row in rows}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_numbers_are_scaled_wherever_they_are() -> None:
    @dataclass(frozen=True)
    class Pair:
        a: float
        b: tuple[int, ...]

    two = Fraction(2)
    assert scaled(Pair(1.5, (2, 3)), two) == Pair(3.0, (4, 6))
    assert scaled({"x": [True, Fraction(1, 3)]}, two) == {"x": [False, Fraction(2, 3)]}
    assert scaled(3, Fraction(1, 2)) == 1
    assert scaled(np.array([1.0, 4.0]), Fraction(1, 2)).tolist() == [0.5, 2.0]
    assert scaled("text", two) == "text"
    assert scaled(None, two) is None
    assert scaled(Basis.PATH, two) is Basis.ASSUMED
    assert scaled(Basis.BOUND, Fraction(1, 2)) is Basis.ASSUMED


@pytest.mark.slow
@pytest.mark.parametrize("group", ["privacy.collision"])
def test_the_named_tests_notice_every_scaling(group: str) -> None:
    """In a process of its own: tests in the files that docs/proved.md names catch each function."""
    command = [sys.executable, "-m", "tools.scalings", "--named", group]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
