"""`solve`: bad input is named, progress is told, results are complete."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import DataError, FedTMLEError, InputError, NumericalError
from fedtmle.model.table import Table
from fedtmle.protocol.query import Phase
from fedtmle.runtime.session import RoundReport
from fedtmle.targets.residuals import OnColumns
from fedtmle_paper.two_arm import TwoArm
from tests.cases import targets

any_ft: Any = ft  # for arguments of a wrong type, which mypy would refuse

PROBLEM = ft.Mean(bounds=(0.0, 10.0))
LAW = PROBLEM.start(5.0)
GOOD = [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("silos", "words"),
    [
        ({}, ["silos"]),
        ({"north": GOOD, "south": []}, ["south", "no rows"]),
        ({"north": GOOD, "south": [1.0, math.nan]}, ["south", "missing"]),
        ({"north": GOOD, "south": [1.0, math.inf]}, ["south", "infinite"]),
        ({"north": GOOD, "south": [[1.0, 2.0]]}, ["south", "shape"]),
        ({"north": GOOD, "south": [1.0, 87.125]}, ["south", "bounds"]),
    ],
)
def test_bad_rows_name_the_silo_and_quote_no_value(silos: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        ft.solve(PROBLEM, LAW, silos, ft.Gradient())
    for word in words:
        assert word in str(caught.value)
    assert "87.125" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: ft.Coded(tolerance=0.0), "tolerance"),
        (lambda: ft.Coded(tolerance=-1e-3), "tolerance"),
        (lambda: ft.Coded(tolerance=math.nan), "tolerance"),
        (lambda: ft.Coded(smoothness=0.0), "smoothness"),
        (lambda: any_ft.Coded(coordinates="polar"), "coordinates"),
        (lambda: ft.Coded(fixed_width=0), "fixed_width"),
        (lambda: ft.Coded(max_rounds=-1), "max_rounds"),
        (lambda: ft.Estimated(factor=0.5), "factor"),
        (lambda: ft.Gradient(tolerance=-1e-9), "tolerance"),
        (lambda: ft.Gradient(max_updates=-1), "max_updates"),
        (lambda: ft.GradientDescent(step=-0.1), "step"),
        (lambda: ft.GradientDescent(max_steps=-2), "max_steps"),
        (lambda: ft.Backtracking(armijo=0.7), "armijo"),
        (lambda: any_ft.StochasticGradientDescent(batch=5, step=0.1, batches="new"), "batches"),
        (lambda: ft.StochasticGradientDescent(batch=5, step=0.1, replace=True), "replace"),
        (lambda: ft.StochasticGradientDescent(batch=0, step=0.1), "batch"),
        (lambda: ft.LocalAverage(weights={"a": -0.1, "b": 1.1}), "weights"),
        (lambda: ft.LocalAverage(weights={"a": 0.3, "b": 0.3}), "weights"),
        (lambda: ft.LocalAverage(weights="largest"), "weights"),
        (lambda: ft.LocalAverage(radius=0.0), "radius"),
        (lambda: ft.LocalAverage(progress_tolerance=-1.0), "progress_tolerance"),
        (lambda: ft.Personalized(weights="largest"), "weights"),
        (lambda: any_ft.Personalized(weights={"a": 1.0}), "weights"),
        (lambda: ft.Personalized(lattice=0.0), "lattice"),
        (lambda: ft.Central(tolerance=-1.0), "tolerance"),
        (lambda: ft.Mean(bounds=(3.0, 1.0)), "bounds"),
        (lambda: PROBLEM.start(11.0), "mu"),
        (lambda: TwoArm(outcome_bounds=(0.0, math.inf)), "outcome_bounds"),
        (lambda: TwoArm(weight_ceiling=0.5), "weight_ceiling"),
    ],
)
def test_bad_arguments_are_named(build: Callable[[], object], argument: str) -> None:
    with pytest.raises(InputError, match=f"^{argument}"):
        build()


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("problem", ft.Mean, "problem: expected a target, such as ft.Mean(), not the class Mean: call it"),
        ("problem", "mean", "problem: expected a target, such as ft.Mean(), not something of type str"),
        ("algorithm", ft.Coded, "algorithm: expected an algorithm, such as ft.Coded(), not the class Coded"),
        ("law", 5.0, "law: Mean expects a law of its own, such as problem.start(...), not something of"),
    ],
    ids=["class", "text", "class of an algorithm", "law"],
)
def test_an_argument_of_a_wrong_type_is_named(argument: str, value: object, expected: str) -> None:
    good = {"problem": PROBLEM, "law": LAW, "silos": {"north": GOOD}, "algorithm": ft.Gradient()}
    with pytest.raises(InputError) as caught:
        any_ft.solve(**good | {argument: value})
    assert expected in str(caught.value)


def test_weights_and_index_must_name_the_silos() -> None:
    silos = {"a": GOOD, "b": GOOD}
    with pytest.raises(InputError, match="weights"):
        ft.solve(PROBLEM, LAW, silos, ft.LocalAverage(weights={"a": 0.5, "c": 0.5}))
    with pytest.raises(InputError, match="index"):
        ft.solve(PROBLEM, LAW, silos, ft.Gradient(), index={"a": np.arange(3)})
    with pytest.raises(InputError, match="silo 'b'"):
        ft.solve(PROBLEM, LAW, silos, ft.Gradient(), index={"a": np.arange(3), "b": np.arange(2)})


def test_too_large_a_batch_is_named() -> None:
    sgd = ft.StochasticGradientDescent(batch=7, step=0.1)
    with pytest.raises(InputError, match="batch"):
        ft.solve(PROBLEM, LAW, {"a": GOOD, "b": GOOD}, ft.Gradient(optimizer=sgd, tolerance=1e-9))


def test_a_diverging_fixed_step_ends_in_a_typed_error() -> None:
    case = targets()["two arms"]
    algorithm = ft.Gradient(tolerance=1e-9, optimizer=ft.GradientDescent(step=1e4, max_steps=50))
    with pytest.raises((NumericalError, DataError)):
        ft.solve(case.problem, case.law, case.silos(case.split(2)), algorithm)


def test_an_inadmissible_eps_is_a_typed_error() -> None:
    with pytest.raises(NumericalError, match="eps"):
        PROBLEM.move(LAW, np.array([50.0]))
    two = TwoArm()
    with pytest.raises(NumericalError, match="eps"):
        two.move(two.start(), np.array([math.nan, 0.0]))


def test_one_exception_base() -> None:
    assert issubclass(InputError, FedTMLEError)
    assert issubclass(InputError, ValueError)


def test_progress_hears_every_round() -> None:
    case = targets()["two arms"]
    heard: list[RoundReport] = []
    result = ft.solve(
        case.problem, case.law, case.silos(case.split(3)), ft.Coded(tolerance=1e-4), progress=heard.append
    )
    assert [report.round for report in heard] == list(range(1, len(heard) + 1))
    assert len(heard) == sum(result.account.rounds.values())
    assert heard[-1].bits == sum(result.account.bits_up.values()) + sum(result.account.bits_down.values())
    assert {str(report.phase) for report in heard} == {"calibration", "targeting"}
    assert result.account.bits(Phase.CLOSING) > 0  # the closing sums ride along with the last round


def test_contrast_is_the_linear_combination() -> None:
    case = targets()["two arms"]
    result = ft.solve(case.problem, case.law, case.silos(case.split(3)), ft.Central(tolerance=1e-8))
    assert result.psi is not None
    estimate, error = result.contrast((1, -1))
    eif = case.problem.eif(result.law, case.pooled(), result.psi)
    assert estimate == pytest.approx(result.psi[0] - result.psi[1], abs=1e-14)
    assert error == pytest.approx(np.std(eif[:, 0] - eif[:, 1], ddof=1) / math.sqrt(case.n), rel=1e-12)
    with pytest.raises(InputError, match="weights"):
        result.contrast((1, 0, 0))


def test_a_single_row_silo_takes_part() -> None:
    result = ft.solve(PROBLEM, LAW, {"a": GOOD, "b": [9.0]}, ft.Gradient(tolerance=1e-9))
    assert result.psi is not None
    assert float(result.psi[0]) == pytest.approx(3.75, abs=1e-9)


def test_rows_that_a_problem_cannot_pool() -> None:
    """Only the centralised comparator needs them, and what is observed."""
    problem = OnColumns(problem=PROBLEM, columns=("y",))
    silos = {name: Table(n_rows=3, numeric={"y": np.array(GOOD)}, factors={}) for name in ("north", "south")}
    message = "problem: algorithm Central and observe need pooled rows, and OnColumns cannot pool them"
    with pytest.raises(InputError, match=message):
        ft.solve(problem, LAW, silos, ft.Central())
    with pytest.raises(InputError, match=message):
        ft.solve(problem, LAW, silos, ft.Gradient(), observe=True)
    assert ft.solve(problem, LAW, silos, ft.Gradient()).psi[0] == pytest.approx(2.0)
