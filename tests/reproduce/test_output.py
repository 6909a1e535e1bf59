"""What `fedtmle reproduce` leaves behind: figures, tables, RESULTS.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtmle.errors import InputError
from fedtmle_paper.benchmark import curved_mixture, gaussian_mixture
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.reproduce import run, style
from fedtmle_paper.reproduce.extra import costs, truth
from fedtmle_paper.reproduce.figures import wilson
from fedtmle_paper.reproduce.run import Order, carry_out
from fedtmle_paper.reproduce.scenario import Dgp, Partition, Scale, Scenario

from .conftest import TINY, read, run_of_one_figure


@pytest.mark.slow
def test_a_quick_run_of_one_figure(tmp_path: Path) -> None:
    run_of_one_figure(tmp_path)


def test_extra_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "DATA_SETS", 2)
    monkeypatch.setattr(run, "REBOUNDS", 1)
    monkeypatch.setattr(run, "SAMPLES", 1)
    monkeypatch.setattr(run, "TOLERANCES", (1e-1,))
    order = Order(figures=(), seeds=(4,), scale=TINY, out=tmp_path)
    results = carry_out(order, quiet=True).read_text(encoding="utf-8")
    assert "Bounds broken: 0 of 8 runs" in results
    assert "more rounds than their bound: 0 of 4." in results  # M = 3 alone
    assert "most delta: 4 of 4." in results
    assert len(read(tmp_path / "extra-robustness.csv")) == 2 * 4 * 2 * 4  # populations, models, rules, silos
    rebounds = read(tmp_path / "extra-rebound.csv")
    assert [row["dgp"] for row in rebounds] == ["gaussian", "curved"]
    assert all(float(row["decrease"]) > 0 for row in rebounds)  # the optimum is below the start
    for name in ("cost", "retirement", "coverage"):
        assert (tmp_path / f"extra-{name}.png").stat().st_size > 5_000
        assert read(tmp_path / f"extra-{name}.csv")
    retired = read(tmp_path / "extra-retirement.csv")
    assert len(retired) == 2 * 2 * 2 * 3  # distributions, partitions, weights, silos
    assert {row["weights"] for row in retired} == {"size", "uniform"}


def test_realised_costs_lie_below_their_bounds() -> None:
    scenario = Scenario(seed=2, dgp=Dgp.GAUSSIAN, partition=Partition.SPATIAL, clients=3, scale=TINY)
    for cost in costs(scenario, (1e-1, 1e-2)):
        assert cost.residual_bound <= cost.tolerance
        assert cost.rounds <= cost.round_bound
        assert cost.bits <= cost.pathwise_bit_bound <= cost.universal_bit_bound


@pytest.mark.parametrize(("dgp", "draw"), [(Dgp.GAUSSIAN, gaussian_mixture), (Dgp.CURVED, curved_mixture)])
def test_the_truth_agrees_with_a_large_sample(dgp: Dgp, draw: object) -> None:
    rows = draw(200_000, np.random.default_rng(0))  # type: ignore[operator]
    assert np.abs(OptimalTransport().direct(rows) - truth(dgp)).max() < 0.2  # some 4 standard errors
    assert np.abs(np.subtract(truth(dgp), truth(dgp, 120))).max() < 1e-4


def test_wilsons_interval() -> None:
    assert wilson(8, 10) == pytest.approx((0.8, 0.4901625, 0.9433178), abs=1e-6)


def test_names_are_moved_apart_and_stay_inside() -> None:
    assert style._apart([0.1, 0.5], 0.1) == [0.1, 0.5]
    assert style._apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert style._apart([0.0, 0.0, 0.0], 0.1) == pytest.approx([0.0, 0.1, 0.2])
    assert style._apart([1.0, 1.0], 0.1) == pytest.approx([0.9, 1.0])


@pytest.mark.parametrize("wrong", [{"seeds": ()}, {"latency": -1.0}, {"workers": 0}])
def test_orders_that_cannot_be_carried_out(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Order(**wrong)  # type: ignore[arg-type]


def test_the_papers_scale() -> None:
    assert Scale() == Scale(n=10_000, pilot=2_000, clients=(5, 10, 20, 40), reference_clients=10)
