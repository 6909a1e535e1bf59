"""Queries that ask whether the silos' rows are draws from one population.

With g_m the mean gradient of silo m's N_m rows at a common law, g that of all rows, and Sigma the covariance
of a row's gradient within silos,

    T = sum_m N_m (g_m - g)' Sigma^-1 (g_m - g)

is close to chi^2 with d (M - 1) degrees of freedom if every row is a draw from the same law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.model import linear
from fedtmle.model.exact import GRID_BITS, Sums, query_shifts
from fedtmle.model.types import Array, Part, packed_size, upper_pairs
from fedtmle.protocol.query import Derivatives, Evaluation, IntegerSums, Law, Local, Phase, Problem, RowMeans

PRODUCT_BITS = 40  # binary places of a product of gradients, relative to the bound of one row's
STATISTIC_BITS = 20  # binary places of a silo's part of T
MOST_GROUPS = 256  # groups of rows whose means give the spread; with fewer rows, each row is a group


@final
@dataclass(frozen=True, kw_only=True)
class SpreadQuery(IntegerSums):
    """The sum of the rows' gradients at eps = 0, and their spread within the silo.

    The spread is A_m = sum_b n_b (g_b - g_m)(g_b - g_m)' over groups b of the silo's rows, with its degrees
    of freedom, one less than the groups: A_m over these is an unbiased estimate of Sigma.
    """

    problem: Problem
    law: Law
    n: int
    phase: Phase = Phase.DIAGNOSTICS

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        bound = self.problem.row_bound(self.law)
        products = (PRODUCT_BITS - 2 * bound.gradient,) * packed_size(self.problem.dim)
        return (*query_shifts(bound, self._origin, Part.GRADIENT), *products, 0)

    @property
    def row_units(self) -> int:
        return 1 << GRID_BITS

    @property
    def largest(self) -> tuple[int, ...]:
        d = self.problem.dim
        # |g_b - g_m| is at most twice a row's bound.
        products = (self.n << PRODUCT_BITS + 2,) * packed_size(d)
        return ((self.n << GRID_BITS,) * d) + products + (self.n,)

    @property
    def explanation(self) -> str:
        return "exact sums over the rows of the gradient of the targeting step, and their covariance"

    @property
    def _origin(self) -> Array:
        return np.zeros(self.problem.dim)

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.problem, self.law, self._origin),)

    def answer(self, local: Local) -> Sums:
        submodel, d = local.submodel(self.problem, self.law), self.problem.dim
        sums = submodel.sums(self._origin, Part.GRADIENT)
        own = sums.values(submodel.n_rows)
        groups = list(submodel.gradients_by_group(self._origin, MOST_GROUPS))
        products = [
            math.fsum(size * float(g[j] - own[j]) * float(g[k] - own[k]) for size, g in groups)
            for j, k in upper_pairs(d)
        ]
        spread = self.shifts[d:-1]
        units = [round(math.ldexp(value, shift)) for value, shift in zip(products, spread, strict=True)]
        return Sums((*sums.units, *units, len(groups) - 1), self.shifts)

    def row_means(self, answer: Sums | None, local: Local) -> RowMeans:
        d = self.problem.dim
        return RowMeans(
            label="gradient",
            terms=(Derivatives(self.problem, self.law, self._origin, Part.GRADIENT),),
            box=self.grid_box[:d],
            sent=None if answer is None else answer.values(local.n_rows)[:d],
        )


@final
@dataclass(frozen=True, kw_only=True)
class PopulationsQuery(IntegerSums):
    """The sum over the silos of T_m = N_m |C (g_m - g)|^2, and the number of silos.

    ``mean`` is g, and ``root`` is C with C'C = Sigma^-1. T_m is truncated at n.
    """

    problem: Problem
    law: Law
    n: int
    mean: Array
    root: Array
    phase: Phase = Phase.DIAGNOSTICS

    @property
    def shifts(self) -> tuple[int, ...]:
        return (STATISTIC_BITS, 0)

    @property
    def row_units(self) -> int:
        return 1 << STATISTIC_BITS

    @property
    def explanation(self) -> str:
        return "how far the mean gradient of the silo's rows is from that of all silos: one number"

    def answer(self, local: Local) -> Sums:
        submodel = local.submodel(self.problem, self.law)
        own = submodel.sums(np.zeros(self.problem.dim), Part.GRADIENT).values(submodel.n_rows)
        gap = (own - self.mean).tolist()
        distance = [linear.dot(row, gap) for row in self.root.tolist()]
        statistic = submodel.n_rows * linear.dot(distance, distance)
        return Sums((round(math.ldexp(min(statistic, float(self.n)), STATISTIC_BITS)), 1), self.shifts)
