"""The qualitative sentences of section 5 as data: what is quoted, what is asked, what the runs say."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fedtmle_paper.reproduce import checks
from fedtmle_paper.reproduce.campaign import Campaign
from fedtmle_paper.reproduce.checks import Evidence
from fedtmle_paper.reproduce.reasons import EXCESS, FITS, INNER, RANDOM, START, Reason
from fedtmle_paper.reproduce.scenario import Profile


class Verdict(enum.StrEnum):
    """What the runs say of a sentence."""

    CONFIRMED = "confirmed"
    MIXED = "mixed"
    NOT_CONFIRMED = "not confirmed"


SentenceCheck = Callable[[Campaign, int], Iterator[Evidence]]


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A sentence of section 5, what we ask of a panel, and the number reported."""

    name: str
    quote: str
    criterion: str
    number: str
    check: SentenceCheck
    required: bool = False
    decided_by: tuple[Reason, ...] = ()  # where the panels differ


@dataclass(frozen=True, kw_only=True)
class SentenceResult:
    """A sentence's evidence over all seeds."""

    sentence: Sentence
    evidence: tuple[Evidence, ...]

    @property
    def held(self) -> int:
        return sum(item.holds for item in self.evidence)

    @property
    def verdict(self) -> Verdict:
        if self.held == len(self.evidence):
            return Verdict.CONFIRMED
        return Verdict.MIXED if self.held else Verdict.NOT_CONFIRMED

    def by_panel(self) -> dict[str, tuple[int, int, float, float, float]]:
        """Panel -> how often it held, of how many, and the number's median, least and greatest."""
        panels: dict[str, list[Evidence]] = {}
        for item in self.evidence:
            panels.setdefault(item.where, []).append(item)
        return {
            where: (
                sum(item.holds for item in items),
                len(items),
                statistics.median(item.value for item in items),
                min(item.value for item in items),
                max(item.value for item in items),
            )
            for where, items in panels.items()
        }


SENTENCES = (
    Sentence(
        name="comparable-final-losses",
        quote="Comparable final losses are reached",
        criterion="final losses of G and both L within 5% of the decrease from P_n L(p^0)",
        number="spread of final losses / decrease",
        check=checks.comparable_final_losses,
        decided_by=(EXCESS,),
    ),
    Sentence(
        name="different-transients",
        quote="... through different transient behavior",
        criterion="at some time up to 3 units the losses are more than 5% of the decrease apart",
        number="widest spread / decrease",
        check=checks.different_transients,
    ),
    Sentence(
        name="local-leads-on-gaussian",
        quote="Local averaging makes faster initial progress on the Gaussian mixture",
        criterion="mean loss over the first 0.5 units below G's",
        number="lead / decrease",
        check=checks.local_leads_early,
        decided_by=(EXCESS,),
    ),
    Sentence(
        name="gradient-leads-on-curved",
        quote="FedTMLE-G leads early on the curved mixture",
        criterion="G's mean loss over the first 0.5 units below L's",
        number="lead / decrease",
        check=checks.gradient_leads_early,
        decided_by=(INNER, FITS),
    ),
    Sentence(
        name="local-catches-up",
        quote="... before the local methods catch up",
        criterion="curved mixture: at 3 units, L's loss at most 5% of the decrease above G's",
        number="(L - G) / decrease",
        check=checks.local_catches_up,
        decided_by=(EXCESS,),
    ),
    Sentence(
        name="spatial-slowdown",
        quote="Spatial partitioning introduces a clearer middle-stage slowdown for local averaging",
        criterion="L's residual at 1 unit larger under the spatial than under the random partition",
        number="spatial / random residual",
        check=checks.spatial_slowdown,
    ),
    Sentence(
        name="uniform-rebound",
        quote="... including a ... pooled-loss rebound under uniform weights",
        criterion="spatial partition, uniform weights: the pooled loss rises above an earlier one, in every "
        "sample (over more samples: the section on the rebound)",
        number="largest rise / decrease",
        check=checks.uniform_rebound,
        required=True,
        decided_by=(START,),
    ),
    Sentence(
        name="small-rebound",
        quote="a small ... rebound",
        criterion="the rise is positive and at most 10% of the decrease",
        number="largest rise / decrease",
        check=checks.small_rebound,
        decided_by=(EXCESS,),
    ),
    Sentence(
        name="uniform-excess",
        quote="(ours, beside the rebound: where the loss only falls, does it stay above G's?)",
        criterion="spatial partition: uniform weights end at a loss above G's",
        number="(L uniform - G) / decrease",
        check=checks.uniform_excess,
    ),
    Sentence(
        name="residuals-differ",
        quote="The EIF curves retain differences in targeting progress even when the losses are close",
        criterion="two methods within 5% of the decrease in loss at one time, a factor 2 apart in residual",
        number="largest such ratio",
        check=checks.residuals_differ,
    ),
    Sentence(
        name="dearer-local-rounds",
        quote="Timing balances repeated gradient synchronization against complete local solves",
        criterion="L makes fewer rounds than G, each with a slower slowest silo",
        number="L / G slowest compute per round",
        check=checks.dearer_local_rounds,
    ),
    Sentence(
        name="sizes-matter",
        quote="Unequal client sizes distinguish the averaging rules even under random partitioning",
        criterion="final residuals of the two weights a factor 2 apart, random partition",
        number="uniform / size residual",
        check=checks.sizes_matter,
    ),
    Sentence(
        name="spatial-gradients-and-curvature",
        quote="Spatial heterogeneity changes both local gradients and curvature",
        criterion="the silos' gradients, and Hessians, at p^0 vary more than under the random partition",
        number="spatial / random spread",
        check=checks.spatial_dispersion,
    ),
    Sentence(
        name="size-weights-miss",
        quote="sample-size weighting does not recover the pooled minimizer in general",
        criterion="spatial partition: L size stops at a residual above the tolerance",
        number="residual at its fixed point",
        check=checks.size_weights_miss,
    ),
    Sentence(
        name="reversals",
        quote="These effects allow temporary reversals in the methods' ordering",
        criterion="two of the three methods change order in loss within 3 units",
        number="changes of order",
        check=checks.reversals,
        decided_by=(INNER,),
    ),
    Sentence(
        name="fixed-time-balance",
        quote="The fixed-time residuals reflect a balance between parallel local work, synchronization, "
        "and smaller local samples",
        criterion="the residual at 1.5 units changes by a factor 2 from the fewest to the most clients",
        number="most / fewest clients",
        check=checks.fixed_time_balance,
        decided_by=(INNER,),
    ),
    Sentence(
        name="uniform-worsens-with-clients",
        quote="At 200 rounds, uniform weighting becomes less favorable as more clients divide the sample",
        criterion="uniform's loss above size's grows from the fewest to the most clients",
        number="growth / decrease",
        check=checks.uniform_worsens,
        decided_by=(RANDOM,),
    ),
    Sentence(
        name="most-with-spatial",
        quote="... particularly with spatial heterogeneity",
        criterion="that growth is positive and larger under the spatial partition",
        number="spatial - random growth / decrease",
        check=checks.worsens_most_spatially,
        decided_by=(RANDOM,),
    ),
    Sentence(
        name="gradient-higher-at-200-rounds",
        quote="FedTMLE-G retains higher loss under this communication budget",
        criterion="G's loss after 200 rounds above L's, at every number of clients",
        number="(G - L) / decrease",
        check=checks.gradient_higher_at_budget,
        decided_by=(EXCESS, INNER),
    ),
    Sentence(
        name="queries-per-update",
        quote="each update requires several pooled gradient and step-selection queries, while FedTMLE-L "
        "communicates after a complete local solve",
        criterion="G: at least 2 rounds per update; L: exactly 1",
        number="G's rounds per update",
        check=checks.queries_per_update,
    ),
    Sentence(
        name="gradient-invariant",
        quote="FedTMLE-G's full-batch trajectory remains invariant to repartitioning",
        criterion="every accepted eps the same to the bit for all partitions and numbers of clients",
        number="distinct trajectories",
        check=checks.invariance,
        required=True,
    ),
    Sentence(
        name="not-slower-in-time",
        quote="This budget-specific difference does not imply uniformly slower targeting in time",
        criterion="at some time up to 3 units G's residual is below L's",
        number="share of the time",
        check=checks.not_slower_in_time,
    ),
)


def joint_verdict(findings: Mapping[Profile, SentenceResult]) -> str:
    """Under which profiles every panel of every seed agrees with the sentence."""
    held = [profile.value for profile, found in findings.items() if found.verdict is Verdict.CONFIRMED]
    return (
        f"holds under profile {' and '.join(held)}" if held else "holds in every panel under neither profile"
    )


def sentence_results(campaign: Campaign) -> list[SentenceResult]:
    """Every sentence on every seed."""
    return [
        SentenceResult(
            sentence=sentence,
            evidence=tuple(item for seed in campaign.seeds for item in sentence.check(campaign, seed)),
        )
        for sentence in SENTENCES
    ]
