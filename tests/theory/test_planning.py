"""`fedtmle bounds`: a plan from given constants, from a pilot run, and what it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.errors import InputError
from fedtmle.theory.planning import BENCHMARK, pilot_from_result, plan
from fedtmle_paper.benchmark import client_sizes, gaussian_mixture, random_partition
from fedtmle_paper.optimal_transport import OptimalTransport
from tests.cases import targets
from tests.theory import transcription

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
STUDY = ["bounds", "--n", "985", "--silos", "8", "--dim", "2"]


def test_the_default_pilot_is_what_the_benchmark_measures() -> None:
    rng = np.random.default_rng(1)  # as `fedtmle demo --study transport`
    problem = OptimalTransport()
    law = problem.start(gaussian_mixture(2_000, rng))
    rows = gaussian_mixture(10_000, rng)
    parts = random_partition(client_sizes(10_000, 10), rng)
    silos = {f"silo {m + 1}": rows[part] for m, part in enumerate(parts)}
    result = ft.solve(problem, law, silos, ft.Coded(tolerance=1e-3), observe=True)
    measured = pilot_from_result(result.to_dict(), "measured")
    for name in ("beta", "kappa", "Delta", "G", "b", "std_error"):
        assert getattr(BENCHMARK, name) == pytest.approx(getattr(measured, name), rel=0.01), name
    assert (BENCHMARK.n, BENCHMARK.rounds, BENCHMARK.bits) == (measured.n, measured.rounds, measured.bits)


def test_a_plan_is_the_theorem_at_the_scaled_tolerance() -> None:
    made = plan(n=40_000, M=10, d=3, tolerance=1e-3, pilot=BENCHMARK, latency=0.2, bandwidth=1e6, share=0.01)
    delta = 1e-3 / BENCHMARK.b
    assert made.rounds == pytest.approx(transcription.round_bound(BENCHMARK.beta, BENCHMARK.Delta, delta))
    constants = (BENCHMARK.beta, BENCHMARK.kappa, BENCHMARK.Delta, BENCHMARK.G, delta)
    assert made.bits == pytest.approx(transcription.planned_bit_bound(10, 3, *constants))
    assert made.bits <= made.bits_universal
    assert made.seconds == pytest.approx(0.2 * made.rounds + made.bits / 10 / 1e6)
    assert made.std_error == pytest.approx(BENCHMARK.std_error / 2)  # four times the rows
    assert made.negligible_tolerance == pytest.approx(0.01 * made.std_error)
    assert made.scheduled_tolerance == pytest.approx(made.std_error / math.log(40_000))


def test_bounds_prints_a_plan_within_80_columns() -> None:
    output = runner.invoke(app, [*STUDY, "--tolerance", "0.01", "--beta", "1.1", "--latency", "0.2"])
    assert output.exit_code == 0, output.output
    assert max(map(len, output.output.splitlines())) <= 80
    for word in ("rounds R", "bits B", "time", "negligible", "pilot"):
        assert word in output.output
    assert "kappa, Delta, G, b" in output.output  # what was not given is said


def test_bounds_as_json_with_a_pilot_of_ones_own(tmp_path: Path) -> None:
    case = targets()["two arms"]
    result = ft.solve(
        case.problem, case.law, case.silos(case.split(3)), ft.Coded(tolerance=1e-4), observe=True
    )
    path = tmp_path / "pilot.json"
    path.write_text(json.dumps(result.to_dict()))
    output = runner.invoke(app, [*STUDY, "--pilot", str(path), "--delta-loss", "0.5", "--json"])
    assert output.exit_code == 0, output.output
    document = json.loads(output.stdout)
    known = {constant.name: constant.value for constant in result.certificate.constants}
    assert document["constants"]["beta"] == known["beta"]
    assert document["constants"]["Delta"] == 0.5
    assert document["constants"]["b"] == pytest.approx(1e-4 / known["delta/b"])
    wanted = transcription.round_bound(known["beta"], 0.5, 1e-3 / document["constants"]["b"])
    assert document["plan"]["rounds"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tolerance", "0"], "tolerance"),
        (["--tolerance", "nan"], "tolerance"),
        (["--silos", "0"], "silos"),
        (["--beta", "-1"], "beta"),
        (["--pilot", "/nonexistent.json"], "nonexistent"),
    ],
)
def test_bad_options_are_named(options: list[str], said: str) -> None:
    output = runner.invoke(app, [*STUDY, *options])
    assert output.exit_code == 2
    assert said in output.output


def test_a_pilot_that_was_not_observed_is_refused() -> None:
    case = targets()["two arms"]
    result = ft.solve(case.problem, case.law, case.silos(case.split(3)), ft.Coded(tolerance=1e-4))
    with pytest.raises(InputError, match="observe=True"):
        pilot_from_result(result.to_dict(), "run")


@pytest.mark.parametrize("inner", ["step", "adaptive"])
def test_what_run_observe_saves_is_a_pilot(tmp_path: Path, inner: str) -> None:
    assert runner.invoke(app, ["init", str(tmp_path), "--all-keys"]).exit_code == 0
    study, saved = tmp_path / "study.toml", tmp_path / "pilot.json"
    text = study.read_text(encoding="utf-8").replace('kind = "Coded"', f'kind = "Coded"\ninner = "{inner}"')
    study.write_text(text, encoding="utf-8")
    made = runner.invoke(app, ["run", str(study), "--observe", "--quiet", "--out", str(saved)])
    assert made.exit_code == 0, made.output
    output = runner.invoke(app, [*STUDY, "--pilot", str(saved), "--json"])
    assert output.exit_code == 0, output.output
    document = json.loads(saved.read_text(encoding="utf-8"))
    constants = json.loads(output.stdout)["constants"]
    losses = document["trajectory"]["loss"]
    # Delta, beta and the silos' gradients are of the very run: it fell by no more than Delta.
    assert constants["Delta"] >= losses[0] - min(losses) - 1e-12
    assert constants["Delta"] == pytest.approx(losses[0] - min(losses), rel=1e-3)
    assert constants["beta"] == document["certificate"]["smoothness"]["value"]
    checks = {line["name"]: line for line in document["certificate"]["checks"]}
    assert checks["rounds R"]["realised"] == document["rounds"] <= checks["rounds R"]["bound"]
    assert checks["residual r^K"]["realised"] <= checks["residual r^K"]["bound"]
    # Silo by silo as followed here, and over the pooled rows as observed there: the same residual.
    assert checks["residual r^K"]["realised"] == pytest.approx(
        document["trajectory"]["residual"][-1], rel=1e-6
    )
    assert document["certificate"]["descent"] == pytest.approx(np.diff(losses), abs=1e-9)


def test_the_transport_demo_as_json_is_a_pilot(tmp_path: Path) -> None:
    saved = tmp_path / "demo.json"
    saved.write_text(runner.invoke(app, ["demo", "--study", "transport", "--json"]).stdout, encoding="utf-8")
    output = runner.invoke(app, [*STUDY, "--pilot", str(saved), "--json"])
    assert output.exit_code == 0, output.output
    assert json.loads(output.stdout)["constants"]["beta"] == pytest.approx(BENCHMARK.beta, rel=0.01)
