"""What a privacy budget is expected to cost, in words: for `fedtmle budget` and the demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

from fedtmle.layout import aligned, wrapped
from fedtmle.studies.privacy_cost import SMALLEST_N, PrivacyCost, PrivacyPlan

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


def render(plan: PrivacyPlan, table: Sequence[Sequence[PrivacyCost]], smallest: int | None) -> str:
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
