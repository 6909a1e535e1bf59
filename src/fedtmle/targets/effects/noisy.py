"""The sums of a differentially private study: a Gram matrix, gradients, and moments of the one-step estimate.

The rows of the first two lie in a public ball (`targets.effects.noisy_design`). The terms of the last sum are
clipped to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.initial.glm import FittedGLM
from fedtmle.model.statistics import AbstractPrivateColumns
from fedtmle.model.table import AnyTable, Table, over_blocks
from fedtmle.model.types import Array, unpack, upper_pairs
from fedtmle.targets.effects.noisy_design import PrivateDesign
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem

Result = TypeVar("Result")

SQUARE_SCALE = {1: 1.5, 2: 0.7}  # scale of second moments, by the number of coordinates
COUNT_SCALE = 0.7  # scale of the number of rows in a stratum
TRUNCATED_SCALE = 0.125  # scale of the count of truncated rows


@final
@dataclass(frozen=True, kw_only=True)
class GramColumns(AbstractPrivateColumns[Table]):
    """Products of the entries of w z, z = (1, covariates, arm, observed, outcome), each entry in [-1, 1].

    The arm and being observed are -1 or 1; the outcome is scaled to [-1, 1], and 0 where it is missing.
    Products of two different entries are multiplied by sqrt(2), so that the norm of all of them is |w z|^2.
    """

    design: PrivateDesign

    @property
    def label(self) -> str:
        return "products of covariates, treatment and outcome"

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the entries of z."""
        arm = ("arm",) if self.design.columns.treatment is not None else ()
        seen = ("observed",) if "missingness" in self.design.models else ()
        return ("1", *self.design.names, *arm, *seen, "outcome")

    @cached_property
    def terms(self) -> list[tuple[int, ...]]:
        d = len(self.labels)
        return [(j, k if j == k else d + k) for j, k in upper_pairs(d)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.labels[j]} * {self.labels[k]}" for j, k in upper_pairs(len(self.labels)))

    @property
    def squared_sensitivity(self) -> Fraction:
        """2 R^4, R the largest norm of w z: |z z' - s s'|^2 = |z|^4 + |s|^4 - 2 (z's)^2 <= 2 R^4."""
        others = len(self.labels) - 1 - len(self.design.covariates)  # each in [-1, 1]
        return 2 * (self.design.squared_radius + others) ** 2

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        design, columns = self.design, self.design.columns
        observed, covariates = columns.observed(piece), design.scaled(piece)
        z = [np.ones(piece.n_rows), *covariates]
        if columns.treatment is not None:
            z.append(design.arm(piece))
        if "missingness" in design.models:
            z.append(2.0 * observed - 1.0)
        z.append((2.0 * np.clip(columns.y(piece), 0.0, 1.0) - 1.0) * observed)
        weighted = np.stack(z) * design.weight(covariates)
        return np.concatenate([weighted, math.sqrt(2.0) * weighted])

    def matrix(self, sums: Array) -> Array:
        """Return the symmetric matrix of sums of w^2 z z'."""
        d = len(self.labels)
        scaled = unpack(sums, d)
        return np.asarray(np.where(np.eye(d) > 0, scaled, scaled / math.sqrt(2.0)))


@final
@dataclass(frozen=True, kw_only=True)
class GradientColumns(AbstractPrivateColumns[Table]):
    """The weighted score w x (y - mu) of every model at its coefficients, one model after the other."""

    design: PrivateDesign
    fits: dict[str, FittedGLM]

    @property
    def label(self) -> str:
        return "gradients of the nuisance models"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{role}: {name}" for role in self.fits for name in self.design.models[role].labels)

    @property
    def terms(self) -> Sequence[tuple[int, ...]]:
        return [(j,) for j in range(len(self.names))]

    @property
    def squared_sensitivity(self) -> Fraction:
        """(2 R)^2, R^2 the sum over the models of r^2, and 1 if a model has the treatment: |y - mu| <= 1."""
        models = [self.design.models[role] for role in self.fits]
        treated = sum(model.treated is not None for model in models)
        return 4 * (len(models) * self.design.squared_radius + treated)

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        design = self.design
        covariates, responses = design.scaled(piece), design.responses(piece)
        arm = None if design.columns.treatment is None else design.arm(piece)
        weight = design.weight(covariates)
        scores = []
        for role, fit in self.fits.items():
            y, used = responses[role]
            residual = np.clip((y - fit.predict(piece)) * used, -1.0, 1.0) * weight
            scores.append(design.models[role].stacked(covariates, arm) * residual)
        return np.concatenate(scores)


class StratumMoments(NamedTuple):
    """Sums over the rows of one stratum, over n: their share, and the first and second moments."""

    share: float
    first: Array  # (k,)
    second: Array  # (k, k)


@final
@dataclass(frozen=True, kw_only=True)
class OneStepColumns(AbstractPrivateColumns[Table]):
    """First and second moments of the one-step terms, and the rows of each arm whose g was truncated.

    With u_r the term of component r and L the combination that is estimated, t = (L u / width - centre) /
    radius, clipped to the unit ball. The second moments are scaled by ``SQUARE_SCALE``, those of two
    different coordinates also by sqrt(2). With strata, the moments are summed in each of them, beside the
    number of its rows, which is scaled by ``COUNT_SCALE``.
    """

    problem: EffectProblem
    columns: EffectColumns
    centre: float
    radius: float

    @property
    def strata(self) -> tuple[str, ...]:
        """The levels of the strata, none if only everyone is of interest."""
        return self.columns.strata_levels

    @property
    def arms(self) -> int:
        return len(self.columns.arms)

    @property
    def label(self) -> str:
        return "moments of the influence function" + (" by stratum" if self.strata else "")

    @property
    def dim(self) -> int:
        """The number of coordinates that are estimated, of everyone or in each stratum."""
        return self.problem.dim

    @property
    def scale(self) -> float:
        """The factor of the second moments."""
        return SQUARE_SCALE[2 if self.strata else min(self.dim, 2)]

    @property
    def names(self) -> tuple[str, ...]:
        moments = [f"mean {j + 1}" for j in range(self.dim)]
        moments += [f"{j + 1} * {k + 1}" for j, k in upper_pairs(self.dim)]
        truncated = [f"truncated, arm {a + 1}" for a in range(self.arms)]
        if self.strata:
            moments = [f"{each} in {level}" for level in self.strata for each in ("rows", *moments)]
        return (*moments, *truncated)

    @property
    def terms(self) -> Sequence[tuple[int, ...]]:
        return [(j,) for j in range(len(self.names))]

    @property
    def squared_sensitivity(self) -> Fraction:
        """4 for the moments, with strata or not, and the square of the last scale for each arm's count.

        For t, s in the unit ball and the scale c, |t - s|^2 + c^2 |t t' - s s'|^2 is at most 4 if c^2 is at
        most 1/2, and in one dimension, where it is (t - s)^2 (1 + c^2 (t + s)^2), if c^2 is at most 2.77.

        With strata, a record that is replaced by another of the same stratum changes the sums of that
        stratum alone, as above: its number of rows stays. One that is replaced by a record of another stratum
        takes (c_0, t, c t t') away from the one and adds (c_0, s, c s s') to the other, c_0 the scale of the
        counts. These are different lanes, so that the squares add up: at most 2 (c_0^2 + 1 + c^2), which is
        below 4 because c_0^2 + c^2 = 0.98. More strata add nothing, since no record changes more than two.
        (If records were added or removed instead, one stratum would change: strata would then compose in
        parallel.) The counts of truncated rows are of all strata together.
        """
        moments = Fraction(4)
        if self.strata:
            moments = max(moments, 2 * (1 + Fraction(COUNT_SCALE) ** 2 + Fraction(self.scale) ** 2))
        return moments + self.arms * Fraction(TRUNCATED_SCALE) ** 2

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        problem = self.problem
        rows = problem.prepare(piece)
        u = problem.moment_columns(EffectLaw(), rows).u / problem.width
        t = np.zeros((self.dim, piece.n_rows))
        for k, row in enumerate(problem.combination):
            for r, weight in enumerate(row):
                t[k] += weight * u[r]
        t = (t - self.centre) / self.radius
        length = np.sqrt((t * t).sum(axis=0))
        t /= np.maximum(length, 1.0)
        squares = [
            self.scale * t[j] * t[k] * (1.0 if j == k else math.sqrt(2.0)) for j, k in upper_pairs(self.dim)
        ]
        moments = np.concatenate([t, np.stack(squares)])
        if self.strata:
            counted = np.concatenate([np.full((1, piece.n_rows), COUNT_SCALE), moments])
            stratum = np.asarray(self.columns.stratum(piece))
            moments = np.concatenate([counted * (stratum == code) for code in range(len(self.strata))])
        return np.concatenate([moments, TRUNCATED_SCALE * rows.truncated])

    def split(self, means: Array) -> list[StratumMoments]:
        """Return the moments in each stratum, or those of everyone, from the sums of all terms over n."""
        k, found = self.dim, []
        for part in means[: -self.arms].reshape(max(len(self.strata), 1), -1):
            share = float(part[0]) / COUNT_SCALE if self.strata else 1.0
            moments = part[1:] if self.strata else part
            scaled = unpack(moments[k:], k) / self.scale
            second = np.where(np.eye(k) > 0, scaled, scaled / math.sqrt(2.0))
            found.append(StratumMoments(share, moments[:k], second))
        return found
