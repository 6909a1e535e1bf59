"""Poor overlap is said aloud; the estimate under other bounds, and balance, are those of the pooled rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.errors import InputError
from fedtmle.programs.diagnostics import ladder_columns
from fedtmle.results import sensitivity
from fedtmle.text.result import render
from fedtmle_core.kernels import column_sums
from tests.effects.studies import NEWTON, Columns, change, cut, expit, finish
from tests.narrow import targeted

VARIABLES = ft.Variables(
    {
        "y": {"kind": "binary"},
        "a": {"kind": "binary"},
        "x": {"kind": "number", "range": (-8.0, 8.0), "label": "severity"},
        "family": {"kind": "identifier"},
        "sex": {"kind": "category", "levels": ("f", "m")},
        "ward": {"kind": "category", "levels": ("a", "b", "c")},
    }
)

WEIGHT = {"kind": "number", "range": (0.0, 4.0)}


def people(n: int, seed: int, slope: float) -> Columns:
    """Treatment follows x the more, the larger the slope: above 3, few could have had either arm."""
    rng = np.random.default_rng(seed)
    x, ward = rng.normal(size=n).clip(-7, 7), rng.integers(0, 3, size=n)
    a = (rng.random(n) < expit(slope * x + 0.2 * ward)).astype(int)
    y = (rng.random(n) < expit(0.6 * x - 0.3 * a * x + 0.2 * ward)).astype(int)
    sex = np.where(rng.random(n) < 0.5, "f", "m")
    return {"x": x, "a": a, "y": y, "sex": sex, "ward": np.array(["a", "b", "c"])[ward]}


def study(kind: type = ft.ATE, **options: Any) -> ft.Study:
    arguments = {
        "target": kind(outcome="y", treatment="a"),
        "outcome_model": ft.GLM("C(a) + x + C(sex)"),
        "treatment_model": ft.GLM("x + C(ward)"),
        "algorithm": NEWTON,
        "variables": VARIABLES,
    }
    return ft.Study(**{**arguments, **options})


def silos(data: Columns, count: int = 3) -> dict[str, Columns]:
    return cut(data, np.array_split(np.arange(len(data["x"])), count))


def test_many_truncated_scores_are_said_aloud() -> None:
    """The issue's study: about half of the scores of 1,800 records below the bound, and not a word."""
    result = ft.run(study(), silos(people(1800, 1, slope=12.0)))
    assert sum(result.document["truncated"]) > 890
    assert result.document["overlap"]["is_poor"]
    assert any("propensity score of arm" in warning for warning in result.warnings)
    assert any("ATO" in warning for warning in result.warnings)
    for shown in (render(result.document), repr(result), result._repr_html_()):
        assert "Poor overlap" in shown
    assert render(result.document).index("Poor overlap") < render(result.document).index("estimand")


def test_good_overlap_is_left_alone() -> None:
    result = ft.run(study(), silos(people(1800, 2, slope=0.4)))
    assert not result.document["overlap"]["is_poor"]
    assert not result.warnings
    assert "oor overlap" not in render(result.document) + repr(result)


@pytest.mark.parametrize(
    ("support", "said"),
    [
        (sensitivity.Support(name="m", effective=24.9, records=100, largest_share=0.05), "count as 24.9"),
        (sensitivity.Support(name="m", effective=25.0, records=100, largest_share=0.05), None),
        (sensitivity.Support(name="m", effective=49.0, records=100, largest_share=0.11), "up to 11%"),
        (sensitivity.Support(name="m", effective=49.0, records=100, largest_share=0.10), None),
        (sensitivity.Support(name="m", effective=50.0, records=100, largest_share=0.11), None),
        (sensitivity.Support(name="m", effective=19.9, records=None, largest_share=0.01), "of 19.9"),
        (sensitivity.Support(name="m", effective=20.0, records=None, largest_share=0.9), None),
    ],
)
def test_the_thresholds_are_where_they_are_said_to_be(support: sensitivity.Support, said: str | None) -> None:
    warnings = sensitivity._support_warnings(support)
    assert (said is None) == (not warnings)
    assert said is None or said in warnings[0]


def test_no_record_has_a_larger_share_than_is_stated() -> None:
    for bounds, slope in (("auto", 2.0), (None, 1.0), (0.2, 3.0)):
        own = study(g_bounds=bounds)
        finished, tables = finish(own, {"s": people(700, 4, slope)})
        details = targeted(finished).details
        h = targeted(finished).problem.rows(tables["s"]).covariates
        largest = h.max(axis=1) / h.sum(axis=1)
        stated = np.array(details.overlap.largest_shares)
        assert (largest <= stated * (1 + 1e-12)).all()
        if bounds == 0.2:  # some are truncated, so the bound is attained
            np.testing.assert_allclose(stated, largest, rtol=1e-9)
        np.testing.assert_allclose(details.overlap.mean_squares, (h**2).mean(axis=1), rtol=1e-9)


# The ladder.


@pytest.mark.parametrize("weights", [None, "w"])
def test_rounded_sums_change_neither_the_ladder_nor_the_balance_visibly(weights: str | None) -> None:
    data = people(900, 5, slope=2.0) | {"w": np.random.default_rng(3).uniform(0.5, 2.0, 900)}
    own = study(algorithm=ft.Coded(), weights=weights, variables={**VARIABLES, "w": WEIGHT})
    rounded, exact = (ft.run(change(own, sums=sums), silos(data)).document for sums in ("rounded", "exact"))
    assert len(rounded["ladder"]) == 4
    for found, known in zip(rounded["ladder"], exact["ladder"], strict=True):
        for row, other in zip(found["estimates"], known["estimates"], strict=True):
            assert row["estimate"] == pytest.approx(other["estimate"], abs=2e-3 * other["std_error"])
            assert row["std_error"] == pytest.approx(other["std_error"], rel=2e-3)
            assert row != other
    for line, other in zip(rounded["balance"]["covariates"], exact["balance"]["covariates"], strict=True):
        for key in ("differences", "weighted_differences"):
            assert line[key] == pytest.approx(other[key], abs=0.01)


@pytest.mark.parametrize("options", [{}, {"cluster": "family"}, {"submodel": "contrast"}], ids=str)
def test_the_ladder_is_the_one_step_estimate_at_each_bound(options: dict[str, Any]) -> None:
    data = people(900, 5, slope=2.5) | {"family": np.arange(900) // 3}
    own = study(**options)
    finished, tables = finish(own, {"s": data})
    outcome = targeted(finished)
    problem, floor = outcome.problem, outcome.details.g_floor
    rows = problem.rows(tables["s"])
    g, _ = problem.prepare.propensities(tables["s"])
    q = np.stack(problem.regression(outcome.law, rows, problem.parts[0]))
    taken = np.eye(2)[rows.arm].T
    ladder = ft.run(own, {"s": data}).document["ladder"]
    assert [rung["bound"] for rung in ladder] == pytest.approx([floor * k for k in (0.25, 0.5, 2.0, 4.0)])
    for rung in ladder:
        H = taken / np.maximum(g, rung["bound"])
        u = H * (rows.y - np.take_along_axis(q, rows.arm[None].astype(int), 0)[0]) + q
        D = u[1] - u[0]
        estimate = D.mean()
        assert rung["estimates"][0]["estimate"] == pytest.approx(estimate, abs=1e-9)
        D = D - (outcome.estimate.psi @ [-1, 1] if problem.dim == 2 else outcome.estimate.psi[0])
        if "cluster" in options:
            sums = np.bincount(data["family"], weights=D - D.mean())
            variance = sums @ sums / 900 / 899
        else:
            variance = D.var(ddof=1) / 900
        assert rung["estimates"][0]["std_error"] == pytest.approx(np.sqrt(variance), rel=1e-8)


@pytest.mark.parametrize("options", [{}, {"cluster": "family"}, {"submodel": "contrast"}], ids=str)
def test_the_ladder_sums_the_terms_of_every_row(options: dict[str, Any]) -> None:
    """Rows far from every bound are summed from one column; the terms row by row have one for each bound."""
    data = people(900, 5, slope=2.5) | {"family": np.arange(900) // 3}
    finished, tables = finish(study(**options), {"s": data})
    outcome = targeted(finished)
    ladder = ladder_columns(outcome.problem)
    assert ladder is not None
    ladder = replace(ladder, law=outcome.law)
    piece = outcome.problem.rows(tables["s"])
    near = piece.denominator < max(ladder.bounds)
    assert 0 < np.count_nonzero(near) < 900
    assert ladder.summed(piece) == column_sums(ladder.disclosed(piece), ladder.exponents, what="term")


@pytest.mark.parametrize("target", [ft.ATE, ft.ATT])
def test_the_guard_judges_every_root_of_the_products_that_a_ladder_tells(target: Any) -> None:
    """U U', U t and t t are second moments of (U, t): the guard must see the columns U and t themselves."""
    data = people(400, 5, slope=1.0) | {"w": np.random.default_rng(3).uniform(0.5, 2.0, 400)}
    own = study(target, weights="w", variables={**VARIABLES, "w": WEIGHT})
    finished, tables = finish(own, {"s": data})
    outcome = targeted(finished)
    columns = ladder_columns(outcome.problem)
    assert columns is not None
    rows = outcome.problem.rows(tables["s"])
    told = dict(zip(columns.names, columns.disclosed(rows), strict=True))
    judged = [columns.names[at] for at in columns.judged]
    assert np.ptp(told["t"]) > 0.1  # the premise: t is not the same for all
    np.testing.assert_allclose(told["t t"], told["t"] ** 2)
    for name in (name for name in told if name not in judged):
        first, second, *_ = name.split(" at ")[0].split()
        bound = f" at {name.split(' at ')[1]}" if " at " in name else ""
        roots = [part if part == "t" else part + bound for part in (first, second)]
        assert set(roots) <= set(judged), name
        np.testing.assert_allclose(told[name], told[roots[0]] * told[roots[1]])


def test_at_the_studys_own_bound_the_ladder_is_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.targets.diagnostics.MULTIPLES", (1.0,))
    result = ft.run(study(ft.RR), silos(people(900, 6, slope=2.0)))
    (rung,) = result.document["ladder"]
    own, again = result.document["estimates"][0], rung["estimates"][0]
    for key in ("estimate", "std_error", "conf_low", "conf_high"):
        assert again[key] == pytest.approx(own[key], rel=1e-8)


def test_any_partition_gives_the_same_ladder() -> None:
    data = people(600, 7, slope=2.0)
    ladders = [ft.run(study(ft.ATT), silos(data, count)).document["ladder"] for count in (1, 4)]
    assert ladders[0] == ladders[1]


def test_without_scores_to_bound_there_is_no_ladder() -> None:
    assert ft.run(study(ft.ATO), silos(people(600, 8, 1.0))).document["ladder"] == []
    none = ft.run(study(g_bounds=None), silos(people(600, 8, 1.0)))
    assert [rung["bound"] for rung in none.document["ladder"]] == [0.01, 0.025, 0.05, 0.1]
    assert "none (the study's)" in render(none.document)


def test_the_ladder_shows_how_far_an_estimate_depends_on_its_bound() -> None:
    """With a wrong outcome model and poor overlap, the truncation bias appears as a trend (truth known)."""
    poor = ft.run(study(outcome_model=ft.GLM("C(a)")), silos(people(6000, 9, slope=3.0))).document
    good = ft.run(study(outcome_model=ft.GLM("C(a)")), silos(people(6000, 9, slope=0.4))).document
    spread = {
        name: max(r["estimates"][0]["estimate"] for r in d["ladder"])
        - min(r["estimates"][0]["estimate"] for r in d["ladder"])
        for name, d in (("poor", poor), ("good", good))
    }
    assert spread["poor"] > 2 * poor["estimates"][0]["std_error"]
    assert spread["good"] < 0.05 * good["estimates"][0]["std_error"]


# Balance.


def test_balance_is_that_of_the_pooled_rows() -> None:
    data = people(1500, 10, slope=0.8)
    own = study()
    finished, tables = finish(own, {"s": data})
    rows = targeted(finished).problem.rows(tables["s"])
    h = rows.covariates.sum(axis=0)
    result = ft.run(own, silos(data))
    table = result.document["balance"]
    assert table["is_complete"]
    columns = {
        ("x", None): data["x"],
        ("sex", "m"): (data["sex"] == "m").astype(float),
        **{("ward", level): (data["ward"] == level).astype(float) for level in "abc"},
    }
    assert {(line["name"], line["level"]) for line in table["covariates"]} == set(columns)
    for line in table["covariates"]:
        values = columns[line["name"], line["level"]]
        arms = [values[data["a"] == arm] for arm in (0, 1)]
        weights = [h[data["a"] == arm] for arm in (0, 1)]
        scale = np.sqrt((arms[0].var() + arms[1].var()) / 2)
        weighted = [np.average(v, weights=w) for v, w in zip(arms, weights, strict=True)]
        assert line["means"] == pytest.approx([v.mean() for v in arms], abs=1e-9)
        assert line["weighted_means"] == pytest.approx(weighted, abs=1e-9)
        assert line["differences"] == pytest.approx([(arms[1].mean() - arms[0].mean()) / scale], abs=1e-9)
        assert line["weighted_differences"] == pytest.approx([(weighted[1] - weighted[0]) / scale], abs=1e-9)
    severity = table["covariates"][0]
    assert severity["label"] == "severity"
    assert abs(severity["differences"][0]) > 0.4
    assert abs(severity["weighted_differences"][0]) < 0.1
    assert "severity" in render(result.document)


def test_a_rare_level_is_hidden_and_the_table_says_so() -> None:
    data = people(900, 11, slope=0.5)
    data["sex"] = np.where(np.arange(900) < 300, np.where(np.arange(900) < 3, "m", "f"), data["sex"])
    document = ft.run(study(), silos(data)).document
    hidden = document["balance"]
    assert not hidden["is_complete"]
    by_name = {line["name"]: line["hidden_in"] for line in hidden["covariates"]}
    assert (by_name["sex"], by_name["x"]) == (1, 0)
    assert "some silos only" in render(document)


def test_rules_have_no_balance() -> None:
    data = silos(people(400, 12, 0.5))
    rules = ft.PolicyMeans(
        outcome="y", treatment="a", rules=(ft.Threshold("x", 0.0, arm="1", otherwise="0"),)
    )
    assert ft.run(study(target=rules), data).document["balance"] is None


def test_the_love_plot_draws_both_differences() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    result = ft.run(study(), silos(people(500, 13, 0.8)))
    axes = ft.plots.balance(result)
    labels = [line.get_label() for line in axes.get_lines()]
    assert {"unweighted", "weighted"} <= set(labels)
    drawn = next(line for line in axes.get_lines() if line.get_label() == "weighted")
    expected = [line["weighted_differences"][0] for line in result.document["balance"]["covariates"]]
    np.testing.assert_allclose(np.asarray(drawn.get_xdata(), dtype=float), expected)
    with pytest.raises(InputError, match="balance"):
        ft.plots.balance(ft.run(change(study(), diagnostics=False), silos(people(500, 13, 0.8))))


# Overlap weights.


def test_overlap_weighted_means_are_exactly_balanced() -> None:
    """With a logistic g and its own columns, overlap weights balance each column exactly (Li et al. 2018)."""
    data = people(1200, 14, slope=2.0)
    own = study(ft.ATO, treatment_model=ft.GLM("x + C(sex)"))
    table = ft.run(own, silos(data)).document["balance"]["covariates"]
    for line in table:
        assert line["weighted_differences"][0] == pytest.approx(0.0, abs=1e-8)
    assert abs(table[0]["differences"][0]) > 0.8


def test_ato_where_overlap_is_poor_has_no_warning_and_a_small_error() -> None:
    data = silos(people(1800, 15, slope=3.0))
    ate, ato = (ft.run(study(kind), data) for kind in (ft.ATE, ft.ATO))
    assert ate.document["overlap"]["is_poor"]
    assert not ato.document["overlap"]["is_poor"]
    assert ato.document["truncated"] == [0, 0]


STUDY = """
[target]
kind = "ATE"
outcome = "y"
treatment = "a"

[models.outcome]
formula = "C(a) + x"

[models.treatment]
formula = "x"

[variables]
y = { kind = "binary" }
a = { kind = "binary" }
x = { kind = "number", range = [-8, 8] }

[silos]
"silo 0" = "silo 0.csv"
"silo 1" = "silo 1.csv"
"silo 2" = "silo 2.csv"
"""


@pytest.mark.parametrize(("slope", "code"), [(5.0, 5), (0.4, 0)])
def test_the_exit_code_says_so(slope: float, code: int, tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    for name, columns in silos(people(1500, 16, slope)).items():
        pd.DataFrame(columns).to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "study.toml").write_text(STUDY)
    done = CliRunner().invoke(app, ["run", str(tmp_path / "study.toml"), "--quiet"])
    assert done.exit_code == code, done.output
    assert ("Poor overlap" in done.output) == (code == 5)
