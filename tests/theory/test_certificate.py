"""The certificate: data that prints, what it says with and without the rows, and of every algorithm."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.fit import fit_local
from fedtmle.runtime.certificate import Constants, heard_rounds
from fedtmle.theory.averaging import smoothness_basis
from fedtmle.theory.path import Basis, Constant
from tests.cases import ALGORITHMS, TARGETS, Case, targets
from tests.theory.runs import personal_run, plan_of

FIELDS = {
    "tolerance", "residual_bound", "arithmetic", "smoothness", "spacing", "coordinates", "history_bits"
}  # fmt: skip


def solve(case: Case, algorithm: Any, *, observe: bool = True, silos: int = 4) -> ft.Result:
    return ft.solve(case.problem, case.law, case.silos(case.split(silos)), algorithm, observe=observe)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("name", ["two arms", "transport, tilt"])
def test_it_is_data_and_prints_at_80_columns(name: str, algorithm: str) -> None:
    case = targets()[name]
    result = solve(case, ALGORITHMS[algorithm](case.tolerance))
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))["certificate"]
    assert set(document) >= FIELDS | {"checks", "constants", "descent", "averaging"}
    text = str(result.certificate)
    assert max(map(len, text.splitlines()), default=0) <= 80
    for check in result.certificate.checks:
        assert check.name in text
    slack = [check for check in result.certificate.checks if check.bound is not None and check.realised > 0]
    assert all(check.slack == check.bound / check.realised for check in slack)
    assert len(slack) >= (10 if algorithm.startswith("coded") else 0)
    for line in document["checks"]:
        assert line["basis"] in (None, "bound", "estimate along the path", "assumed")


def test_an_observed_result_shows_its_certificate() -> None:
    case = targets()["two arms"]
    assert "rests on" in repr(solve(case, ft.Coded(tolerance=1e-4)))
    assert "rests on" not in repr(solve(case, ft.Coded(tolerance=1e-4), observe=False))


def test_without_the_rows_the_bounds_that_need_them_are_open() -> None:
    case = targets()["two arms"]
    result = solve(case, ft.Coded(tolerance=1e-4), observe=False)
    by_name = {check.name: check for check in result.certificate.checks}
    assert by_name["residual bound"].bound == 1e-4
    assert by_name["rounds R"].realised == result.rounds
    assert by_name["rounds R"].bound is None
    assert "two loss messages" in str(result.certificate)
    assert result.certificate.constants == ()


def test_constants_are_labelled_with_what_they_rest_on() -> None:
    case = targets()["two arms"]
    bases = {}
    for smoothness in (ft.Certified(), ft.Estimated(), 250.0):
        certificate = solve(
            case, ft.Coded(tolerance=1e-4, coordinates="raw", smoothness=smoothness)
        ).certificate
        known = {constant.name: constant for constant in certificate.constants}
        bases[type(smoothness)] = known["beta"].basis
        assert known["kappa"].basis is Basis.PATH
        assert known["Delta"].basis is Basis.BOUND
        assert "two counted loss messages" in known["Delta"].note
        rounds = next(check for check in certificate.checks if check.name == "rounds R")
        assert rounds.basis is known["beta"].basis  # the weakest of what it uses
    assert bases == {ft.Certified: Basis.BOUND, ft.Estimated: Basis.PATH, float: Basis.ASSUMED}


def test_a_beta_that_a_step_disproves_is_said_so() -> None:
    case = targets()["two arms"]
    algorithm = ft.Coded(tolerance=1e-5, coordinates="raw", smoothness=20.0, max_rounds=30)
    certificate = solve(case, algorithm).certificate
    assert any("no bound is proved" in text for text in certificate.assumptions)


def test_kappa_realised_beta_and_budget_against_longhand() -> None:
    """The mean in raw coordinates: every gradient is affine with slope one, so beta = kappa = 1 exactly."""
    case = targets()["mean"]
    result = solve(case, ft.Coded(tolerance=1e-3, coordinates="raw", smoothness=2.0))
    known = {constant.name: constant.value for constant in result.certificate.constants}
    y = case.pooled()
    assert known["beta, realised"] == pytest.approx(1.0, abs=1e-9)
    assert known["kappa"] == pytest.approx(1.0, abs=1e-9)
    fell = np.mean((y - case.law.mu) ** 2 - (y - result.law.mu) ** 2) / 2
    assert known["Delta"] == pytest.approx(fell, abs=1e-12)
    first = max(abs(float(np.mean(case.take(part))) - case.law.mu) for part in case.split(4))
    assert known["G"] == pytest.approx(first, abs=1e-12)


def test_a_silo_steeper_than_beta_is_charged_to_its_variation() -> None:
    """A silo of slope beta_m above the pooled beta varies by beta_m/beta a step, kappa + beta_m an update."""
    beta, beta_m, kappa = 2.0, 5.0, 0.7

    def constant(value: float) -> Constant:
        return Constant(name="", value=value, basis=Basis.PATH)

    known = Constants(
        beta=constant(beta),
        realised=constant(beta_m),
        kappa=constant(kappa),
        Delta=constant(0.1),
        G=constant(1.0),
        delta=0.1,
        descends=True,
    )
    steps = 3.0  # sum of ||g~||, one step an update: ||eps|| = ||g~||/beta
    variation = beta_m / beta * steps + (kappa + beta_m) * steps / beta
    assert (2 + known.effective_kappa / beta) * steps == pytest.approx(variation, rel=1e-14)
    assert replace(known, realised=constant(1.0)).effective_kappa == kappa


def test_local_average_reports_pooled_descent_and_its_failure() -> None:
    """Two silos of opposite, unequal pulls under uniform weights: the pooled loss rises, and it is said."""
    problem = ft.Mean(bounds=(-10.0, 10.0))
    silos = {"small": [9.0], "large": [-1.0] * 30}
    start = problem.start(-0.5)
    rising = ft.solve(problem, start, silos, ft.LocalAverage(weights="uniform", max_updates=1), observe=True)
    assert rising.certificate.descent[0] > 0
    assert "rose in 1 of 1" in str(rising.certificate)
    falling = ft.solve(problem, start, silos, ft.LocalAverage(max_updates=1), observe=True)
    assert falling.certificate.descent[0] < 0
    assert "rose in 0 of 1" in str(falling.certificate)
    loss = [np.mean(problem.losses(law, np.array([9.0, *[-1.0] * 30]))) for law in (start, rising.law)]
    assert rising.certificate.descent[0] == pytest.approx(loss[1] - loss[0], abs=1e-12)


def test_gaps_are_what_the_local_fits_gained() -> None:
    case, parts = targets()["transport, tilt"], targets()["transport, tilt"].split(3)
    _, rounds = personal_run(case, parts, ft.Personalized(max_updates=1))
    normaliser = case.problem.normaliser(case.law)
    for m, part in enumerate(parts):
        submodel = case.problem.submodel(case.law, case.problem.read(case.take(part)))
        fit = fit_local(submodel, normaliser, dim=3, radius=64.0)
        assert rounds[0].gap[m] == pytest.approx(fit.decrease, abs=1e-12)
        assert rounds[0].decrease[m] < rounds[0].gap[m]  # the average gains less than its own fit
    assert rounds[0].error > 1e-4


def test_personalized_reports_each_round_beside_its_bounds() -> None:
    case = targets()["transport, logistic"]
    certificate = solve(case, ft.Personalized(max_updates=3)).certificate
    assert [line.update for line in certificate.averaging] == [0, 1, 2]
    for line in certificate.averaging:
        assert 0 <= line.error <= min(line.quadratic_bound, line.fourth_order_bound)
    assert {"beta", "G_1", "zeta", "beta_4"} == {constant.name for constant in certificate.constants}
    rounded = solve(case, ft.Personalized(max_updates=3, lattice=0.02)).certificate
    for line in rounded.averaging:
        assert line.error <= min(line.quadratic_bound, line.fourth_order_bound)


@pytest.mark.parametrize(
    "algorithm", ["coded whitened", "local size", "gradient newton", "personalized noise"]
)
@pytest.mark.parametrize("name", TARGETS)
def test_the_transcript_tells_what_the_server_heard(name: str, algorithm: str) -> None:
    case = targets()[name]
    chosen = ALGORITHMS[algorithm](case.tolerance)
    result = solve(case, chosen, observe=False)
    rounds = list(heard_rounds(plan_of(case, chosen, result), result.transcript, result.sizes))
    assert len(rounds) == sum(result.account.rounds.values())
    assert set(rounds[0].answers) == set(result.sizes)


def test_beta_of_a_personalised_run_is_a_bound_only_if_every_round_has_one() -> None:
    case = targets()["two arms"]
    result, rounds = personal_run(case, case.split(3), ft.Personalized(max_updates=2))
    assert smoothness_basis(rounds) is Basis.BOUND
    assert {c.name: c.basis for c in result.certificate.constants}["beta"] is Basis.BOUND
    visited = replace(rounds[-1], smoothness_is_bound=False)
    assert smoothness_basis([*rounds, visited]) is Basis.PATH
