"""C(silo) as an intercept of each silo's own: the fit is that of indicator columns, and no sum is one silo's.

Fits are compared with iteratively reweighted least squares on indicator columns, estimates with those of a
column that names the silo, and derivatives with differences of a profile that is computed longhand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle import solver
from fedtmle.errors import DataError, FitError, InputError
from fedtmle.initial.design import column_names, design
from fedtmle.initial.glm import AbstractResponse, GLMModel
from fedtmle.initial.own import OwnBlock, ProfiledModel, by_silo, own_formula
from fedtmle.initial.syntax import parse_formula
from fedtmle.model.leverage import RowSpace
from fedtmle.model.submodels import Profiled
from fedtmle.model.table import SILO, Factor, Table
from fedtmle.privacy.answers import Submodels, explain
from fedtmle.programs.superlearner import OwnCoefficients, own_blocks
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Ask, Close
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import AnsweredQuery
from fedtmle.protocol.regression import FitCurvatureQuery, FitGradientQuery
from fedtmle.runtime.rows import LocalRows
from fedtmle.studies.run import pooled_rows
from fedtmle_core.exact import GRID_BITS
from fedtmle_core.types import Array, Family, Part, unpack
from tests.effects.studies import NEWTON, finish
from tests.narrow import targeted
from tests.premise import Premise
from tests.runtime.test_masked import check_broadcasts

SILOS = ("north", "south", "east", "west")
LEVELS = {SILO: SILOS, "g": ("p", "q", "r")}
DICTIONARY: dict[str, Any] = {
    "x": {"kind": "number", "range": (0, 8)},
    "g": {"kind": "category", "levels": ["p", "q", "r"]},
    "a": {"kind": "binary"},
    "event": {"kind": "binary"},
    "score": {"kind": "number", "range": (-40, 60)},
    "visits": {"kind": "count", "range": (0, 60)},
    "weight": {"kind": "number", "range": (0.1, 4)},
    "site": {"kind": "category", "levels": list(SILOS)},
}
SIZES = dict(zip(SILOS, (130, 70, 210, 90), strict=True))


def expit(eta: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-eta))


def frames(seed: int = 5) -> dict[str, pd.DataFrame]:
    """Four hospitals of which each has its own level of treatment and of every outcome."""
    rng = np.random.default_rng(seed)
    data = {}
    for k, (name, n) in enumerate(SIZES.items()):
        x, g = rng.uniform(0, 8, n) * rng.uniform(0.5, 1.0), rng.integers(0, 3, n)
        a = (rng.random(n) < expit(0.7 * (k - 1.5) + 0.2 * (x - 3))).astype(int)
        lift = 0.8 * (1.5 - k) + 0.15 * (x - 3) + 0.3 * a + 0.4 * (g == 1)
        data[name] = pd.DataFrame(
            {
                "x": x,
                "g": np.array(["p", "q", "r"])[g],
                "a": a,
                "event": (rng.random(n) < expit(lift)).astype(int),
                "score": np.clip(8 * lift + rng.normal(0, 5, n), -40, 60),
                "visits": np.minimum(rng.poisson(np.exp(0.5 + 0.5 * lift)), 60),
                "weight": rng.uniform(0.4, 2.0, n),
                "site": name,
            }
        )
    return data


def study(outcome: str = "event", term: str = "C(silo)", **options: Any) -> ft.Study:
    defaults: dict[str, Any] = {
        "outcome_model": ft.GLM(f"a + x + C(g) + {term}"),
        "treatment_model": ft.GLM(f"x + C(g) + {term}"),
        "algorithm": NEWTON,
        "target": ft.ATE(outcome=outcome, treatment="a"),
        "variables": ft.Variables(DICTIONARY),
    }
    return ft.Study(**(defaults | options))


# The profile itself.


class Given(AbstractResponse):
    """A response and weights that the table has as columns."""

    def of(self, table: Table) -> tuple[Array, Array]:
        return table.numeric["y"], table.numeric["w"]


def profiled(family: Family) -> ProfiledModel:
    formula = own_formula(parse_formula("x + C(g) + C(silo)"), LEVELS)
    assert formula is not None
    whole = GLMModel(
        formula=formula.whole,
        levels=LEVELS,
        scales=(1, 4, 1, 1),
        family=family,
        response=Given(),
        weight_ceiling=2.0,
        ranges=((1, 1), (0, 8), (0, 1), (0, 1)),
    )
    return ProfiledModel(whole=whole)


def table(family: Family, silos: int = 2, n: int = 90, seed: int = 1) -> Table:
    rng = np.random.default_rng(seed)
    codes = np.sort(rng.integers(0, silos, n))
    x, g = rng.uniform(0, 8, n), rng.integers(0, 3, n)
    eta = 0.2 * x - 1.0 + codes
    y = {
        Family.LOGISTIC: (rng.random(n) < expit(eta)) * 1.0,
        Family.GAUSSIAN: np.clip(0.1 * eta + rng.normal(0.4, 0.1, n), 0, 1),
        Family.POISSON: np.minimum(rng.poisson(np.exp(0.3 * eta)), 20) / 20,
    }[family]
    w = np.where(rng.random(n) < 0.2, 0.0, rng.uniform(0.2, 2.0, n))
    factors = {SILO: Factor(codes, SILOS), "g": Factor(g, ("p", "q", "r"))}
    numeric: dict[str, Array] = {"x": x, "y": np.asarray(y, dtype=np.float64), "w": w}
    return Table(n_rows=n, numeric=numeric, factors=factors)


def columns(rows: Table) -> Array:
    g = rows.factors["g"].codes
    return np.stack([rows.numeric["x"] / 16, (g == 1) / 2, (g == 2) / 2])


LOSS: dict[Family, Callable[[Array, Array], Array]] = {
    Family.LOGISTIC: lambda eta, y: np.logaddexp(0.0, eta) - y * eta,
    Family.GAUSSIAN: lambda eta, y: 0.5 * (eta - y) ** 2,
    Family.POISSON: lambda eta, y: np.exp(eta) - y * eta,
}
MEAN: dict[Family, Callable[[Array], Array]] = {
    Family.LOGISTIC: expit,
    Family.GAUSSIAN: lambda eta: eta,
    Family.POISSON: np.exp,
}
FAMILIES = list(LOSS)


def longhand(rows: Table, family: Family, beta: Array) -> float:
    """The profile of the loss: over each silo's intercept by golden section, no derivative."""
    X, y, w = columns(rows), rows.numeric["y"], rows.numeric["w"]
    total = 0.0
    for code in np.unique(rows.factors[SILO].codes):
        here = rows.factors[SILO].codes == code
        eta = beta @ X[:, here]

        def loss(alpha: float, eta: Array = eta, here: Array = here) -> float:
            return math.fsum(w[here] * LOSS[family](eta + alpha, y[here]))

        low, high = -8.0, 8.0
        ratio = (math.sqrt(5) - 1) / 2
        for _ in range(90):
            one, two = high - ratio * (high - low), low + ratio * (high - low)
            low, high = (low, two) if loss(one) < loss(two) else (one, high)
        total += loss(0.5 * (low + high))
    return total


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_gradient_and_curvature_are_those_of_the_profile(family: Family) -> None:
    rows, model = table(family), profiled(family)
    beta, step = np.array([1.2, -0.6, 0.4]), 2e-3
    sums = model.submodel(None, rows).sums(beta, Part.GRADIENT | Part.HESSIAN).values()
    gradient, hessian = sums[:3], unpack(sums[3:], 3)
    unit = np.eye(3) * step

    def at(*moves: Array) -> float:
        return longhand(rows, family, beta + sum(moves, np.zeros(3)))

    for j in range(3):
        near, far = at(unit[j]) - at(-unit[j]), at(2 * unit[j]) - at(-2 * unit[j])
        assert abs((8 * near - far) / (12 * step) - gradient[j]) < 1e-8 * 90
        for k in range(3):
            mixed = at(unit[j], unit[k]) - at(unit[j], -unit[k]) - at(-unit[j], unit[k])
            found = (mixed + at(-unit[j], -unit[k])) / (4 * step * step)
            assert abs(found - hessian[j, k]) < 3e-6 * 90


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_sums_of_silos_add_up_to_those_of_all_rows_bit_by_bit(family: Family) -> None:
    rows, model = table(family, silos=3, n=200), profiled(family)
    beta, parts = np.array([2.0, 0.3, -1.1]), Part.GRADIENT | Part.HESSIAN
    whole = model.submodel(None, rows).sums(beta, parts)
    shuffled = rows.take(np.random.default_rng(3).permutation(rows.n_rows))
    assert model.submodel(None, shuffled).sums(beta, parts) == whole
    apart = [model.submodel(None, part).sums(beta, parts) for _, part in by_silo(rows)]
    assert len(apart) == 3
    assert [sum(each) for each in zip(*(one.units for one in apart), strict=True)] == list(whole.units)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_at_its_intercept_the_slopes_of_a_silo_add_up_to_zero(family: Family) -> None:
    rng = np.random.default_rng(7)
    with Premise("the intercept is far from zero", at_least=0.3) as is_far:
        for seed in range(12):
            rows, model = table(family, silos=1, seed=seed), profiled(family)
            beta = rng.normal(0, 6, 3) if family is not Family.GAUSSIAN else rng.normal(0, 60, 3)
            alpha = model.block(beta, rows)[0] / 2  # its column is 1/2
            is_far.holds(abs(alpha) > 1)
            slopes = rows.numeric["w"] * (MEAN[family](alpha + beta @ columns(rows)) - rows.numeric["y"])
            unit = 2.0 ** (model.row_bound(None).gradient - GRID_BITS)  # of a row in the exact sums
            assert abs(math.fsum(slopes)) <= rows.n_rows * unit


@pytest.mark.parametrize(("family", "y"), [(f, y) for f in FAMILIES[::2] for y in (0.0, 1.0)], ids=str)
def test_a_constant_response_leaves_nothing_of_a_silo(family: Family, y: float) -> None:
    rows, model = table(family, silos=1), profiled(family)
    rows = rows.with_numeric("y", np.full(rows.n_rows, y))
    beta = np.array([3.0, -2.0, 1.0])
    alpha = model.block(beta, rows)[0] / 2
    assert math.isfinite(alpha)
    eta = alpha + beta @ columns(rows)
    if family is Family.POISSON and y:  # a constant count has an intercept like any other
        assert abs(math.fsum(rows.numeric["w"] * (np.exp(eta) - y))) < 1e-12 * rows.n_rows
        return
    assert np.abs(MEAN[family](eta) - y).max() < 1e-13
    sums = model.submodel(None, rows).sums(beta, Part.GRADIENT | Part.HESSIAN).values()
    assert np.abs(sums).max() < 1e-12


def test_rows_without_a_weight_count_for_nothing() -> None:
    rows, model = table(Family.LOGISTIC, silos=2), profiled(Family.LOGISTIC)
    first = rows.factors[SILO].codes == 0
    beta = np.array([1.0, 0.0, 0.5])
    empty = rows.with_numeric("w", np.where(first, 0.0, rows.numeric["w"]))
    alone = rows.take(np.flatnonzero(~first))
    parts = Part.GRADIENT | Part.HESSIAN
    assert model.submodel(None, empty).sums(beta, parts) == model.submodel(None, alone).sums(beta, parts)


# What the guard judges.


@pytest.mark.parametrize("part", [Part.GRADIENT, Part.HESSIAN])
def test_leverages_are_those_of_rows_centred_within_the_silo(part: Part) -> None:
    rows, model = table(Family.LOGISTIC, silos=1), profiled(Family.LOGISTIC)
    beta = np.array([1.5, -0.5, 0.7])
    submodel = model.submodel(None, rows)
    assert isinstance(submodel, Profiled)
    X, y, w = columns(rows), rows.numeric["y"], rows.numeric["w"]
    mu = expit(model.block(beta, rows)[0] / 2 + beta @ X)
    sd = np.sqrt(mu * (1 - mu))
    s = w * np.maximum(np.abs(mu - y), sd) if part is Part.GRADIENT else np.sqrt(w) * sd
    t = s * (X - (X @ s**2 / (s @ s))[:, None])
    told = np.concatenate([piece.rows for piece in submodel.disclosed_rows(beta, part)], axis=1)
    np.testing.assert_allclose(told, t, atol=1e-12)
    q, S = s**2 / (s @ s), t @ t.T
    h = np.einsum("in,ij,jn->n", t, np.linalg.inv(S), t)
    assert submodel.look(beta, part).largest == pytest.approx((q + h).max(), rel=1e-9)
    with_ones = np.stack([s, *(s * X)])
    direct = np.einsum("in,ij,jn->n", with_ones, np.linalg.inv(with_ones @ with_ones.T), with_ones)
    np.testing.assert_allclose(q + h, direct, atol=1e-10)
    values, vectors = np.linalg.eigh(3 * S)  # as if others had twice as much
    pooled = submodel.look(beta, part, space=RowSpace(vectors / np.sqrt(values)))
    assert pooled.largest == pytest.approx((h / 3 / (1 - q)).max(), rel=1e-9)
    raw = np.concatenate([piece.rows for piece in submodel.counted_rows(beta, part)], axis=1)
    np.testing.assert_allclose(raw, s * X, atol=1e-12)


def test_the_share_under_masks_is_what_an_attacker_could_explain() -> None:
    """Of slopes with these variances that add up to zero, the answer explains h / (1 - q) of each one."""
    rng = np.random.default_rng(2)
    s, X = rng.uniform(0.2, 1.0, 12), rng.normal(size=(3, 12))
    variance = np.diag(s**2) - np.outer(s**2, s**2) / (s @ s)  # given that they add up to zero
    told = X @ variance @ X.T
    with_each = variance @ X.T
    explained = np.einsum("nj,jk,nk->n", with_each, np.linalg.inv(told), with_each) / np.diag(variance)
    t = s * (X - (X @ s**2 / (s @ s))[:, None])
    h, q = np.einsum("in,ij,jn->n", t, np.linalg.inv(t @ t.T), t), s**2 / (s @ s)
    np.testing.assert_allclose(explained, h / (1 - q), rtol=1e-9)


# Formulas.


@pytest.mark.parametrize(
    ("formula", "whole", "block"),
    [
        ("x + C(silo)", "1 + x", "1"),
        ("C(silo)", "1", "1"),
        ("0 + C(silo) + C(g)", "1 + C(g)", "1"),
        ('C(silo, ref="east") + x:C(g)', "1 + x:C(g)", "1"),
        ('C(silo) + C(silo, ref="east")', "1", "1"),
        ("z + x*C(silo)", "1 + x + z", "1 + x"),
        ("z + x:C(silo)", "1 + x + z", "0 + x"),
        ("0 + z + x:C(silo)", "0 + x + z", "0 + x"),
        ("C(g) + x + C(silo):C(g)", "1 + C(g) + x", "1 + C(g)"),
        ("poly(x, 2):C(silo) + x", "1 + poly(x, 2)", "0 + poly(x, 2)"),
        ("x + C(g)*C(h)*C(silo)", "1 + C(g) + C(h) + C(g):C(h) + x", "1 + C(g) + C(h) + C(g):C(h)"),
        ("C(h) + C(g):C(h):C(silo)", "1 + C(g):C(h)", "1 + C(g):C(h)"),
        ("0 + C(g):C(h) + C(g):C(k):C(l):C(silo)", None, None),
        ("x", None, None),
    ],
)
def test_which_formulas_have_it(formula: str, whole: str | None, block: str | None) -> None:
    levels = {**LEVELS, "h": ("u", "v"), "k": ("u", "v"), "l": ("u", "v")}
    found = own_formula(parse_formula(formula), levels)
    assert (found and (str(found.whole), str(found.own))) == (whole and (whole, block))
    assert own_formula(parse_formula(formula), levels | {SILO: ("alone",)}) is None


@pytest.mark.parametrize(
    "formula",
    [
        "z + x*C(silo)",
        "z + x:C(silo)",
        "C(g) + x + C(silo):C(g)",
        "x*C(silo) + C(g)*C(h)",
        "C(g):C(h):C(silo) + C(h):x",
    ],
)
def test_a_block_and_the_other_columns_span_what_indicators_do(formula: str) -> None:
    """At the rows of all silos, the block's columns times each silo's indicator, with the others."""
    rng = np.random.default_rng(5)
    n, levels = 400, {**LEVELS, "h": ("u", "v")}
    factors = {name: Factor(rng.integers(0, len(of), n), of) for name, of in levels.items()}
    rows = Table(n_rows=n, numeric={"x": rng.normal(size=n), "z": rng.normal(size=n)}, factors=factors)
    plain = design(parse_formula(formula), rows, levels)
    found = own_formula(parse_formula(formula), levels)
    assert found is not None
    of_block = column_names(found.own, levels)
    whole = dict(zip(column_names(found.whole, levels), design(found.whole, rows, levels), strict=True))
    silo = factors[SILO].codes
    own = [whole[name] * (silo == m) for name in of_block for m in range(len(SILOS))]
    ours = np.stack([*own, *(column for name, column in whole.items() if name not in of_block)])
    assert len(ours) == len(plain) == np.linalg.matrix_rank(plain) == np.linalg.matrix_rank(ours)
    assert np.linalg.matrix_rank(np.concatenate([plain, ours])) == len(plain)


@pytest.mark.parametrize(
    ("options", "has_columns"),
    [
        ({}, False),
        ({"outcome_model": ft.GLM("a + x + a:C(silo)")}, False),
        ({"term": "x"}, False),
        ({"treatment_model": ft.SuperLearner((ft.GLM("x"), ft.GLM("x + C(silo)")))}, False),
        ({"treatment_model": ft.Pilot(ft.GLM("x + C(silo)"), at="north")}, True),
        ({"algorithm": ft.Personalized()}, False),
        ({"target": ft.ATE(outcome="event", treatment="g"), "outcome_model": ft.GLM("C(g)")}, False),
    ],
    ids=["own", "interaction", "none", "super learner", "pilot", "personalized", "three arms"],
)
def test_which_studies_have_columns_of_one_silo(options: dict[str, Any], has_columns: bool) -> None:
    if "outcome_model" in options and "target" in options:
        options = options | {"treatment_model": ft.GLM("x + C(silo)")}
    assert study(**options).has_silo_columns is has_columns


# Studies.


def dummies(data: dict[str, pd.DataFrame], *, with_a: bool) -> Array:
    rows = pd.concat(data.values())
    covariates = [*([rows["a"]] if with_a else []), rows["x"], rows["g"] == "q", rows["g"] == "r"]
    return np.stack([*covariates, *(rows["site"] == name for name in SILOS)]).astype(float)


def reweighted(X: Array, y: Array, family: Family) -> Array:
    """Iteratively reweighted least squares."""
    beta = np.zeros(len(X))
    beta[-len(SILOS) :] = {Family.POISSON: math.log(y.mean() + 1e-9)}.get(family, 0.0)
    for _ in range(60):
        mu = MEAN[family](beta @ X)
        bend = {Family.LOGISTIC: mu * (1 - mu), Family.POISSON: mu}.get(family, np.ones_like(mu))
        beta = beta + np.linalg.solve((X * bend) @ X.T, X @ (y - mu))
    return beta


OUTCOMES = {"event": Family.LOGISTIC, "score": Family.GAUSSIAN, "visits": Family.POISSON}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_fits_are_those_of_indicator_columns(outcome: str) -> None:
    data, family = frames(), OUTCOMES[outcome]
    asked = study(outcome)
    finished, tables = finish(asked, data)
    fitted = targeted(finished).details.nuisances
    rows = pd.concat(data.values())
    low, high = asked.outcome_bounds
    table = pooled_rows(asked, tables)
    view = OwnCoefficients(blocks=tuple(own_blocks(fit for fits in fitted.values() for fit in fits)))
    assert len(view.blocks) == 2
    shown = view.of(table)
    assert isinstance(shown, Table)
    responses = {
        "treatment": (rows["a"].to_numpy(float), Family.LOGISTIC),
        "outcome": (((rows[outcome] - low) / (high - low)).to_numpy(float), family),
    }
    for role, (y, of) in responses.items():
        X = dummies(data, with_a=role == "outcome")
        beta = reweighted(X, y, of)
        (model,) = fitted[role]
        np.testing.assert_allclose(model.coefficients[1:], beta[: -len(SILOS)], rtol=1e-9, atol=1e-10)
        own = {silo: shown.numeric[model.own.names[0]][first] for silo, first in _first_rows(shown).items()}
        np.testing.assert_allclose([own[silo] for silo in SILOS], beta[-len(SILOS) :], rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(model.predict(shown), MEAN[of](beta @ X), rtol=1e-9)


def _first_rows(table: Table) -> dict[str, int]:
    factor = table.factors[SILO]
    return {silo: int(np.argmax(factor.codes == k)) for k, silo in enumerate(factor.levels)}


MISSING: dict[str, Any] = {"missingness_model": ft.GLM("a + x + C(silo)")}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "folds": {"folds": 3},
    "weights": {"weights": "weight", "weight_ceiling": 4.0},
    "missing outcomes": MISSING,
    "strata": {"target": ft.ATE(outcome="event", treatment="a", strata="g")},
    "no other column": {"treatment_model": ft.GLM("C(silo)"), "outcome_model": ft.GLM("C(silo)")},
    "super learner": {
        "outcome_model": ft.SuperLearner((ft.GLM("a + C(silo)"), ft.GLM("a + x")), folds=2),
    },
    "three arms": {
        "target": ft.ATE(outcome="event", treatment="g"),
        "outcome_model": ft.GLM("C(g) + x + C(silo)"),
        "treatment_model": ft.GLM("x + C(silo)"),
    },
    "slopes": {
        "outcome_model": ft.GLM("x + C(g) + a*C(silo)"),
        "treatment_model": ft.GLM("C(g) + x*C(silo)"),
    },
    "slopes alone": {
        "outcome_model": ft.GLM("a + C(g) + x:C(silo)"),
        "treatment_model": ft.GLM("C(g) + x:C(silo)"),
    },
    "slopes of factors": {
        "outcome_model": ft.GLM("a + x + C(g)*C(silo)"),
        "treatment_model": ft.GLM("C(silo) + spline(x, knots=[2, 4, 6]):C(silo)"),
    },
    "slopes and folds": {
        "outcome_model": ft.GLM("x + C(g) + a*C(silo)"),
        "treatment_model": ft.GLM("C(g) + x*C(silo)"),
        "folds": 2,
    },
    "slopes, three arms": {
        "target": ft.ATE(outcome="event", treatment="g"),
        "outcome_model": ft.GLM("C(g) + x*C(silo)"),
        "treatment_model": ft.GLM("a + x*C(silo)"),
    },
    "three arms, no other column": {
        "target": ft.ATE(outcome="event", treatment="g"),
        "outcome_model": ft.GLM("C(g) + x"),
        "treatment_model": ft.GLM("C(silo)"),
    },
    "one step": {"algorithm": ft.OneStep(), "sums": "exact"},
    "local": {"algorithm": ft.LocalAverage(max_updates=3)},
}


def renamed(value: Any) -> Any:
    """The same models with a column that names the silo."""
    if isinstance(value, ft.GLM):
        return ft.GLM(value.formula.replace("C(silo)", "C(site)"))
    if isinstance(value, ft.SuperLearner):
        return ft.SuperLearner(tuple(map(renamed, value.learners)), folds=value.folds)
    return value


def lost(data: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(8)
    return {
        name: frame.assign(event=np.where(rng.random(len(frame)) < 0.15, np.nan, frame["event"]))
        for name, frame in data.items()
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_estimates_are_those_of_a_column_that_names_the_silo(name: str) -> None:
    options, data = OPTIONS[name], frames()
    if name == "missing outcomes":
        data = lost(data)
    if name == "folds":  # drawn within silos either way
        assert study(**options).outer_folds is not None
    one = ft.run(study(**options), data).table()
    other = ft.run(study(term="C(site)", **{key: renamed(value) for key, value in options.items()}), data)
    np.testing.assert_allclose(one["estimate"], other.table()["estimate"], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(one["std_error"], other.table()["std_error"], rtol=1e-8)


@pytest.mark.parametrize("missing", ["impute", "indicator"])
def test_covariates_may_be_missing(missing: str) -> None:
    """Each completed data set has intercepts of its own."""
    rng = np.random.default_rng(4)
    data = {
        name: frame.assign(x=np.where(rng.random(len(frame)) < 0.3, np.nan, frame["x"]))
        for name, frame in frames().items()
    }
    declared = ft.Variables({**DICTIONARY, "x": {**DICTIONARY["x"], "missing": missing}})
    one, other = (
        ft.run(study(term=term, variables=declared), data).table() for term in ("C(silo)", "C(site)")
    )
    if missing == "indicator":
        np.testing.assert_allclose(one["estimate"], other["estimate"], rtol=1e-8)
        np.testing.assert_allclose(one["std_error"], other["std_error"], rtol=1e-8)
    else:  # values are imputed from a model of the other columns, of which the site is one
        assert abs(one["estimate"] - other["estimate"])[0] < 0.3 * other["std_error"][0]
    pooled = ft.run(study(variables=declared, algorithm=ft.Central()), data).table()
    np.testing.assert_allclose(one["estimate"], pooled["estimate"], rtol=1e-8)
    np.testing.assert_allclose(one["std_error"], pooled["std_error"], rtol=1e-8)


@pytest.mark.parametrize("outcome", ["score", "visits"])
def test_estimates_of_other_outcomes_too(outcome: str) -> None:
    data = frames()
    one, other = (ft.run(study(outcome, term), data).table() for term in ("C(silo)", "C(site)"))
    pooled = ft.run(study(outcome, algorithm=ft.Central()), data).table()
    for column in ("estimate", "std_error"):
        np.testing.assert_allclose(one[column], other[column], rtol=1e-9)
        np.testing.assert_allclose(one[column], pooled[column], rtol=1e-9)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_coded_fits_agree_within_their_accuracy(outcome: str) -> None:
    data, coded = frames(), {"algorithm": ft.Coded()}
    one, other = (ft.run(study(outcome, term, **coded), data) for term in ("C(silo)", "C(site)"))
    apart = abs(one.table()["estimate"] - other.table()["estimate"]) / other.table()["std_error"]
    assert apart.max() < 1e-4
    assert one.run is not None
    assert other.run is not None
    assert len(one.run.transcript.exchanges) <= len(other.run.transcript.exchanges)


def test_a_silo_without_events_does_not_end_the_study() -> None:
    """Where the indicator columns have no finite fit, the others are fitted as if that silo were absent."""
    data = frames()
    data["south"] = data["south"].assign(event=0)
    fits = {}
    for silos in (SILOS, tuple(name for name in SILOS if name != "south")):
        finished, _ = finish(study(), {name: data[name] for name in silos})
        (fits[silos],) = targeted(finished).details.nuisances["outcome"]
    every, without = fits.values()
    np.testing.assert_allclose(every.coefficients, without.coefficients, rtol=1e-8, atol=1e-10)
    with pytest.raises(FitError, match="perfectly predicted"):
        ft.run(study(term="C(site)"), data)


@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["exact", "coded"])
def test_a_column_that_is_constant_within_silos_is_refused(algorithm: Any) -> None:
    data = {name: frame.assign(x=1.0 + k) for k, (name, frame) in enumerate(frames().items())}
    with pytest.raises(FitError, match=r"column\(s\) x are the same for everyone of a silo") as caught:
        ft.run(study(algorithm=algorithm), data)
    assert "C(silo) determines them" in str(caught.value)


@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["exact", "coded"])
def test_a_treatment_that_is_constant_within_silos_is_refused(algorithm: Any) -> None:
    data = {name: frame.assign(a=k % 2) for k, (name, frame) in enumerate(frames().items())}
    with pytest.raises(FitError, match=r"column\(s\) a are the same for everyone of a silo"):
        ft.run(study(algorithm=algorithm, treatment_model=ft.GLM("x")), data)


def test_a_silo_with_nobody_to_fit_its_intercept_to_is_told_so() -> None:
    data = lost(frames())
    data["east"] = data["east"].assign(event=np.nan)
    with pytest.raises(DataError, match=r"no row to which its own intercept, C\(silo\), can be fitted"):
        ft.run(study(**MISSING), data)


def test_batches_and_losses_of_it_are_not_asked() -> None:
    submodel = profiled(Family.LOGISTIC).submodel(None, table(Family.LOGISTIC))
    with pytest.raises(InputError, match="fitted to all rows"):
        submodel.take(np.arange(3))
    with pytest.raises(InputError, match="no sum of its own"):
        submodel.sums(np.zeros(3), Part.LOSS)


# Under masks.


Watched = Callable[..., tuple[ft.StudyResult, Plan]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Run a study; return the result and the plan."""
    plans: list[Plan] = []
    run = solver.run_in_process

    def watch(*arguments: Any, **options: Any) -> Any:
        completed = run(*arguments, **options)
        plans.append(completed.plan)
        return completed

    monkeypatch.setattr("fedtmle.studies.run.run_in_process", watch)

    def result(asked: ft.Study, data: dict[str, pd.DataFrame]) -> Any:
        return ft.run(asked, data), plans[-1]

    return result


def same_bytes(planned: Watched, asked: Callable[[str], ft.Study], data: dict[str, pd.DataFrame]) -> None:
    """Assert that open and masked runs of a study have the same broadcasts and results."""
    (one, open_plan), (other, masked_plan) = (planned(asked(how), data) for how in ("open", "masked"))
    assert masked_plan.is_masked
    assert not open_plan.is_masked
    assert one.run is not None
    assert other.run is not None
    check_broadcasts(one.run.transcript, other.run.transcript, masked_plan)
    pd.testing.assert_frame_equal(one.table(), other.table(), check_exact=True)


MASKED: dict[str, Any] = {"aggregation": "masked", "algorithm": ft.Coded(), "diagnostics": False}


def totals(data: dict[str, pd.DataFrame], **options: Any) -> list[Any]:
    """Every broadcast of a masked study under the default policy, looks included."""
    return totals_of(study(**(MASKED | options)), data)


def totals_of(asked: ft.Study, data: dict[str, pd.DataFrame]) -> list[Any]:
    result = ft.run(asked, data, policy=ft.Policy())
    assert result.run is not None
    exchanges = result.run.transcript.exchanges
    requests = [messages.decode_request(next(iter(each.requests.values()))) for each in exchanges]
    return [request.pooled for request in requests if isinstance(request, Ask | Close)]


@pytest.mark.parametrize("sums", ["rounded", "exact"])
def test_no_total_says_which_silo_has_which_rows(sums: str) -> None:
    """If two silos exchange all their rows, every broadcast of a masked study stays the same.

    So no broadcast holds a sum over the rows of one of them.
    """
    data = frames()
    exchanged = {**data, "south": data["east"], "east": data["south"]}
    assert totals(data, sums=sums) == totals(exchanged, sums=sums)
    slopes = {"outcome_model": ft.GLM("a + x + C(g) + a:C(silo)")}
    assert totals(data, sums=sums, **slopes) == totals(exchanged, sums=sums, **slopes)


@pytest.mark.parametrize("aggregation", ["open", "masked"])
@pytest.mark.parametrize("name", ["plain", "folds", "missing outcomes", "slopes", "three arms"])
def test_silos_may_retire_with_laws_of_their_own(name: str, aggregation: str) -> None:
    """Each silo's law and estimate, with its own coefficients, are those of indicator columns."""
    options = {**OPTIONS[name], "algorithm": ft.Personalized(noise=0.4, max_updates=4, min_active=3)}
    data = lost(frames()) if name == "missing outcomes" else frames()
    run = ft.run(study(**options, aggregation=aggregation), data).run
    assert run is not None
    site = ft.run(study(term="C(site)", **{key: renamed(value) for key, value in options.items()}), data).run
    assert site is not None
    assert run.status is site.status
    with Premise("the silo retires", at_least=0.2) as retires:
        for silo in SILOS:
            own, other = run.silos[silo], site.silos[silo]
            retires.holds(own.retired_at is not None)
            assert own.retired_at == other.retired_at
            np.testing.assert_allclose(own.estimate.psi, other.estimate.psi, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(own.estimate.covariance, other.estimate.covariance, rtol=1e-8)


def test_no_total_of_a_run_with_retirement_says_whose_rows_they_are() -> None:
    data = frames()
    exchanged = {**data, "south": data["east"], "east": data["south"]}
    retiring = ft.Personalized(noise=0.4, max_updates=4)
    assert totals(data, algorithm=retiring) == totals(exchanged, algorithm=retiring)


def test_nothing_is_asked_about_one_silo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the profile the same test fails: it can."""
    data = frames()
    exchanged = {**data, "south": data["east"], "east": data["south"]}
    monkeypatch.setattr("fedtmle.programs.nuisance.own_formula", lambda *_: None)
    assert totals(data) != totals(exchanged)


@pytest.mark.parametrize(
    "options",
    [{}, {"folds": 2}, {"algorithm": NEWTON}, {"outcome": "score"}, OPTIONS["no other column"]],
    ids=["coded", "folds", "exact", "continuous", "no other column"],
)
def test_masked_is_open_byte_for_byte(options: dict[str, Any], planned: Watched) -> None:
    same_bytes(planned, lambda how: study(**(MASKED | options | {"aggregation": how})), frames())


# The audit.


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("curved", [False, True], ids=["gradient", "curvature"])
def test_a_record_moves_the_sums_as_the_audit_says(family: Family, curved: bool) -> None:
    """Each record is moved alone, and the silo's intercept follows."""
    rows, model = table(family, silos=1, n=60), profiled(family)
    beta = np.array([0.8, -0.4, 0.3])
    common: dict[str, Any] = {"model": model, "eps": beta, "C": np.eye(3), "exponent": -30, "n": 60}
    query = FitCurvatureQuery(**common) if curved else FitGradientQuery(**common, stream="")
    local = LocalRows("north", rows, rows.n_rows)
    answered = AnsweredQuery(query=query, answer=query.answer(local))
    explained = explain(answered, local, rows, Submodels())
    assert explained is not None
    part = Part.HESSIAN if curved else Part.GRADIENT
    summed = model.submodel(None, rows).sums(beta, part).values()
    np.testing.assert_allclose(explained.terms(rows).sum(axis=1), summed, atol=1e-9)
    if curved:  # of a curvature the audit has the first order at a fixed intercept only
        return
    step = 1e-4
    for name in ("x", "y"):
        told = explained.tangents(rows, name)
        for i in (0, 17, 42):
            moved = []
            for by in (step, -step):
                column = rows.numeric[name].copy()
                column[i] += by
                moved.append(model.submodel(None, rows.with_numeric(name, column)).sums(beta, part).values())
            np.testing.assert_allclose(told[:, i], (moved[0] - moved[1]) / (2 * step), atol=1e-6)


def test_a_held_view_keeps_the_intercepts_of_its_rows() -> None:
    """The audit moves all records at once to see what each one does: the silo's intercept must not follow."""
    rows, model = table(Family.LOGISTIC, silos=2), profiled(Family.LOGISTIC)
    view = OwnCoefficients(blocks=(OwnBlock(label="m", model=model, eps=(0.5, 0.1, -0.2)),))
    moved = rows.with_numeric("y", 1.0 - rows.numeric["y"])
    (name,) = view.names
    first, held, other = (each.of(r) for each, r in ((view, rows), (view.held(rows), moved), (view, moved)))
    assert isinstance(first, Table)
    assert isinstance(held, Table)
    assert isinstance(other, Table)
    assert len(np.unique(first.numeric[name])) == 2
    np.testing.assert_array_equal(held.numeric[name], first.numeric[name])
    assert (other.numeric[name] != first.numeric[name]).all()
    assert name not in rows.numeric
