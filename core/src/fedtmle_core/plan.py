"""A plan, which an owner approves, and a question, which the hospitals' programs ask under it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias, final

import msgspec

from fedtmle_core import graph
from fedtmle_core.blocks import AbstractBlock, Block, Cells, Intervals, Layer, Moments, Score
from fedtmle_core.dictionary import Categorical, Dictionary, Identifier, Numeric
from fedtmle_core.errors import InputError
from fedtmle_core.terms import ONE, Term

Plain: TypeAlias = object

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
class Plan:
    """All that an owner approves.

    ``columns`` is the vocabulary of every linear predictor, ``responses`` are the terms whose products with
    columns the fits ask for, and ``groups`` are compared: in each of them a column is that of nobody or of
    ``floor`` people. ``people`` is a public bound of how many people all hospitals have together.
    ``study`` is the digest of the study's own document, which the program reads.
    """

    dictionary: Dictionary
    columns: tuple[Term, ...]
    responses: tuple[Term, ...]
    groups: tuple[Term, ...]
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
        graph.intervals((*self.columns, *self.responses, *self.groups), self.dictionary)

    @cached_property
    def document(self) -> bytes:
        """The plan's one form as bytes."""
        nodes, roots = graph.encode((*self.columns, *self.responses, *self.groups))
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        named |= {
            "dictionary": [_variable(variable) for variable in self.dictionary.variables],
            "columns": len(self.columns),
            "responses": len(self.responses),
            "groups": len(self.groups),
            "members": [[member.name, member.signing, member.exchange] for member in self.members],
            "terms": [nodes, roots],
        }
        return msgspec.msgpack.encode(named, order="deterministic")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the document."""
        return hashlib.sha256(b"fedtmle plan" + self.document).digest()


def _variable(variable: Numeric | Categorical | Identifier) -> list[Plain]:
    match variable:
        case Numeric():
            return ["number", variable.name, variable.low, variable.high]
        case Categorical():
            return ["levels", variable.name, list(variable.levels)]
        case Identifier():
            return ["identifier", variable.name, variable.largest]


@final
@dataclass(frozen=True)
class Lane:
    """One integer of an answer: the public bound of the total over all hospitals, |total| <= reach."""

    reach: int


@final
@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked in one round: blocks of sums.

    If it is ``judged``, the totals stay in the cores. ``noise`` is the variance, in squared units of the
    integers, of the noise that each hospital adds to every number.
    """

    blocks: tuple[Block, ...]
    is_judged: bool = False
    noise: Fraction | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for block in self.blocks for term in block.terms)

    @cached_property
    def document(self) -> bytes:
        """The question's one form as bytes."""
        nodes, roots = graph.encode(self.terms)
        noise = None if self.noise is None else [str(self.noise.numerator), str(self.noise.denominator)]
        content = [nodes, roots, [_shape(block) for block in self.blocks], self.is_judged, noise]
        return msgspec.msgpack.encode(content)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the document."""
        return hashlib.sha256(b"fedtmle question" + self.document).digest()

    def intervals(self, plan: Plan) -> Intervals:
        """Return the public interval of each term."""
        return graph.intervals((ONE, *self.terms), plan.dictionary)

    def lanes(self, plan: Plan) -> tuple[Lane, ...]:
        """Return the public bound of every number, from the plan alone."""
        found, intervals = [], self.intervals(plan)
        for block in self.blocks:
            found += [Lane(reach) for reach in block.reaches(intervals, plan.people)]
        return tuple(found)


def _shape(block: AbstractBlock) -> list[Plain]:
    """Return what a block adds to its terms, as plain data; terms are counted, and listed in their order."""
    match block:
        case Score():
            lattice = block.lattice
            return [
                "score",
                int(block.family),
                [_layer(layer) for layer in block.layers],
                list(block.at),
                block.part.value,
                None if lattice is None else [lattice.places, None if lattice.C is None else list(lattice.C)],
            ]
        case Moments():
            return ["moments", len(block.columns), [list(pair) for pair in block.products], block.places]
        case Cells():
            return ["cells", list(block.edges), len(block.groups), len(block.sums), block.places]
    raise TypeError("a question has blocks of three shapes")


def _layer(layer: Layer) -> list[Plain]:
    present = [layer.offset is not None, layer.y is not None, layer.w is not None]
    return [len(layer.X), list(layer.factors), present]
