"""How well the arms overlap, before anything is targeted."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.algorithms.outcome import Query
from fedtmle.errors import InputError
from fedtmle.model.types import Array, exponent, first, unpack
from fedtmle.protocol.bins import BinsQuery, Group
from fedtmle.protocol.learners import JointQuery
from fedtmle.protocol.query import Phase, Spread
from fedtmle.protocol.tables import TallyQuery
from fedtmle.targets.effects.prepare import Preparation
from fedtmle.targets.effects.problem import EffectProblem
from fedtmle.targets.effects.rows import EffectRows

DEPENDENT = 1e-9  # share of a clever covariate's square that others leave unexplained


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """From pooled sums; ``truncated`` from the silos that tell theirs, as many as ``told``."""

    truncated: tuple[int, ...]  # rows whose g pi is below the floor, per arm
    told: tuple[int, ...]  # the others have a few such rows, or all but a few; per arm
    effective_sizes: tuple[float, ...]  # (sum H)^2 / sum H^2 of those observed, per component
    spanning: tuple[int, ...]  # components whose clever covariates span those of all
    predicted: tuple[float, float]  # mean and standard deviation of Q(A, W) on the unit scale


def find_overlap(effect: EffectProblem, preparation: Preparation, n: int) -> Generator[Query, Any, Overlap]:
    """One round; refuses a study whose arms do not overlap."""
    arms, count = len(preparation.columns.arms), len(preparation.components)

    def diagnosed(rows: EffectRows) -> Array:
        weight, q = first(rows.weight), rows.factual(rows.q)
        found = np.empty((count + len(upper) + 3, rows.n_rows))
        h, products, predicted = found[:count], found[count:-3], found[-3:]
        np.multiply(rows.covariates, weight, out=h)
        for product, r, s in zip(products, upper, lower, strict=True):
            np.multiply(h[r], h[s], out=product)
        predicted[0] = weight * first(rows.observed)
        np.multiply(predicted[0], q, out=predicted[1])
        np.multiply(q, q, out=predicted[2])
        predicted[2] *= predicted[0]
        return found

    def bounded(rows: EffectRows) -> list[Group]:
        return [Group(bins=below) for below in rows.truncated.view(np.uint8)]

    upper, lower = np.triu_indices(count)
    h, weight = effect.ceiling, effect.population_ceiling
    exponents = (exponent(h),) * count + (exponent(h * h),) * len(upper) + (exponent(weight),) * 3
    pooled, bins = yield JointQuery(
        (
            TallyQuery(
                columns=diagnosed,
                over=effect.over,
                exponents=exponents,
                n=n,
                what="inverse probability",
                spread=tuple(
                    Spread(r, count + int(np.flatnonzero((upper == r) & (lower == r))[0]))
                    for r in range(count)
                ),
            ),
            BinsQuery(
                groups=bounded,
                sizes=(2,) * arms,
                exponents=(),
                n=n,
                what="probabilities below their bound",
                phase=Phase.NUISANCE,
                floors=("min_cell", "min_truncated"),
                over=effect.over,
            ),
        )
    )
    sums = pooled.values()
    totals, gram = sums[:count], unpack(sums[count:-3], count)
    truncated = tuple(below.count for _, below in bins)
    _refuse_no_overlap(preparation, truncated, n)
    for component, mass in zip(preparation.components, np.diag(gram), strict=True):
        if not mass > 0:
            raise InputError(f"target: nobody with an observed outcome tells of {component.name}")
    effective = tuple(float(a * a / b) for a, b in zip(totals, np.diag(gram), strict=True))
    mass, total, squares = map(float, sums[-3:])
    mean = total / mass
    return Overlap(
        truncated=truncated,
        told=tuple(below.silos for _, below in bins),
        effective_sizes=effective,
        spanning=_spanning(gram, effective),
        predicted=(mean, float(np.sqrt(max(squares / mass - mean * mean, 0.0)))),
    )


def _refuse_no_overlap(preparation: Preparation, truncated: tuple[int, ...], n: int) -> None:
    for arm, rows in zip(preparation.columns.arms, truncated, strict=True):
        if rows > n / 2:
            raise InputError(
                f"g_bounds: the probability of arm '{arm}' is below {preparation.g_floor:.3g} for "
                f"{rows} of {n} rows; there is no overlap to learn from. Restrict the cohort, or simplify "
                "the treatment model"
            )


def _spanning(gram: Array, effective: tuple[float, ...]) -> tuple[int, ...]:
    """Components whose covariates are no combination of others', the narrowest first.

    The rest are mixtures of narrower ones, as everyone is of strata: their residuals are no larger.
    """
    root = np.sqrt(np.diag(gram))
    rest = gram / (root[:, None] * root)
    kept = []
    for r in sorted(range(len(gram)), key=lambda r: (effective[r], r)):
        if rest[r, r] > DEPENDENT:
            kept.append(r)
            rest = rest - rest[:, r, None] * rest[r] / rest[r, r]
    return tuple(sorted(kept))
