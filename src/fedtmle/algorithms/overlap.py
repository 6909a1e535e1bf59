"""How well the arms overlap, before anything is targeted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array, unpack
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.query import Flow, JointQuery, Phase, WeightSum
from fedtmle.protocol.sums import TallyQuery
from fedtmle.targets.effects.prepare import Preparation
from fedtmle.targets.effects.problem import EffectProblem
from fedtmle.targets.effects.statistics import OverlapColumns, TruncationBins

DEPENDENT_SHARE = 1e-9  # a clever covariate depends on others that leave less of its square unexplained


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap from pooled sums; ``truncated`` is over the silos that disclose theirs."""

    truncated: tuple[int, ...]  # rows whose g pi is below the bound, per arm
    disclosing: tuple[int, ...]  # silos that disclose their count, per arm; the others have too few rows
    effective_sizes: tuple[float, ...]  # (sum H)^2 / sum H^2 of those observed, per component
    spanning: tuple[int, ...]  # components whose clever covariates span those of all
    predicted: tuple[float, float]  # mean and standard deviation of Q(A, W) on the unit scale


def find_overlap(effect: EffectProblem, preparation: Preparation, n: int) -> Flow[Overlap]:
    """Ask for overlap in one round; refuse a study whose arms do not overlap."""
    arms, count = len(preparation.columns.arms), len(preparation.components)
    columns = OverlapColumns(effect)
    pooled, bins = yield JointQuery(
        (
            TallyQuery(
                columns=columns,
                n=n,
                weights=tuple(WeightSum(r, count + columns.pairs.index((r, r))) for r in range(count)),
            ),
            BinsQuery(
                bins=TruncationBins(effect, arms),
                n=n,
                phase=Phase.NUISANCE,
                floors=("min_cell", "min_truncated"),
            ),
        )
    )
    sums = pooled.values()
    totals, gram = sums[:count], unpack(sums[count:-3], count)
    truncated = tuple(below.count for _, below in bins)
    _refuse_no_overlap(preparation, truncated, n)
    for component, mass in zip(preparation.components, np.diag(gram), strict=True):
        if not mass > 0:
            raise InputError(f"target: no observed outcome contributes to {component.name}")
    effective = tuple(float(a * a / b) for a, b in zip(totals, np.diag(gram), strict=True))
    mass, total, squares = map(float, sums[-3:])
    mean = total / mass
    return Overlap(
        truncated=truncated,
        disclosing=tuple(below.silos for _, below in bins),
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
    """Return the components whose covariates are no combination of others', the narrowest first.

    The rest are mixtures of narrower ones, as everyone is of strata: their residuals are no larger.
    """
    root = np.sqrt(np.diag(gram))
    rest = gram / (root[:, None] * root)
    kept = []
    for r in sorted(range(len(gram)), key=lambda r: (effective[r], r)):
        if rest[r, r] > DEPENDENT_SHARE:
            kept.append(r)
            rest = rest - rest[:, r, None] * rest[r] / rest[r, r]
    return tuple(sorted(kept))
