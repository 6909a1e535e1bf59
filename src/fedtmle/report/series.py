"""The numbers and the words that the report and `fedtmle.plots` share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from fedtmle.layout import Document, covariate_name, silo_count
from fedtmle.results.result import StudyResult
from fedtmle.runtime.result import Result
from fedtmle.targets.effects.estimands import Scale

# The words of a study that a clinician reads: its measure, title and labels, and a methods paragraph.

ALGORITHMS = {
    "Coded": "federated TMLE with rounded gradients (FedTMLE, Algorithm 4 of Li, Wang and Gan)",
    "Gradient": "federated TMLE with exact pooled gradients (FedTMLE-G)",
    "LocalAverage": "federated TMLE by averaged local fits (FedTMLE-L)",
    "Personalized": "federated TMLE with retirement (FedTMLE-LR)",
    "Central": "TMLE on pooled records",
    "OneStep": "a one-step (augmented inverse probability weighted) correction",
}


def label(document: Document, name: str | None) -> str:
    """Return the label of a variable from the dictionary, or its name."""
    declared = document["study"]["variables"].get(name, {})
    return str(declared.get("label") or name)


def _with_unit(document: Document, name: str | None) -> str:
    unit = document["study"]["variables"].get(name, {}).get("unit")
    return f"{label(document, name)} ({unit})" if unit else label(document, name)


def outcome(document: Document) -> str:
    """Return the outcome's label, with its unit."""
    return _with_unit(document, document["study"]["target"]["outcome"])


def time(document: Document) -> str:
    """Return the label of the time to the event, with its unit."""
    return _with_unit(document, document["study"]["target"].get("time"))


def arm(document: Document, code: str) -> str:
    """Return the label of an arm from the dictionary's levels of the treatment, or its code."""
    treatment = document["study"]["target"]["treatment"]
    levels = document["study"]["variables"].get(treatment, {}).get("levels", {})
    return str(levels.get(code) or code)


def rule(document: Document, name: str) -> str:
    """Return the words of a rule over time: its name, or "always" and the arm if it is one arm."""
    return f"always {arm(document, name)}" if name in document["study"]["target"]["arms"] else name


def component(document: Document, name: str) -> str:
    """Return the words of a component such as "E[Y(usual)]": the arm, and the population if not everyone."""
    regime, _, population = name.removeprefix("E[Y(").partition(")]")
    return f"{arm(document, regime)}{population}" if name.startswith("E[Y(") else name


def caption(document: Document) -> str:
    """Return the caption of a table of estimates: the measure, the outcome and the arms compared."""
    first, compared = measure(document), comparison(document)
    named = f"{first[:1].upper()}{first[1:]} of {outcome(document)}"
    return f"{named}: {compared}" if compared else named


def asked(document: Document) -> str:
    """Return a sentence that says what was estimated, where the page's title does not."""
    if title(document) == document["question"]:
        return ""
    if document["study"]["target"]["measure"] is None:
        return str(document["question"])
    return f"{caption(document)}." if document["study"]["title"] else ""


def measure(document: Document) -> str:
    """Return the measure, such as "risk difference"; for an estimand of another package, its name."""
    target = document["study"]["target"]
    return str(target["measure"] or _spaced(target["kind"]))


def curve_measure(document: Document) -> str:
    """Return the measure that the curves of a study of time to an event show, such as "risk"."""
    kind = str(document["grid"]["measure"])
    words = _spaced(kind.removeprefix("Policy").removesuffix("Difference").removesuffix("Ratio"))
    return f"{words} in periods" if kind.startswith(("RMST", "TimeLost")) else words


def _spaced(name: str) -> str:
    """Return the name of a class as words: "RiskDifference" is "risk difference", "RMST" stays as it is."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[^A-Z]+", name)
    return " ".join(word if word.isupper() and len(word) > 1 else word.lower() for word in words)


def title(document: Document) -> str:
    """Return the title of the page: the study's own, or one made of measure, outcome and arms."""
    own = document["study"]["title"]
    if own:
        return str(own)
    if document["study"]["target"]["measure"] is None:
        return str(document["question"])
    first = measure(document)
    named = f"{first[:1].upper()}{first[1:]}: {label(document, document['study']['target']['outcome'])}"
    compared = comparison(document)
    return f"{named}, {compared}" if compared else named


def comparison(document: Document) -> str:
    """Return the arms that are compared, as in "exercise against usual"; empty without a treatment."""
    target = document["study"]["target"]
    if target["treatment"] is None or target["kind"] == "PolicyMeans" or "over_time" in target:
        return ""
    reference, *others = (arm(document, code) for code in target["arms"])
    treatment = label(document, target["treatment"])
    named = " and ".join(others)
    if treatment.lower() not in named.lower():  # "Early intervention" needs no "early intervention" after it
        named = f"{treatment} {named}"
    return f"{named} against {reference}"


def _own_methods(document: Document) -> Iterator[str]:
    """Yield the sentences about the models of a target that another distribution brings."""
    study, brought = document["study"], document["study"]["target"]["brought"]
    source = f"{brought['distribution'] or brought['module']} {brought['version'] or ''}".strip()
    yield f"The target, {study['target']['kind']}, comes from the package {source}."
    for role, model in study["models"].items():
        yield f"The {role} model was {model}."
    if document.get("g_floor"):
        yield f"Probabilities were truncated from below at {document['g_floor']:.3g}."


def methods(document: Document) -> Iterator[str]:
    """Yield the sentences of a methods paragraph, all from the values of this run."""
    study = document["study"]
    target, options, models = study["target"], study["options"], study["models"]
    compared = comparison(document)
    yield (
        f"We estimated the {measure(document)} of {outcome(document)}"
        + (f", comparing {compared}," if compared else "")
        + " by targeted maximum likelihood estimation (TMLE) over "
        f"{document['n']:,} records held by {silo_count(document)}; records were not pooled."
    )
    if "brought" in target:
        yield from _own_methods(document)
        models = {}
    if "over_time" in target:
        bound = document.get("weight_bound")
        limit = f"truncated at {bound:.3g}" if bound else "not truncated"
        yield (
            "Outcomes under the rules were estimated by sequential regression, backwards over "
            f"{len(document['periods'])} periods, each regression fluctuated with the cumulative inverse "
            f"probability weights, {limit}."
        )
    if "outcome" in models:
        yield f"The outcome regression was {models['outcome']}."
    if "hazard" in models:
        yield f"The hazard of the event was modelled by {models['hazard']}."
    if "treatment" in models:
        floor = document.get("g_floor")
        bound = f", truncated from below at {floor:.3g}" if floor else ", not truncated"
        yield f"The propensity score was {models['treatment']}{bound}."
    if "missingness" in models:
        yield (
            "Missing outcomes were accounted for by inverse probability of observation weights from "
            f"{models['missingness']}."
        )
    if "censoring" in models:
        yield f"Censoring was modelled by {models['censoring']}."
    if target["strata"]:
        yield f"Effects were also estimated within levels of {label(document, target['strata'])}."
    if options.get("folds"):
        yield f"Models were cross-fitted over {options['folds']} folds."
    if options.get("weights"):
        yield f"Records were weighted by {label(document, options['weights'])}."
    clustered = (
        f", with records clustered by {label(document, options['cluster'])}" if options.get("cluster") else ""
    )
    yield (
        f"Standard errors are those of the efficient influence function{clustered}; intervals are Wald "
        f"intervals with {options['confidence']:.0%} confidence, on the log scale for ratios."
    )
    kind = study["algorithm"]["kind"]
    stated = document.get("certificate") or {}
    privacy = document.get("privacy")
    if privacy:
        stated = {}
        yield (
            f"Sums had discrete Gaussian noise for ({privacy['epsilon']:g}, {privacy['delta']:g})-"
            "differential privacy of single records; standard errors include the noise and its effect on "
            "the models."
        )
    what = "estimate was made" if privacy else "estimating equation was solved"
    sentence = f"The {what} by {ALGORITHMS.get(kind, kind)}"
    errors = [row["std_error"] for row in document["estimates"] if row["std_error"]]
    if stated.get("residual_bound") is not None and errors:
        relative = stated["residual_bound"] / min(errors)
        sentence += (
            f" until it held over all records to within {relative:.1g} of the smallest standard error, so "
            "that the estimate is that of the pooled records to this accuracy"
        )
    yield f"{sentence}."
    yield (
        f"Analyses used fedtmle {document.get('version', '')} (plan {str(document.get('plan', ''))[:16]}, "
        f"random seed {options.get('seed', 0)})."
    )


# The numbers in figures, which the report and `fedtmle.plots` share.


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


ZERO = "0 to the grid's rounding"  # a norm of zero, in words


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

    @property
    def known(self) -> list[tuple[int, float]]:
        """The rounds whose norm the parties learned, with their norms."""
        return [(r, v) for r, v in zip(self.rounds, self.norm, strict=True) if v is not None]

    @property
    def zeros(self) -> list[int]:
        """The rounds whose norm is zero: the pooled sums, rounded to their grid, cancel."""
        return [r for r, v in self.known if v == 0]


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
    """One arm: its records, observed outcomes or events, and truncated probabilities.

    ``truncated`` is summed over the silos that disclose the count. ``hidden_in`` is the number of silos that
    hide it because it is small. ``observed_hidden_in`` is the same for events.
    """

    name: str
    records: int
    observed: int
    truncated: int
    hidden_in: int
    observed_hidden_in: int = 0


@dataclass(frozen=True, kw_only=True)
class CohortOverlap:
    """Counts by arm and effective sample sizes."""

    arms: tuple[Arm, ...]
    records: int  # number in all arms; each record has a score for every arm
    effective: Mapping[str, float]


def overlap(document: Document) -> CohortOverlap | None:
    """Return the counts by arm, or None for the result of something other than a study."""
    if "arms" not in document:
        return None
    keys = ("arms", "arm_counts", "observed_counts", "truncated", "truncated_hidden")
    if not document["truncated"]:  # a target with a problem of its own has no such counts
        document = {**document, **dict.fromkeys(keys[3:], [0] * len(document["arms"]))}
    unseen = document.get("events_hidden_in", [0] * len(document["arms"]))
    return CohortOverlap(
        arms=tuple(
            Arm(
                name=name,
                records=records,
                observed=observed,
                truncated=truncated,
                hidden_in=hidden,
                observed_hidden_in=less,
            )
            for name, records, observed, truncated, hidden, less in zip(
                *(document[key] for key in keys), unseen, strict=True
            )
        ),
        records=document["n"],
        effective=document["effective_sizes"],
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
