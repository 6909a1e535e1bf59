"""The language of terms: a closed set of functions of one person's record, each with a public interval.

A term is a value: a leaf that reads the record, or an operation on other terms. Terms share parts, so that a
question is a graph. Two terms are equal if their digests are, and a digest covers all that a term is made of.
Whoever reads a plan and a question knows what is computed, and the largest value that it can have for anyone:

    Constant            a number
    Number, Power, Log, Root, Spline, Level, Known, Between      leaves (`leaves.py`)
    Fold, Draw          a public rule about the place of a person in the table (`leaves.py`)
    Sum                 f_1 t_1 + f_2 t_2 + ...
    Product             t_1 t_2 ...
    Apply               expit, logit, exp, log, root, inverse, clip, step, sign, size of a term
    Pick                the term that belongs to a person's level of a variable
    Softmax             exp(t_j) / sum of exp(t_1), exp(t_2), ...
    ByCluster           the sum of a term over a cluster, at the first person of the cluster; 0 at the others

Nothing else can be computed from records. There is no comparison of two people, no sorting, no search.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol, final

import msgspec
import numpy as np

from fedtmle_core import kernels
from fedtmle_core.dictionary import Dictionary, Interval
from fedtmle_core.errors import InputError
from fedtmle_core.kernels import add_multiple
from fedtmle_core.types import Array, Codes, Family, IntArray, Scaled, first

DIGEST = 16  # bytes: nobody finds two terms with one digest by chance, and an author gains nothing by it
SLACK = 8  # units in the last place by which a computed end may err: the kernels' functions err by 3 at most
UNIT = 2.0**-52  # of 1 in the last place
PLAIN = 2.0**10  # multiples of 1/PLAIN below PLAIN: products and sums of a few million of them are exact
FEW = 4  # parts of a sum up to which single additions are as fast as one pass


class Rows(Protocol):
    """Consecutive people of one hospital, as terms read them."""

    @property
    def n(self) -> int: ...

    def number(self, name: str) -> Array:
        """Return the values of a numeric variable, NaN where it is missing."""
        ...

    def is_complete(self, name: str) -> bool:
        """Return whether nobody in the whole table lacks a variable."""
        ...

    def codes(self, name: str) -> Codes:
        """Return the levels of a categorical variable as places in the dictionary's list, -1 if missing."""
        ...

    def fold(self, folds: int, seed: int, cluster: str) -> IntArray:
        """Return the fold of each person; people of one cluster, if there is one, share theirs."""
        ...

    def uniform(self, seed: int, stream: int) -> Array:
        """Return one number in (0, 1) for each person, drawn by a public rule from the place in the table."""
        ...

    def by_cluster(self, name: str, values: Array) -> Array:
        """Return each cluster's sum at its first person, and 0 at the others."""
        ...


class Term(ABC):
    """A function of one person's record; subclasses are frozen dataclasses."""

    __slots__ = ()

    @property
    def parts(self) -> tuple[Term, ...]:
        """The terms that this one is an operation on."""
        return ()

    @abstractmethod
    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        """Return the least and the largest value that anyone can have, given those of the parts.

        Raise `InputError` if there is no bound, or the dictionary lacks a variable.
        """

    @abstractmethod
    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        """Return the value of each person, given those of the parts; nobody writes to it."""

    @cached_property
    def digest(self) -> bytes:
        """The identity of the term: its kind, its parameters, and the digests of its parts."""
        return digest_of(type(self).__name__, parameters(self), [part.digest for part in self.parts])

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    # Formulas as they are written; a factor of 1 and a term of 0 are left out.

    def __add__(self, other: Term | float) -> Term:
        return total([self, as_term(other)])

    def __radd__(self, other: float) -> Term:
        return total([as_term(other), self])

    def __sub__(self, other: Term | float) -> Term:
        return total([self, as_term(other)], [1.0, -1.0])

    def __rsub__(self, other: float) -> Term:
        return total([as_term(other), self], [1.0, -1.0])

    def __neg__(self) -> Term:
        return total([self], [-1.0])

    def __mul__(self, other: Term | float) -> Term:
        if isinstance(other, Term):
            return product(self, other)
        return self if other == 1.0 else total([self], [other])

    def __rmul__(self, other: float) -> Term:
        return self * other


def parameters(term: Term) -> list[object]:
    """Return the fields of a term that are not terms, in their order."""
    named = ((field.name, getattr(term, field.name)) for field in fields(term))  # type: ignore[arg-type]
    return [plain(value) for name, value in named if not _holds_terms(name)]


def _holds_terms(name: str) -> bool:
    return name in ("of", "terms")  # the two names under which operations hold their parts


def plain(value: object) -> object:
    """Return a parameter as plain data; numbers have one form each."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError("a term has a parameter that is not finite")
        return value + 0.0  # -0 is 0
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def digest_of(*content: object) -> bytes:
    """Return the digest of plain data."""
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()[:DIGEST]


@final
@dataclass(frozen=True, eq=False)
class Constant(Term):
    """The same number for everyone."""

    value: float

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        return self.value, self.value

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        return np.broadcast_to(np.float64(self.value), (rows.n,))


ONE, ZERO = Constant(1.0), Constant(0.0)


def as_term(value: Term | float) -> Term:
    """Return a number as a constant, and a term as it is."""
    return value if isinstance(value, Term) else Constant(float(value))


@final
@dataclass(frozen=True, eq=False)
class Sum(Term):
    """The terms times public factors, added in order: a linear predictor is one."""

    terms: tuple[Term, ...]
    factors: tuple[float, ...]

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.terms

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if not self.terms or len(self.terms) != len(self.factors):
            raise InputError("a sum has terms, and as many factors")
        scaled = [_hull(f * low, f * high) for f, (low, high) in zip(self.factors, parts, strict=True)]
        magnitude = sum(max(abs(low), abs(high)) for low, high in scaled)
        if not math.isfinite(magnitude):
            raise InputError("a sum has no finite bound")
        low, high = (math.fsum(end) for end in zip(*scaled, strict=True))
        # Each of k additions and products errs by half a unit in the last place of what it adds up to.
        error = (len(parts) + SLACK) * UNIT * magnitude
        # Rounding is monotone: an end that is computed without error bounds every computed sum, so that 1 - t
        # is not negative if t is at most 1. Nor is a sum of numbers that are not.
        if not all(map(_is_plain, [*self.factors, *self._ends(parts, low=True)])):
            low = max(low - error, 0.0) if min(scaled)[0] >= 0.0 else low - error
        if not all(map(_is_plain, [*self.factors, *self._ends(parts, low=False)])):
            high += error
        return low, high

    def _ends(self, parts: Sequence[Interval], *, low: bool) -> list[float]:
        """Return the end of each part at which the sum is lowest, or highest."""
        return [part[low is not (factor >= 0.0)] for factor, part in zip(self.factors, parts, strict=True)]

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        if len(parts) > FEW:
            # The mean of the Gaussian family is the linear predictor: one pass over all columns.
            design = Scaled(tuple(parts), np.ones(len(parts)))
            return kernels.glm_means(kernels.glm_rows(Family.GAUSSIAN, design), np.array(self.factors))
        result = self.factors[0] * first(parts[0])
        result = result if len(result) == rows.n else np.full(rows.n, result)
        for factor, part in zip(self.factors[1:], parts[1:], strict=True):
            add_multiple(result, factor, part)
        return result


def total(terms: Sequence[Term], factors: Sequence[float] | None = None) -> Term:
    """Return the sum of terms times factors (ones by default), without the terms that are 0."""
    scaled = [1.0] * len(terms) if factors is None else list(map(float, factors))
    kept = [(t, f) for t, f in zip(terms, scaled, strict=True) if f != 0.0 and t != ZERO]
    if not kept:
        return ZERO
    if len(kept) == 1 and kept[0][1] == 1.0:
        return kept[0][0]
    return Sum(tuple(t for t, _ in kept), tuple(f for _, f in kept))


@final
@dataclass(frozen=True, eq=False)
class Product(Term):
    """The product of terms, from the left."""

    terms: tuple[Term, ...]

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.terms

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if len(parts) == 2 and self.terms[0] == self.terms[1]:  # a square
            low, high = parts[0]
            least = 0.0 if low <= 0.0 <= high else min(low * low, high * high)
            return _outward(least, max(low * low, high * high), least=0.0)
        least = 0.0 if all(low >= 0.0 for low, _ in parts) else -math.inf
        result: Interval = (1.0, 1.0)
        for low, high in parts:
            result = _hull(result[0] * low, result[0] * high, result[1] * low, result[1] * high)
            result = result if all(map(_is_plain, (*result, low, high))) else _outward(*result, least=least)
        return result

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        result = parts[0]
        for part in parts[1:]:
            result = first(result) * part if result.strides == (0,) else result * first(part)
        return everyone(result, rows.n)


def product(*terms: Term) -> Term:
    """Return the product of terms, without factors of 1; 0 if one of them is."""
    if any(term == ZERO for term in terms):
        return ZERO
    kept = tuple(term for term in terms if term != ONE)
    if not kept:
        return ONE
    return kept[0] if len(kept) == 1 else Product(kept)


FUNCTIONS = ("expit", "logit", "exp", "log", "root", "softplus", "inverse", "clip", "step", "sign", "size")


@final
@dataclass(frozen=True, eq=False)
class Apply(Term):
    """A public function of a term.

    ``inverse`` is 1/max(t, low). ``clip`` keeps t from low to high. ``step`` is 1 where t >= low, else 0.
    ``root`` is that of max(t, 0), ``sign`` is -1, 0 or 1, and ``size`` is |t|.
    """

    function: str
    of: Term
    low: float = 0.0
    high: float = 0.0

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.of,)

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        ((low, high),) = parts
        match self.function:
            case "step":
                return 0.0, 1.0
            case "sign":
                return -1.0, 1.0
            case "size":
                return (0.0 if low <= 0.0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
            case "clip":
                if not self.low <= self.high:
                    raise InputError("clip: the lower end is above the upper one")
                return min(max(low, self.low), self.high), min(max(high, self.low), self.high)
            case "inverse" if not (self.low > 0.0 or low > 0.0):
                raise InputError("inverse: the term may be 0; give a positive floor")
            case "logit" if not 0.0 < low <= high < 1.0:
                raise InputError("logit: the term may be 0 or 1; clip it first")
            case "log" if not low > 0.0:
                raise InputError("log: the term may be 0; clip it first")
        if self.function not in FUNCTIONS:
            raise InputError(f"'{self.function}' is no function of the language")
        ends = self._of(np.array([low, high])).tolist()
        if not all(map(math.isfinite, ends)):
            raise InputError(f"{self.function}: the term has no finite bound")
        least = 0.0 if self.function in ("expit", "exp", "root", "softplus", "inverse") else -math.inf
        return _outward(min(ends), max(ends), least=least, most=1.0 if self.function == "expit" else math.inf)

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        (part,) = parts
        return everyone(self._of(first(part)), rows.n)

    def _of(self, x: Array) -> Array:
        match self.function:
            case "expit":
                return kernels.expit(x)
            case "logit":
                return kernels.logit(x)
            case "exp":
                return kernels.exp(x)
            case "log":
                return kernels.log(x)
            case "softplus":
                return kernels.softplus(x)
            case "root":
                return np.sqrt(np.maximum(x, 0.0))
            case "inverse":
                return 1.0 / np.maximum(x, self.low)
            case "clip":
                return np.clip(x, self.low, self.high)
            case "step":
                return (x >= self.low).astype(np.float64)
            case "sign":
                return np.sign(x)
            case "size":
                return np.abs(x)
        raise InputError(f"'{self.function}' is no function of the language")


@final
@dataclass(frozen=True, eq=False)
class Pick(Term):
    """The term that belongs to a person's level of a categorical variable, 0 where the level is missing."""

    name: str
    terms: tuple[Term, ...]

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.terms

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if len(parts) != len(dictionary.levels(self.name)):
            raise InputError(f"pick: expected a term for each level of '{self.name}'")
        return min(0.0, *(low for low, _ in parts)), max(0.0, *(high for _, high in parts))

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        codes = rows.codes(self.name)
        if rows.is_complete(self.name):
            return kernels.chosen(parts, codes)
        columns = [*parts, np.zeros(rows.n)]
        return kernels.chosen(columns, np.where(codes < 0, len(parts), codes).astype(np.int16))


@final
@dataclass(frozen=True, eq=False)
class Softmax(Term):
    """The probability of the class at ``place``: exp(t_j) / sum_k exp(t_k)."""

    terms: tuple[Term, ...]
    place: int

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.terms

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if not 0 <= self.place < len(parts):
            raise InputError("softmax: there is no class at this place")
        return 0.0, 1.0

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        logits = np.stack([np.broadcast_to(part, (rows.n,)) for part in parts])
        return np.asarray(kernels.softmax(logits)[self.place])


@final
@dataclass(frozen=True, eq=False)
class ByCluster(Term):
    """The sum of a term over a cluster of this hospital, at its first person; 0 at the others."""

    name: str
    of: Term

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.of,)

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        ((low, high),) = parts
        most = dictionary.largest_cluster(self.name)
        return min(0.0, most * low), max(0.0, most * high)

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        return rows.by_cluster(self.name, parts[0])


@final
@dataclass(frozen=True, eq=False)
class Kept(Term):
    """The term itself; its column stays in memory, because later questions read it again."""

    of: Term

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.of,)

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        return parts[0]

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        return parts[0]


def everyone(values: Array, n: int) -> Array:
    """Return the values of n people, given those or one of a constant."""
    return values if values.shape == (n,) else np.broadcast_to(values, (n,))


def _is_plain(end: float) -> bool:
    """Return whether arithmetic with this number is exact, as with the levels of an indicator."""
    return abs(end) <= PLAIN and (end * PLAIN).is_integer()


def _hull(*ends: float) -> Interval:
    return min(ends), max(ends)


def _outward(low: float, high: float, *, least: float = -math.inf, most: float = math.inf) -> Interval:
    """Return an interval moved outward by the error of its computed ends, within known ends."""
    low, high = low - SLACK * UNIT * abs(low), high + SLACK * UNIT * abs(high)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError("a term has no finite bound")
    return max(low, least), min(high, most)
