"""Plans and questions as bytes, each in one form, and back: what is signed, approved and sent to a core.

A document lists the terms of its graph once, parts first, and then the shapes that refer to them by place.
Reading builds a value and compares its document with the bytes, so that no two documents have one meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TypeVar

import msgspec

from fedtmle_core import graph
from fedtmle_core.blocks import Block, Cells, Lattice, Layer, Moments, Score
from fedtmle_core.dictionary import Categorical, Dictionary, Identifier, Numeric, Variable
from fedtmle_core.errors import DecodeError, InputError
from fedtmle_core.plan import Member, Model, Plan, Question
from fedtmle_core.terms import Term
from fedtmle_core.types import Family, Part

LONGEST = 1 << 24  # bytes of a document: a question of 5,000 columns has some 2^20

T = TypeVar("T", bound=msgspec.Struct)


class _Layer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    columns: int
    factors: list[float]
    has_offset: bool
    has_y: bool
    has_w: bool


class _Score(msgspec.Struct, frozen=True, array_like=True, tag="score", forbid_unknown_fields=True):
    family: int
    layers: list[_Layer]
    at: list[float]
    part: int
    places: int | None
    C: list[list[float]] | None


class _Moments(msgspec.Struct, frozen=True, array_like=True, tag="moments", forbid_unknown_fields=True):
    columns: int
    products: list[list[int]]
    places: int | None


class _Cells(msgspec.Struct, frozen=True, array_like=True, tag="cells", forbid_unknown_fields=True):
    edges: list[float]
    groups: int
    sums: int
    places: int


class _Question(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    nodes: list[graph.Node]
    roots: list[int]
    blocks: list[_Score | _Moments | _Cells]
    noise: tuple[str, str] | None


class _Variable(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    kind: str
    name: str
    low: float = 0.0
    high: float = 0.0
    levels: list[str] = []
    largest: int = 0
    required: bool = False


class _Plan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    variables: list[_Variable]
    nodes: list[graph.Node]
    roots: list[int]
    models: list[tuple[int, int, int]]
    members: list[tuple[str, bytes, bytes]]
    study: bytes
    author: str
    min_hospitals: int
    floor: int
    people: int
    most_rounds: int
    most_numbers: int
    epsilon: float | None


def write_question(question: Question) -> bytes:
    """Return the one document of a question."""
    nodes, roots = graph.encode(question.terms)
    noise = question.noise
    return msgspec.msgpack.encode(
        _Question(
            nodes=nodes,
            roots=roots,
            blocks=[_shape(block) for block in question.blocks],
            noise=None if noise is None else (str(noise.numerator), str(noise.denominator)),
        )
    )


def read_question(data: bytes) -> Question:
    """Return the question of a document, or raise `DecodeError`."""
    found = _decoded(data, _Question)
    terms = iter(graph.decode(found.nodes, found.roots))
    try:
        question = Question(
            blocks=tuple(_block(shape, terms) for shape in found.blocks),
            noise=None if found.noise is None else Fraction(int(found.noise[0]), int(found.noise[1])),
        )
    except (InputError, ValueError, ZeroDivisionError, StopIteration, RuntimeError):
        raise DecodeError("a question does not hold together") from None
    if write_question(question) != data:
        raise DecodeError("a question is not in its canonical form")
    return question


def write_plan(plan: Plan) -> bytes:
    """Return the one document of a plan."""
    nodes, roots = graph.encode(plan.terms)
    return msgspec.msgpack.encode(
        _Plan(
            variables=[_variable(variable) for variable in plan.dictionary.variables],
            nodes=nodes,
            roots=roots,
            models=[(len(each.columns), len(each.responses), len(each.groups)) for each in plan.models],
            members=[(member.name, member.signing, member.exchange) for member in plan.members],
            study=plan.study,
            author=plan.author,
            min_hospitals=plan.min_hospitals,
            floor=plan.floor,
            people=plan.people,
            most_rounds=plan.most_rounds,
            most_numbers=plan.most_numbers,
            epsilon=plan.epsilon,
        )
    )


def read_plan(data: bytes) -> Plan:
    """Return the plan of a document, or raise `DecodeError`."""
    found = _decoded(data, _Plan)
    terms = iter(graph.decode(found.nodes, found.roots))
    try:
        plan = Plan(
            dictionary=Dictionary(tuple(_read_variable(variable) for variable in found.variables)),
            models=tuple(_read_model(sizes, terms) for sizes in found.models),
            members=tuple(Member(name=name, signing=s, exchange=x) for name, s, x in found.members),
            study=found.study,
            author=found.author,
            min_hospitals=found.min_hospitals,
            floor=found.floor,
            people=found.people,
            most_rounds=found.most_rounds,
            most_numbers=found.most_numbers,
            epsilon=found.epsilon,
        )
    except (InputError, ValueError, StopIteration, RuntimeError):
        raise DecodeError("a plan does not hold together") from None
    if write_plan(plan) != data:
        raise DecodeError("a plan is not in its canonical form")
    return plan


def _decoded(data: bytes, kind: type[T]) -> T:
    if len(data) > LONGEST:
        raise DecodeError(f"a document is longer than {LONGEST} bytes")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError):
        raise DecodeError("bytes are not a document of this kind") from None


def _shape(block: Block) -> _Score | _Moments | _Cells:
    """Return a block without its terms, which it counts; they are listed in its own order."""
    match block:
        case Score(lattice=lattice):
            matrix = None if lattice is None or lattice.C is None else [list(row) for row in lattice.C]
            return _Score(
                family=int(block.family),
                layers=[_layer(layer) for layer in block.layers],
                at=list(block.at),
                part=block.part.value,
                places=None if lattice is None else lattice.places,
                C=matrix,
            )
        case Moments():
            products = [list(product) for product in block.products]
            return _Moments(columns=len(block.columns), products=products, places=block.places)
        case Cells():
            return _Cells(
                edges=list(block.edges),
                groups=len(block.groups),
                sums=len(block.sums),
                places=block.places,
            )


def _layer(layer: Layer) -> _Layer:
    return _Layer(
        columns=len(layer.X),
        factors=list(layer.factors),
        has_offset=layer.offset is not None,
        has_y=layer.y is not None,
        has_w=layer.w is not None,
    )


def _block(shape: _Score | _Moments | _Cells, terms: Iterator[Term]) -> Block:
    """Return a block from its shape, and from the terms that follow."""
    match shape:
        case _Score():
            lattice = None
            if shape.places is not None:
                C = None if shape.C is None else tuple(map(tuple, shape.C))
                lattice = Lattice(places=shape.places, C=C)
            return Score(
                family=Family(shape.family),
                layers=tuple(_read_layer(layer, terms) for layer in shape.layers),
                at=tuple(shape.at),
                part=Part(shape.part),
                lattice=lattice,
            )
        case _Moments():
            products = tuple(map(tuple, shape.products))
            return Moments(columns=_next(terms, shape.columns), products=products, places=shape.places)
        case _Cells():
            return Cells(
                of=next(terms),
                edges=tuple(shape.edges),
                groups=_next(terms, shape.groups),
                sums=_next(terms, shape.sums),
                places=shape.places,
            )


def _read_layer(layer: _Layer, terms: Iterator[Term]) -> Layer:
    X = _next(terms, layer.columns)
    return Layer(
        X=X,
        factors=tuple(layer.factors),
        offset=next(terms) if layer.has_offset else None,
        y=next(terms) if layer.has_y else None,
        w=next(terms) if layer.has_w else None,
    )


def _next(terms: Iterator[Term], count: int) -> tuple[Term, ...]:
    return tuple(next(terms) for _ in range(count))


def _read_model(sizes: tuple[int, int, int], terms: Iterator[Term]) -> Model:
    columns, responses, groups = (_next(terms, size) for size in sizes)
    return Model(columns=columns, responses=responses, groups=groups)


def _variable(variable: Variable) -> _Variable:
    match variable:
        case Numeric():
            return _Variable(kind="number", name=variable.name, low=variable.low, high=variable.high)
        case Categorical():
            levels = list(variable.levels)
            return _Variable(kind="levels", name=variable.name, levels=levels, required=variable.required)
        case Identifier():
            return _Variable(kind="identifier", name=variable.name, largest=variable.largest)


def _read_variable(variable: _Variable) -> Variable:
    match variable.kind:
        case "number":
            return Numeric(name=variable.name, low=variable.low, high=variable.high)
        case "levels":
            levels = tuple(variable.levels)
            return Categorical(name=variable.name, levels=levels, required=variable.required)
        case "identifier":
            return Identifier(name=variable.name, largest=variable.largest)
    raise DecodeError("a plan declares a variable of an unknown kind")
