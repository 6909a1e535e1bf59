"""The checks behind the sentences of section 5: each yields one piece of evidence per panel of one seed.

The thresholds are conventions, chosen after a trial on seed 0 and before the reported seeds 1 to 5: "early"
is the first half reference unit, "close" or "comparable" losses differ by at most 5% of the total decrease,
residuals "differ" from a factor of two. `uniform_excess` alone was added later, after three of those seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np

from fedtmle_core.types import Part, unpack
from fedtmle_paper.benchmark import client_sizes
from fedtmle_paper.reproduce.campaign import TIME_BUDGET, Campaign
from fedtmle_paper.reproduce.extra import largest_rise
from fedtmle_paper.reproduce.measure import Measured
from fedtmle_paper.reproduce.scenario import ROUND_BUDGET, Dgp, Method, Partition, Scenario, build

EARLY, END = 0.5, 3.0  # reference units
CLOSE = 0.05
FACTOR = 2.0
LOCAL = (Method.LOCAL_SIZE, Method.LOCAL_UNIFORM)
PAPER = (Method.GRADIENT, *LOCAL)
TIMES = [0.05 * step for step in range(1, int(END / 0.05) + 1)]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Whether a sentence holds in one panel, and the number that decided it."""

    where: str
    holds: bool
    value: float


def _panel(scenario: Scenario) -> str:
    return f"{scenario.dgp}, {scenario.partition}"


def comparable_final_losses(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        last = [campaign.run(scenario, method).checkpoints[-1].loss for method in PAPER]
        spread = (max(last) - min(last)) / campaign.decrease(scenario)
        yield Evidence(where=_panel(scenario), holds=spread <= CLOSE, value=spread)


def different_transients(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        paths = [[campaign.loss(campaign.run(scenario, method), t) for t in TIMES] for method in PAPER]
        apart = max(max(losses) - min(losses) for losses in zip(*paths, strict=True)) / campaign.decrease(
            scenario
        )
        yield Evidence(where=_panel(scenario), holds=apart > CLOSE, value=apart)


def _lead(campaign: Campaign, scenario: Scenario, method: Method) -> float:
    """How far G's loss, averaged over the early stage, lies above a local method's, of the decrease."""
    gap = campaign.mean_loss(campaign.run(scenario, Method.GRADIENT), EARLY) - campaign.mean_loss(
        campaign.run(scenario, method), EARLY
    )
    return gap / campaign.decrease(scenario)


def local_leads_early(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    yield from _early(campaign, seed, Dgp.GAUSSIAN, sign=1)


def gradient_leads_early(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    yield from _early(campaign, seed, Dgp.CURVED, sign=-1)


def _early(campaign: Campaign, seed: int, dgp: Dgp, *, sign: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        if scenario.dgp is dgp:
            for method in LOCAL:
                lead = sign * _lead(campaign, scenario, method)
                yield Evidence(where=f"{_panel(scenario)}, {method}", holds=lead > 0, value=lead)


def local_catches_up(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        if scenario.dgp is Dgp.CURVED:
            G = campaign.loss(campaign.run(scenario, Method.GRADIENT), END)
            for method in LOCAL:
                behind = (campaign.loss(campaign.run(scenario, method), END) - G) / campaign.decrease(
                    scenario
                )
                yield Evidence(where=f"{_panel(scenario)}, {method}", holds=behind <= CLOSE, value=behind)


def spatial_slowdown(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for method in LOCAL:
            spatial, random = (
                campaign.residual(campaign.run(_reference(campaign, seed, dgp, partition), method), 1.0)
                for partition in (Partition.SPATIAL, Partition.RANDOM)
            )
            yield Evidence(where=f"{dgp}, {method}", holds=spatial > random, value=spatial / random)


def _reference(campaign: Campaign, seed: int, dgp: Dgp, partition: Partition) -> Scenario:
    return campaign.scenario(seed, dgp, partition, campaign.scale.reference_clients)


def rebound(run: Measured) -> float:
    """The largest rise of the pooled loss above an earlier one; zero or less if it only fell."""
    return largest_rise(c.loss for c in run.checkpoints)


def uniform_rebound(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        scenario = _reference(campaign, seed, dgp, Partition.SPATIAL)
        rise = rebound(campaign.run(scenario, Method.LOCAL_UNIFORM)) / campaign.decrease(scenario)
        yield Evidence(where=_panel(scenario), holds=rise > 0, value=rise)


def small_rebound(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for item in uniform_rebound(campaign, seed):
        yield Evidence(where=item.where, holds=0 < item.value <= 2 * CLOSE, value=item.value)


def uniform_excess(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        scenario = _reference(campaign, seed, dgp, Partition.SPATIAL)
        uniform, pooled = (
            campaign.run(scenario, method).checkpoints[-1].loss
            for method in (Method.LOCAL_UNIFORM, Method.GRADIENT)
        )
        excess = (uniform - pooled) / campaign.decrease(scenario)
        yield Evidence(where=_panel(scenario), holds=excess > 0, value=excess)


def residuals_differ(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        ratio = 1.0
        for t in TIMES:
            runs = [campaign.run(scenario, method) for method in PAPER]
            for a in runs:
                for b in runs:
                    close = abs(campaign.loss(a, t) - campaign.loss(b, t)) <= CLOSE * campaign.decrease(
                        scenario
                    )
                    if close:
                        ratio = max(ratio, campaign.residual(a, t) / campaign.residual(b, t))
        yield Evidence(where=_panel(scenario), holds=ratio >= FACTOR, value=ratio)


def dearer_local_rounds(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        G, L = (campaign.run(scenario, method) for method in (Method.GRADIENT, Method.LOCAL_SIZE))
        ratio = _slowest(L) / _slowest(G)
        yield Evidence(where=_panel(scenario), holds=ratio > 1 and L.rounds < G.rounds, value=ratio)


def _slowest(run: Measured) -> float:
    return statistics.median(time.slowest for time in run.times)


def sizes_matter(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        scenario = _reference(campaign, seed, dgp, Partition.RANDOM)
        size, uniform = (campaign.run(scenario, method).checkpoints[-1].residual for method in LOCAL)
        ratio = uniform / size
        yield Evidence(where=_panel(scenario), holds=max(ratio, 1 / ratio) >= FACTOR, value=ratio)


def size_weights_miss(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        scenario = _reference(campaign, seed, dgp, Partition.SPATIAL)
        run = campaign.run(scenario, Method.LOCAL_SIZE)
        residual = run.checkpoints[-1].residual
        yield Evidence(where=_panel(scenario), holds=residual > campaign.scale.targeted, value=residual)


def spatial_dispersion(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        spatial, random = (
            dispersion(_reference(campaign, seed, dgp, partition)) for partition in reversed(Partition)
        )
        for part, a, b in zip(("gradient", "curvature"), spatial, random, strict=True):
            yield Evidence(where=f"{dgp}, {part}", holds=a > b, value=a / b)


def reversals(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        losses = {m: [campaign.loss(campaign.run(scenario, m), t) for t in TIMES] for m in PAPER}
        changes = 0
        for a, b in combinations(PAPER, 2):
            signs = [x > y for x, y in zip(losses[a], losses[b], strict=True) if x != y]
            changes += sum(p != q for p, q in pairwise(signs))
        yield Evidence(where=_panel(scenario), holds=changes > 0, value=changes)


def _ends(campaign: Campaign, seed: int, dgp: Dgp, partition: Partition, method: Method) -> list[Measured]:
    """The runs at the fewest and at the most clients."""
    return [
        campaign.run(campaign.scenario(seed, dgp, partition, M), method)
        for M in (campaign.clients[0], campaign.clients[-1])
    ]


def fixed_time_balance(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for partition in Partition:
            for method in PAPER:
                few, many = (
                    campaign.residual(run, TIME_BUDGET)
                    for run in _ends(campaign, seed, dgp, partition, method)
                )
                differs = max(few / many, many / few) >= FACTOR
                yield Evidence(where=f"{dgp}, {partition}, {method}", holds=differs, value=many / few)


def uniform_worsens(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for partition in Partition:
            change = _uniform_change(campaign, seed, dgp, partition)
            yield Evidence(where=f"{dgp}, {partition}", holds=change > 0, value=change)


def worsens_most_spatially(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        spatial, random = (
            _uniform_change(campaign, seed, dgp, partition) for partition in reversed(Partition)
        )
        yield Evidence(where=dgp.value, holds=spatial > max(random, 0.0), value=spatial - random)


def _uniform_change(campaign: Campaign, seed: int, dgp: Dgp, partition: Partition) -> float:
    """The growth, from few to many clients, of uniform weights' loss above size weights', of the decrease."""
    uniform, size = (
        [run.at_round(ROUND_BUDGET).loss for run in _ends(campaign, seed, dgp, partition, method)]
        for method in (Method.LOCAL_UNIFORM, Method.LOCAL_SIZE)
    )
    scenario = _reference(campaign, seed, dgp, partition)
    return ((uniform[1] - size[1]) - (uniform[0] - size[0])) / campaign.decrease(scenario)


def gradient_higher_at_budget(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for partition in Partition:
            for method in LOCAL:
                for M in campaign.clients:
                    scenario = campaign.scenario(seed, dgp, partition, M)
                    G, L = (
                        campaign.run(scenario, m).at_round(ROUND_BUDGET).loss
                        for m in (Method.GRADIENT, method)
                    )
                    above = (G - L) / campaign.decrease(scenario)
                    yield Evidence(where=f"{dgp}, {partition}, {method}", holds=above > 0, value=above)


def queries_per_update(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        G, L = (campaign.run(scenario, method) for method in (Method.GRADIENT, Method.LOCAL_SIZE))
        several = G.checkpoints[-1].rounds / G.updates
        one = L.checkpoints[-1].rounds == L.updates
        yield Evidence(where=_panel(scenario), holds=several >= FACTOR and one, value=several)


def invariance(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        runs = [
            campaign.run(campaign.scenario(seed, dgp, partition, M), Method.GRADIENT)
            for partition in Partition
            for M in campaign.clients
        ]
        distinct = len({(run.digest, run.rounds, run.updates) for run in runs})
        yield Evidence(where=f"{dgp}, {len(runs)} partitions", holds=distinct == 1, value=distinct)


def not_slower_in_time(campaign: Campaign, seed: int) -> Iterator[Evidence]:
    for scenario in campaign.scenarios(seed):
        for method in LOCAL:
            G, L = campaign.run(scenario, Method.GRADIENT), campaign.run(scenario, method)
            ahead = sum(campaign.residual(G, t) < campaign.residual(L, t) for t in TIMES) / len(TIMES)
            yield Evidence(where=f"{_panel(scenario)}, {method}", holds=ahead > 0, value=ahead)


@lru_cache(maxsize=256)  # the sentences are read again at every latency
def dispersion(scenario: Scenario) -> tuple[float, float]:
    """Root of sum_m (N_m/n) |X_m - X|^2, for X the local gradient and for X the local Hessian at eps = 0."""
    data = build(scenario)
    problem, origin = data.problem, np.zeros(data.problem.dim)
    local, shares = [], []
    for rows in data.silos.values():
        sums = problem.submodel(data.law, problem.read(rows)).sums(origin, Part.GRADIENT | Part.HESSIAN)
        local.append(sums.values(len(rows)))  # the public normaliser is the same for all
        shares.append(len(rows) / len(data.rows))
    table, weights = np.array(local), np.array(shares)
    squares = weights @ (table - weights @ table) ** 2
    # The packed upper triangle holds each off-diagonal entry once.
    return float(np.sqrt(squares[: problem.dim].sum())), float(np.sqrt(squares[problem.dim :].sum()))


@lru_cache(maxsize=256)
def uniform_excess_formula(scenario: Scenario) -> float:
    """(1/2) Delta' V^-1 Delta at p^0: how far uniform weights end above the pooled optimum, to second order.

    Delta = sum_m (1/M - N_m/n) P_m D is the difference of the two averages of gradients, V the curvature of
    the pooled loss. The fixed points differ by V^-1 Delta, and the pooled loss is quadratic around its own.
    """
    data = build(scenario)
    problem, origin = data.problem, np.zeros(data.problem.dim)
    n, M, d = len(data.rows), len(data.silos), data.problem.dim
    Delta = np.zeros(d)
    for rows in data.silos.values():
        sums = problem.submodel(data.law, problem.read(rows)).sums(origin, Part.GRADIENT)
        Delta += (1 / M - len(rows) / n) * sums.values(len(rows))  # the public part cancels
    pooled = problem.submodel(data.law, problem.read(data.rows)).sums(origin, Part.HESSIAN)
    V = unpack(pooled.values(n), d) + problem.normaliser(data.law).hessian(origin)
    return float(Delta @ np.linalg.solve(V, Delta)) / 2


def expected_excess(scenario: Scenario, dim: int = 3) -> float:
    """(d/2) sum_m (1/M - N_m/n)^2/N_m: the mean of that formula under a random partition.

    There P_m D has the covariance V/N_m around a common mean, which the weights 1/M - N_m/n cancel.
    """
    sizes = client_sizes(scenario.scale.n, scenario.clients)
    n, M = scenario.scale.n, scenario.clients
    return dim / 2 * float(sum((1 / M - N / n) ** 2 / N for N in sizes))
