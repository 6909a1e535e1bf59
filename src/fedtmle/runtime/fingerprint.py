"""What identifies a silo's part: its plan, its name and its rows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtmle.model.table import StreamedTable


def fingerprint(plan: bytes, name: str, rows: Any) -> bytes:
    """A digest that stays at the silo: after a restart, the same plan and the same rows, or none.

    A table that changed between a crash and the resumption would give answers that do not belong
    together.
    """
    found = hashlib.blake2b(plan + name.encode(), digest_size=32)
    _feed(found, rows)
    return found.digest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype.str}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).data)
    elif isinstance(value, StreamedTable):
        found.update(value.digest)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _feed(found, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value):
            _feed(found, str(key))
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(found, item)
    else:
        found.update(repr(value).encode())
