"""The instruments of the conformance suite: a problem at a law, differences, broken rows, and the report."""

from __future__ import annotations

import enum
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Generic, final

import numpy as np

from fedtmle.errors import CheckFailedError
from fedtmle.model.problem import AbstractProblem, Estimate, Law, Rows
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, IntArray, Part, unpack

# The report of the conformance suite: named checks, figures, and a verdict.


class Outcome(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_CHECKED = "not checked"


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """One named check: passed if ``figure`` <= ``tolerance``."""

    name: str
    outcome: Outcome
    figure: float | None = None
    tolerance: float | None = None
    note: str = ""

    def __str__(self) -> str:
        figures = "".join(f"{x:>10.1e}" if x is not None else " " * 10 for x in (self.figure, self.tolerance))
        lines = [f"{self.name:<40} {self.outcome.value:<12}{figures}".rstrip()]
        lines += textwrap.wrap(self.note, width=76, initial_indent="    ", subsequent_indent="    ")
        return "\n".join(lines)


@final
@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The checks of a problem, in order."""

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is Outcome.FAILED)

    def raise_if_failed(self) -> None:
        """Raise `CheckFailedError` with the failed checks, if there are any."""
        if self.failures:
            raise CheckFailedError("\n".join(["the problem fails these checks:", *map(str, self.failures)]))

    def __str__(self) -> str:
        header = f"{'check':<40} {'outcome':<12}{'figure':>10}{'tolerance':>10}"
        return "\n".join([header, "-" * len(header), *map(str, self.checks)])


# Does `read` quote a record's value in an error? It is given broken rows that hold known values.
#
# An error message ends in logs and in front of other people, so `read` must say what is wrong with a column
# and never with which value. Every broken form is read twice, with two values: a number that a message
# shows by chance is not close to both.

FRACTIONS = (0.735193, 0.268351)  # shares of a column's range at which the two known values lie
CLOSE = 4e-3  # a printed number this close to a known value, relative to it, is a quotation
_NUMBER = re.compile(r"\d[\d,_]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+")

Form = tuple[str, object, float]  # a description, rows, and the value that they hold


def broken_rows(raw: object) -> Iterator[tuple[Form, Form]]:
    """Yield broken forms of the raw rows, each with two different values."""
    first, second = FRACTIONS
    yield from zip(_forms(raw, first), _forms(raw, second), strict=True)


def quotes(error: BaseException, value: float) -> bool:
    """Whether the text of an error, or of one that it shows as its cause, has the value in some format."""
    numbers = (float(token.replace(",", "").replace("_", "")) for token in _NUMBER.findall(_text(error)))
    return any(abs(number - abs(value)) <= CLOSE * abs(value) for number in numbers)


def _text(error: BaseException) -> str:
    shown = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    notes = getattr(error, "__notes__", ())
    return "\n".join([str(error), *map(repr, error.args), *notes, _text(shown) if shown else ""])


def _forms(raw: object, fraction: float) -> Iterator[Form]:
    """Yield each column of the rows broken in several ways, then values that are no rows at all."""
    columns = _columns(raw)
    for name, column in columns.items():
        for description, broken, value in _broken_columns(np.asarray(column, dtype=np.float64), fraction):
            yield description, _rebuilt(raw, {**columns, name: broken}), value
    for number in (fraction, 1e6 * fraction):
        yield "one number instead of rows", number, number
        yield "text instead of rows", f"id {number}", number
        yield "text instead of numbers", [f"id {number}"] * 3, number
        yield "too many dimensions", np.full((2, 2, 2), number), number
        yield "rows of different lengths", [[number], [number, number]], number
        yield "a column of another name", {"another": [number]}, number


def _broken_columns(column: Array, fraction: float) -> Iterator[tuple[str, object, float]]:
    low, high = float(column.min()), float(column.max())
    inside = low + fraction * ((high - low) or 1.0)
    outside = high + 1e6 * fraction * (1.0 + abs(high))
    for value in (inside, outside, -outside):
        yield "a column of one value that it does not hold", np.full_like(column, value), value
        for description, wrong in (("a missing value", np.nan), ("an infinite value", np.inf)):
            yield description, np.array([wrong, *np.full(len(column) - 1, value)]), value
        yield "text in a column", np.full(len(column), f"id {value}"), value
        yield "text among numbers", np.array([f"id {value}", *column[1:]], dtype=object), value
        yield "a column of two dimensions", np.full((len(column), 2), value), value
        yield "a column that is too short", np.full(len(column) - 1, value), value


def _columns(raw: object) -> dict[object, object]:
    """Return the columns of a mapping or of an array; none of another kind of rows."""
    if isinstance(raw, Mapping):
        return {name: column for name, column in raw.items() if _is_numeric(np.asarray(column))}
    if isinstance(raw, list | tuple | np.ndarray) and _is_numeric(array := np.asarray(raw)):
        return dict(enumerate(array.T if array.ndim == 2 else [array]))
    return {}


def _is_numeric(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf" and array.ndim in (1, 2) and array.size > 0


def _rebuilt(raw: object, columns: Mapping[object, object]) -> object:
    if isinstance(raw, Mapping):
        return {**raw, **columns}
    if np.ndim(raw) == 1:  # type: ignore[arg-type]  # `_columns` has made an array of it
        return columns[0]
    return [list(row) for row in zip(*map(np.asarray, columns.values()), strict=False)]


ROUNDING = 2.0**-44  # rounding error of a mean, relative to its largest term
SAMPLE = 50  # rows that are checked one by one
POINTS = 3  # random fluctuations tried
USEFUL = 1e-4  # a tolerance above this share of the quantity that it bounds would check nothing
STEPS = range(3, 11)  # differences are taken over 2^-3, ..., 2^-10 of a scale
WEIGHT = (
    2**10
)  # a row's weight is changed in units of 1/WEIGHT: every step in STEPS is a whole number of them
MASS = 2**60  # probabilities of atoms are rounded to this denominator


@final
@dataclass(frozen=True, kw_only=True)
class FiniteLaw(Generic[Law]):
    """A law p with finitely many atoms, to compare psi and D(p) with Psi and its derivative at p.

    ``support`` holds one row per atom, as `read` accepts it; ``masses`` their probabilities;
    ``law`` is p as the problem's law, and ``psi`` is Psi, written longhand, as a function of
    any masses on the support. It returns an array with an entry for each coordinate, or a number if there is
    one coordinate.
    """

    support: object
    masses: Array
    law: Law
    psi: Callable[[Array], Array | float]


@dataclass(frozen=True)
class Gap:
    """A difference between two figures that should agree, and how large it may be.

    ``subject`` names the figures in a failure; ``remark`` is shown with a success too; ``size`` is the size
    of the figures, by which the tolerance is judged.
    """

    figure: float
    tolerance: float
    size: float = math.inf
    subject: str = ""
    remark: str = ""

    @property
    def failed(self) -> bool:
        return not self.figure <= self.tolerance  # written so that NaN fails

    @property
    def coarse(self) -> bool:
        return self.tolerance > USEFUL * self.size > 0


def requirement(holds: bool, failure: str) -> Gap:
    """Return the gap of a statement that is true or false; ``failure`` says what is wrong if it is false."""
    return Gap(float(not holds), 0.0, subject=failure)


class NotApplicableError(Exception):
    """A check that says nothing about this problem; the message is the reason."""


@dataclass(frozen=True)
class Case(Generic[Law, Rows]):
    """A problem at a law on rows; values that several checks need are computed once.

    ``raw`` are the rows before `read`. ``finer`` is the same problem and law, computed more accurately.
    """

    problem: AbstractProblem[Law, Rows]
    law: Law
    raw: object
    rows: Rows
    seed: int
    finite: FiniteLaw[Law] | None = None
    finer: tuple[AbstractProblem[Law, Rows], Law] | None = None

    @cached_property
    def n(self) -> int:
        return self.problem.count(self.rows)

    @cached_property
    def eta(self) -> float:
        return self.problem.accuracy(self.law)

    @cached_property
    def zero(self) -> Array:
        return np.zeros(self.problem.dim)

    @cached_property
    def submodel(self) -> AbstractSubmodel:
        return self.problem.submodel(self.law, self.rows)

    @cached_property
    def normaliser(self) -> AbstractNormaliser:
        return self.problem.normaliser(self.law)

    @cached_property
    def moments(self) -> Sums:
        return self.problem.moments(self.law, self.rows)

    @cached_property
    def estimate(self) -> Estimate:
        return self.problem.finish(self.law, self.moments, self.n)

    @cached_property
    def eif(self) -> Array:
        return self.problem.eif(self.law, self.rows, self.estimate.psi)

    @cached_property
    def scale(self) -> Array:
        """The fluctuation that the rows can tell from zero: sd(D_j) / H_jj, halved until admitted."""
        mean, _ = mean_parts(self.submodel, self.zero, Part.HESSIAN)
        curvature = np.diag(unpack(mean, self.problem.dim) + self.normaliser.hessian(self.zero))
        spread = self.eif.std(axis=0)
        smallest = 2.0 ** -self.problem.row_bound(self.law).gradient
        informed = (curvature > 0) & (spread > 0)
        scale = np.divide(spread, curvature, out=np.full(self.problem.dim, smallest), where=informed)
        for _ in range(60):
            if all(self.problem.admits(self.law, sign * scale) for sign in (-1, 1)):
                break
            scale = scale / 2
        return np.asarray(scale)

    @cached_property
    def points(self) -> tuple[Array, ...]:
        """Zero and a few random admitted fluctuations."""
        rng = np.random.default_rng(self.seed)
        random = [self.scale * rng.uniform(-1, 1, self.problem.dim) for _ in range(POINTS)]
        return (self.zero, *(eps for eps in random if self.problem.admits(self.law, eps)))

    @cached_property
    def sample(self) -> tuple[IntArray, ...]:
        """Some rows, each as a batch of one."""
        order = np.random.default_rng(self.seed).permutation(self.n)[:SAMPLE]
        return tuple(np.array([row]) for row in order)

    def at(self, law: Law) -> Case[Law, Rows]:
        """Return the case of the same rows at another law."""
        return replace(self, law=law)

    def moved(self) -> Iterator[Case[Law, Rows]]:
        """Yield the case itself, and those at laws to which fluctuations lead."""
        yield self
        for eps in self.points[1:]:
            yield self.at(self.problem.move(self.law, eps))

    def part(self, rows: IntArray) -> Rows:
        """Return some of the rows as a silo with only these would read them."""
        return self.problem.read(take(self.raw, rows))


def take(raw: object, rows: IntArray) -> object:
    """Return some of the raw rows: of columns by name, of a table with a method ``take``, or of an array."""
    if isinstance(raw, Mapping):
        return {name: np.asarray(column)[rows] for name, column in raw.items()}
    if isinstance(raw, list | tuple | np.ndarray):
        return np.asarray(raw)[rows]
    if hasattr(raw, "take"):
        return raw.take(rows)
    raise NotApplicableError(f"rows of type {type(raw).__name__} cannot be taken one by one")


def mean_parts(submodel: AbstractSubmodel, eps: Array, parts: Part) -> tuple[Array, float]:
    """Return the means of the requested parts, and the largest error that the grid allows in one."""
    sums = submodel.sums(eps, parts)
    return sums.values(submodel.n_rows), max(2.0 ** -(shift + 1) for shift in sums.shifts)


def weighted(sums: Sums, weight: int) -> Sums:
    """Return the sums of rows that each count ``weight`` times."""
    return Sums(tuple(weight * unit for unit in sums.units), sums.shifts)


def units_apart(a: Sums, b: Sums) -> float:
    """Return the largest difference of two exact sums, in units of their grid."""
    return float(max(abs(x - y) for x, y in zip(a.units, b.units, strict=True)))


Computed = Callable[[Array], tuple[Array, float]]  # a function of eps, and a bound of its error


def compare(
    derivative: Computed,
    f: Computed,
    points: tuple[Array, ...],
    scale: Array,
    *,
    size: float = 0.0,
    steps: range = STEPS,
) -> Iterator[Gap]:
    """Yield row j of ``derivative`` at each point against differences of f along e_j."""
    derivatives = [derivative(eps) for eps in points]
    size = max(size, *(float(np.abs(value).max()) for value, _ in derivatives))
    for eps, (value, resolution) in zip(points, derivatives, strict=True):
        for j, axis in enumerate(np.diag(scale)):
            slope, error = difference(f, eps, axis, steps)
            gap = float(np.abs(value[j] - slope / scale[j]).max())
            tolerance = resolution + error / float(scale[j]) + ROUNDING * size
            yield Gap(gap, tolerance, size=size, subject=f"along coordinate {j}")


def difference(f: Computed, eps: Array, axis: Array, steps: range = STEPS) -> tuple[Array, float]:
    """Return the derivative of f(eps + t axis) at t = 0 by sixth-order differences, and a bound of its error.

    A step's truncation error is bounded by the change from twice that step, of which it is 1/63;
    of several steps we take the one with the least sum of that and of f's own errors.
    """

    def central(step: float) -> tuple[Array, float]:
        terms = [
            (w, f(eps + k * step * axis), f(eps - k * step * axis)) for k, w in ((1, 45), (2, -9), (3, 1))
        ]
        slope = np.sum([w * (up[0] - down[0]) for w, up, down in terms], axis=0) / (60 * step)
        return slope, sum(abs(w) * (up[1] + down[1]) for w, up, down in terms) / (60 * step)

    slopes = [central(2.0**-k) for k in steps]
    errors = [float(np.abs(fine[0] - coarse[0]).max()) + fine[1] for coarse, fine in pairwise(slopes)]
    best = int(np.argmin(errors))
    return slopes[best + 1][0], errors[best]
