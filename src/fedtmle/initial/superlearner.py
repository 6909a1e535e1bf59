"""The super learner: a convex combination of learners, weighted by pooled cross-validated risk.

With r_k = y - p_k the out-of-fold residual of learner k and weights a on the simplex, the
combination's residual is sum_k a_k r_k, so its risk is a' A a with A_kl = sum_i w_i r_k r_l: the
silos send the sums A, no prediction. Squared error serves binary responses too (it is a proper
score); this is what R's SuperLearner calls method.CC_LS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import final

import numpy as np

from fedtmle.errors import DecodeError, InputError
from fedtmle.initial.crossfit import Fitted, Folds
from fedtmle.initial.glm import GLM, FittedGLM, Supplied
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.syntax import Formula
from fedtmle.initial.trees import GradientBoostedTrees, TreeEnsemble
from fedtmle.model.table import Table
from fedtmle.model.types import Array

MAX_CANDIDATES = 32  # exact weights of more take too long in the worst case
KEPT_BITS = 96  # bits kept of the largest sum; the rest is far below the ridge
RIDGE_BITS = 50


@final
@dataclass(frozen=True)
class PerSilo:
    """Trees that each silo fits on its own records. Each silo's trees have a weight of their own.

    A silo with too few records for a split abstains. All trees are sent to all silos: they disclose more
    about a silo's records than pooled sums do, as with `Pilot`.

    Parameters
    ----------
    model
        The trees to fit.

    Examples
    --------
    >>> ft.PerSilo(ft.GradientBoostedTrees("age + C(sex)")).model.rounds
    50
    """

    model: GradientBoostedTrees


Learner = GLM | Pilot | PerSilo


@final
@dataclass(frozen=True)
class SuperLearner:
    """The convex combination of learners with the least cross-validated squared error over all silos.

    Parameters
    ----------
    learners
        The candidates, such as `GLM`, `PerSilo` or `Pilot`.
    folds
        The number of folds. Each learner is fitted without each fold, and on all records.
    seed
        The seed of the folds, which each silo draws within its own records.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.SuperLearner((ft.GLM("age"), ft.GLM("age + I(age**2)")), folds=5).folds
    5
    """

    learners: tuple[Learner, ...]
    folds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "learners", tuple(self.learners))
        for learner in self.learners:
            if not isinstance(learner, Learner):
                raise InputError(
                    f"learners: expected GLM, Pilot or PerSilo, not {type(learner).__name__} "
                    "(trees go into a Pilot or PerSilo)"
                )
        if not 1 <= len(self.learners) <= MAX_CANDIDATES:
            raise InputError(f"learners: expected 1 to {MAX_CANDIDATES}, not {len(self.learners)}")
        if not self.folds >= 2:
            raise InputError(f"folds: expected at least 2, not {self.folds}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed: expected an integer from 0 to 2^32 - 1, not {self.seed}")

    def folds_within(self, left_out: int | None, cluster: str | None, *, spanning: bool = False) -> Folds:
        """Return the learner's folds when the study leaves out its fold ``left_out``, or none."""
        # Each fold that the study leaves out has another stream: if the study's own folds were drawn again,
        # one of them would be left without rows.
        stream = self.seed + ((1 if left_out is None else left_out + 2) << 32)
        return Folds(count=self.folds, seed=stream, cluster=cluster, spanning=spanning)


def formulas(model: object, *, public: bool = False) -> tuple[Formula, ...]:
    """Return the formulas to fit, whose factors need the study's levels.

    With ``public`` also those of models that are already fitted, which have levels of their own.
    """
    match model:
        case GLM() | GradientBoostedTrees():
            return (model.parsed,)
        case FittedGLM() | TreeEnsemble():
            return (model.formula,) if public else ()
        case Pilot(inner) | PerSilo(inner):
            return formulas(inner, public=public)
        case SuperLearner(learners):
            return tuple(formula for learner in learners for formula in formulas(learner, public=public))
        case _:
            return ()


def used_columns(model: object) -> tuple[str, ...]:
    """Return the columns that a nuisance model reads to predict, each once."""
    if isinstance(model, Supplied):
        return model.columns
    used = formulas(model, public=True)
    return tuple(dict.fromkeys(name for f in used for name in (*f.numeric_names, *f.factor_names)))


def pilots(model: object) -> tuple[Pilot, ...]:
    """Return the pilots among a nuisance model and its learners."""
    learners = model.learners if isinstance(model, SuperLearner) else (model,)
    return tuple(learner for learner in learners if isinstance(learner, Pilot))


def unit(prediction: Array) -> Array:
    """Return the prediction truncated to [0, 1], where every response of a study lies."""
    return np.clip(prediction, 0.0, 1.0)


@final
@dataclass(frozen=True, kw_only=True)
class SuperLearned:
    """The fitted combination; ``risks`` are the candidates' cross-validated mean squared errors."""

    labels: tuple[str, ...]
    models: tuple[Fitted, ...]
    weights: tuple[float, ...]
    risks: tuple[float, ...]

    def predict(self, table: Table) -> Array:
        """Return sum_k a_k p_k, added in order: the same bits in any partition; shape (N,)."""
        total = np.zeros(table.n_rows)
        for weight, model in zip(self.weights, self.models, strict=True):
            if weight:
                total += weight * unit(model.predict(table))
        return total


def simplex_weights(gram: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return argmin of a' A a over the simplex, by Wolfe's nearest-point method in exact integers.

    A is symmetric, of pooled sums in units of one grid. A ridge of 2^-50 of its largest entry makes
    it positive definite, so that the minimiser is unique: the same at all parties, and equal
    learners share their weight.
    """
    top = max(row[k] for k, row in enumerate(gram))
    cut = max(0, top.bit_length() - KEPT_BITS)
    ridge = max(1, top >> cut >> RIDGE_BITS)
    size = range(len(gram))
    A = [[(gram[k][j] >> cut) + (ridge if k == j else 0) for j in size] for k in size]
    first = min(size, key=lambda k: A[k][k])
    weights = {first: Fraction(1)}
    while True:
        weights, level = _descend(A, weights)
        outside = [j for j in size if j not in weights]
        slopes = {j: sum(A[j][k] * weight for k, weight in weights.items()) for j in outside}
        best = min(slopes, key=lambda j: slopes[j], default=None)
        if best is None or slopes[best] >= level:
            return tuple(float(weights.get(k, Fraction(0))) for k in size)
        weights[best] = Fraction(0)


def _descend(A: list[list[int]], weights: dict[int, Fraction]) -> tuple[dict[int, Fraction], Fraction]:
    """Return the minimiser over the learners in use, without those that would get a negative weight."""
    while True:
        used = list(weights)
        parts, determinant = _solve_ones([[A[i][j] for j in used] for i in used])
        total = sum(parts)
        target = {k: Fraction(part, total) for k, part in zip(used, parts, strict=True)}
        negative = [k for k in used if target[k] <= 0]
        if not negative:
            return target, Fraction(determinant, total)  # (A a)_k, equal for all in use
        step = min(weights[k] / (weights[k] - target[k]) for k in negative)
        moved = {k: weights[k] + step * (target[k] - weights[k]) for k in used}
        weights = {k: weight for k, weight in moved.items() if weight > 0}


def _solve_ones(A: list[list[int]]) -> tuple[list[int], int]:
    """Return x and d with A x = d 1, A positive definite, by fraction-free elimination (Bareiss)."""
    size = len(A)
    rows = [[*row, 1] for row in A]
    previous = 1
    for p in range(size):
        pivot = rows[p]
        if pivot[p] <= 0:  # a leading minor; while all are positive, the method ends
            raise DecodeError("the pooled risk is no sum of squares")
        for i in range(size):
            if i != p:
                factor = rows[i][p]
                rows[i] = [
                    (x * pivot[p] - factor * y) // previous for x, y in zip(rows[i], pivot, strict=True)
                ]
        previous = pivot[p]
    return [row[size] for row in rows], previous
