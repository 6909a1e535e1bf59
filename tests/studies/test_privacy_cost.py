"""Expected costs of privacy before any data, against simulated studies, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.privacy import Cell, answered, draw, study_of
from benchmarks.private_records import Records, floats
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.errors import InputError
from fedtmle.studies.privacy_cost import SMALLEST_N, PrivacyPlan

CELL = Cell(n=10_000, p=5)
STUDY = study_of(CELL)
TEXT = """
[target]
kind = "ATE"
outcome = "y"
treatment = "a"
[variables]
y = {kind = "binary"}
a = {kind = "category", levels = ["usual", "new"]}
x = {kind = "count", range = [0, 9]}
site = {kind = "category", levels = ["north", "south", "west"]}
[models.outcome]
formula = "C(a) + x + C(site)"
[models.treatment]
formula = "x + C(site)"
[privacy]
epsilon = 1.0
[silos]
one = "one.csv"
two = "two.csv"
three = "three.csv"
"""


@pytest.mark.parametrize("kind", ["binary", "rare", "continuous", "missing", "trial"])
def test_expected_widths_are_those_of_simulated_studies(kind: str) -> None:
    """Twelve studies with noise, on records of another law than the plan's: their median width."""
    cell = replace(CELL, kind=kind)
    study, rng = study_of(cell), np.random.default_rng(3)
    found = []
    with floats():
        for _ in range(12):
            columns, _ = draw(cell, cell.n, rng)
            outcome = answered(study, cell.n, Records(columns).sums, rng)
            account = outcome.details.privacy  # type: ignore[attr-defined]  # of a study
            found.append((account.inflation[0], account.sampling[0] ** 0.5))
    assumed: dict[str, Any] = {"outcome_mean": float(np.nanmean(columns["y"]))}
    if kind == "continuous":
        assumed["outcome_sd"] = 0.19  # sqrt(Q (1 - Q) / 6)
    if kind == "missing":
        assumed["strength"] = 0.5  # 0.57 and 0.67 for treatment and outcome, 0.4 for missingness
    cost = PrivacyPlan(study=study, silos=10, treated=float(columns["a"].mean()), **assumed).cost(cell.n)
    inflation, sampling = np.median(found, axis=0)
    assert cost.inflation - 1 == pytest.approx(inflation - 1, rel=0.25, abs=0.02)
    assert cost.without_noise[0] == pytest.approx(sampling, rel=0.1)


def test_fewer_records_and_smaller_budgets_cost_more() -> None:
    plan = PrivacyPlan(study=STUDY, silos=10)
    errors = [[plan.cost(n, epsilon).std_errors[0] for epsilon in (0.5, 1.0, 4.0)] for n in (3_000, 30_000)]
    assert np.all(np.diff(errors, axis=0) < 0)
    assert np.all(np.diff(errors[0]) < 0)
    assert plan.cost(3_000).epsilon == 1.0  # the study's


def test_the_smallest_n_is_where_results_are_promised() -> None:
    plan = PrivacyPlan(study=STUDY, silos=10)
    smallest = plan.smallest_n()
    assert smallest is not None
    assert SMALLEST_N < smallest < 20_000
    assert not plan.cost(smallest).limits
    assert plan.cost(round(0.9 * smallest)).limits
    # More colluders share less noise; a smaller epsilon and a rarer outcome need more people.
    rarer = PrivacyPlan(study=STUDY, silos=10, outcome_mean=0.03).smallest_n()
    assert rarer is not None
    assert rarer > smallest < (plan.smallest_n(0.5) or 0)
    assert PrivacyPlan(study=study_of(replace(CELL, kind="trial")), silos=10).smallest_n() == SMALLEST_N


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study": replace(STUDY, privacy=None)}, "no budget to plan"),
        ({"silos": 1}, "may collude"),
        ({"treated": 1.0}, "treated: expected a share"),
        ({"outcome_mean": 1.5}, "outcome_mean: expected a number between 0 and 1"),
        ({"outcome_sd": 0.2}, "outcome_sd: leave it out"),
        ({"strength": -1.0}, "strength"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"study": STUDY, "silos": 10}
    with pytest.raises(InputError, match=message):
        PrivacyPlan(**(given | changes))
    with pytest.raises(InputError, match="n: expected at least"):
        PrivacyPlan(study=STUDY, silos=10).cost(10)


def test_a_range_that_does_not_hold_the_spread_is_refused() -> None:
    study = study_of(replace(CELL, kind="continuous"))
    with pytest.raises(InputError, match=r"outcome_sd: expected a number between 0 and 0\.5"):
        PrivacyPlan(study=study, silos=10, outcome_sd=0.6)


def test_ratios_are_planned_by_their_means() -> None:
    target = ft.RR(outcome="y", treatment="a")
    plan = PrivacyPlan(study=replace(STUDY, target=target, submodel="per arm"), silos=10)
    assert len(plan.cost(10_000).std_errors) == 2


def test_the_command_needs_the_study_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(TEXT)
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    shown = runner.invoke(app, ["budget", str(path), "--n", "10000"])
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    assert "Epsilon = 1 is not useful below n =" in shown.output
    assert "3 silos, delta = 1e-06, 1 colluding" in " ".join(shown.output.split())
    given = ["--n", "20000", "--n", "5000", "--epsilon", "3", "--treated", "0.2", "--json"]
    found = json.loads(runner.invoke(app, ["budget", str(path), *given]).stdout)
    assert [(cost["n"], cost["epsilon"]) for cost in found["costs"]] == [
        (5000, 1.0),
        (5000, 3.0),
        (20000, 1.0),
        (20000, 3.0),
    ]
    assert found["smallest_n"] > SMALLEST_N
    path.write_text(TEXT.partition("[privacy]")[0] + "[silos]" + TEXT.partition("[silos]")[2])
    without = runner.invoke(app, ["budget", str(path)])
    assert without.exit_code != 0
    assert "add a [privacy] section" in without.stderr
