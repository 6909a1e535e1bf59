"""Coded fits: as near to the pooled fit as they say, in few rounds, and a clear end where there is no fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.communication import random_studies

import fedtmle as ft
from fedtmle.errors import FitError
from fedtmle.initial.glm import EveryRow, FittedGLM, FittedMultinomial
from fedtmle.programs.coded_fit import DesignColumns
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import roster
from fedtmle.protocol.query import Phase
from fedtmle.protocol.regression import FitCurvatureQuery, FitGradientQuery, Near
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.studyfile.file import study_plan
from fedtmle_core.types import RowBound
from tests.declare import declare
from tests.effects.studies import VARIABLES, cut, finish, population
from tests.premise import Premise
from tests.time import law as time_law
from tests.time import studies as time_studies

SITES = ["east", "north", "south", "west"]


def study(**changes: Any) -> ft.Study:
    options: dict[str, Any] = {
        "target": ft.ATE(outcome="y", treatment="a"),
        "outcome_model": ft.GLM("a * w + z + C(site)"),
        "treatment_model": ft.GLM("w + z + C(site)"),
        "missingness_model": ft.GLM("a + w"),
        "variables": VARIABLES,
    }
    return ft.Study(**{**options, **changes})


def silos(n: int = 900, seed: int = 1, count: int = 4, **options: Any) -> dict[str, Any]:
    data = population(n, seed, **options)
    return cut(data, np.array_split(np.random.default_rng(seed).permutation(n), count))


def fits(asked: ft.Study, rows: dict[str, Any]) -> tuple[Targeted, dict[str, tuple[Any, ...]], Any]:
    finished, tables = finish(asked, rows)
    outcome = finished.outcome
    assert isinstance(outcome, Targeted)
    return outcome, outcome.details.nuisances, (finished, tables)  # type: ignore[attr-defined]


@pytest.mark.parametrize("outcome", ["y", "event"])
@pytest.mark.parametrize("seed", range(3))
def test_linear_predictors_are_within_the_stated_error_of_the_exact_fit(outcome: str, seed: int) -> None:
    asked = study(target=ft.ATE(outcome=outcome, treatment="a"))
    rows = silos(seed=seed, missing=True)
    _, coded, (_, tables) = fits(asked, rows)
    _, exact, _ = fits(study(target=asked.target, sums="exact"), rows)
    assert coded.keys() == exact.keys() == {"treatment", "missingness", "outcome"}
    for role, (near,) in coded.items():
        (true,) = exact[role]
        squares = [(_link(near, t) - _link(true, t)) ** 2 for t in tables.values()]
        distance = np.sqrt(np.concatenate(squares).mean())
        assert 0 < near.error < 2e-6 / np.sqrt(900)
        assert distance <= near.error, role
        assert near.coefficients != true.coefficients  # it is another fit, so that the test can fail


# Small silos. 118, 195 and 263 were refused after a poor first step; 30, 74 and 286 took too many rounds.
@pytest.mark.parametrize("seed", [*range(12), 30, 74, 118, 195, 263, 286, 325, 333])
def test_a_random_study_ends_as_with_exact_sums(seed: int) -> None:
    (row,) = random_studies(seed, 1)
    assert row["verdict"] in ("holds", "same end")
    assert "gap" not in row or row["share"] <= 1.0


def test_a_range_away_from_zero_is_centred() -> None:
    """z = A x is -1 and 1 at the ends of the range, whatever the scale of the intercept's column."""
    ranges = {"age": (10.0, 60.0), "dose": (0.0, 5.0)}
    columns = DesignColumns.declared(ft.GLM("age + dose").parsed, {}, ranges)
    assert columns.names == ("1", "age", "dose")
    scales = np.exp2(columns.scales)
    low, high = (columns.A @ (np.array([1.0, age, dose]) / scales) for age, dose in ((10, 0), (60, 5)))
    np.testing.assert_allclose(low, [1, -1, 0])
    np.testing.assert_allclose(high, [1, 1, 1])
    assert columns.largest == 1.0


def _link(model: FittedGLM, table: Any) -> np.ndarray:
    mean = model.predict(table)
    return mean if model.family.name == "GAUSSIAN" else np.log(mean) - np.log1p(-mean)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"folds": 3},
        {"weights": "weight"},
        {"target": ft.ATE(outcome="event", treatment="a")},
        {"treatment_model": ft.GLM("w + z + C(site)", ridge=0.01)},
        {"outcome_model": ft.GLM("0 + a + w + C(site)")},
    ],
    ids=["plain", "folds", "weights", "binary", "ridge", "no intercept"],
)
def test_estimates_are_within_a_millionth_of_a_standard_error_of_the_pooled_ones(changes: Any) -> None:
    rows = silos(missing=True)
    near, _, _ = fits(study(**changes), rows)
    exact, _, _ = fits(study(**changes, sums="exact", algorithm=ft.Coded(tolerance=1e-8)), rows)
    errors = np.sqrt(np.diag(exact.estimate.covariance))
    # The fits' accuracy, and the tolerances of the two targetings.
    allowed = 1e-6 * errors + near.certificate.residual_bound + exact.certificate.residual_bound
    assert (np.abs(near.estimate.psi - exact.estimate.psi) <= allowed).all()
    np.testing.assert_allclose(near.estimate.covariance, exact.estimate.covariance, rtol=1e-5)


def test_a_study_asks_for_no_exact_derivative_and_for_each_curvature_once() -> None:
    asked, rows = study(), silos(missing=True)
    _, _, (finished, _) = fits(asked, rows)
    plan = study_plan(asked, roster(list(rows)))
    queries = [
        member
        for heard in heard_rounds(plan, finished.transcript, finished.sizes)
        for member in heard.query.members
    ]
    assert not any(isinstance(query, SumsQuery) for query in queries)
    assert sum(isinstance(query, FitGradientQuery) for query in queries) > 10
    curvatures = [query for query in queries if isinstance(query, FitCurvatureQuery)]
    models = [query.model for query in curvatures]
    rest = [model for model in models if not isinstance(getattr(model, "response", None), EveryRow)]
    assert len(models) - len(rest) == 2  # the Gram matrix; here it is asked again, on a finer grid
    assert len(rest) == len(set(map(id, rest))) > 1
    assert finished.account.rounds[Phase.NUISANCE] <= 14
    assert sum(finished.account.rounds.values()) <= 20


def test_a_study_of_many_models_takes_hardly_more_rounds_than_one_of_few() -> None:
    rows = silos()
    few, _, (plain, _) = fits(study(missingness_model=None), rows)
    learner = ft.SuperLearner((ft.GLM("a + w"), ft.GLM("a * w + C(site)")), folds=3)
    many, _, (folded, _) = fits(study(missingness_model=None, outcome_model=learner, folds=2), rows)
    assert few.status.is_converged
    assert many.status.is_converged
    assert sum(folded.account.rounds.values()) <= sum(plain.account.rounds.values()) + 6


def test_coefficients_do_not_depend_on_the_partition_beyond_their_error() -> None:
    data = population(700, 5)
    _, whole, (_, tables) = fits(study(), cut(data, [np.arange(700)]))
    parts = np.array_split(np.arange(700), 7)
    for role, (fit,) in fits(study(), cut(data, parts))[1].items():
        (one,) = whole[role]
        (gaps,) = [_link(fit, table) - _link(one, table) for table in tables.values()]
        assert 0 < np.sqrt((gaps**2).mean()) <= fit.error + one.error


def test_the_result_states_how_far_the_fits_may_leave_the_estimate() -> None:
    rows = silos(missing=True)
    learner = ft.SuperLearner((ft.GLM("a + w"), ft.GLM("a * w")), folds=2)
    loose, tight = (
        ft.run(study(outcome_model=learner, fit_accuracy=goal, algorithm=ft.Coded()), rows).document["fits"]
        for goal in (1e-3, 1e-6)
    )
    for fits_, goal in ((loose, 1e-3), (tight, 1e-6)):
        assert fits_["accuracy"] == goal
        by_model = Counter(fit["model"] for fit in fits_["models"])
        assert by_model == {"treatment": 1, "missingness": 1, "outcome": 2}
        # The goal bounds what is left after the last step; the lattice of the coefficients adds to it.
        assert 0 < fits_["largest"] == max(fit["effect"] for fit in fits_["models"]) <= 1.25 * goal
    assert ft.run(study(sums="exact"), rows).document["fits"] is None


def test_separation_ends_with_the_names_of_the_columns() -> None:
    rows = silos(400)
    for own in rows.values():
        own["a"] = (own["w"] > 0).astype(int)
    with pytest.raises(FitError, match="perfectly predicted, mostly by w"):
        fits(study(treatment_model=ft.GLM("w + z"), missingness_model=None), rows)


def test_a_level_that_determines_the_treatment_is_separation_too() -> None:
    rows = silos(600)
    for own in rows.values():
        own["a"] = np.where(own["site"] == "west", 1, own["a"])
    with pytest.raises(FitError, match=r"perfectly predicted, mostly by C\(site\)\[west\]"):
        fits(study(missingness_model=None), rows)


def test_collinear_columns_are_named_and_a_ridge_allows_them() -> None:
    rows = silos(400)
    with pytest.raises(FitError, match=r"I\(2\*w\) are determined by the columns before them"):
        fits(study(treatment_model=ft.GLM("w + I(2 * w)"), missingness_model=None), rows)
    outcome, _, _ = fits(
        study(treatment_model=ft.GLM("w + I(2 * w)", ridge=0.01), missingness_model=None), rows
    )
    assert outcome.status.is_converged


def test_nearly_collinear_columns_are_fitted_as_accurately() -> None:
    rows = silos(600)
    model = ft.GLM("w + I(w + 0.001 * z)")
    near, coded, (_, tables) = fits(study(treatment_model=model, missingness_model=None), rows)
    _, exact, _ = fits(study(treatment_model=model, missingness_model=None, sums="exact"), rows)
    (fit,), (true,) = coded["treatment"], exact["treatment"]
    distance = np.concatenate([_link(fit, t) - _link(true, t) for t in tables.values()])
    assert np.sqrt((distance**2).mean()) <= fit.error
    assert near.status.is_converged


def test_a_constant_response_is_refused() -> None:
    rows = silos(300)
    for own in rows.values():
        own["event"] = np.zeros(len(own["w"]))
    with pytest.raises(FitError, match="every observed outcome is the same"):
        fits(study(target=ft.ATE(outcome="event", treatment="a"), missingness_model=None), rows)


def test_rare_outcomes_and_wide_ranges_converge() -> None:
    rng = np.random.default_rng(3)
    n = 4000
    w = rng.normal(size=n)
    a = (rng.random(n) < 0.5).astype(int)
    y = (rng.random(n) < 0.01 * np.exp(0.5 * w)).astype(float)
    data = {"w": 1000.0 + w, "a": a, "event": y, "y": y}
    variables = declare(w=(0, 4000), a="binary", event="binary", y=(0, 1))
    asked = ft.Study(
        target=ft.ATE(outcome="event", treatment="a"),
        outcome_model=ft.GLM("a + w"),
        treatment_model=ft.GLM("w"),
        variables=variables,
    )
    outcome, _, (finished, _) = fits(asked, cut(data, np.array_split(np.arange(n), 4)))
    assert outcome.status.is_converged
    assert sum(finished.account.rounds.values()) <= 25


def test_fit_accuracy_is_checked() -> None:
    with pytest.raises(ft.errors.InputError, match="fit_accuracy"):
        study(fit_accuracy=0.5)
    with pytest.raises(ft.errors.InputError, match="sums"):
        study(sums="coarse")


@pytest.mark.parametrize("seed", range(2))
def test_a_multinomial_fit_is_within_its_stated_error_of_the_exact_one(seed: int) -> None:
    asked = study(
        target=ft.TSM(outcome="y", treatment="a", arms=("0", "1", "2")),
        missingness_model=None,
        variables=declare(w=(-8, 8), z=(-1, 1), site=SITES, a=["0", "1", "2"], y=(0, 10)),
        outcome_model=ft.GLM("C(a) + w + z"),
        algorithm=ft.Coded(),
    )
    rows = silos(seed=seed, arms=3)
    _, coded, (finished, tables) = fits(asked, rows)
    _, exact, (by_sums, _) = fits(dataclasses.replace(asked, sums="exact"), rows)
    (near,), (true,) = coded["treatment"], exact["treatment"]
    assert isinstance(near, FittedMultinomial)
    squares = [(_log_odds(near, t) - _log_odds(true, t)) ** 2 for t in tables.values()]
    distance = np.sqrt(np.concatenate(squares, axis=1).sum(axis=0).mean())
    assert 0 < distance <= near.error < 2e-6 / np.sqrt(900)
    assert finished.account.bits(Phase.NUISANCE) < 0.2 * by_sums.account.bits(Phase.NUISANCE)
    assert sum(finished.account.rounds.values()) <= 1.2 * sum(by_sums.account.rounds.values())


def test_a_class_without_records_is_refused_by_a_coded_fit_too() -> None:
    asked = study(
        target=ft.TSM(outcome="y", treatment="a", arms=("0", "1", "2")),
        missingness_model=None,
        variables=declare(w=(-8, 8), z=(-1, 1), site=SITES, a=["0", "1", "2"], y=(0, 10)),
        outcome_model=ft.GLM("C(a) + w + z"),
    )
    with pytest.raises(FitError, match="no silo has an observed outcome in arm"):
        fits(asked, silos(arms=2))


def _log_odds(model: Any, table: Any) -> np.ndarray:
    p = model.predict(table)
    return np.asarray(np.log(p[1:]) - np.log(p[0]))


@pytest.mark.parametrize("causes", [1, 2])
def test_hazards_are_within_their_stated_error_of_the_exact_fits(causes: int) -> None:
    records = time_law.Law(causes).draw(600, seed=8)
    asked = time_law.study(ft.Risk, causes, horizons=(4,), algorithm=ft.Coded(), diagnostics=False)
    rows = time_studies.split(records, 3)
    _, near, (finished, _) = fits(asked, rows)
    _, exact, (by_sums, _) = fits(dataclasses.replace(asked, sums="exact"), rows)
    roles = [name for name in near if name in ("hazard", "censoring")]
    assert "hazard" in roles
    for role in roles:
        for coded, true in zip(near[role], exact[role], strict=True):
            assert isinstance(coded, FittedGLM)
            assert 0 < coded.error < 2e-6 / np.sqrt(600)
            np.testing.assert_allclose(coded.coefficients, true.coefficients, atol=1e-6)
            assert coded.coefficients != true.coefficients
    rounds = [sum(each.account.rounds.values()) for each in (finished, by_sums)]
    assert rounds[0] <= 1.2 * rounds[1]
    assert finished.account.bits(Phase.NUISANCE) < 0.3 * by_sums.account.bits(Phase.NUISANCE)


def _compare_with_lanes(asked: ft.Study, rows: dict[str, Any], narrow: Premise) -> None:
    """Compare every total of a run with its public range."""
    finished, _ = finish(asked, rows)
    plan = study_plan(asked, roster(list(rows)))
    for heard in heard_rounds(plan, finished.transcript, finished.sizes):
        queries = heard.query.members
        answers: dict[str, Any] = {s: heard.query.split(a) for s, a in heard.answers.items()}
        for k, query in enumerate(queries):
            if not isinstance(query, FitGradientQuery | FitCurvatureQuery):
                continue
            total = [
                sum(finished.sizes[silo] * parts[k][j] for silo, parts in answers.items())
                for j in range(query.functionals)
            ]
            widest = max(abs(z) for parts in answers.values() for z in parts[k])
            for value, lane in zip(total, query.lanes, strict=True):
                assert abs(value - lane.centre) <= lane.reach
            # It is shorter than a lane for the largest answer of a silo.
            narrow.holds(query.lanes[0].reach < query.n * max(widest, 1))


def test_totals_stay_within_their_public_ranges() -> None:
    with Premise("a public range is narrower than what single silos send", at_least=0.3) as narrow:
        for seed in range(6):
            rng = np.random.default_rng(seed)
            changes: list[dict[str, Any]] = [
                {},
                {"folds": 2},
                {"weights": "weight", "weight_ceiling": 4.0},
                {"target": ft.ATE(outcome="event", treatment="a")},
                {"treatment_model": ft.GLM("w + z + C(site)", ridge=0.01)},
                {"outcome_model": ft.GLM("0 + a + w + C(site)")},
            ]
            data = population(500, seed, missing=True)
            data["w"] = data["w"] + 30.0  # a range that is away from zero
            order = np.argsort(data["w"] + rng.normal(size=500) * seed / 3)  # silos that differ much
            parts = np.array_split(order, 2 + seed)
            away = declare(VARIABLES, w=(10, 38))
            _compare_with_lanes(study(**changes[seed], variables=away), cut(data, parts), narrow)


def test_a_lane_is_centred_where_the_total_must_be() -> None:
    near = Near(np.array([0.25]), 0.01)
    bound = SimpleNamespace(row_bound=lambda _: RowBound(gradient=10, curvature=10))
    model: Any = bound  # its bound alone is asked
    query = FitGradientQuery(
        model=model,
        eps=np.zeros(1),
        C=np.eye(1),
        exponent=-9,
        n=100,
        stream="s",
        near=near,
    )
    (lane,) = query.lanes
    assert lane.centre == 100 * 0.25 * 2**8  # the grid of answers is twice as coarse
    assert 100 * (0.01 * 2**8 + 0.5) <= lane.reach <= 100 * (0.01 * 2**8 + 0.52) + 2
    (wide,) = dataclasses.replace(query, near=None).lanes
    assert wide.reach >= 100 * 2**18
