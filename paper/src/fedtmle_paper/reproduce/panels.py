"""Every method at one tolerance on every panel: rounds and bits beside the bound on rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm, TargetingProgram
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.local import Adaptive
from fedtmle.protocol.coded import Estimated
from fedtmle.protocol.fits import Choice, Switched
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Phase
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.runtime.result import Result
from fedtmle.solver import solve
from fedtmle_core.types import Part
from fedtmle_paper.reproduce.campaign import Campaign
from fedtmle_paper.reproduce.scenario import Data, Method, Partition, Profile, Scale, Scenario, build

ADAPTIVE = "adaptive"


@dataclass(frozen=True, kw_only=True)
class PanelRun:
    """One method on one panel, run to ``tolerance``."""

    seed: int
    dgp: str
    partition: str
    clients: int
    method: str
    tolerance: float
    status: str
    rounds: int  # targeting, without calibration
    calibration_rounds: int
    bits: int  # calibration and targeting
    local_rounds: int  # rounds whose update was the average of local fits
    stated_residual: float  # certified, or computed from exact sums
    residual: float  # of the last law, from the rows
    round_bound: float | None  # 1 + 32 beta Delta/(3 delta^2), where one is proved


def methods(scale: Scale) -> dict[str, AbstractAlgorithm]:
    """Return the algorithms that are run here, whitened, to the tolerance of Algorithm 4."""
    tolerance = scale.coded_tolerance
    return {
        # The paper's beta bounds every silo's curvature, as switching needs; the default is the pooled one.
        "coded, beta of the silos": Coded(tolerance=tolerance, smoothness=Estimated()),
        "coded, pooled beta": Coded(tolerance=tolerance),
        ADAPTIVE: Adaptive(tolerance=tolerance),
    }


def panel(scenario: Scenario) -> list[PanelRun]:
    """Return every method's run on one panel."""
    data = build(scenario)
    return [_run(scenario, data, name, each) for name, each in methods(scenario.scale).items()]


def _run(scenario: Scenario, data: Data, name: str, algorithm: AbstractAlgorithm) -> PanelRun:
    result = solve(data.problem, data.law, data.silos, algorithm, observe=name == ADAPTIVE)
    own = result.certificate
    bounds = {} if own is None else {check.name: check.bound for check in own.checks}
    account = result.account
    return PanelRun(
        seed=scenario.seed,
        dgp=scenario.dgp.value,
        partition=scenario.partition.value,
        clients=scenario.clients,
        method=name,
        tolerance=scenario.scale.coded_tolerance,
        status=result.status.name.lower(),
        rounds=result.rounds,
        calibration_rounds=account.rounds[Phase.CALIBRATION],
        bits=account.bits(Phase.CALIBRATION, Phase.TARGETING),
        local_rounds=_local_rounds(data, algorithm, result),
        stated_residual=math.inf if result.residual is None else result.residual,
        residual=_residual(data, result),
        round_bound=bounds.get("rounds R") if name == ADAPTIVE else None,
    )


def _residual(data: Data, result: Result) -> float:
    """Return ||P_n D|| at the run's last law, from the pooled rows."""
    problem, origin = data.problem, np.zeros(data.problem.dim)
    sums = problem.submodel(result.law, problem.read(data.rows)).sums(origin, Part.GRADIENT)
    score = sums.values(len(data.rows)) + problem.normaliser(result.law).gradient(origin)
    return float(np.linalg.norm(score))


def _local_rounds(data: Data, algorithm: AbstractAlgorithm, result: Result) -> int:
    """Return in how many rounds the server chose the average of the fits."""
    program = TargetingProgram(problem=data.problem, law=data.law, algorithm=algorithm)
    plan = Plan(program=program, roster=roster(list(data.silos)))
    heard = heard_rounds(plan, result.transcript, result.sizes)
    answers = (part for each in heard for part in (each.pooled if each.query.members[1:] else (each.pooled,)))
    return sum(isinstance(part, Switched) and part.choice is Choice.LOCAL for part in answers)


def measured_runs(campaign: Campaign, tolerance: float, clients: set[int]) -> Iterator[PanelRun]:
    """Yield G, L and raw Algorithm 4 as the figures measured them, until their residual is ``tolerance``.

    Every round of theirs has the same bits, so that a run's bits are shared among its rounds.
    """
    for view, method in (
        (campaign, Method.GRADIENT),
        (campaign.under(Profile.B), Method.GRADIENT),
        (campaign, Method.LOCAL_SIZE),
        (campaign, Method.CODED_RAW),
    ):
        for run in view.runs:
            if run.method is not method or run.scenario.clients not in clients:
                continue
            done = next((c for c in run.checkpoints if c.residual <= tolerance), None)
            rounds = run.rounds if done is None else done.rounds + 1  # and the EIF check that sees it
            yield PanelRun(
                seed=run.scenario.seed,
                dgp=run.scenario.dgp.value,
                partition=run.scenario.partition.value,
                clients=run.scenario.clients,
                method=f"{method}, profile {view.profile}" if method is Method.GRADIENT else method.value,
                tolerance=tolerance,
                status=run.status if done is None else "converged",
                rounds=rounds,
                calibration_rounds=0,
                bits=round(run.bits * rounds / run.rounds),
                local_rounds=0,
                stated_residual=(done or run.checkpoints[-1]).residual,
                residual=(done or run.checkpoints[-1]).residual,
                round_bound=None,
            )


def panel_section(table: Sequence[PanelRun], campaign: Campaign | None) -> Iterator[str]:
    """Yield the section of RESULTS.md: medians over the panels of each partition."""
    delta, adaptive = table[0].tolerance, [run for run in table if run.method == ADAPTIVE]
    others = [] if campaign is None else measured_runs(campaign, delta, {run.clients for run in table})
    compared = [*others, *table]
    yield from (
        "",
        "## Adaptive switching beside G, L and Algorithm 4",
        "",
        f"{len(adaptive)} panels (seeds, distributions, partitions, M in "
        f"{sorted({run.clients for run in table})}), every method until its residual is at most {delta:g}: "
        "G, L and raw Algorithm 4 as measured for the figures, the others whitened. R: rounds of targeting; "
        "bits: calibration and targeting, all links. Local: rounds that took the average of the fits. Bound: "
        "1 + 32 beta Delta/(3 delta^2), that of Algorithm 4 with one step per update, with the run's own "
        "beta and Delta. Medians with the least and the greatest.",
        "",
        "| partition | method | converged | R | kbit | local | worst R / bound | worst residual / delta |",
        "|---|---|---|---|---|---|---|---|",
    )
    for partition, method in dict.fromkeys((p, r.method) for p in Partition for r in compared):
        runs = [run for run in compared if (run.partition, run.method) == (partition, method)]
        shares = [run.rounds / run.round_bound for run in runs if run.round_bound is not None]
        yield (
            f"| {partition} | {method} | {sum(run.status == 'converged' for run in runs)} of {len(runs)} "
            f"| {_range([run.rounds for run in runs])} | {_range([run.bits / 1e3 for run in runs])} "
            f"| {_range([run.local_rounds for run in runs]) if method == ADAPTIVE else '-'} "
            f"| {f'{max(shares):.2g}' if shares else '-'} "
            f"| {max(run.residual / delta for run in runs):.3g} |"
        )
    broken = sum(run.round_bound is None or run.rounds > run.round_bound for run in adaptive)
    certified = sum(run.residual <= run.stated_residual <= delta for run in adaptive)
    yield from (
        "",
        f"* Adaptive runs with more rounds than their bound: {broken} of {len(adaptive)}.",
        "* Adaptive runs whose residual, computed from the rows, is at most the certified one, which is at "
        f"most delta: {certified} of {len(adaptive)}.",
        *_against_coded(table),
    )


def _against_coded(table: Sequence[PanelRun]) -> Iterator[str]:
    """Yield how often switching saves rounds against Algorithm 4 on the same panel."""
    runs = {(run.seed, run.dgp, run.partition, run.clients, run.method): run for run in table}
    for method in dict.fromkeys(run.method for run in table if run.method != ADAPTIVE):
        pairs = [
            (run, runs[run.seed, run.dgp, run.partition, run.clients, method])
            for run in table
            if run.method == ADAPTIVE
        ]
        fewer = sum(own.rounds < coded.rounds for own, coded in pairs)
        more = sum(own.rounds > coded.rounds for own, coded in pairs)
        cheaper = sum(own.bits < coded.bits for own, coded in pairs)
        ratio = statistics.median(own.rounds / coded.rounds for own, coded in pairs)
        yield (
            f"* Against {method}: fewer rounds in {fewer} of {len(pairs)} panels, more in {more}, fewer bits "
            f"in {cheaper}; median ratio of rounds {ratio:.2f}."
        )


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
