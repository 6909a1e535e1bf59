"""What decides the sentences whose panels differ: a formula or a setting, with its numbers in a campaign."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedtmle_paper.reproduce.campaign import Campaign
from fedtmle_paper.reproduce.checks import expected_excess, uniform_excess_formula
from fedtmle_paper.reproduce.measure import Measured
from fedtmle_paper.reproduce.scenario import Dgp, Method, Partition, Profile

Views = Mapping[Profile, Campaign]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A formula or a setting in words, and the numbers that it has in a campaign, as text."""

    text: str
    numbers: Callable[[Views], str]


def _excess(views: Views) -> str:
    """The formula at the reference number of clients, on the scale of the sentences' own tables."""
    campaign = views[Profile.A]
    M = campaign.scale.reference_clients
    parts = []
    for dgp in Dgp:
        for partition in Partition:
            scenarios = [campaign.scenario(seed, dgp, partition, M) for seed in campaign.seeds]
            ratios = [uniform_excess_formula(s) / campaign.decrease(s) for s in scenarios]
            parts.append(f"{dgp}, {partition} {_median(ratios)}")
    return f"the formula over the decrease, M = {M}: {'; '.join(parts)}"


def _random_part(views: Views) -> str:
    """The random part, and the whole formula under the spatial partition, by the number of clients."""
    campaign = views[Profile.A]
    seed = campaign.seeds[0]
    random = [
        f"{expected_excess(campaign.scenario(seed, Dgp.GAUSSIAN, Partition.RANDOM, M)):.2e}"
        for M in campaign.clients
    ]
    parts = [f"the random part at M = {', '.join(map(str, campaign.clients))}: {', '.join(random)}"]
    for dgp in Dgp:
        spatial = [
            _median(
                [
                    uniform_excess_formula(campaign.scenario(s, dgp, Partition.SPATIAL, M))
                    for s in campaign.seeds
                ],
                ".2e",
            )
            for M in campaign.clients
        ]
        parts.append(f"the whole formula, {dgp}, spatial: {', '.join(spatial)}")
    return "; ".join(parts)


def _inner_rounds(views: Views) -> str:
    """G's rounds per update under each profile."""
    return "G's rounds per update: " + ", ".join(
        f"{profile} {_median([run.checkpoints[-1].rounds / max(1, run.updates) for run in runs])}"
        for profile, runs in _of(views, Method.GRADIENT)
    )


def _fit_seconds(views: Views) -> str:
    """The slowest silo's compute in a round of L under each profile."""
    return "slowest silo's compute in a round of L: " + ", ".join(
        f"{profile} {_median([1e3 * statistics.mean(t.slowest for t in run.times) for run in runs])} ms"
        for profile, runs in _of(views, Method.LOCAL_SIZE)
    )


def _of(views: Views, method: Method) -> list[tuple[Profile, list[Measured]]]:
    """The runs of a method at the reference number of clients, by profile."""
    return [
        (
            profile,
            [view.run(scenario, method) for seed in view.seeds for scenario in view.scenarios(seed)],
        )
        for profile, view in views.items()
    ]


def _median(values: Sequence[float], digits: str = ".3g") -> str:
    return format(statistics.median(values), digits)


EXCESS = Reason(
    text="the excess of uniform weights, (1/2) Delta' V^-1 Delta with Delta = sum_m (1/M - N_m/n) P_m D; "
    "under the spatial partition client size goes with the score, so it does not vanish with n, whatever the "
    "budget",
    numbers=_excess,
)
START = Reason(
    text="the loss rises where the start lies nearer to the pooled optimum than that excess, so where the "
    "formula over the decrease is above one",
    numbers=_excess,
)
RANDOM = Reason(
    text="the random part of the excess, (d/2) sum_m (1/M - N_m/n)^2/N_m, falls with M; only its spatial "
    "part can grow",
    numbers=_random_part,
)
INNER = Reason(
    text="how long G's inner solves are: profile A solves to 0.1 r^k, profile B takes one step",
    numbers=_inner_rounds,
)
FITS = Reason(
    text="how dear a local fit is: Newton's method in profile A, gradients alone in profile B",
    numbers=_fit_seconds,
)
