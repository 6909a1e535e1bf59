"""The sections of RESULTS.md on the extra experiments."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

from fedtmle.reproduce.bounds import Cost
from fedtmle.reproduce.coverage import Coverage
from fedtmle.reproduce.extra import Extra
from fedtmle.reproduce.extra_figures import wilson
from fedtmle.reproduce.rebound import Rebound
from fedtmle.reproduce.retirement import MAX_UPDATES, NOISE, Retirement

Key = TypeVar("Key")


def extra_sections(extra: Extra) -> list[str]:
    """Costs, the rebound, retirement, coverage."""
    return [
        *_costs(extra.costs),
        *_rebounds(extra.rebounds),
        *_retirements(extra.retirements),
        *_coverage(extra.coverage),
    ]


def _costs(table: Sequence[Cost]) -> Iterator[str]:
    yield from (
        "",
        "## Rounds and bits of Algorithm 4 against its tolerance",
        "",
        f"Random partition, M = {table[0].clients}, seed {table[0].seed}. Inner: adaptive, the paper's inner "
        "solves, or one step per update, the default here. R bound: eq. main-communication, half of it for "
        "one step; B bound: eq. pathwise-bit-bound, with the run's own beta, kappa, Delta and G; fixed "
        "width: the absolute protocol on the same trajectory; H: bits of the accepted history.",
        "",
        "| data | coordinates | inner | delta | certified | R | R bound | B | B bound | fixed width | H |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    )
    for cost in table:
        yield (
            f"| {cost.dgp} | {cost.coordinates} | {cost.inner} | {cost.tolerance:g} "
            f"| {cost.residual_bound:.2g} "
            f"| {cost.rounds} | {cost.round_bound:,.0f} | {cost.bits:,} | {cost.pathwise_bit_bound:,.0f} "
            f"| {cost.fixed_width_bits:,} | {cost.history_bits:,} |"
        )
    broken = [c for c in table if c.rounds > c.round_bound or c.bits > c.pathwise_bit_bound]
    yield from ("", f"Bounds broken: {len(broken)} of {len(table)} runs.")


def _rebounds(table: Sequence[Rebound]) -> Iterator[str]:
    yield from (
        "",
        "## The rebound under uniform weights and spatial partition, over more samples",
        "",
        "The rise of a loss is positive or nil, and which of them is a matter of the sample. Uniform weights "
        "end near the root of the equal-weight equation, above the pooled optimum because client size goes "
        "with the spatial score; that excess varies little from sample to sample. The start lies anywhere "
        "around both, as the pilot sample has it: where it lies beyond that root the loss falls all the way. "
        "So *the sign of the rebound* is read as that of its median over samples, with the counts beside it. "
        "Decrease: from P_n L(p^0) to the pooled optimum; medians with the least and the greatest.",
        "",
        "| data | samples | rises | by over 1% of the decrease | ends above the start "
        "| ends above the optimum | rise / decrease | excess | decrease |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    for dgp in dict.fromkeys(item.dgp for item in table):
        items = [item for item in table if item.dgp == dgp]
        yield (
            f"| {dgp} | {len(items)} | {sum(item.rise > 0 for item in items)} "
            f"| {sum(item.rise > 0.01 * item.decrease for item in items)} "
            f"| {sum(item.excess > item.decrease for item in items)} "
            f"| {sum(item.excess > 0 for item in items)} "
            f"| {_spread([item.rise / item.decrease for item in items])} "
            f"| {_spread([item.excess for item in items])} "
            f"| {_spread([item.decrease for item in items])} |"
        )


def _retirements(table: Sequence[Retirement]) -> Iterator[str]:
    yield from (
        "",
        "## Retirement in FedTMLE-LR, uniform against sample-size weights",
        "",
        f"A silo retires when its EIF mean is within its own sampling noise (`noise={NOISE:g}`); at most "
        f"{MAX_UPDATES} updates. Error: the distance of a retired silo's Psi from its own direct "
        "solution, in its own standard errors; chi is the run's sum of chi_k (thm:personalized-convergence).",
        "",
        "| panel | weights | retired | their median tau | median error / SE | median chi | all retired |",
        "|---|---|---|---|---|---|---|",
    )
    for panel in dict.fromkeys((item.dgp, item.partition, item.weights) for item in table):
        items = [item for item in table if (item.dgp, item.partition, item.weights) == panel]
        gone = [item for item in items if item.retired_at is not None]
        taus = [float(item.retired_at) for item in gone if item.retired_at is not None]
        seeds = sorted({item.seed for item in items})
        whole = sum(all(i.retired_at is not None for i in items if i.seed == seed) for seed in seeds)
        yield (
            f"| {panel[0]}, {panel[1]} | {panel[2]} | {len(gone)} of {len(items)} | {_median(taus)} "
            f"| {_median([item.endpoint_error / item.std_error for item in gone])} "
            f"| {_median([item.chi_total for item in items])} | {whole} of {len(seeds)} |"
        )


def _coverage(table: Sequence[Coverage]) -> Iterator[str]:
    yield from (
        "",
        "## Coverage of the transport target's 95% intervals",
        "",
        "Coded, whitened, ten silos, random partition; the truth is Psi of the distribution, by quadrature. "
        "D takes its curvature H from the law, a kernel density that is wider than the data. The standard "
        "errors take H over the rows, from the same closing moments; the last two columns are what D as it "
        "stands would give.",
        "",
        "| data | coordinate | covered | share (95% interval) | mean error / SD | mean SE / SD | law: share "
        "| SE / SD |",
        "|---|---|---|---|---|---|---|---|",
    )
    for dgp, name in dict.fromkeys((item.dgp, item.name) for item in table):
        items = [item for item in table if (item.dgp, item.name) == (dgp, name)]
        hits = sum(item.covers for item in items)
        share, low, high = wilson(hits, len(items))
        errors = [item.estimate - item.truth for item in items]
        spread = statistics.stdev(errors)
        error, size = statistics.mean(errors), statistics.mean(item.std_error for item in items)
        law_size = statistics.mean(item.law_std_error for item in items)
        law_share = statistics.mean(item.law_covers for item in items)
        yield (
            f"| {dgp} | {name} | {hits} of {len(items)} | {share:.3f} ({low:.3f} to {high:.3f}) "
            f"| {error / spread:+.2f} | {size / spread:.2f} | {law_share:.3f} | {law_size / spread:.2f} |"
        )


def _spread(values: Sequence[float]) -> str:
    return f"{_median(values)} ({min(values):.2g} to {max(values):.2g})"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g}" if values else "-"
