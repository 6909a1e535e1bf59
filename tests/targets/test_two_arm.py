"""Two counterfactual means, against formulas written longhand."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from scipy.special import expit

from fedtmle.errors import ContributionError, DataError, InputError, NumericalError
from fedtmle.model.check import FiniteLaw, check_problem
from fedtmle.model.fit import FitStatus, fit_local
from fedtmle.model.submodel import NoNormaliser
from fedtmle_core.types import Part
from fedtmle_paper.two_arm import LOGIT_REACH, TwoArm, TwoArmLaw

ORIGIN = np.zeros(2)


def study(n: int = 120, low: float = 0.0, high: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=n)
    g = np.clip(expit(w), 0.05, 0.95)
    treatment = (rng.random(n) < g).astype(float)
    q1, q0 = expit(0.3 + w), expit(0.5 * w - 0.2)
    outcome = rng.beta(2, 2, n) * 0.5 + 0.5 * np.where(treatment == 1, q1, q0)
    width = high - low
    return {
        "outcome": low + width * np.clip(outcome, 0, 1),
        "treatment": treatment,
        "Q1": low + width * q1,
        "Q0": low + width * q0,
        "g": g,
    }


# A finite law over (W, A, Y): three covariate values, two arms, three outcomes.
OUTCOMES = (-2.0, 0.5, 5.0)
ATOMS = list(itertools.product(range(3), (0, 1), range(3)))
W, A, Y = (np.array(column) for column in zip(*ATOMS, strict=True))
Y = np.array(OUTCOMES)[Y]
MASSES = np.random.default_rng(4).dirichlet(np.full(len(ATOMS), 3.0))


def regression(masses: np.ndarray, arm: int, w: int) -> complex:
    """E[Y | A = arm, W = w]."""
    cell = (arm == A) & (w == W)
    return (masses[cell] @ Y[cell]) / masses[cell].sum()


def psi(masses: np.ndarray) -> np.ndarray:
    """sum_w P(w) E[Y | a, w], for a = 1 and a = 0."""
    return np.array(
        [sum(masses[w == W].sum() * regression(masses, arm, w) for w in range(3)) for arm in (1, 0)]
    )


def support() -> dict[str, np.ndarray]:
    share = [MASSES[(w == W) & (A == 1)].sum() / MASSES[w == W].sum() for w in range(3)]
    return {
        "outcome": Y,
        "treatment": A.astype(float),
        "Q1": np.array([regression(MASSES, 1, w) for w in W]),
        "Q0": np.array([regression(MASSES, 0, w) for w in W]),
        "g": np.array(share)[W],
    }


def test_eif_is_the_complex_step_derivative_of_psi():
    problem = TwoArm(outcome_bounds=(-2.0, 5.0))
    eif = problem.eif(problem.start(), problem.read(support()), psi(MASSES))
    for atom, row in enumerate(eif):
        direction = np.eye(len(ATOMS))[atom] - MASSES  # towards the point mass at the atom
        derivative = psi(MASSES + 1e-200j * direction).imag / 1e-200
        np.testing.assert_allclose(row, derivative, atol=1e-10)
    np.testing.assert_allclose(MASSES @ eif, 0, atol=1e-12)


@pytest.mark.parametrize(
    ("bounds", "ceiling"), [((0.0, 1.0), 4096.0), ((-2.0, 5.0), 32.0), ((0.0, 4000.0), 64.0)]
)
def test_two_arm_conforms(bounds, ceiling):
    problem = TwoArm(outcome_bounds=bounds, weight_ceiling=ceiling)
    law = problem.move(problem.start(), np.array([0.1, -0.05]) / problem.width)
    check_problem(problem, law, study(60, *bounds)).raise_if_failed()


def test_two_arm_conforms_on_a_finite_law():
    problem = TwoArm(outcome_bounds=(-2.0, 5.0), weight_ceiling=32.0)
    finite = FiniteLaw(support=support(), masses=MASSES, law=problem.start(), psi=psi)
    check_problem(problem, problem.start(), study(40, -2.0, 5.0), finite=finite).raise_if_failed()


LAWS = [TwoArmLaw(), TwoArmLaw(history=((0.3, -0.2),)), TwoArmLaw(history=((0.3, -0.2), (-0.1, 0.4)))]


def longhand_regression(data: dict[str, np.ndarray], law: TwoArmLaw) -> tuple[np.ndarray, np.ndarray]:
    """Q_1 and Q_0 at the law: logit Q_a - sum of eps_a / g_a, for outcomes in [0, 1]."""
    shift = np.sum(np.array(law.history).reshape(-1, 2), axis=0)
    logit1 = np.log(data["Q1"] / (1 - data["Q1"])) - shift[0] / data["g"]
    logit0 = np.log(data["Q0"] / (1 - data["Q0"])) - shift[1] / (1 - data["g"])
    return expit(logit1), expit(logit0)


@pytest.mark.parametrize("law", LAWS)
def test_psi_covariance_eif_and_loss_are_the_longhand_ones(law):
    problem, data = TwoArm(), study()
    rows = problem.read(data)
    q1, q0 = longhand_regression(data, law)
    a, y, g, n = data["treatment"], data["outcome"], data["g"], len(data["g"])
    estimate = problem.finish(law, problem.moments(law, rows), n)
    np.testing.assert_allclose(estimate.psi, [q1.mean(), q0.mean()], rtol=1e-13)
    eif = np.stack([a / g * (y - q1) + q1 - q1.mean(), (1 - a) / (1 - g) * (y - q0) + q0 - q0.mean()], axis=1)
    np.testing.assert_allclose(problem.eif(law, rows, estimate.psi), eif, atol=1e-12)
    np.testing.assert_allclose(estimate.covariance, np.cov(eif, rowvar=False) / n, rtol=1e-11)
    q = np.where(a == 1, q1, q0)
    np.testing.assert_allclose(
        problem.losses(law, rows), -y * np.log(q) - (1 - y) * np.log(1 - q), rtol=1e-12
    )


def test_variance_keeps_its_digits_far_from_zero():
    near, far = TwoArm(), TwoArm(outcome_bounds=(2.0**20, 2.0**20 + 1))
    data = {name: np.round(column * 2**20) / 2**20 for name, column in study().items()}
    moved = {**data, **{name: data[name] + 2.0**20 for name in ("outcome", "Q1", "Q0")}}  # exactly
    estimates = []
    for problem, columns in ((near, data), (far, moved)):
        rows = problem.read(columns)
        estimates.append(problem.finish(LAWS[1], problem.moments(LAWS[1], rows), problem.count(rows)))
    np.testing.assert_allclose(estimates[1].covariance, estimates[0].covariance, rtol=1e-12)
    np.testing.assert_allclose(estimates[1].psi - 2.0**20, estimates[0].psi, atol=1e-9)


@pytest.mark.parametrize("law", LAWS)
def test_score_is_the_outcome_part_of_the_eif_row_by_row(law):
    problem, data = TwoArm(weight_ceiling=32.0), study()
    rows = problem.read(data)
    q1, q0 = longhand_regression(data, law)
    a, y, g = data["treatment"], data["outcome"], data["g"]
    outcome_part = np.stack([a / g * (y - q1), (1 - a) / (1 - g) * (y - q0)], axis=1)
    submodel = problem.submodel(law, rows)
    for row in range(0, len(g), 7):
        score = submodel.take(np.array([row])).sums(ORIGIN, Part.GRADIENT).values()
        np.testing.assert_allclose(score, outcome_part[row], atol=1e-12)
    pooled = submodel.sums(ORIGIN, Part.GRADIENT).values(len(g))
    # Pooled, r = ||P_n D_Y|| = ||P_n D||: the rest of D has mean zero.
    mean_eif = problem.eif(law, rows, np.array([q1.mean(), q0.mean()])).mean(axis=0)
    np.testing.assert_allclose(pooled, mean_eif, atol=1e-12)
    assert np.linalg.norm(pooled) > 1e-3


def test_targeting_solves_the_pooled_equation_and_respects_the_bounds():
    problem, data = TwoArm(outcome_bounds=(-2.0, 5.0), weight_ceiling=32.0), study(200, -2.0, 5.0)
    rows = problem.read(data)
    law = problem.start()
    fit = fit_local(problem.submodel(law, rows), NoNormaliser(2), dim=2, radius=LOGIT_REACH / problem.width)
    law = problem.move(law, fit.eps)
    estimate = problem.finish(law, problem.moments(law, rows), problem.count(rows))
    assert fit.status is FitStatus.MINIMUM
    assert np.linalg.norm(problem.eif(law, rows, estimate.psi).mean(axis=0)) < 1e-11
    assert ((estimate.psi > -2) & (estimate.psi < 5)).all()
    # One more fit has nothing left to do: the closed submodel is universal here.
    assert not fit_local(
        problem.submodel(law, rows), NoNormaliser(2), dim=2, radius=1.0, zero_floor=1e-11
    ).eps.any()


def test_moves_compose_in_any_order_to_the_same_bits():
    problem, rows = TwoArm(), TwoArm().read(study())
    steps = [np.array(step) for step in ((0.1, 0.7), (1e-17, -0.3), (-0.1, 1e-9))]
    laws = []
    for order in itertools.permutations(steps):
        law = problem.start()
        for eps in order:
            law = problem.move(law, eps)
        laws.append(law)
    first = problem.losses(laws[0], rows)
    assert all((problem.losses(law, rows) == first).all() for law in laws)
    once = problem.losses(problem.move(problem.start(), np.sum(steps, axis=0)), rows)
    np.testing.assert_allclose(first, once, rtol=1e-13)


def test_runaway_moves_are_errors():
    problem = TwoArm(outcome_bounds=(0.0, 2.0))
    assert problem.admits(problem.start(), np.array([LOGIT_REACH / 2, 0.0]))
    for eps in ([LOGIT_REACH / 2 + 1e-9, 0.0], [0.0, -100.0], [np.nan, 0.0], [0.0, np.inf]):
        assert not problem.admits(problem.start(), np.array(eps))
        with pytest.raises(NumericalError, match="eps"):
            problem.move(problem.start(), np.array(eps))


def test_pooling_rows_is_reading_them_together():
    problem, data = TwoArm(), study()
    parts = [problem.read({k: v[part] for k, v in data.items()}) for part in (slice(0, 50), slice(50, None))]
    pooled, whole = problem.concatenate(parts), problem.read(data)
    for field in dataclasses.fields(whole):
        np.testing.assert_array_equal(getattr(pooled, field.name), getattr(whole, field.name))
    moments = [problem.moments(LAWS[1], part) for part in parts]
    assert moments[0] + moments[1] == problem.moments(LAWS[1], whole)


@pytest.mark.parametrize(
    ("column", "value", "match"),
    [
        ("outcome", 1.0625, "outcome"),
        ("outcome", -0.0625, "outcome"),
        ("outcome", np.nan, "missing or infinite"),
        ("treatment", 0.4375, "only 0 and 1"),
        ("treatment", 2.0, "only 0 and 1"),
        ("Q1", 0.0, "strictly within"),
        ("Q0", 1.0, "strictly within"),
        ("Q0", 1.8125, "strictly within"),
        ("g", 0.0, "strictly between"),
        ("g", 1.0, "strictly between"),
        ("g", 1.8125, "strictly between"),
        ("g", 0.000123, "weight_ceiling"),
        ("g", 1 - 0.000123, "weight_ceiling"),
    ],
)
def test_a_bad_value_is_a_data_error_that_does_not_quote_it(column, value, match):
    data = study()
    data[column][17] = value
    with pytest.raises(DataError, match=match) as caught:
        TwoArm().read(data)
    assert column in str(caught.value)
    if value not in (0.0, 1.0, 2.0):  # those are words of the message itself
        assert repr(float(value)) not in str(caught.value)
        assert f"{1 / value:.3f}"[:6] not in str(caught.value)


def _without(column):
    return lambda data: {k: v for k, v in data.items() if k != column}


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (_without("g"), "'g' is missing"),
        (_without("outcome"), "'outcome' is missing"),
        (lambda data: {**data, "g": data["g"][:-1]}, "equally long"),
        (lambda data: {**data, "g": data["g"][:, None]}, "shape"),
        (lambda data: {**data, "g": ["secret"] * 120}, "numeric"),
        (lambda data: {**data, "Q1": np.full(120, np.inf)}, "missing or infinite"),
        (lambda data: {k: v[:0] for k, v in data.items()}, "no rows"),
        (lambda _: 3, "mapping or data frame"),
        (lambda data: list(data.values()), "columns?"),
    ],
)
def test_bad_tables_are_data_errors(spoil, match):
    with pytest.raises(DataError, match=match) as caught:
        TwoArm().read(spoil(study()))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"outcome_bounds": (1.0, 0.0)},
        {"outcome_bounds": (0.0, np.inf)},
        {"weight_ceiling": 1.0},
        {"weight_ceiling": 2.0**20},
        {"weight_ceiling": np.nan},
    ],
)
def test_bad_declarations_are_input_errors_that_name_the_argument(options):
    (name,) = options
    with pytest.raises(InputError, match=name):
        TwoArm(**options)


def test_a_row_beyond_the_bound_is_an_error_without_its_value():
    problem = TwoArm(weight_ceiling=32.0)
    rows = problem.read(study())
    heavy = dataclasses.replace(rows, inverse_g=rows.inverse_g.copy())
    heavy.inverse_g[:, 3] = 777.125  # never through `read`, which would refuse it
    for query in (
        lambda: problem.submodel(problem.start(), heavy).sums(ORIGIN, Part.GRADIENT),
        lambda: problem.submodel(problem.start(), heavy).sums(ORIGIN, Part.HESSIAN),
        lambda: problem.moments(problem.start(), heavy),
    ):
        with pytest.raises(ContributionError, match=r"1 row\(s\)") as caught:
            query()
        assert "777" not in str(caught.value)
