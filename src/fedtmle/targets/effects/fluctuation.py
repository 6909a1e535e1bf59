"""What of an effect's submodel is the same at every law: its covariates and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.scaled import Scaled
from fedtmle.model.table import pieces
from fedtmle.model.types import Array, is_one
from fedtmle.targets.effects.rows import EffectRows

Combination = tuple[tuple[float, ...], ...]  # L, (d, components)


@final
@dataclass(frozen=True)
class Fluctuation:
    """X_k = -width sum_r L_kr H_r of the arm that was taken, shape (d, N), and w (None: ones).

    With ``as_weight``, H is the weight and its sign the covariate.
    """

    combination: Combination
    X: Scaled
    w: Array | None

    @classmethod
    def of(cls, own: EffectRows, combination: Combination, width: float, *, as_weight: bool) -> Fluctuation:
        columns, factors = [], np.ones(len(combination))
        for k, row in enumerate(combination):
            shares = {r: -width * share for r, share in enumerate(row) if share}
            if len(shares) == 1 and not as_weight:  # a multiple of one covariate stays where that is
                ((r, factors[k]),) = shares.items()
                columns.append(own.covariates[r])
            else:
                columns.append(_combined(own, shares, as_weight))
        weight = own.weight * own.covariates.sum(axis=0) if as_weight else own.weight
        largest = np.array([kernels.largest(column) for column in columns])
        return cls(combination, Scaled(tuple(columns), factors, largest), None if is_one(weight) else weight)


def _combined(own: EffectRows, shares: Mapping[int, float], as_weight: bool) -> Array:
    """The sum of some covariates' shares, shape (N,)."""
    combined = np.zeros(own.n_rows)

    def fill(rows: slice) -> None:
        for r, share in shares.items():
            taken = own.covariates[r, rows]
            combined[rows] += share * (np.sign(taken) if as_weight else taken)

    kernels.done(fill, pieces(own.n_rows))
    return combined
