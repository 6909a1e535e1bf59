"""The numbers in figures, which the report and `fedtmle.plots` share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from fedtmle.layout import Document, covariate_name
from fedtmle.results.result import StudyResult
from fedtmle.runtime.result import Result
from fedtmle.targets.effects.estimands import Scale


def document_of(result: StudyResult | Result | Document) -> Document:
    """Return the document of a result; a core result gets the table of estimates that a study has."""
    if isinstance(result, StudyResult):
        return result.document
    if not isinstance(result, Result):
        return result
    plain = result.to_dict()
    z = NormalDist().inv_cdf(0.975)
    errors = plain["std_error"] or []
    plain["estimates"] = [
        {
            "estimand": name,
            "estimate": value,
            "std_error": error,
            "conf_low": None if error is None else value - z * error,
            "conf_high": None if error is None else value + z * error,
            "p_value": None,
            "scale": Scale.VALUE.value,
        }
        for name, value, error in zip(result.names, plain["psi"] or [], errors, strict=False)
    ]
    return plain


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One row of a forest plot.

    ``kind`` is "pooled", "silo", "summary" (of the silos' own estimates), "prediction" (its interval for the
    effect at another silo), or "without" (the summary of all silos but ``label``).
    """

    label: str  # the silo, or "pooled"
    kind: str
    estimate: float
    low: float
    high: float
    n: int | None  # None if sums were masked, which hides a silo's number of records

    @property
    def name(self) -> str:
        return f"without {self.label}" if self.kind == "without" else self.label

    @property
    def is_summary(self) -> bool:
        """Whether it combines all records or all silos."""
        return self.kind in ("pooled", "summary")


@dataclass(frozen=True, kw_only=True)
class Forest:
    """One estimand: the pooled estimate, those of consenting silos, and their random-effects summary."""

    estimand: str
    rows: tuple[Interval, ...]
    null: float | None
    ratio: bool
    weights: Mapping[str, float]  # weight of each silo in the random-effects summary; they add up to 1


def forests(document: Document) -> list[Forest]:
    """Return one forest per estimand, with the silos whose own numbers the document holds."""
    sizes, n = document["sizes"], document["n"]
    drawn = []
    for index, pooled in enumerate(document["estimates"]):
        rows = [
            *(
                _interval(silo, "silo", estimates[index], sizes[silo])
                for silo, estimates in _per_silo(document, "silos")
            ),
            *_summaries(document, pooled["estimand"]),
            *(
                _interval(silo, "without", estimates[index], _less(n, sizes[silo]))
                for silo, estimates in _per_silo(document, "without")
            ),
            _interval("pooled", "pooled", pooled, n),
        ]
        shown = tuple(row for row in rows if row is not None)
        if shown:
            scale = Scale(pooled["scale"])
            spread = [
                line for line in document.get("heterogeneity", []) if line["estimand"] == pooled["estimand"]
            ]
            drawn.append(
                Forest(
                    estimand=pooled["estimand"],
                    rows=shown,
                    null=scale.null,
                    ratio=scale.is_log,
                    weights=spread[0]["weights"] if spread else {},
                )
            )
    return drawn


def _summaries(document: Document, estimand: str) -> Iterator[Interval | None]:
    """Yield the random-effects summary of the silos' own estimates, and its prediction interval."""
    known = [document["sizes"][silo] for silo, _ in _per_silo(document, "silos")]
    n = None if None in known else sum(known)
    for line in document.get("heterogeneity", []):
        if line["estimand"] == estimand:
            summary = line["summaries"][0]
            yield _interval("random effects", "summary", summary, n)
            ends = {f"conf_{end}": summary[f"prediction_{end}"] for end in ("low", "high")}
            yield _interval("prediction", "prediction", {**summary, **ends}, n)


def _per_silo(document: Document, key: str) -> list[tuple[str, list[Document]]]:
    return list(document.get(key, {}).items())


def _less(n: int, size: int | None) -> int | None:
    return None if size is None else n - size


def _interval(label: str, kind: str, row: Document, n: int | None) -> Interval | None:
    numbers = (row["estimate"], row["conf_low"], row["conf_high"])
    if any(number is None or not math.isfinite(number) for number in numbers):
        return None
    estimate, low, high = map(float, numbers)
    return Interval(label=label, kind=kind, estimate=estimate, low=low, high=high, n=n)


@dataclass(frozen=True, kw_only=True)
class Path:
    """The norm of the pooled gradient and, if known, the loss at each round of targeting.

    ``at_origin`` marks the rounds whose norm is the residual of the current law. ``loss`` is the pooled loss
    minus its first value.
    """

    rounds: tuple[int, ...]
    norm: tuple[float | None, ...]
    at_origin: tuple[bool, ...]
    tolerance: float | None
    loss: tuple[float | None, ...] | None


def path(document: Document) -> Path:
    """Return the trajectory of targeting that the document holds."""
    trajectory = document["trajectory"]
    points = trajectory["points"]
    stated = document["certificate"] or {}
    loss = trajectory["loss_by_round"]
    if loss is not None:
        loss = [None if value is None or loss[0] is None else value - loss[0] for value in loss]
    elif any(point["loss_change"] is not None for point in points) and document["updates"] <= 1:
        loss = [
            0.0 if point["at_origin"] and point["update"] == 0 else point["loss_change"] for point in points
        ]
    return Path(
        rounds=tuple(point["round"] for point in points),
        norm=tuple(point["gradient_norm"] for point in points),
        at_origin=tuple(point["at_origin"] for point in points),
        tolerance=stated.get("tolerance"),
        loss=None if loss is None else tuple(loss),
    )


@dataclass(frozen=True, kw_only=True)
class BitsByRound:
    """Payload bits by round: those that each silo sent, and those of each broadcast."""

    phases: tuple[str, ...]  # one per round
    up: Mapping[str, tuple[int, ...]]
    down: tuple[int, ...]


def bits_by_round(document: Document) -> BitsByRound:
    """Return the bits by silo and round."""
    by_round = document["account"]["by_round"]
    return BitsByRound(
        phases=tuple(phase for phase, count in by_round["phases"] for _ in range(count)),
        up={silo: tuple(sent) for silo, sent in by_round["up"].items()},
        down=tuple(by_round["down"]),
    )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm: its records, observed outcomes and truncated probabilities.

    ``truncated`` is summed over the silos that disclose the count. ``hidden_in`` is the number of silos that
    hide it because it is small.
    """

    name: str
    records: int
    observed: int
    truncated: int
    hidden_in: int


@dataclass(frozen=True, kw_only=True)
class CohortOverlap:
    """Counts by arm, effective sample sizes, and the truncation of the propensity score, if any."""

    arms: tuple[Arm, ...]
    records: int  # number in all arms; each record has a score for every arm
    effective: Mapping[str, float]
    truncation: float | None


def overlap(document: Document) -> CohortOverlap | None:
    """Return the counts by arm, or None for the result of something other than a study."""
    if "arms" not in document:
        return None
    keys = ("arms", "arm_counts", "observed_counts", "truncated", "truncated_hidden")
    if not document["truncated"]:  # a target with a problem of its own has no such counts
        document = {**document, **dict.fromkeys(keys[3:], [0] * len(document["arms"]))}
    return CohortOverlap(
        arms=tuple(
            Arm(name=name, records=records, observed=observed, truncated=truncated, hidden_in=hidden)
            for name, records, observed, truncated, hidden in zip(
                *(document[key] for key in keys), strict=True
            )
        ),
        records=document["n"],
        effective=document["effective_sizes"],
        truncation=document["g_floor"] or None,
    )


@dataclass(frozen=True, kw_only=True)
class Love:
    """Standardised differences of the covariates between an arm and the reference; None is hidden."""

    arm: str
    reference: str
    names: tuple[str, ...]
    unweighted: tuple[float | None, ...]
    weighted: tuple[float | None, ...]
    is_partial: tuple[bool, ...]  # by covariate, whether some silo hides it

    @property
    def is_complete(self) -> bool:
        """Whether every silo discloses every covariate."""
        return not any(self.is_partial)

    @property
    def largest(self) -> float:
        """The largest difference after weighting of a covariate that no silo hides; NaN if there is none."""
        pairs = zip(self.weighted, self.is_partial, strict=True)
        return max((abs(v) for v, hidden in pairs if v is not None and not hidden), default=math.nan)


def balance(document: Document) -> tuple[Love, ...]:
    """Return the numbers of a Love plot for each arm but the reference; empty if there are none."""
    data = document.get("balance")
    if not data:
        return ()
    silos = len(document["sizes"])
    lines = [line for line in data["covariates"] if line["hidden_in"] < silos]
    if not lines:
        return ()
    return tuple(
        Love(
            arm=arm,
            reference=data["reference"],
            names=tuple(
                covariate_name(line)
                + (f" [{silos - line['hidden_in']} of {silos} silos]" if line["hidden_in"] else "")
                for line in lines
            ),
            unweighted=tuple(line["differences"][k] for line in lines),
            weighted=tuple(line["weighted_differences"][k] for line in lines),
            is_partial=tuple(line["hidden_in"] > 0 for line in lines),
        )
        for k, arm in enumerate(data["arms"])
    )


@dataclass(frozen=True, kw_only=True)
class Probabilities:
    """Histograms of the probability of the arm ``of`` by observed arm; None is a hidden count."""

    of: str
    edges: tuple[float, ...]
    counts: Mapping[str, tuple[int | None, ...]]  # by observed arm


def probabilities(document: Document) -> list[Probabilities]:
    """Return histograms for each arm whose probability the silos disclosed."""
    by_arm: dict[str, Probabilities] = {}
    for histogram in (document.get("diagnostics") or {}).get("overlap", []):
        of = histogram["probability_of"]
        before = by_arm[of].counts if of in by_arm else {}
        counts = {**before, histogram["arm"]: tuple(histogram["counts"])}
        by_arm[of] = Probabilities(of=of, edges=tuple(histogram["edges"]), counts=counts)
    return list(by_arm.values())


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Cochran's Q of one estimand, and each silo's distance from the weighted mean in standard errors.

    Q is the sum of the squared distances.
    """

    estimand: str
    distance: Mapping[str, float]
    Q: float
    df: int
    I2: float
    p: float


def heterogeneity(document: Document) -> list[Spread]:
    """Return the spread of each estimand for which at least two silos released their estimates."""
    spreads = []
    for line in document.get("heterogeneity", []):
        spreads.append(
            Spread(
                estimand=line["estimand"],
                distance=line["distance"],
                Q=line["Q"],
                df=line["df"],
                I2=line["I2"],
                p=line["p_value"],
            )
        )
    return spreads


@dataclass(frozen=True, kw_only=True)
class Horizons:
    """One estimand by horizon, with pointwise intervals and the band that holds for all of them at once."""

    estimand: str
    horizons: tuple[int, ...]
    estimate: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    band_low: tuple[float, ...]
    band_high: tuple[float, ...]
    null: float | None


def by_horizon(document: Document) -> list[Horizons]:
    """Return each estimand over its horizons: of time to an event, or of an event under rules over time."""
    rows: dict[str, list[tuple[int, Document, Document]]] = {}
    over_time = "grid" in document or any(len(each["horizons"]) > 1 for each in document.get("rules") or ())
    for row, joint in zip(document["estimates"], document.get("simultaneous", []), strict=False):
        named = re.fullmatch(r"(.*) at (\d+)(.*)", row["estimand"]) if over_time else None
        if named:
            rows.setdefault(named[1] + named[3], []).append((int(named[2]), row, joint))
    return [
        Horizons(
            estimand=name,
            horizons=tuple(horizon for horizon, _, _ in points),
            estimate=tuple(row["estimate"] for _, row, _ in points),
            low=tuple(row["conf_low"] for _, row, _ in points),
            high=tuple(row["conf_high"] for _, row, _ in points),
            band_low=tuple(joint["conf_low"] for _, _, joint in points),
            band_high=tuple(joint["conf_high"] for _, _, joint in points),
            null=Scale(points[0][1]["scale"]).null,
        )
        for name, points in rows.items()
    ]


@dataclass(frozen=True, kw_only=True)
class FollowedShares:
    """The shares of those at risk who have followed a rule so far, in the periods that no silo hides."""

    rule: str
    periods: tuple[int, ...]
    shares: tuple[float, ...]


def adherence(document: Document) -> list[FollowedShares]:
    """Return who has followed each rule over time; none for other studies or without diagnostics."""
    followed = []
    for each in document.get("adherence") or ():
        counted = zip(each["followers"], each["at_risk"], each["hidden_in"], strict=True)
        known = [
            (t, count / risk) for t, (count, risk, hidden) in enumerate(counted, 1) if risk and not hidden
        ]
        followed.append(
            FollowedShares(
                rule=each["rule"],
                periods=tuple(t for t, _ in known),
                shares=tuple(share for _, share in known),
            )
        )
    return followed


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The cumulative weights of those who have followed a rule so far, in bins, period by period.

    ``counts`` are None in a period that every silo hides, and sums over the other silos if ``is_partial``.
    All rules of a study have the same bins: from the smallest to the largest weights that any of them has.
    """

    rule: str
    bins: tuple[str, ...]
    counts: tuple[tuple[int, ...] | None, ...]
    is_partial: tuple[bool, ...]

    @property
    def largest(self) -> float:
        """The largest share of a period's followers in one bin; 1 if every silo hides all periods."""
        return max(max(self.shares(t)) for t in range(1, len(self.counts) + 1)) or 1.0

    def shares(self, period: int) -> list[float]:
        """Return the share of the period's followers in each bin; all 0 if every silo hides them."""
        counts = self.counts[period - 1] or (0,) * len(self.bins)
        return [count / (sum(counts) or 1) for count in counts]


def weights(document: Document) -> list[Weights]:
    """Return the weights of each rule's followers; none for other studies or without diagnostics."""
    shown: list[Document] = document.get("adherence") or []
    used = [b for each in shown for row in each["weight_counts"] for b, count in enumerate(row) if count]
    if not used:
        return []
    edges = [f"{edge:g}" for edge in shown[0]["weight_edges"]]
    names = [f"below {edges[0]}", *(f"{a} to {b}" for a, b in pairwise(edges)), f"above {edges[-1]}"]
    bins = slice(min(used), max(used) + 1)
    return [
        Weights(
            rule=each["rule"],
            bins=tuple(names[bins]),
            counts=tuple(None if row[0] is None else tuple(row[bins]) for row in each["weight_counts"]),
            is_partial=tuple(
                hidden > 0 for hidden in each.get("weights_hidden_in", [0] * len(each["weight_counts"]))
            ),
        )
        for each in shown
    ]
