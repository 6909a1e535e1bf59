"""RESULTS.md: the settings of the runs, the verdict on each sentence of section 5, and the numbers.

The last sections report the extra experiments.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedtmle import __version__
from fedtmle_paper.reproduce.campaign import TIME_BUDGET, Campaign
from fedtmle_paper.reproduce.checks import expected_excess, uniform_excess_formula
from fedtmle_paper.reproduce.extra import MAX_UPDATES, NOISE, CodedCost, Coverage, Extra, Rebound, Retirement
from fedtmle_paper.reproduce.figures import wilson
from fedtmle_paper.reproduce.panels import PanelRun, panel_section
from fedtmle_paper.reproduce.robustness import Retained, robustness_section
from fedtmle_paper.reproduce.scenario import ROUND_BUDGET, STANDSTILL, Dgp, Method, Partition, Profile
from fedtmle_paper.reproduce.sentences import SentenceResult, joint_verdict, sentence_results

LATENCIES = (0.0, 0.005, 0.02, 0.1)
ENOUGH_SEEDS = 5


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What the measurements cost on this machine."""

    wall: float
    compute: float  # seconds charged to all silos and the server, shared work as often as needed
    workers: int


def report(campaign: Campaign | None, extra: Extra | None, effort: Effort) -> str:
    """The whole file."""
    sections = ["# The paper's experiments, as they came out here", "", *_conditions(campaign, effort)]
    if campaign is not None:
        sections += [
            *_sentences(campaign),
            *_latencies(campaign),
            *_reference(campaign),
            *_endpoints(campaign),
        ]
    if extra is not None:
        sections += extra_sections(extra, campaign)
    return "\n".join(sections) + "\n"


def _conditions(campaign: Campaign | None, effort: Effort) -> Iterator[str]:
    yield (
        f"fedtmle {__version__}, Python {platform.python_version()}, {platform.machine()}; "
        f"{effort.workers} worker process(es), {effort.wall:.0f} s in all."
    )
    if campaign is None:
        return
    seeds = ", ".join(map(str, campaign.seeds))
    yield from (
        "",
        f"n = {campaign.scale.n:,}, pilot sample {campaign.scale.pilot:,}, M in {campaign.clients}, "
        f"seeds {seeds}. Charged to all parties together: {effort.compute:.0f} s of compute.",
        "",
        "* **Time** is simulated parallel time of a synchronous federation: per round the slowest silo's "
        f"CPU time, the server's, and a link latency of {1e3 * campaign.latency:g} ms (request and reply). "
        "Work on the law (quadrature, normalisers) is done once in this process, and every party that needs "
        "it is charged its measured time, as if it had done it itself. Set-up: the pilot density, the "
        "greetings.",
        "* **Reference unit**: FedTMLE-G's time to r <= 0.01 r^0 on DGP 1, random partition, M = "
        f"{campaign.scale.reference_clients}, of the same seed.",
        f"* **Stops**: G and L at r <= {campaign.scale.tolerance:g}, Algorithm 4 (one step per update) at a "
        f"certified r <= {campaign.scale.coded_tolerance:g}; L also when an update is shorter than "
        f"{STANDSTILL:g}, its fixed point. After its stop a method keeps its last density, in time and up "
        f"to {ROUND_BUDGET} rounds.",
        "* **Profiles**: the paper leaves two choices open. A: G's inner solves run to 0.1 r^k, L fits by "
        "Newton's method. B: G takes one gradient step per update (T_k = 1), with backtracking, L fits by "
        "gradients alone (L-BFGS, to a gradient of 1e-9). Figures of B have the suffix -B; Algorithm 4 is "
        "the same in both. A sentence holds under a profile if it holds in every panel of every seed.",
        "* **A density counts** once its last eps is pooled and its law rebuilt. Figure 3 uses "
        f"{TIME_BUDGET} units. Losses are P_n L; the decrease is P_n L(p^0) less the lowest loss of "
        "the paper's methods.",
        "* Different methods solve the same equation with different densities, so even converged runs differ "
        "in loss.",
    )
    if len(campaign.seeds) < ENOUGH_SEEDS:
        yield f"* Only {len(campaign.seeds)} seed(s): the verdicts below are no more than an indication."


def _sentences(campaign: Campaign) -> Iterator[str]:
    yield from ("", "## The sentences of section 5", "")
    views = {profile: campaign.under(profile) for profile in Profile}
    results = {profile: sentence_results(view) for profile, view in views.items()}
    together = [dict(zip(Profile, row, strict=True)) for row in zip(*results.values(), strict=True)]
    verdicts: dict[str, list[str]] = {}
    for findings in together:
        name = findings[Profile.A].sentence.name
        verdicts.setdefault(joint_verdict(findings), []).append(name)
    yield from (f"* {verdict}: {len(names)} ({', '.join(names)})" for verdict, names in verdicts.items())
    for profile, found in results.items():
        required = [f for f in found if f.sentence.required]
        counts = ", ".join(f"{f.sentence.name} in {f.held} of {len(f.evidence)} panels" for f in required)
        yield f"* required to hold, profile {profile}: {counts}"
    for findings in together:
        yield from _finding(findings, views)
    yield from _excesses(campaign)


def _finding(findings: Mapping[Profile, SentenceResult], views: Mapping[Profile, Campaign]) -> Iterator[str]:
    sentence = findings[Profile.A].sentence
    counts = ", ".join(f"{p} {f.held} of {len(f.evidence)}" for p, f in findings.items())
    yield from (
        "",
        f"### {sentence.name}: {joint_verdict(findings)} ({counts})",
        "",
        f"> {sentence.quote}",
        "",
        f"Asked: {sentence.criterion}.{' Required to hold.' if sentence.required else ''}",
    )
    for reason in sentence.decided_by:
        yield from ("", f"Decided by: {reason.text}. Here, {reason.numbers(views)} (medians over the seeds).")
    yield from (
        "",
        f"| panel | profile | holds | {sentence.number}: median | least | greatest |",
        "|---|---|---|---|---|---|",
    )
    for profile, finding in findings.items():
        for where, (held, total, middle, least, greatest) in finding.by_panel().items():
            row = f"| {where} | {profile} | {held} of {total} "
            yield f"{row}| {middle:.3g} | {least:.3g} | {greatest:.3g} |"


def _excesses(campaign: Campaign) -> Iterator[str]:
    """The excess of uniform weights: realised, by its formula, and the random part of the formula."""
    yield from (
        "",
        "### The excess of uniform weights, by formula",
        "",
        "Loss above the pooled optimum: L uniform's last loss less G's last; the formula "
        "(1/2) Delta' V^-1 Delta at p^0, Delta = sum_m (1/M - N_m/n) P_m D and V the curvature of the pooled "
        "loss; its expectation under a random partition, (d/2) sum_m (1/M - N_m/n)^2/N_m, which depends on "
        "the sizes alone. Medians over the seeds, profile A.",
        "",
        "| data | partition | M | realised | formula | random part |",
        "|---|---|---|---|---|---|",
    )
    for dgp in Dgp:
        for partition in Partition:
            for M in campaign.clients:
                scenarios = [campaign.scenario(seed, dgp, partition, M) for seed in campaign.seeds]
                realised = [
                    campaign.run(s, Method.LOCAL_UNIFORM).checkpoints[-1].loss
                    - campaign.run(s, Method.GRADIENT).checkpoints[-1].loss
                    for s in scenarios
                ]
                formula = [uniform_excess_formula(s) for s in scenarios]
                random = expected_excess(scenarios[0])
                yield (
                    f"| {dgp} | {partition} | {M} | {_median(realised)} | {_median(formula)} | {random:.3g} |"
                )


def _latencies(campaign: Campaign) -> Iterator[str]:
    """The same runs read at other latencies: rounds are dear or cheap, computation is as measured."""
    views = [campaign.at(latency) for latency in LATENCIES]
    table = [sentence_results(view) for view in views]
    header = " | ".join(f"{1e3 * latency:g} ms" for latency in LATENCIES)
    yield from (
        "",
        "## Sensitivity to the link latency",
        "",
        "Panels that hold, of all, under profile A; rows that change only.",
        "",
    )
    yield f"| sentence | {header} |"
    yield "|---" * (len(LATENCIES) + 1) + "|"
    units = " | ".join(f"{view.unit(campaign.seeds[0]):.3g} s" for view in views)
    yield f"| *reference unit, seed {campaign.seeds[0]}* | {units} |"
    for row in zip(*table, strict=True):
        if len({finding.held for finding in row}) > 1:
            scenarios = " | ".join(f"{finding.held} of {len(finding.evidence)}" for finding in row)
            yield f"| {row[0].sentence.name} | {scenarios} |"


def _reference(campaign: Campaign) -> Iterator[str]:
    yield from ("", "## The reference unit", "", "| seed | profile A, seconds | profile B |", "|---|---|---|")
    views = [campaign.under(profile) for profile in Profile]
    for seed in campaign.seeds:
        yield f"| {seed} | {' | '.join(f'{view.unit(seed):.4f}' for view in views)} |"
    early = [
        run
        for view in views
        for run in view.runs
        if run.method is Method.GRADIENT
        and run.checkpoints[-1].elapsed(view.latency) < TIME_BUDGET * view.unit(run.scenario.seed)
    ]
    yield from (
        "",
        f"Runs of G that stopped before {TIME_BUDGET} units, so that figure 3 censors them: {len(early)}.",
    )


def _endpoints(campaign: Campaign) -> Iterator[str]:
    """Each converged run's Psi against the direct pooled solution."""
    yield from (
        "",
        "## The endpoint check",
        "",
        "Psi(p^K) against the direct solution of the pooled transport problem: the largest coordinate of the "
        "difference, over the runs that converged (and, for the record, over those that did not).",
        "",
        "| method | converged | worst error | worst error / r^K | worst error / SE | others | their worst |",
        "|---|---|---|---|---|---|---|",
    )
    chosen = [(profile, method) for profile in Profile for method in profile.methods]
    for profile, method in chosen:
        runs = [r for r in campaign.measured if (r.profile, r.method) == (profile, method)]
        done = [run for run in runs if run.converged]
        others = [run for run in runs if not run.converged]
        ratio = _worst([run.endpoint_error / run.checkpoints[-1].residual for run in done])
        yield (
            f"| {method}, {profile} | {len(done)} of {len(runs)} "
            f"| {_worst([run.endpoint_error for run in done])} "
            f"| {ratio} "
            f"| {_worst([run.endpoint_error / run.std_error for run in done])} "
            f"| {', '.join(sorted({run.status for run in others})) or 'none'} "
            f"| {_worst([run.endpoint_error for run in others])} |"
        )


def _worst(values: Sequence[float]) -> str:
    return f"{max(values):.2g}" if values else "-"


Key = TypeVar("Key")


def extra_sections(extra: Extra, campaign: Campaign | None) -> list[str]:
    """Return the sections of the extra experiments."""
    return [
        *_costs(extra.of(CodedCost)),
        *panel_section(extra.of(PanelRun), campaign),
        *_rebounds(extra.of(Rebound)),
        *_retirements(extra.of(Retirement)),
        *robustness_section(extra.of(Retained)),
        *_coverage(extra.of(Coverage)),
    ]


def _costs(table: Sequence[CodedCost]) -> Iterator[str]:
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
