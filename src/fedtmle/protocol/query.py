"""A query: one question that every party derives for itself.

An algorithm is a generator that yields queries and receives what was pooled. The server and every silo run
the same generator on the same broadcasts (`protocol.plan.Follower`), so a query never crosses the wire: only
answers go up, and only what was pooled comes down.

A query is a value: problems, laws, named columns, statistics and public bounds. Most queries ask for integer
sums (`IntegerSums`; `MomentsQuery` is its smallest instance). The others are exceptions that define their own
pooling and codes. A query's methods give all that the guard, an audit or an observer needs to know: the
gradients it evaluates, the people it counts, the model it ships, and the means over the rows that its answer
consists of (`RowMeans`).
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast, final

import numpy as np

from fedtmle.model.problem import AbstractModel, AbstractProblem, ClosingBlock, Estimate
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.table import AbstractBoundedColumns
from fedtmle.protocol.codes import AbstractCode, FixedSums, Integers, Joined, Parts, SimilarSums
from fedtmle.protocol.masks import Lane
from fedtmle_core.exact import FINE_BITS, GRID_BITS, Sums
from fedtmle_core.types import Array, IntArray, Part

Law: TypeAlias = object  # only its own problem reads it; all other code passes it on
Problem: TypeAlias = AbstractProblem[Any, Any]
Model: TypeAlias = AbstractModel[Any, Any]
BoundedColumns: TypeAlias = AbstractBoundedColumns[Any]

Answer = TypeVar("Answer")
Pooled = TypeVar("Pooled")
Result = TypeVar("Result")


EVERYBODY = sys.maxsize  # as a floor, it leaves an answer out


class Void(enum.Enum):
    """What a masked round pooled if some silo may not disclose its part yet: nothing."""

    VOID = "void"


VOID = Void.VOID


class Phase(enum.StrEnum):
    """Where a round's bits are booked: only ``TARGETING`` is the paper's count."""

    NUISANCE = "nuisance"
    CALIBRATION = "calibration"
    TARGETING = "targeting"
    CLOSING = "closing"
    DIAGNOSTICS = "diagnostics"


class Local(Protocol):
    """One silo's rows as a query sees them: through functions of a problem and a law, never as rows."""

    @property
    def name(self) -> str: ...

    @property
    def n_rows(self) -> int: ...

    def submodel(self, model: Model, law: Law, batch: IntArray | None = None) -> AbstractSubmodel:
        """Return the submodel of all rows, or of those in a pooled batch."""
        ...

    def sums(self, asked: Sequence[Derivatives]) -> list[Sums]:
        """Return the sums of derivatives of several models, in as few passes over the rows as it can."""
        ...

    def normaliser(self, model: Model, law: Law) -> AbstractNormaliser: ...

    def moments(self, problem: Problem, law: Law) -> Sums: ...

    def disclosed_columns(self, problem: Problem, law: Law) -> Iterable[Array]:
        """Return the columns of the closing sums, shape (p, N), piece by piece; they stay in the silo."""
        ...

    def estimate(self, problem: Problem, law: Law) -> Estimate:
        """Return Psi and its covariance from this silo's rows alone; they stay in the silo."""
        ...

    def once(self, model: Model, law: Law, what: Hashable, compute: Callable[[], Result]) -> Result:
        """Return what ``compute`` returns; it is called once for ``what`` at this law."""
        ...

    def evaluate(self, rule: Callable[[Any], Result]) -> Result:
        """Return what a public rule of the installed package computes from the rows."""
        ...

    def part(self, silo: str) -> Local | None:
        """Return the rows of ``silo``: all at that silo, its share of pooled rows, None anywhere else."""
        ...

    def batch(self, pooled: IntArray) -> IntArray:
        """Return this silo's row numbers of a pooled batch, with every repetition."""
        ...

    def through(self, view: View) -> Local:
        """Return the rows as a view shows them; the same view gives the same object for a while."""
        ...


class Evaluation(NamedTuple):
    """Where a query evaluates the rows' gradient: a state that the silo derived itself.

    The arrays must not be written to, because the guard reuses its results for them.
    """

    model: Model
    law: Law
    eps: Array
    batch: IntArray | None = None
    curvature: bool = False  # whether a Hessian is disclosed
    is_coarse: bool = False  # whether it is rounded
    gradient: bool = True  # whether a gradient is disclosed

    @property
    def parts(self) -> tuple[Part, ...]:
        """The derivatives of the rows' loss that are disclosed at this point."""
        parts = ((Part.GRADIENT, self.gradient), (Part.HESSIAN, self.curvature))
        return tuple(part for part, is_disclosed in parts if is_disclosed)


@dataclass(frozen=True)
class CountCell:
    """A sum that counts people: its place in the answer and that of its total (None: all rows).

    ``floor`` and ``rest_floor`` name the policy's floors of the count and of its complement; "" for none.
    """

    at: int
    of: int | None = None
    floor: str = "min_arm_rows"
    rest_floor: str = "min_arm_rows"
    is_arm: bool = False  # whether an empty cell means that an arm is absent at the silo


@final
@dataclass(frozen=True)
class Derivatives:
    """Parts of the row's loss at (law, eps), over all rows or a pooled batch."""

    model: Model
    law: Law
    eps: Array
    parts: Part
    batch: IntArray | None = None


@final
@dataclass(frozen=True)
class CurvatureBound:
    """A bound of the row's Hessian at every eps, upper triangle."""

    model: Model
    law: Law


@final
@dataclass(frozen=True)
class ClosingTerms:
    """The row's terms of the closing sums."""

    problem: Problem
    law: Law


@final
@dataclass(frozen=True)
class ColumnTerms:
    """Named columns."""

    columns: BoundedColumns


class View(Protocol):
    """A public rule from a silo's rows to as many rows (`protocol.flows`)."""

    def of(self, rows: Any) -> Any:
        """Return the rows as the view shows them."""
        ...


@final
@dataclass(frozen=True)
class ViewedTerms:
    """Terms of the row as a view shows it."""

    terms: RowTerms
    view: View


RowTerms: TypeAlias = Derivatives | CurvatureBound | ClosingTerms | ColumnTerms | ViewedTerms


@final
@dataclass(frozen=True, kw_only=True)
class RowMeans:
    """An answer as means over the silo's rows, which is what an audit needs to know of a query.

    Up to public terms and rounding it is G = M t, with t the mean over the rows of ``terms``, one after the
    other; |G - sent| <= ``box``. Answers that are no such means (levels, exponents, whole models) have none.
    ``mix`` is M, or None for the identity. ``sent`` holds the numbers that were sent, less their public
    part; None if the audit does not need them. ``is_rounded`` says that rounding moved them visibly.
    """

    label: str
    terms: tuple[RowTerms, ...]
    box: Array  # (p,)
    mix: Array | None = None
    sent: Array | None = None
    is_rounded: bool = False


class Retirement(Protocol):
    """How a silo retires in a personalised run: at which update, with which law."""

    @property
    def update(self) -> int: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def law(self) -> Law: ...

    def gap_bound(self, local: Local) -> float | None:
        """Return a bound of the local targeting gap that is left, or None if there is none to state."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class KnownLaw:
    """A law on the path of the targeting, and what a round disclosed about it.

    ``residuals`` bounds the coordinates of the pooled mean of the EIF, up to the error of exact sums and
    quadrature.
    """

    problem: Problem
    law: Law
    residuals: tuple[float, ...] | None = None
    estimate: Estimate | None = None
    is_initial: bool = False


def law_at(problem: Problem, law: Law, eps: Array) -> Law | None:
    """Return the law at whose origin the gradient is the one at eps, None if there is none."""
    if not eps.any():
        return law
    if problem.displacement(law) is None or not problem.admits(law, eps):
        return None
    moved: Law = problem.move(law, eps)
    return moved


class AbstractQuery(ABC, Generic[Answer, Pooled]):
    """Base class of queries: how a silo answers, how answers are pooled, and how both are encoded.

    Examples
    --------
    >>> issubclass(ft.IntegerSums, ft.AbstractQuery)
    True
    """

    @property
    def phase(self) -> Phase:
        return Phase.NUISANCE

    @property
    @abstractmethod
    def explanation(self) -> str:
        """What the answer discloses, in words that a silo's owner reads."""

    @abstractmethod
    def answer(self, local: Local) -> Answer:
        """Return this silo's answer, before its guard has examined it."""

    @property
    def derivatives(self) -> Derivatives | None:
        """The sums that `answer_by` takes, if the answer is a function of derivatives of a model alone."""
        return None

    def answer_by(self, sums: Sums, n_rows: int) -> Answer:
        """Return this silo's answer, given the sums of the `derivatives` over its rows."""
        raise TypeError(f"{type(self).__name__} is not answered by the derivatives of a model alone")

    @abstractmethod
    def pool(self, answers: Mapping[str, Answer], sizes: Mapping[str, int]) -> Pooled:
        """Return what is broadcast, from the answers and N_m of the silos still in the run."""

    @property
    @abstractmethod
    def answer_code(self) -> AbstractCode[Answer]: ...

    @property
    @abstractmethod
    def pooled_code(self) -> AbstractCode[Pooled]: ...

    @property
    def functionals(self) -> int:
        """How many numbers the answer discloses; 0 if unknown until the answer exists."""
        return self.answer_code.numbers

    def rows_of(self, local: Local) -> Local:
        """Return the rows that the query is about: the silo's own, or what a view shows of them."""
        return local

    @property
    def noise(self) -> Fraction | None:
        """The variance of the discrete Gaussian noise that a silo adds to each sum, in squared grid units."""
        return None

    # For the silo's guard.

    @property
    def needs_masks(self) -> bool:
        """Whether the answer may leave the silo under a mask only: its own share of noise is too small."""
        return False

    def evaluations(self) -> tuple[Evaluation, ...]:
        """Return the gradients behind the answer."""
        return ()

    def own_evaluations(self, rows: Local) -> tuple[Evaluation, ...]:
        """Return the points at which the answer says that the gradient over these rows is zero.

        The silo finds them in its own rows: it is a fit of its own that it sends.
        """
        return ()

    def cells(self) -> Iterable[CountCell]:
        """Return the sums in the answer that count people."""
        return ()

    def disclosed_columns(self, local: Local) -> DisclosedColumns | None:
        """Return the columns whose sums the answer consists of; None if they are judged otherwise.

        Squares and products of disclosed columns are left out: `model.leverage` says how they count.
        """
        return None

    @property
    def closing_blocks(self) -> tuple[ClosingBlock, ...]:
        """The disclosed columns that masked silos judge together; () if each judges by its own rows."""
        return ()

    @property
    def floors(self) -> tuple[str, ...]:
        """Keys of the policy for the people behind a label, a cluster or a bin; the strictest holds."""
        return ()

    def people(self, local: Local) -> Iterable[int]:
        """Return how many people have each label, or are in each cluster, that the answer is about."""
        return ()

    def rare_columns(self, floor: int) -> tuple[str, ...]:
        """Return columns or groups of the answer with fewer than ``floor`` people of all silos, if known."""
        points = self.evaluations() if self.phase is Phase.NUISANCE else ()  # later ones count nobody else
        groups = (group for point in points for group in point.model.known_people)
        return tuple(dict.fromkeys(each.name for each in groups if 0 < each.people < floor))

    def crowded_groups(self, least: float) -> tuple[str, ...]:
        """Return groups of fewer than ``least`` people of all silos for each sum that singles them out."""
        points = self.evaluations() if self.phase is Phase.NUISANCE else ()
        groups = (group for point in points for group in point.model.known_people)
        return tuple(dict.fromkeys(each.name for each in groups if 0 < each.people < least * each.sums))

    def ships_model(self, silo: str) -> bool:
        """Return whether this silo's answer is a model of its own rows, which every party sees."""
        return False

    @property
    def is_optional(self) -> bool:
        """Whether a silo whose guard refuses the answer leaves it out, and the round goes on."""
        return False

    @property
    def is_declinable(self) -> bool:
        """Whether a silo that may not disclose its sums at this point answers None, and the flow goes on.

        The flow then asks at another point.
        """
        return False

    def suppress(self, answer: Answer, floor: Callable[[Query], int]) -> Answer:
        """Return the answer without the parts that stand for fewer than ``floor(query)`` people.

        A floor of `EVERYBODY` leaves all of it out.
        """
        return answer

    @property
    def hideable(self) -> int:
        """How many parts of the answer each silo may leave out for itself."""
        return 0

    def shown(self, answer: Answer) -> tuple[bool, ...]:
        """Return which of these parts are in an answer that went through `suppress`."""
        return ()

    def hiding(self, parts: Collection[int]) -> Query:
        """Return the same query, to which every silo leaves out these parts."""
        return self

    @property
    def asks_about(self) -> tuple[Query, ...]:
        """The queries of the next round, if a silo answers which of their parts it would leave out."""
        return ()

    @property
    def members(self) -> tuple[Query, ...]:
        """The queries that this one is made of."""
        return (self,)

    def split(self, payload: Answer | Pooled) -> Parts:
        """Return each member's part of an answer, or of what was pooled."""
        return (payload,)

    def joined(self, parts: Parts) -> Pooled:
        """Put the members' pooled parts together again: the inverse of `split`."""
        (pooled,) = parts
        return cast(Pooled, pooled)

    # For masks.

    @property
    def lanes(self) -> tuple[Lane, ...] | None:
        """The public bound of each total, if what is pooled is a function of totals over the silos."""
        return None

    @property
    def disclosed_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of silos whose totals are disclosed, each in its own lanes; () for all silos' totals.

        Only the silos of a group share the masks of its totals, so that no other silo can add to them.
        """
        return ()

    def addends(self, answer: Answer, n_rows: int) -> Integers:
        """Return what an answer of a silo with ``n_rows`` rows adds to each total."""
        raise TypeError(f"{type(self).__name__} is not pooled by addition")

    def pool_totals(self, totals: Integers) -> Pooled:
        """Return what is broadcast, from the totals over all silos."""
        raise TypeError(f"{type(self).__name__} is not pooled by addition")

    @property
    def open_consent(self) -> str | None:
        """The key of the policy by which an owner lets an answer that is not a sum leave without a mask.

        None if it never may: the answer cannot be used where answers are masked.
        """
        return None

    # For the audit.

    def row_means(self, answer: Answer, local: Local) -> RowMeans | None:
        """Return the answer as means over the rows of ``local``, or None if it is no such means."""
        return None

    # For those who follow a run.

    def residual(self, pooled: Pooled) -> float | None:
        """Return the norm of the pooled gradient that the round disclosed, in raw coordinates, or None."""
        return None

    def known_law(self, pooled: Pooled) -> KnownLaw | None:
        """Return the law whose residual or estimate the round disclosed, or None."""
        return None

    @property
    def tolerance(self) -> float | None:
        """The residual at which the run ends, once it is settled."""
        return None

    # For silos that retire.

    def retirement(self, answer: Answer) -> Retirement | None:
        """Return how a silo that gave this answer retires, or None if it does not."""
        return None

    def retirement_by(self, addends: Integers) -> Retirement | None:
        """Return the same from what the silo added to the totals, which it can read in its own records."""
        return None

    def retired_answer(self) -> Answer | None:
        """Return the answer of every silo that has retired; None if it answers like the others."""
        return None


Query: TypeAlias = AbstractQuery[Any, Any]


class DisclosedColumns(NamedTuple):
    """Columns whose sums are disclosed: each call of ``pieces`` yields consecutive rows, shape (p, N) each.

    The last ``alone`` of them are judged one by one, the others together, or in ``groups`` of equal size.
    """

    pieces: Callable[[], Iterable[Array]]
    alone: int = 0
    groups: int = 1


Flow: TypeAlias = Generator[Query, Any, Result]  # yields queries, receives what was pooled


@final
@dataclass(frozen=True, kw_only=True)
class AnsweredQuery:
    """A query and one silo's answer to it."""

    query: Query
    answer: object


def add_up(
    query: AbstractQuery[Answer, Pooled], answers: Mapping[str, Answer], sizes: Mapping[str, int]
) -> Pooled:
    """Return what is broadcast for a query that is pooled by addition."""
    addends = (query.addends(answer, sizes[silo]) for silo, answer in answers.items())
    return query.pool_totals(tuple(map(sum, zip(*addends, strict=True))))


class AbstractTotals(AbstractQuery[Answer, Pooled]):
    """A query whose answers are pooled by adding integers: silos can mask them."""

    @property
    @abstractmethod
    def lanes(self) -> tuple[Lane, ...] | None:
        """The public bound of each total; None if the query as it stands is not pooled by addition."""

    @abstractmethod
    def addends(self, answer: Answer, n_rows: int) -> Integers:
        """Return what an answer of a silo with ``n_rows`` rows adds to each total."""

    @abstractmethod
    def pool_totals(self, totals: Integers) -> Pooled:
        """Return what is broadcast, from the totals over all silos."""

    def pool(self, answers: Mapping[str, Answer], sizes: Mapping[str, int]) -> Pooled:
        return add_up(self, answers, sizes)


class IntegerSums(AbstractTotals[Sums, Sums]):
    """Base class of most queries: a vector of integers with public bounds, pooled by addition.

    Answers and totals travel in the same code: at the fixed widths that the bounds allow, or as differences
    from sums that they are ``like``.

    Examples
    --------
    >>> issubclass(ft.IntegerSums, ft.AbstractQuery)
    True
    """

    n: int

    @property
    @abstractmethod
    def shifts(self) -> tuple[int, ...]:
        """The public grid: entry j counts multiples of 2^-shifts[j]."""

    @property
    @abstractmethod
    def row_units(self) -> int:
        """The most grid units that one row can contribute to one sum."""

    @property
    def largest(self) -> tuple[int, ...]:
        """The public bound of each sum over all n rows, in grid units."""
        return (self.n * self.row_units,) * len(self.shifts)

    @property
    def like(self) -> Sequence[int] | None:
        """For each sum the place of an earlier one that it is likely near, or its own; None: fixed widths."""
        return None

    @property
    def answer_code(self) -> FixedSums | SimilarSums:
        like = self.like
        if like is None:
            return FixedSums(self.shifts, self.largest)
        return SimilarSums(self.shifts, self.largest, tuple(like))

    @property
    def pooled_code(self) -> FixedSums | SimilarSums:
        return self.answer_code

    @property
    def functionals(self) -> int:
        return len(self.shifts)

    @property
    def lanes(self) -> tuple[Lane, ...] | None:
        return tuple(map(Lane, self.largest))

    def addends(self, answer: Sums, n_rows: int) -> Integers:
        return answer.units

    def pool_totals(self, totals: Integers) -> Sums:
        return Sums(totals, self.shifts)

    @property
    def grid_box(self) -> Array:
        """A bound on the difference between a mean and its value as sent: each row is rounded to the grid."""
        return 2.0 ** -np.array(self.shifts, dtype=np.float64)


@final
@dataclass(frozen=True, kw_only=True)
class MomentsQuery(IntegerSums):
    """Additive sums for psi and the EIF covariance: the closing message, or a first look at the SE."""

    explanation = "exact sums over the rows for the estimate and its standard error"

    problem: Problem
    law: Law
    n: int
    phase: Phase = Phase.CLOSING
    one_step: bool = False  # whether the mean of the EIF is added to psi

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        drop = GRID_BITS + FINE_BITS - self.problem.moment_bits
        return tuple(shift - drop for shift in self.problem.moment_shifts(self.law))

    @property
    def row_units(self) -> int:
        return 1 << self.problem.moment_bits

    @property
    def like(self) -> Sequence[int] | None:
        is_rounded = self.problem.moment_bits < GRID_BITS + FINE_BITS
        return self.problem.similar_moments if is_rounded else None

    def answer(self, local: Local) -> Sums:
        return local.moments(self.problem, self.law).rounded(self.shifts)

    def estimate(self, pooled: Sums) -> Estimate:
        """Return psi and its covariance from the pooled sums."""
        finish = self.problem.finish_one_step if self.one_step else self.problem.finish
        return finish(self.law, pooled, self.n)

    def known_law(self, pooled: Sums) -> KnownLaw:
        return KnownLaw(
            problem=self.problem,
            law=self.law,
            estimate=self.estimate(pooled),
            is_initial=self.phase is Phase.CALIBRATION,
        )

    def disclosed_columns(self, local: Local) -> DisclosedColumns:
        # Predictions are smooth functions of the same few covariates, so that their differences are small.
        return DisclosedColumns(
            lambda: local.disclosed_columns(self.problem, self.law),
            alone=self.problem.disclosed_predictions,
            groups=self.problem.disclosed_groups,
        )

    @property
    def closing_blocks(self) -> tuple[ClosingBlock, ...]:
        return self.problem.closing_blocks

    def row_means(self, answer: Sums, local: Local) -> RowMeans:
        return RowMeans(
            label="closing sums",
            terms=(ClosingTerms(self.problem, self.law),),
            box=self.grid_box,
            sent=answer.values(local.n_rows),
        )


@final
@dataclass(frozen=True)
class JointQuery(AbstractQuery[Parts, Parts]):
    """Several queries in one round, booked by the phase of the first; none may retire a silo."""

    queries: tuple[Query, ...]

    @property
    def phase(self) -> Phase:
        return self.queries[0].phase

    @property
    def explanation(self) -> str:
        return "; ".join(dict.fromkeys(query.explanation for query in self.queries))

    @cached_property
    def answer_code(self) -> Joined:
        return Joined(tuple(query.answer_code for query in self.queries))

    @cached_property
    def pooled_code(self) -> Joined:
        return Joined(tuple(query.pooled_code for query in self.queries))

    @cached_property
    def members(self) -> tuple[Query, ...]:
        return tuple(member for query in self.queries for member in query.members)

    def split(self, payload: Parts) -> Parts:
        pairs = zip(self.queries, payload, strict=True)
        return tuple(part for query, joined in pairs for part in query.split(joined))

    def joined(self, parts: Parts) -> Parts:
        rest = iter(parts)
        return tuple(query.joined(tuple(islice(rest, len(query.members)))) for query in self.queries)

    def suppress(self, answer: Parts, floor: Callable[[Query], int]) -> Parts:
        pairs = zip(self.queries, answer, strict=True)
        return tuple(query.suppress(part, floor) for query, part in pairs)

    @property
    def hideable(self) -> int:
        return sum(query.hideable for query in self.queries)

    def shown(self, answer: Parts) -> tuple[bool, ...]:
        pairs = zip(self.queries, answer, strict=True)
        return tuple(each for query, part in pairs for each in query.shown(part))

    def hiding(self, parts: Collection[int]) -> JointQuery:
        kept, first = [], 0
        for query in self.queries:
            own = {part - first for part in parts if 0 <= part - first < query.hideable}
            kept.append(query.hiding(own) if own else query)
            first += query.hideable
        return JointQuery(tuple(kept))

    def answer(self, local: Local) -> Parts:
        """Return the members' answers; the models of several members are summed side by side."""
        asked = {k: query.derivatives for k, query in enumerate(self.members)}
        summed = {k: derivatives for k, derivatives in asked.items() if derivatives is not None}
        sums = dict(zip(summed, local.sums(list(summed.values())), strict=True))
        answers = (
            query.answer_by(sums[k], local.n_rows) if k in sums else query.answer(local)
            for k, query in enumerate(self.members)
        )
        return self.joined(tuple(answers))

    def residual(self, pooled: Parts) -> float | None:
        pairs = zip(self.queries, pooled, strict=True)
        known = (query.residual(part) for query, part in pairs)
        return next((residual for residual in known if residual is not None), None)

    @property
    def tolerance(self) -> float | None:
        return next((query.tolerance for query in self.queries if query.tolerance is not None), None)

    def pool(self, answers: Mapping[str, Parts], sizes: Mapping[str, int]) -> Parts:
        return tuple(
            query.pool({silo: answer[k] for silo, answer in answers.items()}, sizes)
            for k, query in enumerate(self.queries)
        )
