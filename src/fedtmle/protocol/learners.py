"""Queries of learners: models that are sent whole by the silo that fitted them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from fedtmle.errors import DecodeError, InputError, ProtocolError
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.design import column_names
from fedtmle.initial.glm import FittedGLM, Levels
from fedtmle.initial.superlearner import NODE, GradientBoostedTrees, TreeEnsemble
from fedtmle.initial.syntax import Formula
from fedtmle.protocol.codes import (
    MOST_SILOS,
    AbstractCode,
    BitReader,
    BitWriter,
    read_bytes,
    read_count,
    write_bytes,
)
from fedtmle.protocol.query import AbstractQuery, Local
from fedtmle_core.types import Family

LARGEST_MODEL = 1 << 21  # bytes: more than the most and deepest trees

Models = tuple[Fitted, ...]


class ModelFormat(Protocol):
    """One kind of model as bytes; ``unpack`` raises `DecodeError` on anything but what ``pack`` gives."""

    def pack(self, model: Any) -> bytes: ...

    def unpack(self, data: bytes) -> Fitted: ...


@final
@dataclass(frozen=True, kw_only=True)
class GLMFormat:
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
class TreesFormat:
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


class AbstractLocalFit(ABC):
    """How a silo fits ``count`` models to its own rows alone."""

    @property
    @abstractmethod
    def count(self) -> int: ...

    @abstractmethod
    def fit(self, local: Local) -> Models | None:
        """Return the models, or None if the silo has too few rows."""


@final
@dataclass(frozen=True, kw_only=True)
class ModelsCode(AbstractCode[Models | None]):
    """One bit says whether there are models; each follows as a length and bytes."""

    numbers = 0  # unknown until the models are fitted

    count: int
    model_format: ModelFormat

    def write(self, value: Models | None, out: BitWriter) -> None:
        out.uint(int(value is not None), 1)
        for model in value or ():
            write_bytes(self.model_format.pack(model), out)

    def read(self, bits: BitReader) -> Models | None:
        if not bits.uint(1):
            return None
        return tuple(self.model_format.unpack(read_bytes(bits, LARGEST_MODEL)) for _ in range(self.count))


@final
@dataclass(frozen=True, kw_only=True)
class ShippedCode(AbstractCode[tuple[Models | None, ...]]):
    """The models of at most ``most`` silos; a pilot is one silo's."""

    numbers = 0

    models: ModelsCode
    is_pilot: bool

    def write(self, value: tuple[Models | None, ...], out: BitWriter) -> None:
        out.gamma((len(value),))
        for models in value:
            self.models.write(models, out)

    def read(self, bits: BitReader) -> tuple[Models | None, ...]:
        silos = read_count(bits, 1 if self.is_pilot else MOST_SILOS, least=1)
        shipped = tuple(self.models.read(bits) for _ in range(silos))
        if self.is_pilot and shipped == (None,):
            raise DecodeError("the pilot's model is missing")
        return shipped


@final
@dataclass(frozen=True, kw_only=True)
class ModelsQuery(AbstractQuery[Models | None, tuple[Models | None, ...]]):
    """Models from silo ``at``, or from every silo that can fit them, broadcast as they are.

    A silo that fits none answers with one bit.
    """

    explanation = "a model fitted to the silo's own rows"
    open_consent = "allow_open"

    local_fit: AbstractLocalFit
    at: str | None
    model_format: ModelFormat

    @property
    def answer_code(self) -> ModelsCode:
        return ModelsCode(count=self.local_fit.count, model_format=self.model_format)

    @property
    def pooled_code(self) -> ShippedCode:
        return ShippedCode(models=self.answer_code, is_pilot=self.at is not None)

    def ships_model(self, silo: str) -> bool:
        return self.at in (None, silo)

    def answer(self, local: Local) -> Models | None:
        holder = local if self.at is None else local.part(self.at)
        return None if holder is None else self.local_fit.fit(holder)

    def pool(
        self,
        answers: Mapping[str, Models | None],
        sizes: Mapping[str, int],
    ) -> tuple[Models | None, ...]:
        if self.at is None:
            return tuple(answers.values())
        senders = [silo for silo, models in answers.items() if models is not None]
        # A single silo that sends a model has the pooled rows.
        if self.at not in answers and (len(answers) > 1 or not senders):
            raise InputError(absent_pilot(self.at))
        if self.at in answers and senders != [self.at]:
            raise ProtocolError(f"silo '{self.at}' alone is to send a model")
        return (answers[senders[0]],)


def absent_pilot(silo: str) -> str:
    """Return the message for a study whose pilot's silo does not take part."""
    return (
        f"Pilot: silo '{silo}', which is to fit a model, is not in this run; name another in at, or give "
        "a model that is already fitted"
    )
