"""A tiny campaign, run once: what its runs record, and the figures, tables and sentences made of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.solver import solve
from fedtmle_paper.reproduce.campaign import Campaign
from fedtmle_paper.reproduce.measure import (
    Measured,
    measure,
    observed,
    run_scenario,
    scenarios,
    shared,
)
from fedtmle_paper.reproduce.run import Order, publish
from fedtmle_paper.reproduce.scenario import Dgp, Method, Partition, Scale, Scenario, build
from fedtmle_paper.reproduce.sentences import SENTENCES, Verdict, sentence_results

from .conftest import TINY, read, run_of_one_figure

CELL = Scenario(seed=4, dgp=Dgp.CURVED, partition=Partition.SPATIAL, clients=3, scale=TINY)

WHERE = ["seed", "dgp", "partition", "clients", "profile", "method"]
COLUMNS = {
    "figure1": [*WHERE, "update", "rounds", "compute_s", "elapsed_units", "loss", "residual"],
    "figure3": [*WHERE, "unit_s", "residual", "loss", "stopped_before"],
    "figure4": [*WHERE, "rounds_used", "updates", "loss", "loss_change", "residual"],
    "rounds": [*WHERE, "round", "slowest_s", "server_s", "silos_s"],
    "reference": [
        "seed",
        "profile",
        "unit_s",
        "rounds",
        "compute_s",
        "latency_s",
        "residual",
        "residual_start",
    ],
}


@pytest.fixture(scope="module")
def tiny() -> Campaign:
    return Campaign(
        [run for scenario in scenarios([4], TINY.clients, TINY) for run in run_scenario(scenario)]
    )


def test_checkpoints_count_every_query(tiny: Campaign) -> None:
    for run in tiny.runs:
        first, *later = run.checkpoints
        assert (first.update, first.rounds, first.compute) == (0, 0, 0.0)
        assert len(run.checkpoints) == run.updates + 1
        assert all(a.rounds < b.rounds and a.compute < b.compute for a, b in itertools.pairwise(later))
        # What is left after the last update is its EIF check (and L's last, unused fit).
        assert run.checkpoints[-1].rounds == run.rounds - 1
        assert len(run.times) == run.rounds
        assert run.at_round(0) == first
        assert run.at_time(1e9, 0.005) == run.checkpoints[-1]


def test_converged_runs_end_at_the_direct_solution(tiny: Campaign) -> None:
    ended = [run for run in tiny.runs if run.converged]
    assert {run.method for run in ended} >= {Method.GRADIENT, Method.CODED_RAW, Method.CODED_WHITENED}
    for run in ended:
        # To first order Psi - direct is the EIF mean.
        assert run.endpoint_error <= 2 * run.checkpoints[-1].residual + 1e-9


def test_gradient_is_invariant_to_repartitioning_to_the_bit(tiny: Campaign) -> None:
    for dgp in Dgp:
        runs = [run for run in tiny.runs if run.scenario.dgp is dgp and run.method is Method.GRADIENT]
        assert len(runs) == 4
        assert len({(run.digest, run.rounds) for run in runs}) == 1
        local = [run for run in tiny.runs if run.scenario.dgp is dgp and run.method is Method.LOCAL_SIZE]
        assert len({run.digest for run in local}) == 4  # the name does tell trajectories apart


def test_a_run_again_gives_the_same_numbers_but_for_time(tiny: Campaign) -> None:
    again = measure(CELL, build(CELL), Method.LOCAL_UNIFORM)
    before = tiny.run(CELL, Method.LOCAL_UNIFORM)
    assert (again.digest, again.bits, again.endpoint_error) == (
        before.digest,
        before.bits,
        before.endpoint_error,
    )
    assert [(c.rounds, c.loss, c.residual) for c in again.checkpoints] == [
        (c.rounds, c.loss, c.residual) for c in before.checkpoints
    ]


def test_the_plan_of_the_paper(tiny: Campaign) -> None:
    assert [run.method for run in tiny.runs[: len(Method)]] == list(Method)
    plan = scenarios([1, 2], Scale().clients, Scale())
    assert len(plan) == 2 * 4 * 2 * 2
    assert {scenario.scale.n for scenario in plan} == {10_000}
    assert list(shared(abs, [-1, 2], 1)) == [1, 2]


@pytest.mark.slow
def test_a_standstill_is_what_200_rounds_would_give(tiny: Campaign) -> None:
    data, stopped = build(CELL), tiny.run(CELL, Method.LOCAL_UNIFORM)
    whole = solve(
        data.problem,
        data.law,
        data.silos,
        ft.LocalAverage(weights="uniform", max_updates=199, tolerance=1e-9),
    )
    loss, residual = observed(data, data.law, whole.trajectory.accepted)
    assert whole.rounds == 200
    assert loss[-1] == pytest.approx(stopped.checkpoints[-1].loss, abs=1e-8)
    assert residual[-1] == pytest.approx(stopped.checkpoints[-1].residual, abs=1e-4)


def test_four_figures_with_their_tables(tiny: Campaign, tmp_path: Path) -> None:
    order = Order(extra=False, seeds=(4,), scale=TINY, out=tmp_path)
    results = publish(order, tiny, None, 1.0).read_text(encoding="utf-8")
    for number in range(1, 5):
        for kind, least in (("png", 20_000), ("svg", 10_000), ("csv", 500)):
            assert (tmp_path / f"figure{number}.{kind}").stat().st_size > least
    for name, columns in COLUMNS.items():
        assert list(read(tmp_path / f"{name}.csv")[0]) == columns
    assert len(read(tmp_path / "figure3.csv")) == len(tiny.measured)
    assert {row["profile"] for row in read(tmp_path / "figure1.csv")} == {"A", "B"}
    assert (tmp_path / "figure2-B.png").stat().st_size > 15_000
    assert "holds under profile" in results
    assert results.count("Decided by: ") == sum(len(sentence.decided_by) for sentence in SENTENCES)
    assert "Here, the formula over the decrease, M = 3: gaussian, random" in results
    assert {row["clients"] for row in read(tmp_path / "figure2.csv")} == {"3"}
    assert "## The endpoint check" in results
    assert "Only 1 seed(s)" in results
    for name in ("G", "L, uniform", "coded, whitened"):  # written beside the curves
        assert f">{name}<" in (tmp_path / "figure1.svg").read_text(encoding="utf-8")


def test_every_sentence_has_evidence_on_measured_runs(tiny: Campaign) -> None:
    found = sentence_results(tiny)
    assert [finding.sentence for finding in found] == list(SENTENCES)
    assert all(finding.evidence for finding in found)
    required = {finding.sentence.name: finding.verdict for finding in found if finding.sentence.required}
    assert required["gradient-invariant"] is Verdict.CONFIRMED
    assert set(required) == {"gradient-invariant", "uniform-rebound"}
    assert len({sentence.name for sentence in SENTENCES}) == len(SENTENCES)


def test_a_run_of_one_figure(tiny: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, on runs that were measured before."""
    asked = []

    def measured(scenario: Scenario) -> list[Measured]:
        asked.append(scenario)
        here = Scenario(
            seed=4,
            dgp=scenario.dgp,
            partition=scenario.partition,
            clients=scenario.clients,
            scale=scenario.scale,
        )
        return [replace(run, scenario=scenario) for run in tiny.measured if run.scenario == here]

    monkeypatch.setattr("fedtmle_paper.reproduce.scenario.QUICK", TINY)
    monkeypatch.setattr("fedtmle_paper.reproduce.run.run_scenario", measured)
    run_of_one_figure(tmp_path)
    assert {(each.dgp, each.partition) for each in asked} == set(itertools.product(Dgp, Partition))
    assert {each.clients for each in asked} == {TINY.reference_clients}
