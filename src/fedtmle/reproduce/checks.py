"""The checks behind the sentences of section 5: one piece of evidence per panel of one seed.

The thresholds are conventions, chosen after a trial on seed 0 and before the reported seeds 1 to 5: "early"
is the first half reference unit, "close" or "comparable" losses differ by at most 5% of the total decrease,
residuals "differ" from a factor of two. `uniform_excess` alone was added later, after three of those seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from fedtmle.reproduce.heterogeneity import dispersion
from fedtmle.reproduce.measure import Measured
from fedtmle.reproduce.rebound import largest_rise
from fedtmle.reproduce.scenario import ROUND_BUDGET, Cell, Dgp, Method, Partition
from fedtmle.reproduce.study import TIME_BUDGET, Study

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


def _panel(cell: Cell) -> str:
    return f"{cell.dgp}, {cell.partition}"


def comparable_final_losses(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        last = [study.run(cell, method).checkpoints[-1].loss for method in PAPER]
        spread = (max(last) - min(last)) / study.decrease(cell)
        yield Evidence(where=_panel(cell), holds=spread <= CLOSE, value=spread)


def different_transients(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        paths = [[study.loss(study.run(cell, method), t) for t in TIMES] for method in PAPER]
        apart = max(max(losses) - min(losses) for losses in zip(*paths, strict=True)) / study.decrease(cell)
        yield Evidence(where=_panel(cell), holds=apart > CLOSE, value=apart)


def _lead(study: Study, cell: Cell, method: Method) -> float:
    """How far G's loss, averaged over the early stage, lies above a local method's, of the decrease."""
    gap = study.mean_loss(study.run(cell, Method.GRADIENT), EARLY) - study.mean_loss(
        study.run(cell, method), EARLY
    )
    return gap / study.decrease(cell)


def local_leads_early(study: Study, seed: int) -> Iterator[Evidence]:
    yield from _early(study, seed, Dgp.GAUSSIAN, sign=1)


def gradient_leads_early(study: Study, seed: int) -> Iterator[Evidence]:
    yield from _early(study, seed, Dgp.CURVED, sign=-1)


def _early(study: Study, seed: int, dgp: Dgp, *, sign: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        if cell.dgp is dgp:
            for method in LOCAL:
                lead = sign * _lead(study, cell, method)
                yield Evidence(where=f"{_panel(cell)}, {method}", holds=lead > 0, value=lead)


def local_catches_up(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        if cell.dgp is Dgp.CURVED:
            G = study.loss(study.run(cell, Method.GRADIENT), END)
            for method in LOCAL:
                behind = (study.loss(study.run(cell, method), END) - G) / study.decrease(cell)
                yield Evidence(where=f"{_panel(cell)}, {method}", holds=behind <= CLOSE, value=behind)


def spatial_slowdown(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for method in LOCAL:
            spatial, random = (
                study.residual(study.run(_reference(study, seed, dgp, partition), method), 1.0)
                for partition in (Partition.SPATIAL, Partition.RANDOM)
            )
            yield Evidence(where=f"{dgp}, {method}", holds=spatial > random, value=spatial / random)


def _reference(study: Study, seed: int, dgp: Dgp, partition: Partition) -> Cell:
    return study.cell(seed, dgp, partition, study.scale.reference_clients)


def rebound(run: Measured) -> float:
    """The largest rise of the pooled loss above an earlier one; zero or less if it only fell."""
    return largest_rise(c.loss for c in run.checkpoints)


def uniform_rebound(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        cell = _reference(study, seed, dgp, Partition.SPATIAL)
        rise = rebound(study.run(cell, Method.LOCAL_UNIFORM)) / study.decrease(cell)
        yield Evidence(where=_panel(cell), holds=rise > 0, value=rise)


def small_rebound(study: Study, seed: int) -> Iterator[Evidence]:
    for item in uniform_rebound(study, seed):
        yield Evidence(where=item.where, holds=0 < item.value <= 2 * CLOSE, value=item.value)


def uniform_excess(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        cell = _reference(study, seed, dgp, Partition.SPATIAL)
        uniform, pooled = (
            study.run(cell, method).checkpoints[-1].loss for method in (Method.LOCAL_UNIFORM, Method.GRADIENT)
        )
        excess = (uniform - pooled) / study.decrease(cell)
        yield Evidence(where=_panel(cell), holds=excess > 0, value=excess)


def residuals_differ(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        ratio = 1.0
        for t in TIMES:
            runs = [study.run(cell, method) for method in PAPER]
            for a in runs:
                for b in runs:
                    close = abs(study.loss(a, t) - study.loss(b, t)) <= CLOSE * study.decrease(cell)
                    if close:
                        ratio = max(ratio, study.residual(a, t) / study.residual(b, t))
        yield Evidence(where=_panel(cell), holds=ratio >= FACTOR, value=ratio)


def dearer_local_rounds(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        G, L = (study.run(cell, method) for method in (Method.GRADIENT, Method.LOCAL_SIZE))
        ratio = _slowest(L) / _slowest(G)
        yield Evidence(where=_panel(cell), holds=ratio > 1 and L.rounds < G.rounds, value=ratio)


def _slowest(run: Measured) -> float:
    return statistics.median(time.slowest for time in run.times)


def sizes_matter(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        cell = _reference(study, seed, dgp, Partition.RANDOM)
        size, uniform = (study.run(cell, method).checkpoints[-1].residual for method in LOCAL)
        ratio = uniform / size
        yield Evidence(where=_panel(cell), holds=max(ratio, 1 / ratio) >= FACTOR, value=ratio)


def size_weights_miss(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        cell = _reference(study, seed, dgp, Partition.SPATIAL)
        run = study.run(cell, Method.LOCAL_SIZE)
        yield Evidence(where=_panel(cell), holds=not run.converged, value=run.checkpoints[-1].residual)


def spatial_dispersion(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        spatial, random = (
            dispersion(_reference(study, seed, dgp, partition)) for partition in reversed(Partition)
        )
        for part, a, b in zip(("gradient", "curvature"), spatial, random, strict=True):
            yield Evidence(where=f"{dgp}, {part}", holds=a > b, value=a / b)


def reversals(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        losses = {m: [study.loss(study.run(cell, m), t) for t in TIMES] for m in PAPER}
        changes = 0
        for a, b in combinations(PAPER, 2):
            signs = [x > y for x, y in zip(losses[a], losses[b], strict=True) if x != y]
            changes += sum(p != q for p, q in pairwise(signs))
        yield Evidence(where=_panel(cell), holds=changes > 0, value=changes)


def _ends(study: Study, seed: int, dgp: Dgp, partition: Partition, method: Method) -> list[Measured]:
    """The runs at the fewest and at the most clients."""
    return [
        study.run(study.cell(seed, dgp, partition, M), method) for M in (study.clients[0], study.clients[-1])
    ]


def fixed_time_balance(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for partition in Partition:
            for method in PAPER:
                few, many = (
                    study.residual(run, TIME_BUDGET) for run in _ends(study, seed, dgp, partition, method)
                )
                differs = max(few / many, many / few) >= FACTOR
                yield Evidence(where=f"{dgp}, {partition}, {method}", holds=differs, value=many / few)


def uniform_worsens(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for partition in Partition:
            change = _uniform_change(study, seed, dgp, partition)
            yield Evidence(where=f"{dgp}, {partition}", holds=change > 0, value=change)


def worsens_most_spatially(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        spatial, random = (_uniform_change(study, seed, dgp, partition) for partition in reversed(Partition))
        yield Evidence(where=dgp.value, holds=spatial > max(random, 0.0), value=spatial - random)


def _uniform_change(study: Study, seed: int, dgp: Dgp, partition: Partition) -> float:
    """The growth, from few to many clients, of uniform weights' loss above size weights', of the decrease."""
    uniform, size = (
        [run.at_round(ROUND_BUDGET).loss for run in _ends(study, seed, dgp, partition, method)]
        for method in (Method.LOCAL_UNIFORM, Method.LOCAL_SIZE)
    )
    cell = _reference(study, seed, dgp, partition)
    return ((uniform[1] - size[1]) - (uniform[0] - size[0])) / study.decrease(cell)


def gradient_higher_at_budget(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        for partition in Partition:
            for method in LOCAL:
                for M in study.clients:
                    cell = study.cell(seed, dgp, partition, M)
                    G, L = (study.run(cell, m).at_round(ROUND_BUDGET).loss for m in (Method.GRADIENT, method))
                    above = (G - L) / study.decrease(cell)
                    yield Evidence(where=f"{dgp}, {partition}, {method}", holds=above > 0, value=above)


def queries_per_update(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        G, L = (study.run(cell, method) for method in (Method.GRADIENT, Method.LOCAL_SIZE))
        several = G.checkpoints[-1].rounds / G.updates
        one = L.checkpoints[-1].rounds == L.updates
        yield Evidence(where=_panel(cell), holds=several >= FACTOR and one, value=several)


def invariance(study: Study, seed: int) -> Iterator[Evidence]:
    for dgp in Dgp:
        runs = [
            study.run(study.cell(seed, dgp, partition, M), Method.GRADIENT)
            for partition in Partition
            for M in study.clients
        ]
        distinct = len({(run.digest, run.rounds, run.updates) for run in runs})
        yield Evidence(where=f"{dgp}, {len(runs)} partitions", holds=distinct == 1, value=distinct)


def not_slower_in_time(study: Study, seed: int) -> Iterator[Evidence]:
    for cell in study.cells(seed):
        for method in LOCAL:
            G, L = study.run(cell, Method.GRADIENT), study.run(cell, method)
            ahead = sum(study.residual(G, t) < study.residual(L, t) for t in TIMES) / len(TIMES)
            yield Evidence(where=f"{_panel(cell)}, {method}", holds=ahead > 0, value=ahead)
