"""The command line: what a person sees at 80 columns, and what a script reads."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from fedtmle import __version__, demo
from fedtmle.cli import app

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


def numbers(line: str) -> list[float]:
    return [float(cell) for cell in re.findall(r"-?\d+\.\d+", line.split("<", maxsplit=1)[0])]


def test_demo_is_a_table_at_80_columns_that_agrees_with_the_pooled_study() -> None:
    result = runner.invoke(app, ["demo", "--quiet"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    federated, pooled, complete = (
        next(line for line in lines if line.startswith(who))
        for who in ("federated", "pooled", "complete cases")
    )
    assert federated.split()[1:] == pooled.split()[1:]  # all printed digits
    assert numbers(federated) != numbers(complete)
    assert federated.split()[1] == "985"
    assert complete.split()[2] == "908"
    assert "77 have no IQ score" in " ".join(result.output.split())
    assert sum(line.startswith("hospital ") for line in lines) == 9
    text = " ".join(result.output.split())
    for part in ("ATE by bound", "E-value", "robustness", "covariates that every hospital may show", "I2 ="):
        assert part in text


def test_demo_as_json() -> None:
    document = json.loads(runner.invoke(app, ["demo", "--json"]).stdout)
    assert document["converged"]
    assert document["certificate"]["residual_bound"] <= document["certificate"]["tolerance"]
    assert sum(document["observed_counts"]) == 985 - 77
    (own,), (pooled,) = document["estimates"], document["beside"]["pooled"]
    for key in ("estimate", "std_error", "conf_low", "conf_high"):
        assert own[key] == pytest.approx(pooled[key], abs=1e-6)
    # The mother's and the baby's data say who is lost, so leaving them out moves both means.
    (complete,) = document["beside"]["complete_cases"]
    assert complete["estimate"] != pytest.approx(own["estimate"], abs=1e-4)


def test_demo_with_noise_says_what_it_costs_and_that_the_trial_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "TIMES", 20)  # 100 takes longer
    result = runner.invoke(app, ["demo", "--epsilon", "2", "--quiet"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    plain, noisy = (
        next(numbers(line) for line in lines if line.startswith(f"20 times as large, {which}"))
        for which in ("without", "with noise")
    )
    assert abs(noisy[0] - plain[0]) < 6 * noisy[1]
    assert 1.0 < noisy[1] / plain[1] < 2.5
    text = " ".join(result.output.split())
    for part in (
        "infants are too few for this budget",
        "(2, 1e-06)-differential privacy",
        "epsilon = 2 of 2 is spent",
        "would miss too often",
        "not covered",
        "Epsilon = 2 is not useful below n =",
    ):
        assert part in text, part
    assert "unmeasured confounding" not in text
    assert runner.invoke(app, ["demo", "--epsilon", "0"]).exit_code != 0
    assert runner.invoke(app, ["demo", "--study", "transport", "--epsilon", "1"]).exit_code == 2


def test_the_benchmark_as_json() -> None:
    document = json.loads(runner.invoke(app, ["demo", "--study", "transport", "--json"]).stdout)
    assert document["converged"]
    assert document["certificate"]["residual_bound"] <= document["certificate"]["tolerance"]


def test_help_and_version() -> None:
    assert "federated" in runner.invoke(app, ["--help"]).output.lower()
    assert runner.invoke(app, ["--version"]).output.strip() == f"fedtmle {__version__}"
    assert runner.invoke(app, ["demo", "--study", "nonsense"]).exit_code == 2
