"""What the figures show, as numbers: the page and `fedtmle.plots` draw the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from fedtmle.results.result import StudyResult
from fedtmle.runtime.result import Result
from fedtmle.targets.effects.estimands import Scale

Document = Mapping[str, Any]


def document_of(result: StudyResult | Result | Document) -> Document:
    """The plain data of a result; a core result gets the table that a study has."""
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
    """One line of a forest plot."""

    label: str  # the silo, or "pooled"
    kind: str  # "pooled", "silo" or "without": all silos but this one
    estimate: float
    low: float
    high: float
    n: int

    @property
    def name(self) -> str:
        return f"without {self.label}" if self.kind == "without" else self.label


@dataclass(frozen=True, kw_only=True)
class Forest:
    """One estimand: pooled, the silos that consented, and the pooled estimate without each of them."""

    estimand: str
    rows: tuple[Interval, ...]
    null: float | None
    ratio: bool


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
            *(
                _interval(silo, "without", estimates[index], n - sizes[silo])
                for silo, estimates in _per_silo(document, "without")
            ),
            _interval("pooled", "pooled", pooled, n),
        ]
        shown = tuple(row for row in rows if row is not None)
        if shown:
            scale = Scale(pooled["scale"])
            drawn.append(Forest(estimand=pooled["estimand"], rows=shown, null=scale.null, ratio=scale.is_log))
    return drawn


def _per_silo(document: Document, key: str) -> list[tuple[str, Any]]:
    return list(document.get(key, {}).items())


def _interval(label: str, kind: str, row: Mapping[str, Any], n: int) -> Interval | None:
    numbers = (row["estimate"], row["conf_low"], row["conf_high"])
    if any(number is None or not math.isfinite(number) for number in numbers):
        return None
    estimate, low, high = map(float, numbers)
    return Interval(label=label, kind=kind, estimate=estimate, low=low, high=high, n=n)


@dataclass(frozen=True, kw_only=True)
class Path:
    """The residual (and, where it is known, the loss) at each round of targeting."""

    rounds: tuple[int, ...]
    norm: tuple[float | None, ...]  # of the pooled gradient where the round asked
    at_origin: tuple[bool, ...]  # there it is the residual of the current law
    tolerance: float | None
    loss: tuple[float | None, ...] | None  # pooled, less its first value


def path(document: Document) -> Path:
    """The trajectory as the parties learned it."""
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
class Bits:
    """Payload bits by round: what each silo sent, and the length of each broadcast."""

    phases: tuple[str, ...]  # of each round
    up: Mapping[str, tuple[int, ...]]
    down: tuple[int, ...]


def bits(document: Document) -> Bits:
    """Bits by silo and round."""
    by_round = document["account"]["by_round"]
    return Bits(
        phases=tuple(phase for phase, count in by_round["phases"] for _ in range(count)),
        up={silo: tuple(sent) for silo, sent in by_round["up"].items()},
        down=tuple(by_round["down"]),
    )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm: how many records, outcomes and truncated probabilities."""

    name: str
    records: int
    observed: int
    truncated: int  # in the silos that tell
    hidden_in: int  # silos that have a few, and do not


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Counts by arm, and how many rows the inverse probabilities leave in effect."""

    arms: tuple[Arm, ...]
    effective: Mapping[str, float]
    floor: float | None


def overlap(document: Document) -> Overlap | None:
    """None for a result that is not of a study."""
    if "arms" not in document:
        return None
    keys = ("arms", "arm_counts", "observed_counts", "truncated", "truncated_hidden")
    return Overlap(
        arms=tuple(
            Arm(name=name, records=records, observed=observed, truncated=truncated, hidden_in=hidden)
            for name, records, observed, truncated, hidden in zip(
                *(document[key] for key in keys), strict=True
            )
        ),
        effective=document["effective_sizes"],
        floor=document["g_floor"] or None,
    )


@dataclass(frozen=True, kw_only=True)
class Probabilities:
    """How the modelled probability of one arm is spread among those in each arm; None is hidden."""

    of: str
    edges: tuple[float, ...]
    counts: Mapping[str, tuple[int | None, ...]]  # by the arm that was taken


def probabilities(document: Document) -> list[Probabilities]:
    """One for each arm whose probability the silos told of, in bins of enough people."""
    found: dict[str, Probabilities] = {}
    for histogram in (document.get("diagnostics") or {}).get("overlap", []):
        of = histogram["probability_of"]
        before = found[of].counts if of in found else {}
        counts = {**before, histogram["arm"]: tuple(histogram["counts"])}
        found[of] = Probabilities(of=of, edges=tuple(histogram["edges"]), counts=counts)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Cochran's Q of one estimand, with each silo's distance from the centre in its standard errors."""

    estimand: str
    distance: Mapping[str, float]  # Q is the sum of their squares
    Q: float
    df: int
    I2: float
    p: float


def heterogeneity(document: Document) -> list[Spread]:
    """For each estimand that two silos or more released."""
    names = [row["estimand"] for row in document["estimates"]]
    found = []
    for line in document.get("heterogeneity", []):
        index = names.index(line["estimand"])
        rows = {silo: own[index] for silo, own in document["silos"].items()}
        weight = {silo: 1.0 / row["std_error"] ** 2 for silo, row in rows.items()}
        centre = sum(weight[silo] * row["estimate"] for silo, row in rows.items()) / sum(weight.values())
        found.append(
            Spread(
                estimand=line["estimand"],
                distance={s: (row["estimate"] - centre) / row["std_error"] for s, row in rows.items()},
                Q=line["Q"],
                df=line["df"],
                I2=line["I2"],
                p=chi_square_tail(line["Q"], line["df"]),
            )
        )
    return found


def chi_square_tail(x: float, df: int) -> float:
    """P(chi^2_df > x): Q_df(x) = Q_{df-2}(x) + (x/2)^{df/2 - 1} e^{-x/2} / Gamma(df/2)."""
    if x <= 0:
        return 1.0
    half = x / 2
    tail, first = (math.erfc(math.sqrt(half)), 3) if df % 2 else (math.exp(-half), 4)
    for k in range(first, df + 1, 2):
        tail += math.exp((k / 2 - 1) * math.log(half) - half - math.lgamma(k / 2))
    return min(tail, 1.0)
