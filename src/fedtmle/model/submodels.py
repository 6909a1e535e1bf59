"""Further submodels: blocks, long rows of people, several classes, and coefficients of each silo's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial, reduce
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.leverage import FIRST_LOOK, Look, PersonRows, RowSpace, largest_leverage
from fedtmle.model.submodel import AbstractRowsSubmodel, AbstractSubmodel, GeneralisedLinear, StreamedLinear
from fedtmle_core import kernels
from fedtmle_core.exact import Sums, layout, query_shifts, zero_sums
from fedtmle_core.parallel import mapped, pieces
from fedtmle_core.types import (
    Array,
    Design,
    Family,
    IntArray,
    Part,
    RowBound,
    Scaled,
    matrix,
    packed_size,
    unpack,
    upper_pairs,
)

# Several submodels of the same rows, each with coordinates of its own: their losses are added.
#
# The loss of row i is sum_b w_i rho(offset_bi + eps_b . X_bi, y_i), where eps_b are the coordinates of block
# b. The gradient consists of the blocks' gradients, and the Hessian is zero between blocks: the minimiser in
# the coordinates of one block does not depend on the others.


@final
@dataclass(frozen=True, kw_only=True)
class Blocks(AbstractRowsSubmodel):
    """Generalised linear submodels side by side; ``places`` holds the coordinates of each among all."""

    blocks: tuple[GeneralisedLinear, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def dim(self) -> int:
        return sum(map(len, self.places))

    @property
    def bound(self) -> RowBound:
        return self.blocks[0].bound

    @property
    def n_rows(self) -> int:
        return self.blocks[0].n_rows

    def take(self, rows: IntArray) -> Blocks:
        return Blocks(blocks=tuple(block.take(rows) for block in self.blocks), places=self.places)

    def sums(self, eps: Array, parts: Part) -> Sums:
        shifts = query_shifts(self.bound, eps, parts)
        units = [0] * len(shifts)
        for block, place in zip(self.blocks, self.places, strict=True):
            at = self._at(place, parts)
            own = block.units(eps[list(place)], parts, tuple(shifts[k] for k in at))
            for k, unit in zip(at, own, strict=True):
                units[k] += unit
        return Sums(tuple(units), shifts)

    def _at(self, place: tuple[int, ...], parts: Part) -> list[int]:
        """Return where the sums of one block stand among those of all."""
        whole = layout(self.dim, parts)
        at = list(range(whole.loss.start, whole.loss.stop))
        if Part.GRADIENT in parts:
            at += [whole.gradient.start + k for k in place]
        if Part.HESSIAN in parts:
            order = {pair: k for k, pair in enumerate(upper_pairs(self.dim))}
            pairs = [(place[j], place[k]) for j, k in upper_pairs(len(place))]
            at += [whole.hessian.start + order[min(pair), max(pair)] for pair in pairs]
        return at

    def joined(self, parts: Part, of_blocks: Sequence[Array]) -> Array:
        """Return the terms of all blocks, shape (p, N), from those of each, in the order of the sums."""
        whole = np.zeros((layout(self.dim, parts).width, self.n_rows))
        for place, terms in zip(self.places, of_blocks, strict=True):
            whole[self._at(place, parts)] += terms
        return whole

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        may_end_early = self.n_rows >= FIRST_LOOK and space is None and enough > 0
        largest = largest_leverage(
            lambda: self.disclosed_rows(eps, part),
            space=space,
            bounds=self.row_bounds(eps, part) if may_end_early else None,
            enough=enough,
        )
        return Look(largest=largest, columns=self.column_sizes, family=self.blocks[0].family)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        parts = [
            block.disclosed_rows(eps[list(place)], part)
            for block, place in zip(self.blocks, self.places, strict=True)
        ]
        for each in zip(*parts, strict=True):
            rows = np.zeros((self.dim, each[0].rows.shape[1]))
            for place, piece in zip(self.places, each, strict=True):
                rows[list(place)] = piece.rows
            yield PersonRows(rows)

    @property
    def column_sizes(self) -> Array:
        sizes = np.zeros(self.dim)
        for block, place in zip(self.blocks, self.places, strict=True):
            sizes[list(place)] = block.column_sizes
        return sizes

    def row_bounds(self, eps: Array, part: Part = Part.GRADIENT) -> Array | None:
        """Return bounds of the rows' entries by coordinate; None if a block knows none."""
        bounds = np.zeros(self.dim)
        for block, place in zip(self.blocks, self.places, strict=True):
            own = block.row_bounds(eps[list(place)], part)
            if own is None:
                return None
            bounds[list(place)] = own
        return bounds

    def column_people(self, enough: int | None = None) -> IntArray:
        people = np.zeros(self.dim, dtype=np.int64)
        for block, place in zip(self.blocks, self.places, strict=True):
            people[list(place)] = block.column_people(enough)
        return people

    def curvature_ceiling(self) -> Array:
        return self._diagonal(GeneralisedLinear.curvature_ceiling)

    def gram(self) -> Sums:
        units, shifts = [0] * packed_size(self.dim), (0,) * packed_size(self.dim)
        for block, place in zip(self.blocks, self.places, strict=True):
            own = block.gram()
            shifts = (own.shifts[0],) * len(units)  # the same for all blocks, which share one bound
            for k, unit in zip(self._at(place, Part.HESSIAN), own.units, strict=True):
                units[k] = unit
        return Sums(tuple(units), shifts)

    def _diagonal(self, of: Callable[[GeneralisedLinear], Array]) -> Array:
        whole = np.zeros((self.dim, self.dim))
        for block, place in zip(self.blocks, self.places, strict=True):
            whole[np.ix_(place, place)] = of(block)
        return whole


# A generalised linear submodel over the long rows of people: several rows of a sum belong to one person.
#
# Sums are exact sums over the long rows. Whatever the silo's guard asks is answered per person: the share of
# a person in a gradient is that of all the rows of that person together.

Result = TypeVar("Result")


class LongRows(NamedTuple):
    """The long rows of consecutive people, one person after the other, and how many each of them has.

    ``groups`` numbers the rows so that consecutive ones of one person with a common residual, such as those
    of several means in one period, have the same number. The guard judges such a group as one row of all
    coordinates. None if there are no such rows.
    """

    design: GeneralisedLinear
    counts: IntArray
    groups: IntArray | None = None

    @property
    def starts(self) -> IntArray:
        """The first long row of each person who has long rows."""
        return starts_of(self.counts)

    def by_person(self, values: Array) -> Array:
        """Return sums over each person's rows, shape (p, people), of values of shape (p, rows)."""
        return by_person(values, self.counts)


def by_person(values: Array, counts: IntArray) -> Array:
    """Return sums over each person's rows, shape (p, people), given how many rows each has."""
    people = np.zeros((len(values), len(counts)))
    if values.shape[1]:
        people[:, counts > 0] = np.add.reduceat(values, starts_of(counts), axis=1)
    return people


def starts_of(counts: IntArray) -> IntArray:
    """Return the first long row of each person who has long rows, given how many each has."""
    return np.asarray((np.cumsum(counts) - counts)[counts > 0])


class OverPieces(Protocol):
    """A function that applies work to consecutive pieces of the long rows in parallel, in their order."""

    def __call__(self, work: Callable[[LongRows], Any], /) -> Iterator[Any]: ...


@final
@dataclass(frozen=True, kw_only=True)
class GroupedLinear(AbstractRowsSubmodel):
    """The submodel whose long rows ``over`` makes piece by piece, at every query.

    ``people`` is the number of people, with or without a long row; ``bound`` bounds the sum of one person's
    rows. If responses ``are_public``, a person's row in a gradient is the sum of the long ones with their
    signs, because those of others may cancel. ``has_groups`` states whether the pieces have groups.
    """

    people: int
    dim: int
    family: Family
    bound: RowBound
    over: OverPieces
    are_public: bool = False
    has_groups: bool = False

    @property
    def n_rows(self) -> int:
        return self.people

    def take(self, rows: IntArray) -> GroupedLinear:  # noqa: ARG002 - no batch of them
        raise InputError(
            "optimizer: person-periods are made in one pass over all people; choose one that draws no rows"
        )

    def sums(self, eps: Array, parts: Part) -> Sums:
        zero = zero_sums(query_shifts(self.bound, eps, parts))
        return reduce(add, self.over(lambda piece: piece.design.sums(eps, parts)), zero)

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        largest = largest_leverage(lambda: self.disclosed_rows(eps, part), space=space, enough=enough)
        # Elsewhere a move of eps scales the rows of one person by one factor, within known bounds.
        is_scaled = part is Part.HESSIAN or not (self.are_public or self.has_groups)
        return Look(largest=largest, columns=self.column_sizes, family=self.family if is_scaled else None)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield the long rows; the leverages of one person's rows are added up."""
        if self.are_public and part is Part.GRADIENT:
            return self.summed_rows(eps)

        def disclosed(piece: LongRows) -> PersonRows:
            design, counts = piece.design, piece.counts
            pieces = [part.rows for part in design.disclosed_rows(eps, part)]
            rows = np.concatenate(pieces, axis=1) if pieces else np.zeros((self.dim, 0))
            if piece.groups is None or part is not Part.GRADIENT or not rows.size:
                return PersonRows(rows, counts)
            is_first = np.diff(piece.groups, prepend=-1) != 0
            joined = np.add.reduceat(rows, np.flatnonzero(is_first), axis=1)
            return PersonRows(joined, by_person(is_first[None], counts)[0].astype(np.int64))

        return self.over(disclosed)

    def summed_rows(self, eps: Array) -> Iterator[PersonRows]:
        """Yield what each person adds to the gradient: the sum of the long rows with their signs."""
        return self.over(lambda piece: PersonRows(by_person(piece.design.slopes(eps), piece.counts)))

    @property
    def column_sizes(self) -> Array:
        sizes = self.over(lambda piece: piece.design.column_sizes if piece.design.n_rows else 0.0)
        return np.asarray(reduce(np.maximum, sizes, np.zeros(self.dim)))

    def column_people(self, enough: int | None = None) -> IntArray:  # noqa: ARG002 - counted at once
        return np.asarray(reduce(np.add, self.over(_people), np.zeros(self.dim, dtype=np.int64)))

    def gram(self) -> Sums:
        total: Sums = reduce(add, self.over(lambda piece: piece.design.gram()))
        return total

    def curvature_ceiling(self) -> Array:
        ceiling = self.family.curvature_ceiling
        if ceiling is None:
            raise InputError(
                "smoothness: this loss has no curvature bound on the whole line; "
                "give a number, or use smoothness=Estimated()"
            )
        return ceiling * unpack(self.gram().values(max(self.people, 1)), self.dim)


def _people(piece: LongRows) -> IntArray:
    """Return how many people have a long row in which each coordinate has a covariate, shape (d,)."""
    inside = matrix(piece.design.X) != 0
    if piece.design.w is not None:
        inside &= piece.design.w != 0
    if not len(piece.starts):
        return np.zeros(len(inside), dtype=np.int64)
    return np.asarray(np.logical_or.reduceat(inside, piece.starts, axis=1).sum(axis=1))


# The softmax loss of rows in one of J classes: the submodel of a multinomial regression.
#
# With class 0 as the reference, eta_0 = 0 and eta_j = eps_j . x for j = 1..J-1,
#
#     loss of a row = w (log sum_j exp(eta_j) - eta_y),   p_j = exp(eta_j) / sum_k exp(eta_k),
#    gradient in eps_j = w (p_j - 1{y = j}) x,   Hessian in (eps_j, eps_k) = w (p_j 1{j = k} - p_j p_k) x x^T.
#
# Coordinates are class by class: class j and column a have (j - 1) p + a. Every row is evaluated by itself,
# in a fixed order and without BLAS, so that its contribution does not depend on the rows beside it.

HESSIAN_CEILING = 0.5  # diag(p) - p p^T is at most this times the identity
LOOK_ROWS = 1024  # rows of a piece whose leverages are computed at once


class _Piece(NamedTuple):
    """Some rows: the columns (p, N), the predictors (J, N), and the probabilities (J, N)."""

    X: Array
    eta: Array
    p: Array
    y: IntArray
    w: Array


@final
@dataclass(frozen=True, kw_only=True)
class Multinomial(AbstractRowsSubmodel):
    """The submodel above; ``X`` has shape (p, N); ``y``, classes 0..J-1, and ``w`` have shape (N,).

    An ``offset``, of shape (J, N), is added to the predictors.
    """

    X: Design
    y: IntArray
    w: Array
    classes: int
    bound: RowBound
    offset: Array | None = None

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[1])

    @property
    def columns(self) -> int:
        return len(self.X)

    @property
    def dim(self) -> int:
        return (self.classes - 1) * self.columns

    def take(self, rows: IntArray) -> Multinomial:
        X = self.X.take(rows) if isinstance(self.X, Scaled) else np.ascontiguousarray(self.X[:, rows])
        offset = None if self.offset is None else self.offset[:, rows]
        return replace(self, X=X, y=self.y[rows], w=np.asarray(self.w)[rows], offset=offset)

    def sums(self, eps: Array, parts: Part) -> Sums:
        shifts = query_shifts(self.bound, eps, parts)
        columns = mapped(lambda rows: self._piece_sums(eps, parts, shifts, rows), pieces(self.n_rows))
        return reduce(add, columns, zero_sums(shifts))

    def _piece_sums(self, eps: Array, parts: Part, shifts: tuple[int, ...], rows: slice) -> Sums:
        piece, units = self._piece(eps, rows), list[int]()
        if Part.LOSS in parts:
            units += _summed(self._losses(piece)[None, :], [(0,)], shifts[:1])
        if Part.GRADIENT in parts:
            slopes = self._slopes(piece)
            at = [(j, len(slopes) + a) for j in range(len(slopes)) for a in range(self.columns)]
            units += _summed(np.concatenate([slopes, piece.X]), at, shifts[len(units) :][: self.dim])
        if Part.HESSIAN in parts:
            units += self._hessian(piece, shifts[len(units) :])
        return Sums(tuple(units), shifts)

    def _piece(self, eps: Array, rows: slice) -> _Piece:
        X = self.X.part(rows) if isinstance(self.X, Scaled) else self.X[:, rows]
        eta = np.zeros((self.classes, X.shape[1])) if self.offset is None else self.offset[:, rows].copy()
        for j, beta in enumerate(eps.reshape(self.classes - 1, self.columns), start=1):
            for column, coefficient in zip(X, beta, strict=True):
                eta[j] += coefficient * column
        w = np.broadcast_to(self.w, (self.n_rows,))[rows]
        return _Piece(X, eta, kernels.softmax(eta), self.y[rows], w)

    def _losses(self, piece: _Piece) -> Array:
        """Return the change of the loss from eps = 0, shape (N,)."""
        top = piece.eta.max(axis=0)
        mass = np.zeros_like(top)
        for eta in piece.eta:
            mass += kernels.exp(eta - top)
        taken = kernels.chosen(piece.eta, piece.y.astype(np.int16))
        return np.asarray(piece.w * (top + kernels.log(mass) - taken - kernels.log(float(self.classes))))

    def _slopes(self, piece: _Piece) -> Array:
        """Return w (p_j - 1{y = j}) for j = 1..J-1, shape (J - 1, N)."""
        taken = piece.y == np.arange(1, self.classes)[:, None]
        return np.asarray(piece.w * (piece.p[1:] - taken))

    def _hessian(self, piece: _Piece, shifts: tuple[int, ...]) -> list[int]:
        p, columns = self.columns, upper_pairs(self.columns)
        order = {pair: k for k, pair in enumerate(upper_pairs(self.dim))}
        units = [0] * packed_size(self.dim)
        terms = [(a, p + b) for a, b in columns]
        for j, k in upper_pairs(self.classes - 1):
            bend = piece.w * (piece.p[j + 1] * (float(j == k) - piece.p[k + 1]))
            own = _summed(np.concatenate([bend * piece.X, piece.X]), terms, shifts[: len(terms)])
            for (a, b), unit in zip(columns, own, strict=True):
                units[order[j * p + a, k * p + b]] = unit
                if j < k:
                    units[order[j * p + b, k * p + a]] = unit
        return units

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        largest = largest_leverage(lambda: self.disclosed_rows(eps, part), space=space, enough=enough)
        return Look(largest=largest, columns=self.column_sizes, family=None)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield J rows sqrt(p_k) w (e_k - p) x of each person, and w (e_y - p) x, the residual.

        The products of the former add up to the variance w^2 (diag p - p p^T) x x^T.
        """
        J, p = self.classes, self.columns
        for start in range(0, self.n_rows, LOOK_ROWS):
            piece = self._piece(eps, slice(start, min(start + LOOK_ROWS, self.n_rows)))
            apart = np.eye(J)[:, 1:, None] - piece.p[None, 1:]  # (J, J - 1, N)
            spread = np.sqrt(piece.p)[:, None] * apart
            if part is Part.GRADIENT:
                spread = np.concatenate([piece.w * spread, self._slopes(piece)[None]])
            else:
                spread *= np.sqrt(piece.w)
            rows = np.einsum("kjn,an->jank", spread, piece.X).reshape((J - 1) * p, -1)
            yield PersonRows(rows, np.full(piece.X.shape[1], len(spread)))

    @property
    def column_sizes(self) -> Array:
        sizes = np.array([float(np.abs(column).max(initial=0.0)) for column in matrix(self.X)])
        return np.tile(sizes, self.classes - 1)

    @cached_property
    def _squared(self) -> GeneralisedLinear:
        """The same columns with the squared loss, whose Hessian is the sum of w x x^T."""
        # A row's Hessian has p_j (1 - p_j) or p_j p_k, at most 1/4, before x x^T.
        bound = RowBound(gradient=self.bound.gradient, curvature=self.bound.curvature + 2)
        return GeneralisedLinear(family=Family.GAUSSIAN, X=self.X, w=np.asarray(self.w), bound=bound)

    def column_people(self, enough: int | None = None) -> IntArray:
        return np.tile(self._squared.column_people(enough), self.classes - 1)

    def curvature_ceiling(self) -> Array:
        ceiling = np.kron(np.eye(self.classes - 1), self._squared.curvature_ceiling())
        return np.asarray(HESSIAN_CEILING * ceiling, dtype=np.float64)

    def gram(self) -> Sums:
        # diag(p) - p p^T <= 1/2 = 1/4 * 2, and 1/4 is the ceiling of the logistic family.
        own, p = self._squared.gram(), self.columns
        order = {pair: k for k, pair in enumerate(upper_pairs(self.dim))}
        units = [0] * packed_size(self.dim)
        for j in range(self.classes - 1):
            for (a, b), unit in zip(upper_pairs(p), own.units, strict=True):
                units[order[j * p + a, j * p + b]] = 2 * unit
        return Sums(tuple(units), own.shifts[:1] * len(units))


def _summed(columns: Array, terms: Sequence[tuple[int, ...]], shifts: tuple[int, ...]) -> tuple[int, ...]:
    return kernels.term_sums(columns, terms, shifts, what="contribution to a multinomial model")


# A loss with some coefficients of each silo's own, profiled out at the silo.
#
# With beta common to all silos and gamma_m the block of silo m's own coefficients, such as an intercept and a
# slope, each silo minimises its own loss over its block, gamma_m(beta), and what all silos minimise together
# is the profile of the loss,
#
#     l(beta) = sum_m min_c l_m(c, beta),     grad l(beta) = sum_m sum_i s_i x_i   at c = gamma_m(beta),
#     Hess l(beta) = sum_m (H_bb - H_bc H_cc^-1 H_cb),
#
# s_i the slope of row i's loss in its linear predictor, x_i the common columns and o_i those of the block.
# The gradient follows from the envelope theorem. Both add up over silos. No column belongs to one silo alone,
# and no party but the silo learns gamma_m.
#
# **What a sum discloses.** At gamma_m the slopes of a silo's rows solve sum_i s_i o_i = 0, so that x_i counts
# up to a combination of o_i: sum_i s_i x_i = sum_i s_i (x_i - C_m o_i). The guard judges what is left of the
# rows after regression on those of the block, t_i = s_i (x_i - C_m o_i) with C_m = X O^T (O O^T)^-1, where X
# and O have the rows s_i x_i and s_i o_i: the choice for which the sum of t t^T is the smallest. With
# q_i = s_i^2 o_i^T (O O^T)^-1 o_i, the share of person i in what is known of the slopes is
#
#     q_i + t_i^T S^-1 t_i   if the silo's sums of s_i o_i are known as well, as with open sums,
#     t_i^T S^-1 t_i / (1 - q_i)   if they are not, as under masks.
#
# The first is the leverage in the rows of all columns. The second is the share in what the other rows leave
# unknown: the squared correlation of slope and answer, given that the sums over the block are zero. Where a
# person has several rows, H and Q are matrices over them, and the share of any combination of these rows is
# at most the largest eigenvalue of (1 - Q)^-1/2 H (1 - Q)^-1/2, at most tr H / (1 - tr Q).

KEPT = 4  # points whose blocks are kept: guard, gradient and curvature ask for the same ones


@final
@dataclass(frozen=True, kw_only=True)
class SiloRows:
    """The rows of one silo.

    ``own`` are those of the ``dim`` coordinates of ``whole`` that are the silo's own. ``block`` returns
    gamma_m(beta).
    """

    whole: AbstractSubmodel
    dim: int
    own: tuple[int, ...]
    block: Callable[[Array], Array]
    _kept: dict[bytes, Array] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def common(self) -> list[int]:
        """The coordinates of all silos."""
        return [j for j in range(self.dim) if j not in self.own]

    def point(self, eps: Array) -> Array:
        """Return (gamma_m(eps), eps), each in its place."""
        key = eps.tobytes()
        if key not in self._kept:
            if len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]
            point = np.zeros(self.dim)
            point[self.common], point[list(self.own)] = eps, self.block(eps)
            self._kept[key] = point
        return self._kept[key]

    def sums(self, eps: Array, parts: Part, shifts: tuple[int, ...]) -> Sums:
        units, at = self.whole.sums(self.point(eps), parts).units, layout(self.dim, parts)
        profiled: tuple[int, ...] = ()
        if Part.GRADIENT in parts:
            gradient = units[at.gradient]
            profiled = tuple(gradient[j] for j in self.common)
        if Part.HESSIAN in parts:
            profiled += schur_complement(units[at.hessian], self.own, self.common, self.whole.n_rows)
        return Sums(profiled, shifts)

    def rows(self, eps: Array, part: Part) -> Iterator[PersonRows]:
        """Yield the rows with those of the block, s_i (o_i, x_i)."""
        return self.whole.disclosed_rows(self.point(eps), part)

    def summed(self, eps: Array) -> Iterator[PersonRows]:
        """Yield what each person adds to the gradient, of people with several rows."""
        if isinstance(self.whole, GroupedLinear):
            yield from self.whole.summed_rows(self.point(eps))

    def centred(self, pieces: Callable[[], Iterator[PersonRows]]) -> Iterator[tuple[PersonRows, Array]]:
        """Yield the rows t_i, and q_i of each person."""
        own, size = list(self.own), len(self.own)
        products = np.zeros((self.dim, size))
        for piece in pieces():
            products += piece.rows @ piece.rows[own].T
        inverse = _inverse(products[own])
        slopes = products[self.common] @ inverse  # C_m
        for piece in pieces():
            block = piece.rows[own]
            shares = (block * (inverse @ block)).sum(axis=0)[None]
            share = shares[0] if piece.counts is None else by_person(shares, piece.counts)[0]
            yield PersonRows(piece.rows[self.common] - slopes @ block, piece.counts), share

    def largest_leverage(self, eps: Array, part: Part, space: RowSpace) -> float:
        """Return the largest t_i^T S^-1 t_i / (1 - q_i) of a person, S pooled."""
        most = 0.0
        for piece, share in self.centred(lambda: self.rows(eps, part)):
            found, left = space.leverages(piece), 1.0 - share
            alone = np.where(found > 0, np.inf, 0.0)
            ratio = np.divide(found, left, out=alone, where=left > 0)
            most = max(most, float(ratio.max(initial=0.0)))
        return most


def _inverse(products: Array) -> Array:
    """Return the inverse of the sum of o o^T, generalised where no row has some combination of the block."""
    size = np.sqrt(np.diag(products))
    sizes = np.outer(size, size) + (np.outer(size, size) == 0)
    return np.asarray(np.linalg.pinv(products / sizes, rcond=1e-12, hermitian=True) / sizes)


def schur_complement(
    units: Sequence[int], own: Sequence[int], common: Sequence[int], rows: int
) -> tuple[int, ...]:
    """Return H_bb - H_bc H_cc^-1 H_cb, each entry rounded once to the grid of the sums, half to even.

    ``units`` are the sums of H over so many ``rows``, each rounded to one unit; ``own`` are the places of
    the block c. The elimination is exact, without fractions: after some pivots each entry is a minor of H,
    which the minor of the step before divides. A pivot that is no larger than the rounding of its rows says
    that nothing of this coordinate is left.
    """
    order = [*own, *common]
    places = {pair: k for k, pair in enumerate(upper_pairs(len(order)))}
    H = [[units[places[min(j, k), max(j, k)]] for k in order] for j in order]
    minor = 1
    for c in range(len(own)):
        pivot, above = H[c][c], H[c]
        if pivot <= rows * minor:
            continue
        for j in range(c + 1, len(order)):
            row, factor = H[j], above[j]
            for k in range(j, len(order)):
                row[k] = (pivot * row[k] - factor * above[k]) // minor
        minor = pivot
    return tuple(round(Fraction(H[len(own) + j][len(own) + k], minor)) for j, k in upper_pairs(len(common)))


@final
@dataclass(frozen=True, kw_only=True)
class Profiled(AbstractSubmodel):
    """The profile of the loss over one silo's rows or, where all rows are in one place, over several's.

    ``is_level`` says that the block is an intercept alone, of a generalised linear model.
    """

    silos: tuple[SiloRows, ...]
    dim: int
    family: Family
    bound: RowBound
    is_level: bool = True

    @property
    def is_streamed(self) -> bool:
        """Whether the rows are read at every query."""
        return any(isinstance(silo.whole, StreamedLinear) for silo in self.silos)

    @property
    def in_memory(self) -> tuple[GeneralisedLinear, Array] | None:
        """One silo's rows, if they are in memory, and what is left of the columns after regression on the
        block's: with the response's regression taken away, these are disclosed at zero."""
        whole = self.silos[0].whole
        if len(self.silos) > 1 or not isinstance(whole, GeneralisedLinear):
            return None
        X, own = matrix(whole.X), list(self.silos[0].own)
        weighted = X[own] if whole.w is None else X[own] * whole.w
        left = X[self.silos[0].common] - (X[self.silos[0].common] @ weighted.T) @ (
            _inverse(X[own] @ weighted.T) @ X[own]
        )
        return whole, left

    @property
    def n_rows(self) -> int:
        return sum(silo.whole.n_rows for silo in self.silos)

    def take(self, rows: IntArray) -> AbstractSubmodel:  # noqa: ARG002 - no batch of them
        raise InputError(
            "optimizer: coefficients of a silo's own are fitted to all rows; choose one that draws no rows"
        )

    def sums(self, eps: Array, parts: Part) -> Sums:
        if Part.LOSS in parts:
            raise InputError("the profile of a loss has no sum of its own; ask for its derivatives")
        shifts = query_shifts(self.bound, eps, parts)
        return reduce(add, (silo.sums(eps, parts, shifts) for silo in self.silos), zero_sums(shifts))

    def column_people(self, enough: int | None = None) -> IntArray:
        counts = (silo.whole.column_people(enough)[silo.common] for silo in self.silos)
        return np.asarray(reduce(np.add, counts, np.zeros(self.dim, dtype=np.int64)))

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield the rows t_i."""
        for silo in self.silos:
            for piece, _ in silo.centred(partial(silo.rows, eps, part)):
                yield piece

    def summed_rows(self, eps: Array) -> Iterator[PersonRows]:
        """Yield the rows t_i of what each person adds to the gradient, of people with several rows."""
        for silo in self.silos:
            for piece, _ in silo.centred(partial(silo.summed, eps)):
                yield piece

    def counted_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        for silo in self.silos:
            for piece in silo.rows(eps, part):
                yield PersonRows(piece.rows[silo.common], piece.counts)

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        # The shares may grow faster than the rows do when eps moves: no move is covered.
        nowhere_else = Look(largest=0.0, columns=np.zeros(self.dim), family=None)
        if space is not None:
            largest = max(silo.largest_leverage(eps, part, space) for silo in self.silos)
            return replace(nowhere_else, largest=largest)
        looks = [silo.whole.look(silo.point(eps), part, enough=enough) for silo in self.silos]
        largest = max(look.largest for look in looks)
        if not self.is_level:  # a slope may move a predictor further than beta did
            return replace(nowhere_else, largest=largest)
        # When beta moves a predictor by at most delta, the intercept moves it back by no more than that.
        columns = 2.0 * reduce(np.maximum, (look.columns[1:] for look in looks))
        return Look(largest=largest, columns=columns, family=looks[0].family)

    def curvature_ceiling(self) -> Array:
        # The profile's Hessian is at most that of the columns: regression on the block only takes away.
        ceilings = (
            silo.whole.n_rows * silo.whole.curvature_ceiling()[np.ix_(silo.common, silo.common)]
            for silo in self.silos
        )
        return np.asarray(reduce(np.add, ceilings) / max(self.n_rows, 1))
