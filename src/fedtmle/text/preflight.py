"""What a statistician reads before a study runs, as text: its preflight, and the cost of privacy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import NormalDist

from fedtmle.layout import aligned, histogram_table, share, wrapped
from fedtmle.studies.preflight import Preflight
from fedtmle.studies.privacy_cost import SMALLEST_N, PrivacyCost, PrivacyPlan
from fedtmle.targets.diagnostics import Characteristic

HIDDEN = "hidden"
NOTABLE = 0.25  # a larger standardised difference relies on the models (Imbens and Rubin, 2015)


def render_preflight(view: Preflight) -> str:
    """Return the whole view; its first line is the title."""
    parts = (
        _title(view),
        _flow(view),
        _table(view),
        _missing(view),
        _overlap(view),
        _fitted(view),
        _warnings(view),
        _note(view),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _warnings(view: Preflight) -> Iterator[str]:
    for warning in view.warnings:
        yield from wrapped(warning, indent="         ", first="Warning: ")


def _title(view: Preflight) -> Iterator[str]:
    if view.floor is None:
        yield f"Silo {view.silos[0]}: {view.n_rows:,} records, in full, for its owner"
    else:
        few = f"nothing is said about fewer than {view.floor}"
        yield f"{len(view.silos)} silos, {view.n_rows:,} records; {few}"


def _flow(view: Preflight) -> Iterator[str]:
    rows = [["cohort", "records"], ["total", f"{view.n_rows:,}"]]
    rows += [[count.name, f"{count.count:,}"] for count in view.lost]
    yield from aligned(rows)


def _table(view: Preflight) -> Iterator[str]:
    several = len(view.arms) > 1
    arms = [_word(view, view.treatment, arm) for arm in view.arms]
    rows = [["mean (sd) or share", *arms, *(["difference"] if several else [])]]
    rows.append(["records", *(f"{count.count:,}" for count in view.arm_counts), *([""] if several else [])])
    for _, lines in groupby(view.lines, key=lambda line: line.name):
        levels = list(lines)
        if len(levels) > 1 and not any(line.silos for line in levels):
            levels = [replace(levels[0], level=None)]  # one line for a factor of which nothing is shown
        for line in levels:
            row = [_label(view, line), *(_cell(line, a) for a in range(len(view.arms)))]
            if several:
                row.append("-" if line.difference is None else f"{line.difference:+.2f}")
            rows.append(row)
    yield from aligned(rows)


def _label(view: Preflight, line: Characteristic) -> str:
    """Return the label of a line: that of a variable that is 0 or 1 stands for its 1."""
    label = view.labels.get(line.name, line.name)
    if line.level is None or (line.level == "1" and not view.words.get(line.name)):
        return label
    return f"{label}: {_word(view, line.name, line.level)}"


def _word(view: Preflight, name: str | None, level: str) -> str:
    return view.words.get(name or "", {}).get(level, level)


def _cell(line: Characteristic, arm: int) -> str:
    if not line.silos:
        return HIDDEN
    if line.sd is None:
        return "-" if math.isnan(line.mean[arm]) else f"{line.mean[arm]:.0%}"
    return f"{line.mean[arm]:.4g} ({line.sd[arm]:.3g})" if line.sd else f"{line.mean[arm]:.4g}"


def _missing(view: Preflight) -> Iterator[str]:
    """Yield the columns with missing values."""
    columns = [count for count in view.missing if count.count]
    if not columns:
        yield (
            "No value is missing." if view.floor is None else f"No column lacks {view.floor} values or more."
        )
        return
    rows = [["missing values", "records", "share"]]
    for count in columns:
        name = view.labels.get(count.name, count.name)
        rows.append([name, f"{count.count:,}", share(count.count, count.of)])
    yield from aligned(rows)


def _overlap(view: Preflight) -> Iterator[str]:
    if len(view.arms) < 2:
        return
    different = [
        line for line in view.lines if line.difference is not None and abs(line.difference) > NOTABLE
    ]
    names = ", ".join(_label(view, line) for line in different)
    text = "Overlap: "
    if different:
        text += f"The arms differ by more than {NOTABLE:g} standard deviations in {names}. "
    if any(not line.silos for line in view.lines):
        text += "Some characteristics are hidden, so the table does not say whether these are balanced."
    elif not different:
        text += f"No characteristic differs between the arms by more than {NOTABLE:g} standard deviations."
    yield from wrapped(text)


def _fitted(view: Preflight) -> Iterator[str]:
    """Yield histograms of the fitted propensity score by arm."""
    if view.overlap is None:
        return
    if view.overlap.problem is not None:
        yield from wrapped(f"The treatment model could not be fitted: {view.overlap.problem}")
        return
    yield from histogram_table(view.overlap.histograms)


def _note(view: Preflight) -> Iterator[str]:
    if view.floor is not None:
        yield from wrapped(
            f"Counts and shares are rounded, so that no group of 1 to {view.floor - 1} records is told, nor "
            "the rest of one; a mean is rounded to what one record can change. A line is hidden in small "
            "arms, and where one record could be most of it. Outcomes by arm are not shown before the study "
            "runs."
        )


# What a privacy budget is expected to cost, in words: for `fedtmle budget` and the demonstration.

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


def cost_table(
    plan: PrivacyPlan, sizes: Sequence[int] = SIZES, epsilons: Sequence[float] = ()
) -> list[list[PrivacyCost]]:
    """Return the expected costs, one row for each n, with each epsilon and the study's own in its order.

    Without any given, they are half of the study's own, twice and four times that.
    """
    own = plan.privacy.epsilon
    around = [max(own / 2, 0.01), min(2 * own, 20.0), min(4 * own, 20.0)]
    chosen = sorted({own, *(epsilons or around)})
    return [[plan.cost(n, epsilon) for epsilon in chosen] for n in sizes]


def render_cost(plan: PrivacyPlan, table: Sequence[Sequence[PrivacyCost]], smallest: int | None) -> str:
    """Return the expected half-widths by n and epsilon, and below which n the study's epsilon is no use."""
    study, privacy = plan.study, plan.privacy
    z = NormalDist().inv_cdf(0.5 + study.confidence / 2)
    of = "the effect" if study.target.contrast() is not None else "each mean, the widest one"
    if study.target.strata is not None:
        of = f"{of.partition(',')[0]}, overall and by {study.target.strata}, the widest one"
    rows = [["n", *(f"epsilon = {cost.epsilon:g}" for cost in table[0]), "none"]]
    for line in table:
        cells = [
            f"{z * max(cost.std_errors):.2g} ({cost.inflation:.2f}){'*' if cost.limits else ''}"
            for cost in line
        ]
        rows.append([f"{line[0].n:,}", *cells, f"{z * max(line[-1].without_noise):.2g}"])
    if smallest is None:
        useful = f"Epsilon = {privacy.epsilon:g} is not useful for this study at any n."
    elif smallest <= SMALLEST_N:
        useful = f"Epsilon = {privacy.epsilon:g} is useful from n = {SMALLEST_N:,} or fewer."
    else:
        useful = f"Epsilon = {privacy.epsilon:g} is not useful below n = {smallest:,}."
    mean, _ = plan.outcome
    low, high = study.outcome_bounds
    seen = f", {plan.observed:.0%} of the outcomes observed" if "missingness" in study.models else ""
    treated = f"{plan.treated:.0%} treated, " if study.target.treatment is not None else ""
    return "\n".join(
        [
            *wrapped(
                f"Expected half-width of the {study.confidence:.0%} interval of {of}, and how many times as "
                f"wide as without noise. {plan.silos} silos, delta = {privacy.delta:g}, {privacy.colluders} "
                "colluding."
            ),
            "",
            *aligned(rows),
            "",
            *wrapped("* The interval would not be promised to cover: a result says so in a warning."),
            *wrapped(useful),
            "",
            *wrapped(
                f"Assumed: {treated}a mean outcome of {low + (high - low) * mean:g}{seen}, numbers that span "
                f"their declared ranges, levels of equal frequency, correct models whose linear predictors "
                f"have the standard deviation {plan.strength:g}. The options change these. Narrower ranges "
                "and fewer covariates cost less."
            ),
        ]
    )
