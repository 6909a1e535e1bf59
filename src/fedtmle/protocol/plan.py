"""The plan: all that a silo approves, as one canonical document with a digest."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from fedtmle.errors import InputError
from fedtmle.protocol.messages import WIRE_FORMAT
from fedtmle.protocol.outcome import Outcome
from fedtmle.protocol.provenance import provenance
from fedtmle.protocol.query import Flow
from fedtmle.version import __version__


@dataclass(frozen=True, kw_only=True)
class Member:
    """A silo of the roster; ``key`` is its public key (Ed25519, 32 bytes), empty where nothing is signed."""

    name: str
    key: bytes = b""


class AbstractProgram(ABC):
    """What every party runs: a frozen dataclass, since all of its fields are part of the plan."""

    @abstractmethod
    def flow(self, n: int) -> Flow[Outcome]:
        """Return the generator of queries over n pooled rows."""

    @abstractmethod
    def count(self, rows: Any) -> int:
        """Return N_m."""

    @abstractmethod
    def smallest_part(self, rows: Any) -> int:
        """Return the fewest rows that the program sets apart from the others, as in a fold."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run, on which silos, until when.

    ``program`` holds everything that decides what is asked: the problem or study, the algorithm, caps,
    bounds, seeds and the rules by which calibration sets grid, smoothness and tolerance. ``expires`` is
    the last day on which it may run.
    """

    program: AbstractProgram
    roster: tuple[Member, ...]
    expires: datetime.date | None = None

    def __post_init__(self) -> None:
        if not self.roster:
            raise InputError("silos: a study needs at least one")
        if len(set(self.silos)) < len(self.roster):
            raise InputError("silos: two of them have the same name")

    @property
    def silos(self) -> tuple[str, ...]:
        """The roster's names, in its order."""
        return tuple(member.name for member in self.roster)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical document; any change shows, the package's version included."""
        return hashlib.sha256(self.document).digest()

    @cached_property
    def document(self) -> bytes:
        """The canonical document."""
        content = {
            "format": WIRE_FORMAT,
            "version": __version__,
            "program": canonical(self.program),
            "roster": canonical(self.roster),
            "expires": None if self.expires is None else self.expires.isoformat(),
        }
        return msgspec.msgpack.encode(content, order="deterministic")


def roster(names: Sequence[str]) -> tuple[Member, ...]:
    """Silos that sign nothing: those of an embedded run."""
    return tuple(Member(name=str(name)) for name in names)


def canonical(value: Any) -> Any:
    """Return ``value`` as plain data.

    A dataclass is the provenance of its class (`fedtmle.protocol.provenance`) and its compared
    fields; an array is its type, shape and bytes; a sequence other than a list or a tuple is the
    provenance of its class and its items.
    """
    cls: type = type(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):  # before float: a numpy float is one
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if dataclasses.is_dataclass(value):
        fields = {f.name: canonical(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare}
        return [provenance(cls), fields]
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        items = [canonical(item) for item in value]
        return items if cls in (list, tuple) else [provenance(cls), items]
    raise TypeError(f"a {cls.__name__} cannot be part of a plan")
