"""The plan's digest: problem, initial law and algorithm as one canonical document."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from fedtmle.protocol.messages import WIRE_FORMAT


def plan_digest(problem: Any, law: Any, algorithm: Any) -> bytes:
    """SHA-256 of the canonical document; any change to it, the wire format included, shows."""
    document = {
        "format": WIRE_FORMAT,
        "problem": canonical(problem),
        "law": canonical(law),
        "algorithm": canonical(algorithm),
    }
    return hashlib.sha256(msgspec.msgpack.encode(document, order="deterministic")).digest()


def canonical(value: Any) -> Any:
    """``value`` as plain data: dataclasses by name and compared fields, arrays by type, shape and bytes."""
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
        return [type(value).__name__, fields]
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [canonical(item) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be part of a plan")
