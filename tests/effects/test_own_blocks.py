"""Several coefficients of each silo's own: slopes of x:C(silo), and those of multinomial models.

Derivatives of the profile are compared with complex steps through a longhand profile: Newton's method for the
block of each silo in complex arithmetic. Fits are compared with indicator columns.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.errors import DataError, FitError
from fedtmle.initial.glm import GLMModel, MultinomialModel
from fedtmle.initial.own import ProfiledModel, by_silo, own_formula
from fedtmle.initial.syntax import parse_formula
from fedtmle.model.leverage import RowSpace
from fedtmle.model.submodels import schur_complement
from fedtmle.model.table import SILO, StreamedTable, Table
from fedtmle.privacy.answers import Submodels, explain
from fedtmle.programs.superlearner import OwnCoefficients, own_blocks
from fedtmle.protocol.query import AnsweredQuery
from fedtmle.protocol.regression import FitCurvatureQuery, FitGradientQuery
from fedtmle.runtime.rows import LocalRows
from fedtmle.studies.run import pooled_rows
from fedtmle_core.types import Array, Family, Part, unpack, upper_pairs
from tests.effects.studies import NEWTON, finish
from tests.effects.test_own import (
    FAMILIES,
    LEVELS,
    MASKED,
    SILOS,
    Given,
    Watched,
    expit,
    frames,
    planned,
    same_bytes,
    study,
    table,
    totals,
)
from tests.narrow import targeted
from tests.premise import Premise

__all__ = ["planned"]  # a fixture

CLASSES = 3
BLOCKS = {"slopes": "C(g) + x*C(silo)", "slope alone": "C(g) + x:C(silo)"}
SCALES = {"1": 1, "x": 4}


def profiled(kind: str, family: Family | None = Family.LOGISTIC) -> ProfiledModel:
    """The model of a formula, multinomial if the family is None."""
    found = own_formula(parse_formula(BLOCKS[kind]), LEVELS)
    assert found is not None
    shared: dict[str, Any] = {"levels": LEVELS, "response": Given(), "weight_ceiling": 2.0}
    # The columns are 1, x, C(g)[q] and C(g)[r], whichever are the silo's own.
    if family is None:
        return ProfiledModel(
            whole=MultinomialModel(formula=found.whole, scales=(1, 4, 1, 1), classes=CLASSES, **shared),
            own=found.own,
        )
    ranges = ((1.0, 1.0), (0.0, 8.0), (0.0, 1.0), (0.0, 1.0))
    whole = GLMModel(formula=found.whole, scales=(1, 4, 1, 1), family=family, ranges=ranges, **shared)
    return ProfiledModel(whole=whole, own=found.own)


def rows_of(family: Family | None, silos: int = 2, n: int = 120, seed: int = 1) -> Table:
    rows = table(family or Family.LOGISTIC, silos=silos, n=n, seed=seed)
    if family is not None:
        return rows
    classes = np.random.default_rng(seed).integers(0, CLASSES, n).astype(float)
    return rows.with_numeric("y", classes)


def split(rows: Table, kind: str) -> tuple[Array, Array]:
    """The columns of the block and the common ones, on their scales."""
    g = rows.factors["g"].codes
    ones, x = np.full(rows.n_rows, 0.5), rows.numeric["x"] / 16
    levels = [(g == 1) / 2, (g == 2) / 2]
    if kind == "slopes":
        return np.stack([ones, x]), np.stack(levels)
    return np.stack([x]), np.stack([ones, *levels])


class Longhand:
    """The profile over each silo's block, for complex coefficients too."""

    def __init__(self, rows: Table, kind: str, family: Family | None) -> None:
        own, common = split(rows, kind)
        self.y, self.w, self.codes = rows.numeric["y"], rows.numeric["w"], rows.factors[SILO].codes
        self.family, self.classes = family, 1 if family is not None else CLASSES - 1
        self.own, self.common = own, common

    def slopes(self, eta: Any, y: Array) -> tuple[Any, Any]:
        """The derivative of a row's loss in its predictors, (J - 1, N), and the second one."""
        if self.family is None:
            e = np.exp(eta)
            p = e / (1 + e.sum(axis=0))
            taken = y == np.arange(1, CLASSES)[:, None]
            bend = np.einsum("jk,jn->jkn", np.eye(CLASSES - 1), p) - np.einsum("jn,kn->jkn", p, p)
            return p - taken, bend
        mean = {
            Family.LOGISTIC: lambda: 1 / (1 + np.exp(-eta)),
            Family.GAUSSIAN: lambda: eta,
            Family.POISSON: lambda: np.exp(eta),
        }[self.family]()
        bend = {
            Family.LOGISTIC: lambda: mean * (1 - mean),
            Family.GAUSSIAN: lambda: np.ones_like(mean),
            Family.POISSON: lambda: mean,
        }[self.family]()
        return mean - y, bend[None]

    def block(self, beta: Any, here: Array) -> Any:
        own, X, y, w = self.own[:, here], self.common[:, here], self.y[here], self.w[here]
        offset = beta.reshape(self.classes, -1) @ X
        gamma = np.zeros((self.classes, len(own)), dtype=complex)
        for _ in range(80):
            slope, bend = self.slopes(offset + gamma @ own, y)
            g = np.einsum("jn,an,n->ja", slope, own, w).ravel()
            H = np.einsum("jkn,an,bn,n->jakb", bend, own, own, w).reshape(len(g), len(g))
            gamma = gamma - np.linalg.solve(H, g).reshape(gamma.shape)
        return gamma, offset

    def gradient(self, beta: Any) -> Any:
        total = np.zeros(len(beta), dtype=complex)
        for code in np.unique(self.codes):
            here = self.codes == code
            gamma, offset = self.block(beta, here)
            slope, _ = self.slopes(offset + gamma @ self.own[:, here], self.y[here])
            total = total + np.einsum("jn,an,n->ja", slope, self.common[:, here], self.w[here]).ravel()
        return total

    def loss(self, beta: Any) -> Any:
        total = 0.0
        for code in np.unique(self.codes):
            here = self.codes == code
            gamma, offset = self.block(beta, here)
            eta, y, w = offset + gamma @ self.own[:, here], self.y[here], self.w[here]
            if self.family is None:
                taken = np.where(y == 1, eta[0], np.where(y == 2, eta[1], 0.0))
                total = total + (w * (np.log(1 + np.exp(eta).sum(axis=0)) - taken)).sum()
                continue
            eta = eta[0]
            total = (
                total
                + {
                    Family.LOGISTIC: lambda e=eta, y=y, w=w: (w * (np.log(1 + np.exp(e)) - y * e)).sum(),
                    Family.GAUSSIAN: lambda e=eta, y=y, w=w: (w * 0.5 * (e - y) ** 2).sum(),
                    Family.POISSON: lambda e=eta, y=y, w=w: (w * (np.exp(e) - y * e)).sum(),
                }[self.family]()
            )
        return total


CASES = [(kind, family) for kind in BLOCKS for family in (*FAMILIES, None)]


def point(model: ProfiledModel, seed: int = 3) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(0, 0.5, model.dim))


@pytest.mark.parametrize(("kind", "family"), CASES, ids=str)
def test_derivatives_are_those_of_the_profile_by_complex_steps(kind: str, family: Family | None) -> None:
    rows, model = rows_of(family), profiled(kind, family)
    beta, hand, step = point(model), Longhand(rows, kind, family), 1e-30
    d = model.dim
    sums = model.submodel(None, rows).sums(beta, Part.GRADIENT | Part.HESSIAN).values()
    for j in range(d):
        moved = beta.astype(complex)
        moved[j] += 1j * step
        assert abs(hand.loss(moved).imag / step - sums[j]) < 1e-11 * rows.n_rows
        np.testing.assert_allclose(
            hand.gradient(moved).imag / step, unpack(sums[d:], d)[j], atol=1e-11 * rows.n_rows
        )


@pytest.mark.parametrize(("kind", "family"), CASES, ids=str)
def test_the_sums_of_silos_add_up_to_those_of_all_rows_bit_by_bit(kind: str, family: Family | None) -> None:
    rows, model = rows_of(family, silos=3, n=200), profiled(kind, family)
    beta, parts = point(model), Part.GRADIENT | Part.HESSIAN
    whole = model.submodel(None, rows).sums(beta, parts)
    shuffled = rows.take(np.random.default_rng(3).permutation(rows.n_rows))
    assert model.submodel(None, shuffled).sums(beta, parts) == whole
    apart = [model.submodel(None, part).sums(beta, parts) for _, part in by_silo(rows)]
    assert len(apart) == 3
    assert [sum(each) for each in zip(*(one.units for one in apart), strict=True)] == list(whole.units)


@pytest.mark.parametrize("family", [Family.LOGISTIC, None], ids=str)
def test_a_table_that_is_read_in_batches_has_the_same_sums(family: Family | None) -> None:
    rows, model = rows_of(family, silos=1), profiled("slopes", family)
    beta, parts = point(model), Part.GRADIENT | Part.HESSIAN
    batches = [rows.take(np.arange(50)), rows.take(np.arange(50, rows.n_rows))]
    counts = {SILO: dict(zip(rows.levels(SILO), rows.counts(SILO), strict=True))}
    streamed = StreamedTable(n_rows=rows.n_rows, factor_counts=counts, digest=b"", read=lambda: iter(batches))
    one, other = model.submodel(None, streamed), model.submodel(None, rows)
    assert one.sums(beta, parts) == other.sums(beta, parts)
    assert one.look(beta).largest == pytest.approx(other.look(beta).largest, rel=1e-9)
    assert not model.is_separated(beta, streamed)


def test_the_schur_complement_is_exact() -> None:
    """By solving with fractions, rounded once; a block without curvature counts for nothing."""
    rng = np.random.default_rng(4)
    for own in ((0,), (1, 3), (4, 0, 2)):
        A = rng.integers(-(2**20), 2**20, (5, 9)).astype(object)
        H = A @ A.T
        common = [j for j in range(5) if j not in own]
        units = tuple(int(H[j, k]) for j, k in upper_pairs(5))
        left = [[Fraction(H[j, k]) for k in (*own, *common)] for j in (*own, *common)]
        for c in range(len(own)):  # Gaussian elimination
            for j in range(c + 1, 5):
                factor = left[j][c] / left[c][c]
                left[j] = [a - factor * b for a, b in zip(left[j], left[c], strict=True)]
        k = len(own)
        expected = tuple(round(left[k + j][k + i]) for j, i in upper_pairs(5 - k))
        assert schur_complement(units, own, common, 9) == expected
    flat = (0, 0, 0, 5, 7, 11)  # nothing of the first coordinate
    assert schur_complement(flat, (0,), [1, 2], 3) == (5, 7, 11)
    assert schur_complement((2, 3, 3, 5, 7, 11), (0,), [1, 2], 3) == (5, 7, 11)  # the rounding of three rows


# What the guard judges.


@pytest.mark.parametrize("part", [Part.GRADIENT, Part.HESSIAN])
@pytest.mark.parametrize("kind", BLOCKS)
def test_leverages_are_those_of_what_the_block_leaves(kind: str, part: Part) -> None:
    rows, model = rows_of(Family.LOGISTIC, silos=1), profiled(kind)
    beta, submodel = point(model), model.submodel(None, rows)
    B, X = split(rows, kind)
    y, w = rows.numeric["y"], rows.numeric["w"]
    mu = expit(model.block(beta, rows) @ B + beta @ X)
    sd = np.sqrt(mu * (1 - mu))
    s = w * np.maximum(np.abs(mu - y), sd) if part is Part.GRADIENT else np.sqrt(w) * sd
    G = np.linalg.inv((s * B) @ (s * B).T)
    t = s * (X - (s * X) @ (s * B).T @ G @ B)
    told = np.concatenate([piece.rows for piece in submodel.disclosed_rows(beta, part)], axis=1)
    np.testing.assert_allclose(told, t, atol=1e-12)
    q, S = np.einsum("an,ab,bn->n", s * B, G, s * B), t @ t.T
    h = np.einsum("in,ij,jn->n", t, np.linalg.inv(S), t)
    look = submodel.look(beta, part)
    assert look.largest == pytest.approx((q + h).max(), rel=1e-9)
    every = np.concatenate([s * B, s * X])
    direct = np.einsum("in,ij,jn->n", every, np.linalg.inv(every @ every.T), every)
    np.testing.assert_allclose(q + h, direct, atol=1e-10)
    values, vectors = np.linalg.eigh(3 * S)  # as if others had twice as much
    pooled = submodel.look(beta, part, space=RowSpace(vectors / np.sqrt(values)))
    assert pooled.largest == pytest.approx((h / 3 / (1 - q)).max(), rel=1e-9)
    assert look.radius(1.0) == 0.0  # elsewhere the block may move a predictor further than beta does
    assert pooled.radius(1.0) == 0.0


def test_the_share_under_masks_is_what_an_attacker_could_explain() -> None:
    """Of slopes with these variances, given that their sums over the block are zero."""
    rng = np.random.default_rng(2)
    s, X, B = rng.uniform(0.2, 1.0, 14), rng.normal(size=(3, 14)), rng.normal(size=(2, 14))
    D = np.diag(s**2)
    variance = D - D @ B.T @ np.linalg.inv(B @ D @ B.T) @ B @ D
    with_each = variance @ X.T
    explained = np.einsum("nj,jk,nk->n", with_each, np.linalg.inv(X @ variance @ X.T), with_each)
    G = np.linalg.inv(B @ D @ B.T)
    t = s * (X - X @ D @ B.T @ G @ B)
    h, q = np.einsum("in,ij,jn->n", t, np.linalg.inv(t @ t.T), t), np.einsum("an,ab,bn->n", s * B, G, s * B)
    np.testing.assert_allclose(explained / np.diag(variance), h / (1 - q), rtol=1e-9)


def test_a_look_holds_at_its_point_alone() -> None:
    slopes, level = profiled("slopes").judged_together, ProfiledModel(whole=profiled("slopes").whole)
    assert slopes is not None
    assert slopes.largest_move([0.0, 0.0]) == 0.0
    assert slopes.largest_move([0.0, 1e-300]) == np.inf
    facts = level.judged_together
    assert facts is not None
    assert 0.0 < facts.largest_move([0.0, 1e-3, 0.0]) < 1.0


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("curved", [False, True], ids=["gradient", "curvature"])
def test_a_record_moves_the_sums_as_the_audit_says(kind: str, curved: bool) -> None:
    """Each record is moved alone, and the silo's block follows."""
    rows, model = rows_of(Family.LOGISTIC, silos=1, n=60), profiled(kind)
    beta = point(model)
    common: dict[str, Any] = {"model": model, "eps": beta, "C": np.eye(model.dim), "exponent": -30, "n": 60}
    query = FitCurvatureQuery(**common) if curved else FitGradientQuery(**common, stream="")
    local = LocalRows("north", rows, rows.n_rows)
    explained = explain(AnsweredQuery(query=query, answer=query.answer(local)), local, rows, Submodels())
    assert explained is not None
    part = Part.HESSIAN if curved else Part.GRADIENT
    summed = model.submodel(None, rows).sums(beta, part).values()
    np.testing.assert_allclose(explained.terms(rows).sum(axis=1), summed, atol=1e-9)
    if curved:
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


# Silos that do not determine their own coefficients.


@pytest.mark.parametrize("family", [*FAMILIES, None], ids=str)
def test_at_its_block_the_slopes_of_a_silo_are_orthogonal_to_the_columns(family: Family | None) -> None:
    rng = np.random.default_rng(7)
    with Premise("a coefficient is far from zero", at_least=0.3) as is_far:
        for seed in range(8):
            rows, model = rows_of(family, silos=1, seed=seed), profiled("slopes", family)
            beta = rng.normal(0, 4, model.dim)
            gamma = model.block(beta, rows)
            is_far.holds(float(np.abs(gamma).max()) > 2)
            hand = Longhand(rows, "slopes", family)
            eta = beta.reshape(hand.classes, -1) @ hand.common + gamma.reshape(hand.classes, -1) @ hand.own
            slope, _ = hand.slopes(eta, hand.y)
            left = np.einsum("jn,an,n->ja", slope, hand.own, hand.w)
            assert np.abs(left).max() < 1e-12 * rows.n_rows * max(1.0, float(np.abs(gamma).max()))


@pytest.mark.parametrize("family", [Family.LOGISTIC, Family.POISSON, None], ids=str)
def test_a_block_that_separates_a_silo_leaves_nothing_of_it(family: Family | None) -> None:
    rows, model = rows_of(family, silos=1), profiled("slopes", family)
    beta, x = point(model), rows.numeric["x"]
    if family is None:
        y = np.where(x > 4, 2.0, 0.0)
    else:
        y = np.where(x > 4, 1.0, 0.0) if family is Family.LOGISTIC else np.zeros(len(x))
    one = rows.with_numeric("y", y)
    assert model.is_separated(beta, one)
    assert not model.is_separated(beta, rows)
    sums = model.submodel(None, one).sums(beta, Part.GRADIENT | Part.HESSIAN).values()
    assert np.abs(sums).max() < 1e-9
    assert np.isfinite(model.block(beta, one)).all()


def test_one_separated_silo_leaves_the_fit_of_the_others() -> None:
    """South is separated by its own slope: the others are fitted as if it were absent."""
    data = frames()
    data["south"] = data["south"].assign(event=(data["south"]["x"] > 3).astype(int))
    models: dict[str, Any] = {"outcome_model": ft.GLM("a + C(g) + x*C(silo)")}
    fits = {}
    for silos in (SILOS, tuple(name for name in SILOS if name != "south")):
        finished, _ = finish(study(**models), {name: data[name] for name in silos})
        (fits[silos],) = targeted(finished).details.nuisances["outcome"]
    every, without = fits.values()
    np.testing.assert_allclose(every.coefficients, without.coefficients, rtol=1e-7, atol=1e-9)
    with pytest.raises(FitError, match="perfectly predicted"):
        ft.run(study(outcome_model=ft.GLM("a + C(g) + x*C(site)")), data)


@pytest.mark.parametrize("aggregation", ["open", "masked"])
def test_silos_with_a_constant_response_are_counted_in_a_warning(aggregation: Any) -> None:
    data = frames()
    for name, value in (("south", 0), ("west", 1)):
        data[name] = data[name].assign(event=value)
    options: dict[str, Any] = {"aggregation": aggregation, "diagnostics": False}
    models: dict[str, Any] = {"outcome_model": ft.GLM("a + x + C(g) + C(silo)")}
    told = [
        each for each in ft.run(study(**options, **models), data).document["warnings"] if "C(silo)" in each
    ]
    assert len(told) == 1
    assert told[0].startswith("outcome model, a + x + C(g) + C(silo): at 2 silos, C(silo) predicts")
    plain = ft.run(study(**options, **models), frames()).document["warnings"]
    assert not any("predicts" in each for each in plain)
    for name in SILOS:
        assert name not in told[0]


def test_a_run_on_pooled_rows_warns_of_some_silo() -> None:
    data = frames()
    data["south"] = data["south"].assign(event=(data["south"]["x"] > 3).astype(int))
    asked = study(outcome_model=ft.GLM("a + C(g) + x*C(silo)"), algorithm=ft.Central())
    (told,) = (each for each in ft.run(asked, data).document["warnings"] if "predicts" in each)
    assert "at some silo, C(silo) predicts" in told


@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["exact", "coded"])
@pytest.mark.parametrize("constant", ["a", "x"])
def test_a_slope_on_a_column_that_is_constant_in_one_silo_is_refused(constant: str, algorithm: Any) -> None:
    data = frames()
    data["south"] = data["south"].assign(**{constant: 1})
    models: dict[str, Any] = {
        "outcome_model": ft.GLM(f"C(g) + {constant}*C(silo)"),
        "treatment_model": ft.GLM("C(g)"),
    }
    with pytest.raises(
        DataError, match=f"do not determine its own coefficient of {constant}, because"
    ) as caught:
        ft.run(study(algorithm=algorithm, **models), data)
    assert "south" in str(caught.value)


@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["exact", "coded"])
def test_a_column_that_the_slopes_determine_is_refused(algorithm: Any) -> None:
    data = {name: frame.assign(weight=0.1 + 0.4 * frame["x"]) for name, frame in frames().items()}
    models: dict[str, Any] = {
        "outcome_model": ft.GLM("a + weight + x*C(silo)"),
        "treatment_model": ft.GLM("C(g)"),
    }
    with pytest.raises(FitError, match=r"the terms with C\(silo\) determine column\(s\) weight at each silo"):
        ft.run(study(algorithm=algorithm, **models), data)


# Studies.

MODELS: dict[str, dict[str, Any]] = {
    "slopes": {
        "outcome_model": ft.GLM("x + C(g) + a*C(silo)"),
        "treatment_model": ft.GLM("C(g) + x*C(silo)"),
    },
    "three arms": {
        "target": ft.ATE(outcome="event", treatment="g"),
        "outcome_model": ft.GLM("C(g) + x*C(silo)"),
        "treatment_model": ft.GLM("a + x + C(silo)"),
    },
}


def indicators(data: dict[str, pd.DataFrame]) -> tuple[pd.DataFrame, Array]:
    rows = pd.concat(data.values())
    return rows, np.stack([rows["site"] == name for name in SILOS]).astype(float)


def test_fits_of_slopes_are_those_of_indicator_columns() -> None:
    data = frames()
    rows, silos = indicators(data)
    finished, tables = finish(study(**MODELS["slopes"]), data)
    fitted = targeted(finished).details.nuisances
    a, x, y = (rows[name].to_numpy(float) for name in ("a", "x", "event"))
    g = np.stack([rows["g"] == "q", rows["g"] == "r"]).astype(float)
    designs = {"outcome": ([x, *g], a, y), "treatment": ([*g], x, a)}
    view = OwnCoefficients(blocks=tuple(own_blocks(fit for fits in fitted.values() for fit in fits)))
    shown = view.of(pooled_rows(study(**MODELS["slopes"]), tables))
    assert isinstance(shown, Table)
    for role, (common, of_slope, response) in designs.items():
        X = np.stack([*common, *silos, *(silos * of_slope)])
        beta = np.zeros(len(X))
        for _ in range(40):
            mu = expit(beta @ X)
            beta += np.linalg.solve((X * mu * (1 - mu)) @ X.T, X @ (response - mu))
        (model,) = fitted[role]
        k = len(common)
        np.testing.assert_allclose(model.coefficients[2:], beta[:k], rtol=1e-9, atol=1e-10)
        assert model.coefficients[:2] == (0.0, 0.0)
        codes = shown.factors[SILO].codes
        own = np.array(
            [[shown.numeric[name][np.argmax(codes == m)] for m in range(4)] for name in model.own.names]
        )
        np.testing.assert_allclose(own.ravel(), beta[k:], rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(model.predict(shown), expit(beta @ X), rtol=1e-9)


def test_a_multinomial_fit_is_that_of_indicator_columns() -> None:
    data = frames()
    rows, silos = indicators(data)
    finished, tables = finish(study(**MODELS["three arms"]), data)
    (model,) = targeted(finished).details.nuisances["treatment"]
    X = np.stack([rows["a"], rows["x"], *silos]).astype(float)
    y = np.searchsorted(["p", "q", "r"], rows["g"])
    beta, taken = np.zeros(2 * len(X)), np.stack([y == 1, y == 2])
    for _ in range(30):
        e = np.exp(beta.reshape(2, -1) @ X)
        p = e / (1 + e.sum(axis=0))
        bend = np.einsum("jk,jn->jkn", np.eye(2), p) - np.einsum("jn,kn->jkn", p, p)
        H = np.einsum("jkn,an,bn->jakb", bend, X, X).reshape(len(beta), len(beta))
        beta -= np.linalg.solve(H, ((p - taken) @ X.T).ravel())
    by_class = beta.reshape(2, -1)
    np.testing.assert_allclose(np.array(model.coefficients)[:, 1:], by_class[:, :2], rtol=1e-9, atol=1e-10)
    shown = OwnCoefficients(blocks=(model.own,)).of(pooled_rows(study(**MODELS["three arms"]), tables))
    assert isinstance(shown, Table)
    np.testing.assert_allclose(model.predict(shown)[1:], p, rtol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_coded_fits_agree_within_their_accuracy(name: str) -> None:
    data, options = frames(), MODELS[name] | {"algorithm": ft.Coded()}
    renamed = {
        key: ft.GLM(value.formula.replace("silo", "site")) if isinstance(value, ft.GLM) else value
        for key, value in options.items()
    }
    one, other = (ft.run(study(**each), data) for each in (options, renamed))
    apart = abs(one.table()["estimate"] - other.table()["estimate"]) / other.table()["std_error"]
    assert apart.max() < 1e-4


@pytest.mark.parametrize("sums", ["rounded", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_no_total_says_which_silo_has_which_rows(name: str, sums: str) -> None:
    data = frames()
    exchanged = {**data, "south": data["east"], "east": data["south"]}
    assert totals(data, sums=sums, **MODELS[name]) == totals(exchanged, sums=sums, **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["exact", "coded"])
def test_masked_is_open_byte_for_byte(name: str, algorithm: Any, planned: Watched) -> None:
    options = MASKED | MODELS[name] | {"algorithm": algorithm}
    same_bytes(planned, lambda how: study(**(options | {"aggregation": how})), frames())
