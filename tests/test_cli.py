"""The command line: what a person sees at 80 columns, and what a script reads."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from fedtmle import __version__
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
    for part in ("ATE by bound", "E-value", "robustness", "covariates that no hospital hides", "I2 ="):
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


def test_the_benchmark_as_json() -> None:
    document = json.loads(runner.invoke(app, ["demo", "--study", "transport", "--json"]).stdout)
    assert document["converged"]
    assert document["certificate"]["residual_bound"] <= document["certificate"]["tolerance"]


def test_help_and_version() -> None:
    assert "federated" in runner.invoke(app, ["--help"]).output.lower()
    assert runner.invoke(app, ["--version"]).output.strip() == f"fedtmle {__version__}"
    assert runner.invoke(app, ["demo", "--study", "nonsense"]).exit_code == 2
