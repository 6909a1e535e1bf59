"""Masked answers and how they are pooled, and the masked queries by which silos learn about all rows.

A round's query may have several members. Those that are pooled by addition share one packing of lanes. The
others follow it as they are, if the silo's owner consents (`AbstractQuery.open_consent`).

Totals over a group of silos (`AbstractQuery.disclosed_groups`) consist only of what its silos sent, so that a
silo of another group cannot alter them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from typing import NamedTuple, TypeAlias, cast, final

import numpy as np

from fedtmle.errors import DecodeError, InputError
from fedtmle.model.leverage import AMBIGUOUS, PersonRows, Pieces, RowSpace, largest_leverage
from fedtmle.model.linear import cholesky, congruence, invert_lower, multiply
from fedtmle.protocol.codes import AbstractCode, BitReader, Bits, BitWriter, Golomb, Integers, Parts, encode
from fedtmle.protocol.masks import CHECK_BITS, Lane, Masked, Packing
from fedtmle.protocol.query import VOID, AbstractTotals, Evaluation, Local, Phase, Query
from fedtmle.protocol.subjects import AbstractSubject, ClosingRows
from fedtmle_core.exact import column_shifts, zero_sums
from fedtmle_core.kernels import column_sums
from fedtmle_core.types import Array, packed_size, unpack, upper_pairs

Groups: TypeAlias = tuple[tuple[str, ...], ...]


@final
@dataclass(frozen=True)
class MaskedForm:
    """How the answers to one query are written under masks; ``lanes`` has None for what is not masked.

    If a round ``may_be_void``, a silo may send noise instead of its integers, and nothing is pooled then.
    """

    query: Query
    may_be_void: bool = False

    @cached_property
    def members(self) -> tuple[tuple[Query, tuple[Lane, ...] | None], ...]:
        """Each member with its lanes, which are computed once."""
        return tuple((member, member.lanes) for member in self.query.members)

    @cached_property
    def packing(self) -> Packing:
        """The lanes of all members that are pooled by addition."""
        return Packing(tuple(lane for _, lanes in self.members for lane in lanes or ()))

    @property
    def apart(self) -> tuple[Query, ...]:
        """The members whose answers are not sums, and so leave without a mask."""
        return tuple(member for member, lanes in self.members if lanes is None)

    @property
    def groups(self) -> Groups:
        """The groups of silos whose totals are disclosed; () for the totals of all silos."""
        return self.query.disclosed_groups

    def write(self, answer: object, n_rows: int, mask: Callable[[Packing, Integers, Groups], Masked]) -> Bits:
        """Return a silo's answer as bits: the masked lanes, the check, and the parts without a mask."""
        out = BitWriter()
        addends: list[int] = []
        apart: list[tuple[Query, object]] = []
        for (member, lanes), part in zip(self.members, self.query.split(answer), strict=True):
            if lanes is None:
                apart.append((member, part))
            else:
                addends += member.addends(part, n_rows)
        self.packing.write(mask(self.packing, tuple(addends), self.groups), out)
        for member, part in apart:
            member.answer_code.write(part, out)
        return out.finish()

    def read(self, bits: Bits) -> tuple[Masked, Parts]:
        """Return the masked lanes of one answer, and each of its parts that is not masked."""
        reader = BitReader(bits)
        masked = self.packing.read(reader)
        parts = tuple(member.answer_code.read(reader) for member in self.apart)
        reader.finish()
        return masked, parts

    def pool(self, payloads: Mapping[str, Bits]) -> object:
        """Return the broadcast from all silos' payloads; raise `DecodeError` if the masks do not cancel.

        It is `VOID` if they do not in a round that may be void.
        """
        received = {silo: self.read(bits) for silo, bits in payloads.items()}
        sent = {silo: masked for silo, (masked, _) in received.items()}
        if self.groups:
            by_group = (self.packing.totals([sent[silo] for silo in group]) for group in self.groups)
            return self.query.pool_totals(tuple(chain.from_iterable(by_group)))
        try:
            totals = iter(self.packing.totals(list(sent.values())))
        except DecodeError:
            if self.may_be_void:
                return VOID
            raise
        number = 0
        pooled: list[object] = []
        for member, lanes in self.members:
            if lanes is not None:
                pooled.append(member.pool_totals(tuple(islice(totals, len(lanes)))))
            else:
                answers = {silo: parts[number] for silo, (_, parts) in received.items()}
                pooled.append(member.pool(answers, {}))
                number += 1
        return self.query.joined(tuple(pooled))

    def shares(self, bits: Bits) -> Counter[Phase]:
        """Return the bits of a masked answer by the phase of the member that they belong to."""
        apart = iter(self.read(bits)[1] if self.apart else ())
        shares: Counter[Phase] = Counter({self.query.phase: CHECK_BITS})
        for (member, _), width in zip(self.members, self._member_widths, strict=True):
            own = encode(member.answer_code, next(apart)).length if width is None else width
            shares[member.phase] += own
        return shares

    @cached_property
    def _member_widths(self) -> tuple[int | None, ...]:
        """The bits of each member's lanes, None for what is not masked."""
        widths = iter(self.packing.widths)
        return tuple(None if lanes is None else sum(islice(widths, len(lanes))) for _, lanes in self.members)


def check_maskable(form: MaskedForm) -> None:
    """Raise `InputError` if a member can neither be masked nor sent without a mask."""
    for member in form.apart:
        if member.open_consent is None:
            raise InputError(
                f"aggregation: masked sums do not provide {member.explanation}; choose other settings of the "
                "algorithm (docs/masks.md lists those that work), or ask for aggregation = 'open'"
            )


# Four masked queries by which silos learn about the rows of all silos before they answer.
#
# `PeopleQuery` counts the people in each column, `LookQuery` pools the sums S of t t^T, `SharesQuery` counts
# the silos that have at most a given share of every combination, and `GainsQuery` adds up by how much shares
# grow if a silo subtracts its rows. Each is asked for in a round of its own, as `protocol.looks` says, and
# none is ever sent without a mask.

CLEAR = 4.0  # M is resolved if each of its eigenvalues exceeds the error by this factor
# Shares of a combination that may remain without one silo: powers of 1/2, in finer steps down to 1/16.
RESTS = tuple(2.0 ** (-k / 16) for k in (*range(1, 65), *range(68, 132, 4)))

# Shares of the others' part in a lower bound of S: less than all of it where the error exceeds that part.
THETAS = tuple(2.0**-k for k in range(7))
EVEN = 1 / 16  # weight of a column whose values are mostly near its bound, in sharing out rounding errors
LEVELS = 10  # levels at which the rows of closing sums are looked at, each half of the one before

CROWDED = 10.0  # people to a column, among the rows that remain: with fewer, gains are asked for
MOST_SHARE = 63.0 / 64.0  # the largest share of a combination with which a silo still states its gains
NO_END = 4096  # a silo with a larger share states that gains have no end
GAINS = tuple(2.0 ** (k / 2) for k in range(-12, 5))  # gains at which the bound by them is tangent

RARE = 30  # people with a column: with fewer, some combination may rest on a few of them
CLOSE = 1 / 6  # of the distance at which a look can hold: there S shrinks by at most 5 %

People = tuple[tuple[int, ...], ...]  # by group of silos and combination of columns


class AbstractLook(AbstractTotals[Integers, Integers]):
    """Integers that silos of a group add up under masks, and never send unmasked."""

    needs_masks = True

    @property
    def pooled_code(self) -> AbstractCode[Integers]:
        return self.answer_code

    def addends(self, answer: Integers, n_rows: int) -> Integers:
        return answer

    def pool_totals(self, totals: Integers) -> Integers:
        return totals

    def pool(self, answers: Mapping[str, Integers], sizes: Mapping[str, int]) -> Integers:
        groups = self.disclosed_groups or (tuple(answers),)
        members = ([answers[silo] for silo in group] for group in groups)
        return tuple(sum(column) for group in members for column in zip(*group, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class PeopleQuery(AbstractLook):
    """How many people have each column, and each reference level, of some subjects, by group of silos."""

    explanation = (
        "how many people have each column behind some sums, so that none over too few is asked for next"
    )

    subjects: tuple[AbstractSubject, ...]
    n: int
    groups: Groups
    phase: Phase = Phase.NUISANCE

    @property
    def disclosed_groups(self) -> Groups:
        return self.groups

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(len(subject.facts.combinations) for subject in self.subjects)

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=self._sizes)

    @property
    def pooled_code(self) -> Golomb:
        return Golomb(blocks=self._sizes * len(self.groups))

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        return (Lane(self.n),) * sum(self._sizes)

    def answer(self, local: Local) -> Integers:
        return tuple(int(count) for subject in self.subjects for count in subject.people(local))

    def by_group(self, pooled: Integers) -> list[People]:
        """Return the counts of each subject."""
        rest = iter(pooled)
        told = [[tuple(islice(rest, size)) for size in self._sizes] for _ in self.groups]
        return [tuple(counts) for counts in zip(*told, strict=True)]


class AbstractPooled(ABC):
    """What a look disclosed about S; ``by_rest`` are the totals of a `SharesQuery`, () if none was asked."""

    by_rest: tuple[int, ...]
    own_shares: dict[str, float]  # what `own_share` returned, by silo

    @property
    @abstractmethod
    def silos(self) -> int:
        """How many silos were looked at."""

    def own_share(self, local: Local) -> float:
        """Return a bound of the largest share that a silo has in any combination, computed once."""
        if local.name not in self.own_shares:
            self.own_shares[local.name] = self._own_share(local)
        return self.own_shares[local.name]

    @abstractmethod
    def _own_share(self, local: Local) -> float: ...

    def has_rests(self, local: Local) -> Iterator[bool]:
        """Yield, for each share in `RESTS`, whether the others have at least that share of all of them."""
        rest = 1.0 - self.own_share(local) * (1.0 + 1e-9)
        return (rest >= level for level in RESTS)

    def rest(self, local: Local, colluders: int) -> float:
        """Return a lower bound on the share of every combination that remains without ``colluders`` silos.

        If every other silo leaves at least a share r, that many silos leave at least 1 - colluders (1 - r).
        """
        if not colluders:
            return 1.0
        others = zip(RESTS, self.by_rest, self.has_rests(local), strict=True)
        least = max((r for r, count, own in others if count - own == self.silos - 1), default=0.0)
        return max(0.0, 1.0 - colluders * (1.0 - least))


def share_of(W: Array, pieces: Pieces) -> float:
    """Return the largest share of rows in any combination, S^-1 = W W^T: of Z = W^T t, that of Z Z^T."""
    own = np.zeros((W.shape[1], W.shape[1]))
    for piece in pieces():
        inside = W.T @ piece.rows
        own += inside @ inside.T
    return float(np.linalg.eigvalsh(own).max(initial=0.0))


def gains_unit(dim: int, silos: int) -> float:
    """Return the spacing to which gains are rounded: all together they are off by at most 1/128."""
    return math.ldexp(1.0, -6 - (dim * silos - 1).bit_length())


def gains_of(W: Array, pieces: Pieces, silos: int) -> list[int]:
    """Return P^2 (I - P)^-1 of a silo's rows, P = W^T (sum t t^T) W, rounded: its upper triangle.

    If the silo has nearly all of some combination, its gains have no end, and it states many times I.
    """
    dim = W.shape[1]
    own = np.zeros((dim, dim))
    for piece in pieces():
        inside = W.T @ piece.rows
        own += inside @ inside.T
    values, vectors = np.linalg.eigh(own)
    if values[-1] > MOST_SHARE:
        gains = NO_END * np.eye(dim)
    else:
        gains = (vectors * (values**2 / (1.0 - values))) @ vectors.T
    unit = gains_unit(dim, silos)
    return [round(gains[j, k] / unit) for j, k in upper_pairs(dim)]


@final
@dataclass(frozen=True, kw_only=True)
class PooledGram(AbstractPooled):
    """A lower bound of S at one point: M by group, the coordinates, and a bound of the error of M.

    ``people`` are the totals of a `PeopleQuery`, ``by_rest`` those of a `SharesQuery`, () if none was asked.
    """

    subject: AbstractSubject
    C: Array
    groups: Sequence[Array]
    sizes: Sequence[int]  # silos in each group
    people: People
    error: float
    exponent: int  # each silo's part of n M was rounded to multiples of 2^exponent
    n: int
    by_rest: tuple[int, ...] = ()
    own_shares: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    gains: Array | None = None  # the total of a `GainsQuery`

    @property
    def matrix(self) -> Array:
        """M over all silos."""
        return np.asarray(sum(self.groups))

    def holds_at(self, point: Evaluation) -> bool:
        """Return whether a look proves enough at another point; if few people have a column, only nearby."""
        return self.subject.distance(point) <= (CLOSE if self._is_rare or self.is_crowded else 1.0)

    @cached_property
    def _is_rare(self) -> bool:
        """Whether few people have some column."""
        return any(0 < sum(counts) < RARE for counts in zip(*self.people, strict=True))

    @property
    def is_resolved(self) -> bool:
        return cholesky(self.matrix, shift=-CLEAR * self.error) is not None

    @property
    def unit(self) -> float:
        """The spacing of the grid to which each silo rounded its part of n M."""
        return math.ldexp(1.0, self.exponent)

    def rounded_part(self, local: Local) -> Array:
        """Return a silo's part of n M as it sent it, (p, p)."""
        sent = rounded(self.subject, self.C, self.exponent, local)
        return unpack(np.ldexp(np.array(sent, dtype=np.float64), self.exponent), len(self.C))

    def whitened(self) -> Array:
        """Return coordinates in which M is nearly the identity, lifted by its error where it must be."""
        lift = 0.0
        while True:
            factor = cholesky(self.matrix, shift=lift, floor=self.error)
            if factor is not None:
                return multiply(invert_lower(factor), self.C)
            lift = 4.0 * lift if lift else 2.0 * self.error

    def space(
        self, pieces: Pieces, shrunk: float = 1.0, *, left_out: Collection[int] = (), own: int = 0
    ) -> RowSpace:
        """Return the metric by which a silo of group ``own`` judges its rows, with some groups left out.

        S may have shrunk by a factor since the look. The own rows count in any case. Combinations of columns
        that are zero for everyone whose rows count are no directions of S: for a basis P of the others and
        C P = U R with orthonormal U, U^T M U is R P^T S P R^T / n within the same error.
        """
        total, C = self.n / shrunk, self.C / self.subject.largest
        kept = [k for k in range(len(self.groups)) if k not in left_out]
        matrix = total * np.asarray(sum(self.groups[k] for k in kept))
        error = total * self.error * sum(self.sizes[k] for k in kept) / sum(self.sizes)
        is_absent = ~np.array([self.people[k] for k in kept], dtype=bool).any(axis=0)
        absent = self.subject.combinations[is_absent]
        if own in left_out:
            for piece in pieces():
                absent = absent[~(absent @ piece.rows).any(axis=1)]
        if len(absent):
            rank = int(np.linalg.matrix_rank(absent))
            P = np.linalg.qr(absent.T, mode="complete")[0][:, rank:]
            U, R = np.linalg.qr(C @ P)
            C, matrix = R @ P.T, U.T @ matrix @ U
        if own in left_out:
            images = (C @ piece.rows for piece in pieces())
            matrix = matrix + sum(image @ image.T for image in images)
        return RowSpace.pooled(C, matrix, error, pieces)

    @cached_property
    def public_metric(self) -> Array | None:
        """W with S^-1 <= W W^T, the same at all parties, (p, p); None if the look resolves too little.

        If M less its error is L L^T, then C S C^T >= n L L^T.
        """
        factor = cholesky(self.matrix, shift=-self.error) if self.is_resolved else None
        if factor is None:
            return None
        return np.asarray(
            (multiply(invert_lower(factor), self.C) / self.subject.largest).T / math.sqrt(self.n)
        )

    @property
    def is_crowded(self) -> bool:
        """Whether there are few people to a column, after the silo with the largest share has left.

        Sums over the periods are made of the few who leave: at the start of a fit the others' rows cancel.
        """
        if self.subject.is_summed:
            return True
        stated = zip(RESTS, self.by_rest, strict=True) if self.by_rest else [(1.0, self.silos)]
        least = max((rest for rest, count in stated if count == self.silos), default=0.0)
        return self.n * least < CROWDED * len(self.C)

    def spaces_without_one(self, local: Local, shrunk: float = 1.0) -> Iterator[RowSpace]:
        """Yield metrics in which a person's leverage is at least that after another silo subtracted its rows.

        In coordinates in which the public bound of S is I, let P_j be the matrix of silo j, u the row of a
        person of another silo, with |u| = 1, and f_j = u^T P_j^2 (I - P_j)^-1 u. The leverage grows by

            u^T (I - P_j)^-1 u = 1 + m + f_j,     m = u^T P_j u,     m^2 / (1 - m) <= f_j

        by Jensen's inequality, and f_j is at most u^T F u, F the sum over all silos but one's own. The root
        m(f) is concave, so that it is below each of its tangents, which are quadratic forms of u.
        """
        public = self.public_metric
        if public is None or self.gains is None:
            return
        sent = gains_of(public, lambda: self.subject.rows(local), self.silos)
        own = unpack(np.array(sent, dtype=np.float64), len(self.gains))
        unit = gains_unit(len(own), self.silos)
        values, vectors = np.linalg.eigh((self.gains - own) * unit)
        values = np.maximum(values + len(own) * self.silos * unit / 2.0, 0.0)  # and what was rounded
        W = public @ vectors * math.sqrt(shrunk)
        for f in GAINS:
            root = math.sqrt(f * f + 4.0 * f)
            m, slope = (root - f) / 2.0, ((f + 2.0) / root - 1.0) / 2.0
            yield RowSpace(W * np.sqrt(1.0 + m - slope * f + (1.0 + slope) * values))

    @property
    def silos(self) -> int:
        return sum(self.sizes)

    def _own_share(self, local: Local) -> float:
        def pieces() -> Iterator[PersonRows]:
            return self.subject.rows(local)

        return share_of(self.space(pieces).W, pieces)


@final
@dataclass(frozen=True, kw_only=True)
class PooledLevels(AbstractPooled):
    """Lower bounds of the S of closing rows: the matrices of looks at several levels, asked at once.

    At each level, rows are scaled down to a bound, so that S is at least the matrix. With M that of the
    groups that count, M_own the part of a silo that judges its rows (0 if its group does not), S_own its
    whole matrix and E a bound of the rounding of M,

        S >= S_own + theta (M - M_own - E)   for every theta from 0 to 1,

    because the rows of others add nothing negative. Columns that nobody in these groups has are zero in M.
    """

    levels: tuple[PooledGram, ...]
    by_rest: tuple[int, ...] = ()
    own_shares: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def silos(self) -> int:
        return self.levels[0].silos

    @property
    def subject(self) -> ClosingRows:
        subject = self.levels[0].subject
        if not isinstance(subject, ClosingRows):
            raise AssertionError("levels are those of the rows behind closing sums")
        return subject

    def spaces(self, local: Local, own: int, left_out: Collection[int] = ()) -> Iterator[RowSpace]:
        """Yield metrics of S by which a silo of group ``own`` may judge its rows, with groups left out."""
        S_own = self._own_gram(local)
        for gram in self.levels:
            largest, kept = gram.subject.largest, [k for k in range(len(gram.groups)) if k not in left_out]
            others = gram.n * np.asarray(sum(gram.groups[k] for k in kept))
            silos = sum(gram.sizes[k] for k in kept)
            if own in kept:
                others, silos = others - gram.rounded_part(local), silos - 1
            others -= np.diag(silos * gram.unit / 2.0 * self._error_shape)
            is_there = np.array([gram.people[k] for k in kept])[:, : len(largest)].any(axis=0)
            others = np.where(np.outer(is_there, is_there), others, 0.0)
            for theta in THETAS:
                values, vectors = np.linalg.eigh(S_own / largest / largest[:, None] + theta * others)
                if values[0] > AMBIGUOUS * values[-1]:
                    yield RowSpace((vectors / np.sqrt(values)) / largest[:, None])

    @property
    def _error_shape(self) -> Array:
        """The diagonal of a matrix that every symmetric one with entries of at most 1 is below, shape (p,).

        For any w > 0 it may have the entries (sum of w)/w_j. Even columns, of which many people have much,
        are given most of it.
        """
        subject = self.subject
        w = np.array([1.0 if subject.block.uneven[j] else EVEN for j in subject.kept])
        return np.asarray(w.sum() / w)

    def _own_gram(self, local: Local) -> Array:
        dim = len(self.subject.kept)
        rows = (piece.rows for piece in self.subject.rows(local))
        return np.asarray(sum((own @ own.T for own in rows), start=np.zeros((dim, dim))))

    def largest(
        self, local: Local, own: int, left_out: Collection[int] = (), *, enough: float = 0.0
    ) -> float:
        """Return a bound of the largest leverage of the silo's people; infinity if nothing is proved.

        The first bound that is at most ``enough`` is returned.
        """
        least = math.inf
        for space in self.spaces(local, own, left_out):
            least = min(least, largest_leverage(lambda: self.subject.rows(local), space=space))
            if least <= enough:
                break
        return least

    def _own_share(self, local: Local) -> float:
        # Shares are asked for if all silos are one group.
        found = (share_of(space.W, lambda: self.subject.rows(local)) for space in self.spaces(local, 0))
        return min(found, default=math.inf)


def rounded(subject: AbstractSubject, C: Array, unit: int, local: Local) -> list[int]:
    """Return a silo's part of C S C^T in multiples of 2^unit, upper triangle; large rows are scaled down."""
    dim = len(C)
    upper, exponents = upper_pairs(dim), (0,) * packed_size(dim)
    total = zero_sums(column_shifts(exponents))
    for piece in subject.rows(local):
        rows = piece.rows / subject.largest[:, None]
        rows /= np.maximum(np.abs(rows).max(axis=0, initial=0.0), 1.0)
        total += column_sums(rows, exponents, what="row of a look", terms=upper)
    image = congruence(C, unpack(total.values(), dim)).tolist()
    return [round(math.ldexp(image[j][k], -unit)) for j, k in upper]


class Asked(NamedTuple):
    """One matrix of a look: its subject, coordinates and grid, and how many people have each column."""

    subject: AbstractSubject
    C: Array
    grid: int
    people: People

    @property
    def dim(self) -> int:
        return len(self.C)

    def lone_columns(self, local: Local, groups: Groups, liars: int) -> Iterator[str]:
        """Yield the columns and levels that a silo has alone, or at most with silos that may lie.

        A silo knows that an honest one has a column too if others have it in more groups than liars can be
        in. If there is but one group, it must believe the others.
        """
        most = min(liars, len(groups) - 1)
        own = self.subject.people(local).tolist()
        mine = [local.name in group for group in groups]
        for name, count, *by_group in zip(self.subject.labels, own, *self.people, strict=True):
            others = sum(people > count * is_mine for people, is_mine in zip(by_group, mine, strict=True))
            if count and others <= most:
                yield name

    @property
    def error(self) -> float:
        """A bound on the operator norm of the rounding error of M."""
        return self.dim * 2.0 ** (self.grid - 1)


@final
@dataclass(frozen=True, kw_only=True)
class LookQuery(AbstractLook):
    """The pooled sums of t t^T of some subjects in public coordinates, rounded; never sent unmasked.

    The totals are disclosed by group of silos. Each silo rounds to multiples of 2^e <= n 2^grid / silos, so
    that the total over all groups is off by at most n 2^(grid - 1).
    """

    explanation = (
        "sums of products of a model's or the closing sums' rows, rounded coarsely, to judge those sums"
    )

    asked: tuple[Asked, ...]
    n: int
    groups: Groups
    phase: Phase = Phase.NUISANCE
    points: tuple[Evaluation, ...] = ()  # gradients that a silo must be willing to send before it answers

    def evaluations(self) -> tuple[Evaluation, ...]:
        return self.points

    @property
    def disclosed_groups(self) -> Groups:
        return self.groups

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=tuple(packed_size(each.dim) for each in self.asked))

    @property
    def pooled_code(self) -> Golomb:
        return Golomb(blocks=self.answer_code.blocks * len(self.groups))

    @property
    def _silos(self) -> int:
        return sum(map(len, self.groups))

    def _unit(self, each: Asked) -> int:
        """Return e."""
        return math.frexp(self.n / self._silos)[1] - 1 + each.grid

    def answer(self, local: Local) -> Integers:
        units = ((each, self._unit(each)) for each in self.asked)
        return tuple(x for each, unit in units for x in rounded(each.subject, each.C, unit, local))

    def rare_columns(self, floor: int) -> tuple[str, ...]:
        """Return the columns and levels that between 1 and ``floor`` - 1 people of all silos have."""
        rare: dict[str, None] = {}
        for each in (each for each in self.asked if each.subject.has_floor):
            totals = map(sum, zip(*each.people, strict=True))
            named = zip(each.subject.labels, totals, strict=True)
            rare |= dict.fromkeys(name for name, total in named if 0 < total < floor)
        return tuple(rare)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(lane for each in self.asked for lane in self._lanes(each))

    def _lanes(self, each: Asked) -> Iterator[Lane]:
        reach = [math.fsum(map(abs, row)) for row in each.C.tolist()]
        most = math.ldexp(self.n * each.subject.facts.periods * (1.0 + 2.0**-20), -self._unit(each))
        silos = self._silos
        for j, k in upper_pairs(each.dim):
            yield Lane(math.ceil(most * reach[j] * reach[k]) + silos)

    def grams(self, pooled: Integers) -> list[PooledGram]:
        """Return the pooled matrix of each subject, from the totals."""
        rest = iter(pooled)
        by_subject: list[list[Array]] = [[] for _ in self.asked]
        for _ in self.groups:
            for each, groups in zip(self.asked, by_subject, strict=True):
                entries = np.array(list(islice(rest, packed_size(each.dim))), dtype=np.float64)
                groups.append(unpack(np.ldexp(entries, self._unit(each)) / self.n, each.dim))
        return [
            PooledGram(
                subject=each.subject,
                C=each.C,
                groups=groups,
                sizes=tuple(map(len, self.groups)),
                people=each.people,
                error=each.error,
                exponent=self._unit(each),
                n=self.n,
            )
            for each, groups in zip(self.asked, by_subject, strict=True)
        ]


@final
@dataclass(frozen=True, kw_only=True)
class SharesQuery(AbstractLook):
    """How many silos leave at least a share r of every combination to the others, for each r of `RESTS`."""

    explanation = "whether your silo has more than a given share of any combination of the sums asked next"

    grams: tuple[AbstractPooled, ...]
    silos: int
    phase: Phase = Phase.NUISANCE

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=(len(RESTS),) * len(self.grams))

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        return (Lane(self.silos),) * self.answer_code.numbers

    def answer(self, local: Local) -> Integers:
        return tuple(int(has) for gram in self.grams for has in gram.has_rests(local))

    def by_gram(self, pooled: Integers) -> list[tuple[int, ...]]:
        """Return the counts that belong to each matrix."""
        rest = iter(pooled)
        return [tuple(islice(rest, len(RESTS))) for _ in self.grams]


@final
@dataclass(frozen=True, kw_only=True)
class GainsQuery(AbstractLook):
    """The sum over silos of P^2 (I - P)^-1, P a silo's share of each combination: `PooledGram` says why.

    It is asked for with four or five silos. With three, one of which subtracts its own, the sums over the two
    others of their P and of the squares would disclose each of these up to signs.
    """

    explanation = "a bound of how far anyone's share of a combination grows if one silo subtracts its rows"

    grams: tuple[PooledGram, ...]
    silos: int
    phase: Phase = Phase.NUISANCE

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=tuple(packed_size(W.shape[1]) for W in self._metrics))

    @cached_property
    def _metrics(self) -> tuple[Array, ...]:
        return tuple(gram.public_metric for gram in self.grams if gram.public_metric is not None)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        units = (gains_unit(W.shape[1], self.silos) for W in self._metrics)
        blocks = zip(self.answer_code.blocks, units, strict=True)
        return tuple(
            lane for size, unit in blocks for lane in (Lane(round(self.silos * NO_END / unit)),) * size
        )

    def answer(self, local: Local) -> Integers:
        pairs = zip(self.grams, self._metrics, strict=True)
        return tuple(
            x for gram, W in pairs for x in gains_of(W, partial(gram.subject.rows, local), self.silos)
        )

    def by_gram(self, pooled: Integers) -> list[Array]:
        """Return the totals that belong to each matrix."""
        rest = iter(pooled)
        return [
            unpack(np.array(list(islice(rest, packed_size(W.shape[1]))), dtype=np.float64), W.shape[1])
            for W in self._metrics
        ]


# Parts of answers that some silos leave out.
#
# A silo leaves out what few of its people are behind: a covariate's sums, a bin, an answer that is optional.
# The total is then over the other silos. If one silo alone discloses a part, the total is that silo's own,
# and if one alone does not, what is left of the total over all silos, where that is known, is that silo's
# own. So under masks the silos first count who would disclose each part. It is asked for if those who do are
# several, and those who do not are none or several: two or more that neither lie nor collude. Liars may
# change the count of their own group only. A silo that leaves out a part which all are said to disclose
# refuses.


@final
@dataclass(frozen=True, kw_only=True)
class ShownQuery(AbstractLook):
    """How many silos of each group would disclose each part of the next answer that silos may leave out."""

    explanation = "which parts of the next answer the silo leaves out, because few people are behind them"

    query: Query
    groups: Groups
    liars: int
    phase: Phase = Phase.DIAGNOSTICS

    @cached_property
    def asks_about(self) -> tuple[Query, ...]:
        return tuple(member for member in self.query.members if member.hideable)

    @property
    def disclosed_groups(self) -> Groups:
        return self.groups

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=tuple(member.hideable for member in self.asks_about))

    @property
    def pooled_code(self) -> Golomb:
        return Golomb(blocks=self.answer_code.blocks * len(self.groups))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (Lane(max(map(len, self.groups))),) * self.query.hideable

    def answer(self, local: Local) -> Integers:
        """Return the answers themselves, of which `suppress` leaves one bit for each part."""
        return cast(Integers, tuple(member.answer(local) for member in self.asks_about))

    def suppress(self, answer: Integers, floor: Callable[[Query], int]) -> Integers:
        pairs = zip(self.asks_about, cast(Parts, answer), strict=True)
        parts = (member.shown(member.suppress(part, floor)) for member, part in pairs)
        return tuple(int(is_shown) for part in parts for is_shown in part)

    def kept(self, pooled: Integers) -> tuple[Query, frozenset[int]]:
        """Return the query without the parts that too few silos, or all but too few, would disclose.

        The numbers of the parts that all silos are said to disclose come second.
        """
        parts = self.query.hideable
        by_group = [pooled[first : first + parts] for first in range(0, len(pooled), parts)]
        everyone, hidden = set(), set()
        for part, disclosing in enumerate(zip(*by_group, strict=True)):
            hiding = self._hiding(disclosing)
            if not any(hiding):
                everyone.add(part)
            elif min(hiding) < 0 or not (self._are_several(disclosing) and self._are_several(hiding)):
                hidden.add(part)
        return self.query.hiding(hidden) if hidden else self.query, frozenset(everyone)

    def _hiding(self, disclosing: Integers) -> Integers:
        """Return how many silos of each group would not disclose a part."""
        return tuple(len(group) - count for group, count in zip(self.groups, disclosing, strict=True))

    def _are_several(self, counts: Integers) -> bool:
        """Return whether at least two of the silos that were counted are honest.

        A liar can change the count of its own group only, so that the largest counts, one for each liar, are
        set aside. Silos in a single group are believed, but as many as may collude subtract their own rows.
        """
        if len(self.groups) == 1:
            return sum(counts) >= self.liars + 2
        return sum(sorted(counts)[: len(counts) - self.liars]) >= 2
