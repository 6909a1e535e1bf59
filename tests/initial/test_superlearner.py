"""The super learner against a longhand computation on the pooled rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from fedtmle.errors import DecodeError, InputError
from fedtmle.initial.crossfit import CrossFitted, Folds
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.superlearner import (
    GradientBoostedTrees,
    PerSilo,
    Pilot,
    SuperLearned,
    SuperLearner,
    TreeEnsemble,
    formulas,
    simplex_weights,
)
from fedtmle.model.table import Table
from fedtmle.protocol.plan import roster
from fedtmle.protocol.query import Phase
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.solver import CompletedRun
from fedtmle.studies.over import conclude
from fedtmle.studyfile.file import study_plan
from fedtmle.text.result import render
from tests.declare import declare
from tests.initial.silos import VARIABLES, pooled_table, run, split, trial
from tests.premise import Premise

FORMULAS = {"a + x": ("a", "x"), "a + z": ("a", "z"), "x + z": ("x", "z")}
TREES = GradientBoostedTrees("a + x + z", rounds=6, min_leaf=10)


def learned(finished: Any) -> Any:
    return finished.outcome.details.nuisances["outcome"][0]


def fit_and_predict(X: np.ndarray, y: np.ndarray, w: np.ndarray, *, binary: bool) -> np.ndarray:
    """Weighted least squares, or Newton's logistic regression; the mean at every row."""
    if not binary:
        root = np.sqrt(w)[:, None]
        return X @ np.linalg.lstsq(X * root, y * root[:, 0], rcond=None)[0]
    beta = np.zeros(X.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-X @ beta))
        beta += np.linalg.solve(X.T @ (X * (w * p * (1 - p))[:, None]), X.T @ (w * (y - p)))
    return 1 / (1 + np.exp(-X @ beta))


def longhand_weights(
    tables: list[Table], folds: np.ndarray, *, binary: bool
) -> tuple[np.ndarray, np.ndarray]:
    """min |R a|^2 + (1'a - 1)^2 over a >= 0 is a multiple of the simplex minimiser of |R a|^2."""
    column = {name: np.concatenate([t.numeric[name] for t in tables]) for name in ("y", "a", "x", "z", "w")}
    y = column["y"] if binary else (column["y"] + 8) / 16
    w = column["w"] / column["w"].mean()
    residuals = []
    for names in FORMULAS.values():
        X = np.column_stack([np.ones(len(y)), *(column[name] for name in names)])
        out = np.empty(len(y))
        for v in np.unique(folds):
            out[folds == v] = fit_and_predict(X, y, w * (folds != v), binary=binary)[folds == v]
        residuals.append(y - np.clip(out, 0, 1))
    R = np.sqrt(w)[:, None] * np.column_stack(residuals)
    solution, _ = nnls(np.vstack([R, np.ones(R.shape[1])]), np.append(np.zeros(len(R)), 1.0))
    return solution / solution.sum(), (R**2).sum(axis=0) / w.sum()


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("silos", [1, 3])
def test_weights_equal_the_pooled_computation(silos: int, binary: bool) -> None:
    tables = split(pooled_table(300, 4, binary=binary), silos)
    spec = SuperLearner(tuple(GLM(text) for text in FORMULAS), folds=4, seed=9)
    result = learned(run(trial(spec, binary=binary, weights="w"), tables))
    rule = Folds(count=4, seed=9 + 2**32)
    folds = np.concatenate([rule.of(table) for table in tables.values()])
    weights, risks = longhand_weights(list(tables.values()), folds, binary=binary)
    np.testing.assert_allclose(result.weights, weights, rtol=0, atol=1e-8)
    np.testing.assert_allclose(result.risks, risks, rtol=1e-9)
    assert (weights > 0.01).sum() >= 2  # not a corner, where many mistakes would agree


@pytest.mark.parametrize("folds", [None, 2])
def test_the_result_has_every_learner_with_its_weight_and_risk(folds: int | None) -> None:
    spec = SuperLearner((GLM("a + x"), Pilot(TREES, at="s1"), PerSilo(TREES)), folds=2)
    plan = study_plan(trial(spec, folds=folds), roster(["s0", "s1"]))
    tables = split(pooled_table(300, 4), 2)
    silos = [Silo(name, plan, table) for name, table in tables.items()]
    finished = Session(plan, InProcess(silos)).run()
    document = conclude(CompletedRun(plan=plan, finished=finished)).document
    fits = learned(finished)
    expected = []
    for fold, fit in enumerate(fits.models, start=1) if folds else [(None, fits)]:
        for weight, risk in zip(fit.weights, fit.risks, strict=True):
            expected.append((fold, weight, 16.0**2 * risk))
    assert [(r["fold"], r["weight"], r["risk"]) for r in document["learners"]] == expected
    lines = render(document).splitlines()
    shown = {line.split("  ")[0]: line for line in lines if line[:3] in ("1. ", "2. ", "3. ")}
    assert list(shown) == [
        "1. a + x (gaussian)",
        "2. a + x + z (6 trees of depth 3), fitted at s1",
        "3. a + x + z (6 trees of depth 3), fitted at each silo, silo 1",
        "3. a + x + z (6 trees of depth 3), fitted at each silo, silo 2",
    ]
    for k, line in enumerate(shown.values()):
        mean = np.mean([row["weight"] for row in document["learners"][k :: len(shown)]])
        assert line.split()[-2] == f"{mean:.3f}"
    assert "SuperLearner(" not in str(document) + "".join(lines)
    assert max(map(len, lines)) <= 80


def test_the_partition_changes_nothing_if_the_folds_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folds, "of", lambda _, table: table.numeric["fold"].astype(np.int64))
    pooled = pooled_table(240, 6)
    spec = SuperLearner(tuple(GLM(text) for text in FORMULAS), folds=4)
    results = [learned(run(trial(spec, weights="w"), split(pooled, silos))) for silos in (1, 2, 5)]
    assert results[0] == results[1] == results[2]
    weights, _ = longhand_weights([pooled], pooled.numeric["fold"].astype(int), binary=False)
    np.testing.assert_allclose(results[0].weights, weights, rtol=0, atol=1e-8)


def test_the_right_learner_gets_nearly_all_the_weight() -> None:
    spec = SuperLearner((GLM("1"), GLM("a + x + z + C(site)"), GLM("z + I(x*x)")))
    result = learned(run(trial(spec), split(pooled_table(900, 7), 3)))
    assert result.weights[1] > 0.95
    assert np.argmin(result.risks) == 1


def test_a_study_end_to_end_with_every_kind_of_learner() -> None:
    public = Pilot.from_coefficients("a + x", {}, "gaussian", (0.0, 0.5, 1.5))
    right = GLM("a + x + z + C(site)")
    spline = GLM("a + spline(x, knots=[-0.5, 0, 0.5])")
    spec = SuperLearner((right, spline, Pilot(TREES, at="s2"), PerSilo(TREES), public), folds=3)
    tables = split(pooled_table(300, 8), 3)
    finished = run(trial(spec, treatment_model=SuperLearner((GLM("x"), GLM("x + z")), folds=2)), tables)
    result = learned(finished)
    assert isinstance(result, SuperLearned)
    per_silo = [f"learner 4, silo {m}" for m in (1, 2, 3)]
    assert result.labels == ("learner 1", "learner 2", "learner 3", *per_silo, "learner 5")
    assert sum(result.weights) == pytest.approx(1, abs=1e-15)
    # The pilot's silo also fits its own: equal learners share their weight.
    assert result.weights[2] == result.weights[5]
    table = tables["s0"]
    combined = sum(
        weight * np.clip(model.predict(table), 0, 1)
        for weight, model in zip(result.weights, result.models, strict=True)
    )
    np.testing.assert_allclose(result.predict(table), combined, rtol=1e-14)
    reference = run(trial(right), tables)

    def effect(done: Any) -> float:
        return float(done.outcome.estimate.psi[1] - done.outcome.estimate.psi[0])

    assert effect(finished) == pytest.approx(effect(reference), abs=0.02)
    # Side by side: levels, counts, overlap, then each model's longest fit and its risk.
    assert finished.account.rounds[Phase.NUISANCE] <= 3 + 2 * (8 + 1)
    again = run(trial(spec, treatment_model=SuperLearner((GLM("x"), GLM("x + z")), folds=2)), tables)
    assert again.transcript == finished.transcript


def test_a_small_silo_abstains_from_its_own_trees() -> None:
    pooled = pooled_table(200, 10)
    tables = {"small": pooled.take(np.arange(25)), "large": pooled.take(np.arange(25, 200))}
    result = learned(run(trial(SuperLearner((PerSilo(TREES),), folds=2)), tables))
    assert result.labels == ("learner 1, silo 2",)
    assert result.weights == (1.0,)
    assert isinstance(result.models[0], TreeEnsemble)
    wide = PerSilo(GradientBoostedTrees("x", min_leaf=150))
    with pytest.raises(InputError, match="no silo has the rows"):
        run(trial(SuperLearner((wide,), folds=2)), tables)


def test_cross_fitting_nests_the_whole_learner_on_other_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, of = set(), Folds.of

    def recorded(self: Folds, table: Table) -> Any:
        drawn.add((self.count, self.seed, self.cluster))
        return of(self, table)

    monkeypatch.setattr(Folds, "of", recorded)
    spec = SuperLearner((GLM("a + x + z"), GLM("a")), folds=3)
    tables = split(pooled_table(300, 11), 2)
    clusters = declare(VARIABLES, site="identifier")
    result = learned(
        run(trial(spec, folds=3, cluster="site", cluster_scope="silo", variables=clusters), tables)
    )
    # The study's folds drawn again would leave a nested fold without rows.
    assert drawn == {(3, seed, "site") for seed in (0, 2 << 32, 3 << 32, 4 << 32)}
    assert isinstance(result, CrossFitted)
    stacked: Any = result.models
    assert len({model.weights for model in stacked}) == 3
    pooled = pooled_table(300, 11)
    y = (pooled.numeric["y"] + 8) / 16
    X = np.column_stack([np.ones(300), *(pooled.numeric[name] for name in "axz")])
    folds = np.empty(300, dtype=int)
    order = np.random.default_rng(0).permutation(300)
    folds[order] = np.concatenate([of(result.folds, table) for table in tables.values()])
    first = stacked[1].models[0]  # fitted on all rows outside the study's second fold
    expected = fit_and_predict(X, y, (folds != 1).astype(float), binary=False)
    np.testing.assert_allclose(first.predict(pooled), expected, atol=1e-9)


shares_weight = Premise("two learners or more have weight", at_least=0.2)
leaves_out = Premise("a learner has no weight", at_least=0.15)


@shares_weight
@leaves_out
@given(st.integers(1, 6), st.integers(0, 2**32), st.booleans())
def test_weights_minimise_over_the_simplex(size: int, seed: int, similar: bool) -> None:
    rng = np.random.default_rng(seed)
    R = rng.integers(-50, 50, size=(size, 12)) + (rng.integers(-500, 500, size=12) if similar else 0)
    gram = (R @ R.T).tolist()
    weights = np.array(simplex_weights([[int(entry) << 70 for entry in row] for row in gram]))
    shares_weight.holds((weights > 1e-9).sum() >= 2)
    leaves_out.holds((weights <= 1e-9).any())
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    slopes = np.array(gram) @ weights
    risk = float(weights @ slopes)
    scale = max(1.0, float(np.diag(gram).max()))
    assert slopes.min() >= risk - 1e-12 * scale  # no learner would lower the risk
    assert np.abs(slopes[weights > 1e-9] - risk).max() <= 1e-5 * scale


def test_degenerate_risks() -> None:
    assert simplex_weights([[0, 0], [0, 0]]) == (0.5, 0.5)
    assert simplex_weights([[8, 8, 8], [8, 8, 8], [8, 8, 8]]) == (1 / 3, 1 / 3, 1 / 3)
    assert simplex_weights([[1, 0], [0, 3]]) == pytest.approx((2 / 3, 1 / 3))
    for impossible in ([[-5]], [[1, -2], [-2, 1]]):
        with pytest.raises(DecodeError):
            simplex_weights([[entry << 80 for entry in row] for row in impossible])


@pytest.mark.parametrize(
    "wrong",
    [
        {"learners": ()},
        {"learners": (TREES,)},
        {"learners": (SuperLearner((GLM("x"),)),)},
        {"learners": (GLM("x"),) * 33},
        {"folds": 1},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_a_specification_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SuperLearner(**({"learners": (GLM("x"),)} | wrong))


def test_every_model_names_its_formulas() -> None:
    public = Pilot.from_coefficients("z", {}, "binomial", (0.0, 1.0))
    spec = SuperLearner((GLM("C(site)"), Pilot(GLM("x"), at="s"), PerSilo(TREES), public))
    fitted = ["1 + C(site)", "1 + x", "0 + a + x + z"]
    assert [str(formula) for formula in formulas(spec)] == fitted
    assert [str(formula) for formula in formulas(spec, public=True)] == [*fitted, "1 + z"]
    assert formulas(Supplied("q")) == ()
