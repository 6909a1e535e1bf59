"""The command line: what a person sees at 80 columns, and what a script reads."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fedtmle import __version__
from fedtmle.cli import app

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_demo_fits_80_columns_and_agrees_with_the_pooled_study() -> None:
    result = runner.invoke(app, ["demo", "--quiet"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    federated, pooled = (
        next(line for line in lines if f"{who}: effect" in line) for who in ("federated", "pooled")
    )
    assert federated.split()[2:] == pooled.split()[2:]  # all printed digits


@pytest.mark.parametrize("study", ["ihdp", "transport"])
def test_demo_as_json(study: str) -> None:
    result = runner.invoke(app, ["demo", "--study", study, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["converged"]
    assert document["certificate"]["residual_bound"] <= document["certificate"]["tolerance"]


def test_help_and_version() -> None:
    assert "federated" in runner.invoke(app, ["--help"]).output.lower()
    assert runner.invoke(app, ["--version"]).output.strip() == f"fedtmle {__version__}"
    assert runner.invoke(app, ["demo", "--study", "nonsense"]).exit_code == 2
