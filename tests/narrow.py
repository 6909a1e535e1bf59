"""Check at run time that a value is of the kind that a test needs, and return it with a type mypy knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from fedtmle import data
from fedtmle.data.silofile import Schema
from fedtmle.model.table import Table
from fedtmle.protocol.outcome import Targeted


class HasOutcome(Protocol):
    """A finished run."""

    @property
    def outcome(self) -> object: ...


def load(source: object, schema: Schema, *, silo: str, **options: Any) -> Table:
    """Load a source as `fedtmle.data.load` does, and check that the table is in memory."""
    return in_memory(data.load(source, schema, silo=silo, **options))


def load_all(sources: Mapping[str, object], schema: Schema) -> dict[str, Table]:
    """Load all sources as `fedtmle.data.load_all` does, and check that the tables are in memory."""
    return {silo: in_memory(table) for silo, table in data.load_all(sources, schema).items()}


def in_memory(table: object) -> Table:
    """Return the table after a check that it is not streamed."""
    assert isinstance(table, Table)
    return table


def targeted(run: HasOutcome) -> Any:
    """Return the outcome of a run after a check that it is `Targeted`.

    Its type is Any because the problem and the details are those of the study: tests know which.
    """
    assert isinstance(run.outcome, Targeted)
    return run.outcome


def array(values: object) -> np.ndarray:
    """Return the values after a check that they are an array, not a `Scaled` design."""
    assert isinstance(values, np.ndarray)
    return values
