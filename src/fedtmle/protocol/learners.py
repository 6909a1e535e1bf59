"""Queries of learners: models shipped whole by who fitted them, and several queries in one round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from fedtmle.errors import DecodeError, InputError, ProtocolError
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.design import column_names
from fedtmle.initial.glm import FittedGLM, Levels
from fedtmle.initial.syntax import Formula
from fedtmle.initial.trees import NODE, GradientBoostedTrees, TreeEnsemble
from fedtmle.model.families import Family
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.query import AbstractQuery, Link, Local, Phase, Point

LARGEST_MODEL = 1 << 21  # bytes: more than the most and deepest trees
MOST_SILOS = 4096

Models = tuple[Fitted, ...]


class Codec(Protocol):
    """One kind of model as bytes; ``unpack`` raises `DecodeError` on anything but what ``pack`` gives."""

    def pack(self, model: Any) -> bytes: ...

    def unpack(self, data: bytes) -> Fitted: ...


@final
@dataclass(frozen=True, kw_only=True)
class GLMCodec:
    """Coefficients as float64, in the order of the formula's columns."""

    formula: Formula
    levels: Levels
    family: Family

    def pack(self, model: FittedGLM) -> bytes:
        return np.array(model.coefficients, dtype="<f8").tobytes()

    def unpack(self, data: bytes) -> FittedGLM:
        if len(data) != 8 * len(column_names(self.formula, self.levels)):
            raise DecodeError("a model has another number of coefficients")
        coefficients = np.frombuffer(data, dtype="<f8")
        if not np.isfinite(coefficients).all():
            raise DecodeError("a coefficient is not finite")
        return FittedGLM(
            formula=self.formula,
            levels=self.levels,
            family=self.family,
            coefficients=tuple(map(float, coefficients)),
        )


@final
@dataclass(frozen=True, kw_only=True)
class TreesCodec:
    """The start (8 bytes), the number of trees (2), their numbers of nodes (2 each), the nodes (22 each)."""

    trees: GradientBoostedTrees
    levels: Levels
    family: Family

    def pack(self, model: TreeEnsemble) -> bytes:
        count = np.array(len(model.sizes), dtype="<u2")
        arrays = (np.array(model.base, dtype="<f8"), count, model.sizes.astype("<i2"), model.nodes)
        return b"".join(array.tobytes() for array in arrays)

    def unpack(self, data: bytes) -> TreeEnsemble:
        try:
            base = np.frombuffer(data, "<f8", count=1)
            count = np.frombuffer(data, "<u2", count=1, offset=8)
            sizes = np.frombuffer(data, "<i2", count=int(count[0]), offset=10)
            nodes = np.frombuffer(data[10 + sizes.nbytes :], NODE)
        except ValueError:
            raise DecodeError("trees: the bytes end early, or inside a node") from None
        model = TreeEnsemble(
            formula=self.trees.parsed,
            levels=self.levels,
            family=self.family,
            base=float(base[0]),
            sizes=sizes.astype(np.int16),
            nodes=nodes,
        )
        self.trees.admit(model)
        return model


@final
@dataclass(frozen=True, kw_only=True)
class ModelsQuery(AbstractQuery[Models | None, tuple[Models | None, ...]]):
    """``count`` models from silo ``at``, or from every silo that can fit them, broadcast as they are.

    A silo that fits none says so in one bit.
    """

    fit: Callable[[Local], Models | None]
    at: str | None
    count: int
    codec: Codec

    @property
    def phase(self) -> Phase:
        return Phase.NUISANCE

    @property
    def tells(self) -> str:
        return "a model fitted to the silo's own rows"

    @property
    def functionals(self) -> int:
        return 0  # a model has as many as its fit gives it

    def ships(self, silo: str) -> bool:
        return self.at in (None, silo)

    def answer(self, local: Local) -> Models | None:
        holder = local if self.at is None else local.part(self.at)
        return None if holder is None else self.fit(holder)

    def pool(
        self,
        answers: Mapping[str, Models | None],
        sizes: Mapping[str, int],  # noqa: ARG002 - models are not averaged here
    ) -> tuple[Models | None, ...]:
        if self.at is None:
            return tuple(answers.values())
        senders = [silo for silo, models in answers.items() if models is not None]
        if self.at not in answers and (len(answers) > 1 or not senders):  # alone and sending: pooled rows
            raise InputError(absent_pilot(self.at))
        if self.at in answers and senders != [self.at]:
            raise ProtocolError(f"silo '{self.at}' alone is to send a model")
        return (answers[senders[0]],)

    def write_answer(self, answer: Models | None, out: BitWriter, link: Link) -> None:  # noqa: ARG002
        out.uint(int(answer is not None), 1)
        for model in answer or ():
            data = self.codec.pack(model)
            out.gamma((len(data),))
            # One number for the whole model: appending field by field would copy all before it each time.
            out.uint(int.from_bytes(data, "big"), 8 * len(data))

    def read_answer(self, bits: BitReader, link: Link) -> Models | None:  # noqa: ARG002
        return tuple(self._model(bits) for _ in range(self.count)) if bits.uint(1) else None

    def write_pooled(self, pooled: tuple[Models | None, ...], out: BitWriter) -> None:
        out.gamma((len(pooled),))
        for models in pooled:
            self.write_answer(models, out, Link())

    def read_pooled(self, bits: BitReader) -> tuple[Models | None, ...]:
        (silos,) = bits.gamma(1)
        if not 1 <= silos <= (1 if self.at else MOST_SILOS):
            raise DecodeError("a count of silos is out of range")
        pooled = tuple(self.read_answer(bits, Link()) for _ in range(silos))
        if self.at and pooled == (None,):
            raise DecodeError("the pilot's model is missing")
        return pooled

    def retires(self, answer: Models | None) -> bool:  # noqa: ARG002
        return False

    def _model(self, bits: BitReader) -> Fitted:
        (length,) = bits.gamma(1)
        if not 0 <= length <= LARGEST_MODEL:
            raise DecodeError("a model's length is out of range")
        return self.codec.unpack(bits.uint(8 * length).to_bytes(length, "big"))


def absent_pilot(silo: str) -> str:
    """What to say where the silo that is to fit a model does not take part."""
    return (
        f"Pilot: silo '{silo}', which is to fit a model, is not in this run; name another in at, or give "
        "a model that is already fitted"
    )


@final
@dataclass(frozen=True)
class JointQuery(AbstractQuery[tuple[Any, ...], tuple[Any, ...]]):
    """Several queries of one phase in one round; none may keep a memory on the link or retire a silo."""

    queries: tuple[AbstractQuery[Any, Any], ...]

    @property
    def phase(self) -> Phase:
        return self.queries[0].phase

    @property
    def tells(self) -> str:
        return "; ".join(dict.fromkeys(query.tells for query in self.queries))

    @property
    def functionals(self) -> int:
        return sum(query.functionals for query in self.queries)

    def points(self) -> tuple[Point, ...]:
        return tuple(point for query in self.queries for point in query.points())

    def holders(self, local: Local) -> Iterable[int]:
        return (count for query in self.queries for count in query.holders(local))

    def ships(self, silo: str) -> bool:
        return any(query.ships(silo) for query in self.queries)

    def members(self, answer: tuple[Any, ...]) -> Iterable[tuple[AbstractQuery[Any, Any], Any]]:
        return (
            member for query, part in zip(self.queries, answer, strict=True) for member in query.members(part)
        )

    def answer(self, local: Local) -> tuple[Any, ...]:
        return tuple(query.answer(local) for query in self.queries)

    def pool(self, answers: Mapping[str, tuple[Any, ...]], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return tuple(
            query.pool({silo: answer[k] for silo, answer in answers.items()}, sizes)
            for k, query in enumerate(self.queries)
        )

    def write_answer(self, answer: tuple[Any, ...], out: BitWriter, link: Link) -> None:
        for query, part in zip(self.queries, answer, strict=True):
            query.write_answer(part, out, link)

    def read_answer(self, bits: BitReader, link: Link) -> tuple[Any, ...]:
        return tuple(query.read_answer(bits, link) for query in self.queries)

    def write_pooled(self, pooled: tuple[Any, ...], out: BitWriter) -> None:
        for query, part in zip(self.queries, pooled, strict=True):
            query.write_pooled(part, out)

    def read_pooled(self, bits: BitReader) -> tuple[Any, ...]:
        return tuple(query.read_pooled(bits) for query in self.queries)

    def retires(self, answer: tuple[Any, ...]) -> bool:  # noqa: ARG002
        return False
