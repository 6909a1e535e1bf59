"""What a query is: one question that every party derives for itself, and its two payloads.

An algorithm is a generator that yields queries and receives what was pooled. The server and
every silo run the same generator on the same broadcasts, so a query never crosses the wire:
only answers go up, and only what was pooled comes down.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fedtmle.model.exact import Sums
from fedtmle.model.problem import AbstractModel, AbstractProblem, Estimate
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.types import Array, IntArray
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.policy import Policy

Problem = AbstractProblem[Any, Any]
Model = AbstractModel[Any, Any]
Answer = TypeVar("Answer")
Pooled = TypeVar("Pooled")


class Phase(enum.StrEnum):
    """Where a round's bits are booked: only ``TARGETING`` is the paper's count."""

    NUISANCE = "nuisance"
    CALIBRATION = "calibration"
    TARGETING = "targeting"
    CLOSING = "closing"
    DIAGNOSTICS = "diagnostics"


Over = Callable[[Any, Callable[[Any], Any]], Iterable[Any]]  # what a function says of each piece of the rows


def whole(table: Any, work: Callable[[Any], Any]) -> Iterable[Any]:
    """All rows as one piece."""
    return (work(table),)


class Local(Protocol):
    """What a query may ask of one silo: functions of a problem and a law, never a row."""

    @property
    def name(self) -> str: ...

    @property
    def n_rows(self) -> int: ...

    @property
    def policy(self) -> Policy:
        """What the silo's owner allows: the floors below which nothing is told."""
        ...

    def submodel(self, model: Model, law: Any, batch: IntArray | None = None) -> AbstractSubmodel:
        """Of all rows, or of those in a pooled batch."""
        ...

    def normaliser(self, model: Model, law: Any) -> AbstractNormaliser: ...

    def moments(self, problem: Problem, law: Any) -> Sums: ...

    def estimate(self, problem: Problem, law: Any) -> Estimate:
        """Psi and its covariance as this silo's own rows alone give them; stays in the silo."""
        ...

    def evaluate(self, function: Callable[[Any], Any]) -> Any:
        """What a public function of the installed package says of the rows; stays in the silo
        but for what the query makes of it."""
        ...

    def part(self, silo: str) -> Local | None:
        """The rows of ``silo``: all of them there, its own among pooled ones, None anywhere else."""
        ...

    def batch(self, pooled: IntArray) -> IntArray:
        """Own row numbers of a pooled batch, every occurrence kept."""
        ...


@dataclass
class Link:
    """The code memory of one silo's uplink, kept at both of its ends across re-centring."""

    previous: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Point(NamedTuple):
    """Where a query evaluates the rows' gradient: a state that the silo derived itself.

    The arrays are not to be written to: what was seen of them is remembered.
    """

    model: Model
    law: Any
    eps: Array
    batch: IntArray | None = None
    curvature: bool = False  # whether the Hessian is told too: sums of products of two columns


@dataclass(frozen=True)
class Cell:
    """A sum that counts people: its place in the answer and that of its whole (None: all rows).

    ``least`` and ``rest`` name the policy's floors of the count and of its complement.
    """

    at: int
    of: int | None = None
    least: str = "min_arm_rows"
    rest: str = "min_arm_rows"
    arm: bool = False  # whether an empty cell is an arm that is absent here


@dataclass(frozen=True)
class Spread:
    """A sum of nonnegative terms and that of their squares: their places in the answer."""

    at: int
    squares: int


class AbstractQuery(ABC, Generic[Answer, Pooled]):
    """One question: how a silo answers it, how answers are pooled, and both payloads as bits."""

    @property
    @abstractmethod
    def phase(self) -> Phase: ...

    @property
    @abstractmethod
    def tells(self) -> str:
        """What the answer tells, in words that a silo's owner reads."""

    @property
    @abstractmethod
    def functionals(self) -> int:
        """How many numbers the answer tells; 0 where that is known only when it is there."""

    def points(self) -> tuple[Point, ...]:
        """The gradients behind the answer, for the silo's guard."""
        return ()

    def cells(self) -> Iterable[Cell]:
        """The counts of people in the answer, for the silo's guard."""
        return ()

    def spreads(self) -> Iterable[Spread]:
        """Sums in the answer of which one person might make up most, for the silo's guard."""
        return ()

    def holders(self, local: Local) -> Iterable[int]:  # noqa: ARG002 - for those that name labels
        """How many rows stand behind each label that the answer names, for the silo's guard."""
        return ()

    def ships(self, silo: str) -> bool:  # noqa: ARG002 - for those that do
        """Whether this silo's answer is a model of its own rows, which everyone gets to see."""
        return False

    def members(self, answer: Any) -> Iterable[tuple[AbstractQuery[Any, Any], Any]]:
        """The queries that this one is made of, each with its part of the answer."""
        return ((self, answer),)

    @abstractmethod
    def answer(self, local: Local) -> Answer:
        """What this silo's rows say."""

    @abstractmethod
    def write_answer(self, answer: Answer, out: BitWriter, link: Link) -> None: ...

    @abstractmethod
    def read_answer(self, bits: BitReader, link: Link) -> Answer: ...

    @abstractmethod
    def pool(self, answers: Mapping[str, Answer], sizes: Mapping[str, int]) -> Pooled:
        """What is broadcast, from the answers and N_m of the silos still in the run."""

    @abstractmethod
    def write_pooled(self, pooled: Pooled, out: BitWriter) -> None: ...

    @abstractmethod
    def read_pooled(self, bits: BitReader) -> Pooled: ...

    @abstractmethod
    def retires(self, answer: Answer) -> bool:
        """Whether a silo that gave this answer leaves the run."""
