"""A plan, which an owner approves, and a question, which the hospitals' programs ask under it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import final

from fedtmle_core import graph
from fedtmle_core.blocks import Block, Intervals
from fedtmle_core.dictionary import Dictionary
from fedtmle_core.errors import InputError
from fedtmle_core.terms import ONE, Term

MOST_PEOPLE = 1 << 40  # of all hospitals together: totals of 40 + 90 bits still take 17 bytes
LEAST_FLOOR = 1


@final
@dataclass(frozen=True, kw_only=True)
class Member:
    """A hospital of the consortium's list, and its public keys of 32 bytes each."""

    name: str
    signing: bytes  # Ed25519
    exchange: bytes  # X25519


@final
@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that a study fits: what is judged are the products of its responses and its columns.

    ``responses`` are the weight of a record and the weight times the response; ``groups`` are those whom the
    model tells apart. In each group, each column is that of nobody or of as many people as the floor says.
    """

    columns: tuple[Term, ...]
    responses: tuple[Term, ...] = (ONE,)
    groups: tuple[Term, ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*self.columns, *self.responses, *self.groups)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """All that an owner approves.

    ``models`` are those that the study fits. ``people`` is a public bound of how many people all hospitals
    have together. ``study`` is the digest of the study's own document, which the program reads.
    """

    dictionary: Dictionary
    models: tuple[Model, ...]
    members: tuple[Member, ...]
    study: bytes
    author: str
    min_hospitals: int = 3
    floor: int = 5
    people: int = 1 << 24
    most_rounds: int = 100
    most_numbers: int = 50_000
    epsilon: float | None = None  # of a study with noise

    def __post_init__(self) -> None:
        if not 1 <= self.people <= MOST_PEOPLE:
            raise InputError(f"people: expected from 1 to {MOST_PEOPLE}, not {self.people}")
        if self.floor < LEAST_FLOOR:
            raise InputError(f"floor: expected at least {LEAST_FLOOR}, not {self.floor}")
        if len({member.name for member in self.members}) != len(self.members):
            raise InputError("the roster has two hospitals of one name")
        graph.intervals(self.terms, self.dictionary)

    @property
    def terms(self) -> tuple[Term, ...]:
        """All terms of the models."""
        return tuple(term for model in self.models for term in model.terms)

    @cached_property
    def columns(self) -> tuple[Term, ...]:
        """The vocabulary: the columns of all models, over which every linear predictor is."""
        return tuple(dict.fromkeys(column for model in self.models for column in model.columns))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the plan's document."""
        from fedtmle_core.documents import write_plan

        return hashlib.sha256(b"fedtmle plan" + write_plan(self)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@final
@dataclass(frozen=True)
class Lane:
    """One integer of an answer: the public bound of the total over all hospitals, |total| <= reach."""

    reach: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What is asked in one round: blocks of sums.

    ``noise`` is the variance, in squared units of the integers, of the noise that each hospital adds to every
    number.
    """

    blocks: tuple[Block, ...]
    noise: Fraction | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for block in self.blocks for term in block.terms)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the question's document."""
        from fedtmle_core.documents import write_question

        return hashlib.sha256(b"fedtmle question" + write_question(self)).digest()

    def intervals(self, plan: Plan) -> Intervals:
        """Return the public interval of each term."""
        return graph.intervals_of((ONE, *self.terms), plan.dictionary)

    def lanes(self, plan: Plan) -> tuple[Lane, ...]:
        """Return the public bound of every number, from the plan alone."""
        return _lanes(self, plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Question) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@lru_cache(maxsize=8)  # a question is admitted, answered and read; hospitals of one process share it
def _lanes(question: Question, plan: Plan) -> tuple[Lane, ...]:
    intervals = question.intervals(plan)
    reaches = (block.reaches(intervals, plan.people) for block in question.blocks)
    return tuple(Lane(reach) for of_block in reaches for reach in of_block)
