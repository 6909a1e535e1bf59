"""The mean of a bounded outcome, against formulas written longhand."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.errors import ContributionError, DataError, InputError, NumericalError
from fedtmle.model.check import FiniteLaw, check_problem
from fedtmle.model.fit import FitStatus, fit_local
from fedtmle.model.submodel import NoNormaliser
from fedtmle.targets.mean import Mean, MeanLaw
from fedtmle_core.types import Part

ORIGIN = np.zeros(1)


def outcomes(low: float = -1.0, high: float = 3.0, n: int = 101) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, n)


ATOMS = np.array([-1.0, 0.25, 0.5, 3.0])
MASSES = np.array([0.2, 0.4, 0.3, 0.1])


def longhand(masses: np.ndarray) -> np.ndarray:
    return np.array([masses @ ATOMS])


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 3.0), (-2e6, 1e6)])
def test_mean_conforms(bounds):
    problem = Mean(bounds=bounds)
    low, high = bounds
    report = check_problem(problem, problem.start(0.3 * low + 0.7 * high), outcomes(low, high))
    report.raise_if_failed()


def test_mean_conforms_on_a_finite_law():
    problem = Mean(bounds=(-1.0, 3.0))
    finite = FiniteLaw(
        support=ATOMS, masses=MASSES, law=problem.start(float(longhand(MASSES)[0])), psi=longhand
    )
    check_problem(problem, problem.start(0.4), outcomes(), finite=finite).raise_if_failed()


def test_eif_is_the_complex_step_derivative_of_psi():
    problem = Mean(bounds=(-1.0, 3.0))
    psi = longhand(MASSES)
    eif = problem.eif(problem.start(float(psi[0])), problem.read(ATOMS), psi)
    for atom, row in enumerate(eif):
        direction = np.eye(4)[atom] - MASSES  # towards the point mass at the atom
        derivative = longhand(MASSES + 1e-200j * direction).imag / 1e-200
        np.testing.assert_allclose(row, derivative, rtol=1e-14)


def test_score_is_the_eif_at_the_law():
    problem, rows = Mean(bounds=(-1.0, 3.0)), outcomes()
    law = problem.start(0.4)
    score = problem.submodel(law, rows).sums(ORIGIN, Part.GRADIENT).values(len(rows))
    np.testing.assert_allclose(score, [np.mean(rows - 0.4)], atol=1e-14)


def test_one_exact_fit_gives_the_sample_mean_and_its_variance():
    problem, rows = Mean(bounds=(-1.0, 3.0)), outcomes()
    law = problem.start(2.5)
    fit = fit_local(problem.submodel(law, rows), NoNormaliser(1), dim=1, radius=8.0)
    assert fit.status is FitStatus.MINIMUM
    law = problem.move(law, fit.eps)
    estimate = problem.finish(law, problem.moments(law, rows), len(rows))
    assert estimate.psi[0] == pytest.approx(rows.mean(), abs=1e-14)
    assert estimate.covariance[0, 0] == pytest.approx(rows.var(ddof=1) / len(rows), rel=1e-13)


def test_variance_keeps_its_digits_far_from_zero():
    rows = 1e6 + outcomes(0.0, 1.0)
    problem = Mean(bounds=(1e6, 1e6 + 1))
    law = problem.start(1e6 + 0.5)
    estimate = problem.finish(law, problem.moments(law, rows), len(rows))
    assert estimate.covariance[0, 0] == pytest.approx(rows.var(ddof=1) / len(rows), rel=1e-10)


def test_moves_compose():
    problem = Mean(bounds=(-1.0, 3.0))
    law = problem.move(problem.move(problem.start(1.0), np.array([0.25])), np.array([-0.75]))
    assert law == MeanLaw(mu=1.5)


def test_moves_outside_the_admitted_set_are_errors():
    problem = Mean()
    law = problem.start(0.5)
    assert problem.admits(law, np.array([1.0]))
    for eps in (1.01, -1.01, np.nan, np.inf):
        assert not problem.admits(law, np.array([eps]))
        with pytest.raises(NumericalError):
            problem.move(law, np.array([eps]))


@pytest.mark.parametrize(
    ("rows", "match", "value"),
    [
        ([[0.5, 0.6]], "one column", "0.6"),
        ([], "no rows", None),
        ([0.5, np.nan], "missing", "nan"),
        ([0.5, np.inf], "infinite", None),
        ([0.5, 1.2345], "outside the declared bounds", "1.2345"),
        ([0.5, -0.0077], "outside the declared bounds", "0.0077"),
        (["0.5", "secret"], "numbers", "secret"),
        ([{"y": 0.5}], "numbers", "0.5"),
        ([[0.5], [0.25, 0.75]], "numbers", "0.75"),
    ],
)
def test_bad_rows_are_data_errors_that_quote_no_value(rows, match, value):
    with pytest.raises(DataError, match=match) as caught:
        Mean().read(rows)
    assert value is None or value not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (1.0, 0.0), (0.0, np.inf), (np.nan, 1.0)])
def test_bad_bounds_are_input_errors(bounds):
    with pytest.raises(InputError, match="bounds"):
        Mean(bounds=bounds)


@pytest.mark.parametrize("mu", [-0.1, 1.1, np.nan])
def test_bad_start_is_an_input_error(mu):
    with pytest.raises(InputError, match="mu"):
        Mean().start(mu)


def test_a_row_beyond_the_bound_is_an_error_without_its_value():
    problem = Mean()
    rows = np.array([0.5, 77.125])  # never through `read`, which would refuse it
    for query in (
        lambda: problem.submodel(problem.start(0.5), rows).sums(ORIGIN, Part.GRADIENT),
        lambda: problem.moments(problem.start(0.5), rows),
    ):
        with pytest.raises(ContributionError, match=r"1 row\(s\)") as caught:
            query()
        assert "77" not in str(caught.value)
