"""Sentence checks on invented runs whose answers are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedtmle.errors import InputError
from fedtmle_paper.reproduce import checks
from fedtmle_paper.reproduce.campaign import Campaign
from fedtmle_paper.reproduce.checks import Evidence
from fedtmle_paper.reproduce.measure import Checkpoint, Measured
from fedtmle_paper.reproduce.scenario import Dgp, Method, Partition, Profile, Scale, Scenario
from fedtmle_paper.reproduce.sentences import SENTENCES, SentenceResult, Verdict
from fedtmle_paper.reproduce.timing import RoundTime

SCALE = Scale(n=100, pilot=50, clients=(2, 3), reference_clients=3)
Path = list[tuple[float, float]]  # loss and residual at each update


def invented(path: Callable[[Scenario, Method], Path], seconds: Callable[[Method], float]) -> Campaign:
    """Runs of one seed with given losses and residuals, one round of so many seconds per update."""
    runs = []
    for dgp in Dgp:
        for partition in Partition:
            for M in SCALE.clients:
                scenario = Scenario(seed=1, dgp=dgp, partition=partition, clients=M, scale=SCALE)
                runs += [_run(scenario, method, path(scenario, method), seconds(method)) for method in Method]
    return Campaign(runs, latency=0.0)


def _run(scenario: Scenario, method: Method, path: Path, seconds: float) -> Measured:
    rounds = 3 if method is Method.GRADIENT else 1  # per update
    return Measured(
        scenario=scenario,
        profile=Profile.A,
        method=method,
        status="converged",
        converged=method is not Method.LOCAL_SIZE,
        rounds=rounds * (len(path) - 1) + 1,
        updates=len(path) - 1,
        bits=1,
        endpoint_error=0.0,
        std_error=1.0,
        digest="same" if method is Method.GRADIENT else scenario.name,
        checkpoints=tuple(
            Checkpoint(update=k, rounds=rounds * k, compute=seconds * k, loss=loss, residual=residual)
            for k, (loss, residual) in enumerate(path)
        ),
        times=(RoundTime(slowest=seconds, silos=seconds, server=0.0),),
    )


def steady(scenario: Scenario, method: Method) -> Path:
    """G falls to r = 0.005 in two updates; L goes lower in loss and stops at r = 0.1."""
    if method is Method.GRADIENT:
        return [(1.0, 1.0), (0.5, 0.1), (0.02, 0.005)]
    rise = 0.3 if (method, scenario.partition) == (Method.LOCAL_UNIFORM, Partition.SPATIAL) else 0.0
    return [(1.0, 1.0), (0.0, 0.2), (rise, 0.2 if scenario.partition is Partition.SPATIAL else 0.1)]


@pytest.fixture
def campaign() -> Campaign:
    return invented(steady, lambda method: 1.0 if method is Method.GRADIENT else 0.3)


def verdicts(campaign: Campaign, check: Callable[[Campaign, int], object]) -> dict[str, bool]:
    return {item.where: item.holds for item in check(campaign, 1)}  # type: ignore[attr-defined]


def test_the_reference_unit_is_gradients_time_to_a_hundredth(campaign: Campaign) -> None:
    assert campaign.unit(1) == 2.0
    run = campaign.run(campaign.scenario(1, Dgp.GAUSSIAN, Partition.RANDOM, 3), Method.GRADIENT)
    assert campaign.loss(run, 0.49) == 1.0
    assert campaign.loss(run, 0.5) == 0.5
    assert campaign.mean_loss(run, 1.0) == pytest.approx(0.75)  # 1 for half the time, then 1/2
    assert Campaign(campaign.runs, latency=1.0).unit(1) == 8.0  # two seconds and six rounds


def test_rebound_and_its_size(campaign: Campaign) -> None:
    scenario = campaign.scenario(1, Dgp.GAUSSIAN, Partition.SPATIAL, 3)
    assert checks.rebound(campaign.run(scenario, Method.LOCAL_UNIFORM)) == pytest.approx(0.3)
    assert checks.rebound(campaign.run(scenario, Method.GRADIENT)) < 0
    assert set(verdicts(campaign, checks.uniform_rebound).values()) == {True}
    assert set(verdicts(campaign, checks.small_rebound).values()) == {False}
    assert set(verdicts(campaign, checks.uniform_excess).values()) == {True}


def test_losses_and_leads(campaign: Campaign) -> None:
    comparable = verdicts(campaign, checks.comparable_final_losses)
    assert comparable == {
        "gaussian, random": True,
        "gaussian, spatial": False,
        "curved, random": True,
        "curved, spatial": False,
    }
    assert set(verdicts(campaign, checks.local_leads_early).values()) == {True}
    assert set(verdicts(campaign, checks.gradient_leads_early).values()) == {False}
    assert set(verdicts(campaign, checks.different_transients).values()) == {True}
    caught = verdicts(campaign, checks.local_catches_up)
    assert caught["curved, random, L size"]
    assert not caught["curved, spatial, L uniform"]


def test_residuals_rounds_and_order(campaign: Campaign) -> None:
    assert set(verdicts(campaign, checks.residuals_differ).values()) == {True}
    assert set(verdicts(campaign, checks.spatial_slowdown).values()) == {True}
    assert set(verdicts(campaign, checks.sizes_matter).values()) == {False}
    assert set(verdicts(campaign, checks.size_weights_miss).values()) == {True}
    assert set(verdicts(campaign, checks.queries_per_update).values()) == {True}
    assert set(verdicts(campaign, checks.not_slower_in_time).values()) == {True}
    assert set(verdicts(campaign, checks.dearer_local_rounds).values()) == {False}  # 0.3 s against 1 s
    at_budget = verdicts(campaign, checks.gradient_higher_at_budget)
    assert at_budget["gaussian, random, L size"]
    assert not at_budget["gaussian, spatial, L uniform"]


def test_clients_and_invariance(campaign: Campaign) -> None:
    assert set(verdicts(campaign, checks.invariance).values()) == {True}
    assert set(verdicts(campaign, checks.uniform_worsens).values()) == {False}  # nothing depends on M here

    def worse(scenario: Scenario, method: Method) -> Path:
        slope = 0.1 if scenario.partition is Partition.RANDOM else 0.05
        extra = slope * scenario.clients if method is Method.LOCAL_UNIFORM else 0.0
        return [(loss + (k == 2) * extra, r) for k, (loss, r) in enumerate(steady(scenario, method))]

    other = invented(worse, lambda _: 1.0)
    assert set(verdicts(other, checks.uniform_worsens).values()) == {True}
    assert set(verdicts(other, checks.worsens_most_spatially).values()) == {False}


def test_a_verdict_needs_every_panel() -> None:
    yes, no = (Evidence(where="here", holds=holds, value=1.0) for holds in (True, False))
    for evidence, verdict in (
        ((yes, yes), Verdict.CONFIRMED),
        ((yes, no), Verdict.MIXED),
        ((no, no), Verdict.NOT_CONFIRMED),
    ):
        finding = SentenceResult(sentence=SENTENCES[0], evidence=evidence)
        assert finding.verdict is verdict
        assert finding.by_panel()["here"][1] == 2


def test_an_empty_study_is_refused() -> None:
    with pytest.raises(InputError):
        Campaign([])
