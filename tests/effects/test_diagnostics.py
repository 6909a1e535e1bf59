"""Diagnostics against the pooled rows: overlap, fit before and after targeting, EIF means, truncation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.protocol.query import Phase
from fedtmle.report import page
from fedtmle.results.document import diagnostics_document
from fedtmle.text import result as show
from tests.declare import declare
from tests.effects.longhand import irls, least_squares
from tests.effects.studies import NEWTON, Columns, change, cut, expit, finish, logit, population
from tests.effects.test_pooled import TARGETS, design, study_of


def parts(data: Columns, count: int) -> dict[str, Columns]:
    where = np.random.default_rng(0).integers(0, count, size=len(data["w"]))
    return cut(data, [np.flatnonzero(where == m) for m in range(count)])


def models(data: Columns, outcome: str) -> tuple[np.ndarray, np.ndarray]:
    """Q(A, W) on the unit scale and P(1 | W), longhand."""
    V, X = design(data, None, "w", "site"), design(data, data["a"], "w", "z", "site")
    g = expit(V @ irls(V, data["a"].astype(float), np.ones(len(V))))
    if outcome == "event":
        return expit(X @ irls(X, data["event"], np.ones(len(X)))), g
    return np.clip(X @ least_squares(X, data["y"] / 10, np.ones(len(X))), 1e-6, 1 - 1e-6), g


@pytest.mark.parametrize(("name", "outcome"), [("ATE", "y"), ("RR", "event")])
def test_fit_and_overlap_are_those_of_the_pooled_rows(name: str, outcome: str) -> None:
    data = population(3000, 11)
    study = study_of(TARGETS[name])
    finished, _ = finish(study, parts(data, 2))  # unguarded: no bin is joined with another
    found = diagnostics_document(study, finished)
    assert found is not None
    q, g = models(data, outcome)
    y = data[outcome] / (10 if outcome == "y" else 1)
    H = np.where(data["a"] == 1, 1 / g, 0), np.where(data["a"] == 0, 1 / (1 - g), 0)
    eps = irls(np.column_stack(H), y, np.ones(len(y)), offset=logit(q))
    after = expit(logit(q) + np.column_stack(H) @ eps)
    fit = found["outcome_fit"]
    for key, prediction in (("initial", q), ("targeted", after)):
        explained = 1 - ((y - prediction) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        assert fit["r_squared"][key] == pytest.approx(explained, abs=1e-8)
        if outcome == "event":
            loss = -np.where(y > 0, np.log(prediction), np.log1p(-prediction)).sum()
            null = -len(y) * (y.mean() * np.log(y.mean()) + (1 - y.mean()) * np.log1p(-y.mean()))
            assert fit["deviance_explained"][key] == pytest.approx(1 - loss / null, abs=1e-8)
    assert (fit["deviance_explained"] is None) == (outcome == "y")
    width = 10 if outcome == "y" else 1
    table = fit["calibration"]
    place = np.digitize(q, np.array(table["edges"][1:-1]) / width)
    assert table["hidden_in"] == [0] * 10
    for b in range(10):
        own = place == b
        assert table["counts"][b] == own.sum()
        for key, values in (("observed", y), ("initial", q), ("targeted", after)):
            assert table[key][b] == pytest.approx(width * values[own].mean(), abs=1e-7)
    for histogram in found["overlap"]:
        own = g[data["a"] == int(histogram["arm"])]
        expected, _ = np.histogram(own, histogram["edges"])
        assert histogram["counts"] == expected.tolist()
        assert histogram["hidden_in"] == [0] * len(expected)
    assert max(map(abs, found["eif_mean"].values())) < 1e-9


def test_eif_means_are_the_residual_where_nothing_was_solved() -> None:
    study = change(study_of(TARGETS["ATE"]), algorithm=ft.Gradient(tolerance=1e-9, max_updates=0))
    data = population(400, 5)
    result = ft.run(study, parts(data, 2))
    means = np.array(list(result.document["diagnostics"]["eif_mean"].values()))
    assert np.linalg.norm(means) == pytest.approx(result.run.residual, rel=1e-9)
    assert result.run.residual > 1e-4


def test_several_arms_have_a_histogram_for_each_probability() -> None:
    data = population(900, 2, arms=3)
    found = ft.run(study_of(TARGETS["three arms"]), parts(data, 2)).document["diagnostics"]["overlap"]
    assert [(h["probability_of"], h["arm"]) for h in found] == [(a, b) for a in "012" for b in "012"]


def test_few_rows_below_the_bound_are_not_counted_by_their_silo() -> None:
    data = population(600, 4)
    _, g = models(data, "y")
    bound = float(np.sort(g)[2]) + 1e-9  # three rows, in all
    result = ft.run(change(study_of(TARGETS["ATE"]), g_bounds=bound), {"all": data}).document
    assert result["truncated"][1] == 0
    assert result["truncated_hidden"][1] == 1
    many = ft.run(change(study_of(TARGETS["ATE"]), g_bounds=float(np.sort(g)[30])), {"all": data}).document
    assert many["truncated"][1] == 30
    assert many["truncated_hidden"][1] == 0


def test_a_mean_has_no_overlap_and_a_personalised_run_no_pooled_diagnostics() -> None:
    data = population(300, 3, missing=True)
    found = ft.run(study_of(TARGETS["mean"]), parts(data, 2)).document["diagnostics"]
    assert found["overlap"] == []
    assert found["outcome_fit"]["r_squared"]["initial"] is not None
    own = change(study_of(TARGETS["ATE"]), algorithm=ft.Personalized(noise=0.5))
    assert ft.run(own, parts(population(300, 3), 2)).document["diagnostics"] is None


def test_diagnostics_change_no_estimate_take_no_round_and_may_be_left_out() -> None:
    study, silos = study_of(TARGETS["ATE"]), parts(population(300, 3), 2)
    assert study.algorithm is NEWTON
    told, less = ft.run(study, silos), ft.run(change(study, diagnostics=False), silos)
    assert told.run.account.rounds == less.run.account.rounds  # they ride along with the closing sums
    assert told.run.account.bits(Phase.DIAGNOSTICS) > 0
    assert less.run.account.bits(Phase.DIAGNOSTICS) == 0
    assert less.document["diagnostics"] is None
    assert less.document["estimates"] == told.document["estimates"]
    assert "outcome by its prediction" in show.render(told.document)
    assert "outcome by its prediction" not in show.render(less.document)
    assert "Overlap" in page.render(less.document)


def test_constant_predictions_have_one_bin() -> None:
    data = population(300, 6)
    study = change(study_of(TARGETS["ATE"]), outcome_model=ft.GLM("1"))
    fit = ft.run(study, parts(data, 2)).document["diagnostics"]["outcome_fit"]
    assert len(fit["calibration"]["counts"]) in (1, 10)  # rounding may leave a spread of nothing
    assert fit["r_squared"]["initial"] == pytest.approx(0.0, abs=1e-9)


def small_hospitals(n: int, seed: int) -> dict[str, Columns]:
    """Twelve hospitals of a rare binary outcome: by themselves, most of their bins have a few events."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    a = (rng.random(n) < expit(0.3 * x)).astype(int)
    y = (rng.random(n) < expit(-1.3 + 0.8 * x)).astype(int)
    data = {"x": x.clip(-7, 7), "a": a, "y": y}
    return cut(data, np.array_split(rng.permutation(n), 12))


def overall(table: dict[str, Any], key: str) -> float:
    """The mean over all bins; empty ones have none."""
    means = [0.0 if mean is None else mean for mean in table[key]]
    return float(np.average(means, weights=table["counts"]))


def rare_outcome() -> ft.Study:
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("C(a) + x"),
        treatment_model=ft.GLM("x"),
        variables=declare(y="binary", a="binary", x=(-8, 8)),
        algorithm=NEWTON,
    )


def test_histograms_of_small_hospitals_add_up_to_their_arms() -> None:
    silos = small_hospitals(2400, 4)
    document = ft.run(rare_outcome(), silos).document
    for histogram in document["diagnostics"]["overlap"]:
        assert histogram["hidden_in"] == [0] * len(histogram["counts"])
        assert sum(histogram["counts"]) == document["arm_counts"][int(histogram["arm"])]
    first, second = document["diagnostics"]["overlap"]
    assert first["edges"] == second["edges"]


def test_a_hospital_without_events_withholds_its_bins_and_is_counted() -> None:
    silos = small_hospitals(2400, 5)
    silos["silo 3"]["y"] = np.zeros_like(silos["silo 3"]["y"])
    table = ft.run(rare_outcome(), silos).document["diagnostics"]["outcome_fit"]["calibration"]
    assert set(table["hidden_in"]) == {1}
    others = np.concatenate([silo["y"] for name, silo in silos.items() if name != "silo 3"])
    assert sum(table["counts"]) == len(others)
    assert overall(table, "observed") == pytest.approx(others.mean(), abs=1e-9)
