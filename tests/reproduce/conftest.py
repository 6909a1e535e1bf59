"""A tiny scale of the experiments, a run of one figure, and tables read back."""

from __future__ import annotations

import csv
from pathlib import Path

from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle_paper.reproduce.scenario import Scale

TINY = Scale(n=400, pilot=60, clients=(2, 3), reference_clients=3, tolerance=1e-2, coded_tolerance=0.1)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run_of_one_figure(tmp_path: Path) -> None:
    arguments = ["reproduce", "--figure", "2", "--quick", "--quiet", "--workers", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(tmp_path / "RESULTS.md")
    assert {path.name for path in tmp_path.iterdir()} == {
        "figure2.png",
        "figure2.svg",
        "figure2-B.png",
        "figure2-B.svg",
        "figure2.csv",
        "runs.csv",
        "rounds.csv",
        "reference.csv",
        "RESULTS.md",
    }
