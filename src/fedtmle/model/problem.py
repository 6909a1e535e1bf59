"""A problem: the target Psi, its EIF D, a loss L and a fluctuation, linked by eq. (local-score).

All that depends on the estimand is behind this interface. Whatever a method computes from a
law is public and the same at every party; whatever it computes from rows stays in the silo
until a query asks for its exact sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle_core.exact import FINE_BITS, GRID_BITS, Sums, column_shifts
from fedtmle_core.kernels import column_sums
from fedtmle_core.types import Array, Family, IntArray, RowBound, unpack, upper_pairs

Law = TypeVar("Law")
Rows = TypeVar("Rows")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Psi and the covariance of its estimator, cov(D)/n with the divisor n - 1.

    Parameters
    ----------
    psi
        The estimate, shape (d,).
    covariance
        Its covariance, shape (d, d).
    correction
        A matrix T: the covariance is then cov(T D)/n, where a factor of D that is an expectation under the
        law is taken over the rows instead.

    Examples
    --------
    >>> ft.Estimate(psi=np.array([0.5]), covariance=np.array([[0.01]])).psi
    array([0.5])
    """

    psi: Array
    covariance: Array
    correction: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Pooled scales at a law: rough standard errors of psi, (d,), and the curvature of the loss, (d, d).

    ``rounding`` bounds the operator norm of the curvature's error.
    """

    errors: tuple[float, ...]
    curvature: tuple[tuple[float, ...], ...]
    rounding: float


@dataclass(frozen=True, kw_only=True)
class ConvergenceBounds:
    """Public bounds by which a residual at a law bounds the distance from convergence (`theory.statistical`).

    ``curvature`` is a positive definite lower bound of the pooled loss's Hessian at the law, (d, d). A unit
    of coordinate k moves the link of any record by at most ``covariates[k]``, and only one coordinate moves
    that of each record; zero if the loss is quadratic. ``slopes[j][k]`` bounds |d psi_j / d eps_k| at every
    eps.
    """

    curvature: tuple[tuple[float, ...], ...]
    covariates: tuple[float, ...]
    slopes: tuple[tuple[float, ...], ...]


class KnownPeople(NamedTuple):
    """A group of people by name, how many of all silos are in it, and how many sums single them out.

    The shares that the people have in combinations of these sums add up to the number of sums.
    """

    name: str
    people: int
    sums: int = 1


class RowFolds(Protocol):
    """A public rule that assigns each row to a fold. Two rules are equal if they make the same folds."""

    @property
    def count(self) -> int: ...

    def of(self, table: Any, /) -> IntArray:
        """Return the fold of each row, as a code from 0."""
        ...


class LeftOut(NamedTuple):
    """The fold of its rows that a model leaves out, and all folds."""

    fold: int
    folds: RowFolds


class JudgedTogether(NamedTuple):
    """Public facts by which silos judge the gradient of a model against the rows of all of them.

    ``response`` is equal for models of the same response. ``ranges`` are those of the columns, weights are at
    most ``weight``, and a person has at most ``periods`` rows. ``references`` are combinations of columns, by
    column and factor, each the indicator of a factor's reference level: zero where nobody has that level.
    If rows of one person ``may_cancel`` in a sum, as those of two periods do at zero, the person's sum is
    judged too. Unless a move of the predictor ``is_bounded`` by that of the coefficients, no look holds
    anywhere but at its point. ``left_out`` is the fold that a cross-fitted model leaves out.
    """

    family: Family
    response: object
    ranges: tuple[tuple[float, float], ...]
    weight: float
    periods: int = 1
    references: tuple[tuple[tuple[int, float], ...], ...] = ()
    may_cancel: bool = False
    is_bounded: bool = True
    left_out: LeftOut | None = None

    @property
    def sizes(self) -> tuple[float, ...]:
        """The largest magnitude of each column; 1 for a column that is always 0."""
        return tuple(max(abs(low), abs(high)) or 1.0 for low, high in self.ranges)

    @property
    def combinations(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The combinations of columns that may be zero for everyone: each column, and the references."""
        return (*(((j, 1.0),) for j in range(len(self.ranges))), *self.references)

    def largest_move(self, moves: Sequence[float]) -> float:
        """Return a bound of the change of any row's linear predictor when the coefficients move."""
        if not self.is_bounded:
            return math.inf if any(moves) else 0.0
        ends = [(move * low, move * high) for move, (low, high) in zip(moves, self.ranges, strict=True)]
        return max(-math.fsum(map(min, ends)), math.fsum(map(max, ends)), 0.0)


class ClosingBlock(NamedTuple):
    """Public facts by which silos judge together some columns of `AbstractProblem.disclosed_columns`.

    ``columns`` are their places, |value| is at most ``sizes``, mostly far less in those that are ``uneven``.
    Those at the places ``alike`` of the block may be equal for everyone, so that one of them is enough.
    """

    names: tuple[str, ...]
    columns: tuple[int, ...]
    sizes: tuple[float, ...]
    uneven: tuple[bool, ...]
    alike: tuple[int, ...] = ()


class AbstractModel(ABC, Generic[Law, Rows]):
    """A loss over rows, fluctuated by eps around a law: all that an optimiser needs.

    Targets are models with a parameter (`AbstractProblem`); a nuisance regression is a model
    whose eps are its coefficients.
    """

    @property
    @abstractmethod
    def dim(self) -> int:
        """d: the number of coordinates of eps."""

    @property
    def design_names(self) -> tuple[str, ...] | None:
        """The names of the d columns of a regression on a table, or None for other models.

        Columns of the same name are the same in all models of a study.
        """
        return None

    @property
    def shared_residuals(self) -> Hashable:
        """What this model shares with others whose residuals are, for each person, the same or known.

        Sums of such models differ by columns and weights alone, so that they are judged together. None if
        only models of an equal response and equal weights are.
        """
        return None

    @property
    def known_people(self) -> tuple[KnownPeople, ...]:
        """Groups of people whom all sums that follow single out, and how many of all silos are in each.

        Only groups whose size is public. The guard refuses if there are few.
        """
        return ()

    @property
    def judged_together(self) -> JudgedTogether | None:
        """How masked silos judge this model's gradient together; None if each judges by its own rows."""
        return None

    @abstractmethod
    def submodel(self, law: Law, rows: Rows) -> AbstractSubmodel:
        """Return the submodel p^k(.) evaluated on these rows."""

    @abstractmethod
    def normaliser(self, law: Law) -> AbstractNormaliser:
        """Return the public part A of the submodel's loss."""

    @abstractmethod
    def row_bound(self, law: Law) -> RowBound:
        """Return public bounds of one row's contribution, for exact sums."""

    @abstractmethod
    def admits(self, law: Law, eps: Array) -> bool:
        """Whether eps is in E^k."""

    @abstractmethod
    def path(self, law: Law) -> tuple[tuple[float, ...], ...]:
        """Return the fluctuations accepted on the way from the start to the law, in order.

        A silo bounds their total length (`max_path`), so `move` must append eps to them. A model whose law
        never moves returns ().
        """

    def displacement(self, law: Law) -> Array | None:  # noqa: ARG002 - most laws know none
        """Return where the law's origin lies in a submodel common to all laws, shape (d,), or None.

        In a regression's fluctuation only offsets move: each row has the same gradient at eps of this law as
        at eps + displacement(this) - displacement(other) of another. A silo relies on it: where it has
        examined the rows at one law, it does not examine them again at the same point of another.
        """
        return None

    @abstractmethod
    def curvature(self, law: Law) -> Array | None:
        """Return the Hessian of the population loss at eps = 0, (d, d), or None if it needs the rows."""

    @abstractmethod
    def accuracy(self, law: Law) -> float:
        """Return eta: how accurately Psi, D and the gradient of A at eps = 0 are computed from the law.

        It is 0 only if A is zero and Psi and D are computed without integrals.
        """

    def accuracy_at(self, law: Law, eps: Array) -> float:  # noqa: ARG002 - most are as accurate everywhere
        """Return how accurately the gradient of A at eps is computed; by default as at eps = 0.

        No certificate rests on it: a certificate is about the residual at the origin of its law.
        """
        return self.accuracy(law)


class AbstractProblem(AbstractModel[Law, Rows]):
    """Base of targets: the parameter Psi, its influence function D, the loss L and the fluctuation.

    Laws are immutable public values, the same at every party. Rows are a silo's own. `fedtmle.Mean` is the
    smallest instance; the guide to targets explains each method.

    Examples
    --------
    >>> isinstance(ft.Mean(), ft.AbstractProblem)
    True
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of psi's coordinates, as shown to people."""

    @property
    def dim(self) -> int:
        return len(self.names)

    # Methods that a silo applies to its rows.

    @abstractmethod
    def read(self, rows: object) -> Rows:
        """Return validated rows in contiguous columns; raise `DataError`, which quotes no value."""

    @abstractmethod
    def count(self, rows: Rows) -> int:
        """Return N_m, the number of rows."""

    def smallest_part(self, rows: Rows) -> int:
        """Return the size of the smallest part into which the problem splits the rows: all, without folds."""
        return self.count(rows)

    @abstractmethod
    def losses(self, law: Law, rows: Rows) -> Array:
        """Return L(p^k)(O_i) row by row, shape (N,)."""

    @abstractmethod
    def eif(self, law: Law, rows: Rows, psi: Array) -> Array:
        """Return D(p^k)(O_i) row by row, shape (N, d), with psi = Psi(p^k)."""

    @abstractmethod
    def moments(self, law: Law, rows: Rows) -> Sums:
        """Return the closing message: additive sums for psi and the EIF covariance."""

    def disclosed_columns(self, law: Law, rows: Rows) -> Iterable[Array]:
        """Return the columns behind `moments`, which sums them and their products; (p, N) piece by piece.

        The silo's guard judges them. By default they are D at the silo's own estimate.
        """
        psi = self.finish(law, self.moments(law, rows), self.count(rows)).psi
        return (self.eif(law, rows, psi).T,)

    @property
    def disclosed_predictions(self) -> int:
        """The number of predictions, the last of `disclosed_columns`: the guard judges these one by one."""
        return 0

    @property
    def disclosed_groups(self) -> int:
        """The number of equal groups in which the guard judges the other columns; two with clusters."""
        return 1

    @property
    def closing_blocks(self) -> tuple[ClosingBlock, ...]:
        """The columns that masked silos judge together; () if each silo judges them by its own rows only.

        Each column is then in one block.
        """
        return ()

    # Methods that every party applies to a law.

    @abstractmethod
    def move(self, law: Law, eps: Array) -> Law:
        """Return p^{k+1} = p^k(eps): public, deterministic; raise `NumericalError` if eps is not admitted."""

    @abstractmethod
    def moment_shifts(self, law: Law) -> tuple[int, ...]:
        """Return the public grid of the closing message."""

    @property
    def moment_bits(self) -> int:
        """How many bits below its bound a closing sum is sent with; at most those of exact sums."""
        return GRID_BITS + FINE_BITS

    @property
    def similar_moments(self) -> Sequence[int] | None:
        """For each closing sum the index of an earlier one that it is likely near, else its own; or None.

        Rounded sums are sent as differences from these.
        """
        return None

    def calibration(self, law: Law) -> Calibration | None:  # noqa: ARG002 - most problems know none
        """Return the scales at a law that all parties know already, or None if a round must ask for them."""
        return None

    def convergence_bounds(self, law: Law) -> ConvergenceBounds | None:  # noqa: ARG002 - most know none
        """Return bounds by which a residual at the law bounds the distance from convergence, or None."""
        return None

    def envelope(self, law: Law) -> float | None:  # noqa: ARG002 - most problems state none
        """Return a bound on |D_j| over all records, declared or known from the law, or None."""
        return None

    @abstractmethod
    def finish(self, law: Law, pooled: Sums, n: int) -> Estimate:
        """Return Psi(p^k) and its covariance from the pooled closing message."""

    def finish_one_step(self, law: Law, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - few have one
        """Return Psi(p) + P_n D(p) and its covariance from the pooled closing message."""
        raise InputError("algorithm: OneStep is for effects; this target has no one-step estimate")

    @property
    @abstractmethod
    def curvature_is_fixed(self) -> bool:
        """Whether the curvature ceilings of rows and normaliser are the same at every later law."""


def second_moment_shifts(exponents: Sequence[int]) -> tuple[int, ...]:
    """Return the grid of `second_moments` for columns bounded by 2^exponents[j]."""
    return column_shifts(_with_products(exponents))


def second_moments(columns: Array, exponents: Sequence[int]) -> Sums:
    """Return exact sums of m_j and of m_j m_k, j <= k, over the rows of ``columns``, shape (d, N).

    These are the additive sums that close a run. The products are rounded to floats, so a caller whose m
    lies far from zero subtracts a public centre first: the covariance is the same and keeps its digits.
    """
    d = len(columns)
    terms = [*((j,) for j in range(d)), *upper_pairs(d)]
    return column_sums(columns, _with_products(exponents), what="EIF term", terms=terms)


def _with_products(exponents: Sequence[int]) -> list[int]:
    return [*exponents, *(exponents[j] + exponents[k] for j, k in upper_pairs(len(exponents)))]


def mean_and_covariance(sums: Sums, dim: int, n: int) -> tuple[Array, Array]:
    """Return the mean of m and the covariance of that mean, cov(m)/n with divisor n - 1.

    Computed from the sums in exact rationals and rounded once. The covariance of a single row is infinite.
    """
    total = sums.fractions()
    first, second = total[:dim], total[dim:]
    pairs = zip(*np.triu_indices(dim), second, strict=True)
    scatter = [s - first[j] * first[k] / n for j, k, s in pairs]
    covariance = np.array([float(s / (Fraction(n) * (n - 1))) if n > 1 else math.inf for s in scatter])
    return np.array([float(f / n) for f in first]), unpack(covariance, dim)


class PoolableRows(ABC, Generic[Rows]):
    """A second base of targets whose rows can be pooled by a party that has those of all silos.

    `ft.solve` needs it for `Central`. Tables of studies are pooled elsewhere, by the data layer.

    Examples
    --------
    >>> ft.Mean().concatenate([np.array([0.1]), np.array([0.2, 0.3])])
    array([0.1, 0.2, 0.3])
    """

    @abstractmethod
    def concatenate(self, parts: Sequence[Rows]) -> Rows:
        """Return the pooled rows."""
