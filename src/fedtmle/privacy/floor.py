"""A floor on omega: the query after which a named attribute would be known too well is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array
from fedtmle.privacy.answers import Submodels, explain, single
from fedtmle.privacy.modulus import Compressed, coordinate_moduli, direction_modulus, require_at_least_zero
from fedtmle.protocol.query import AnsweredQuery, Local, Query


@final
@dataclass(frozen=True, kw_only=True)
class FloorAttribute:
    """A named attribute by its gradient at a public centre, and how well an attacker knows the data: rho.

    Without a gradient it is the value of each record, of which the one known best counts.
    """

    name: str
    gradient: Array | None  # c, (q,)
    radius: float


@final
@dataclass(frozen=True, kw_only=True)
class OmegaFloor:
    """What a silo's policy says: no answer may bring omega of an attribute below ``floor``.

        jacobian = at_centre(centre, rows, "outcome")
        floor = OmegaFloor(attributes=(...), floor=0.5, noise=0.01, records=len(rows), jacobian=jacobian)
        meter = floor.meter()               # of one session
        name = meter.admit(query)           # before each answer
        if name is not None: refuse         # a refusal ends the run and is charged

    ``jacobian`` gives the response Jacobian of a query, (m, q), at a *public* centre of q ``records``, or
    None where the audit does not cover the answer: what is refused must not depend on the silo's own.
    ``noise`` is the declared norm of all errors together; at 0 an attribute that any answer sees exactly
    has omega 0.
    """

    attributes: tuple[FloorAttribute, ...]
    floor: float
    noise: float
    records: int
    jacobian: Callable[[Query], Array | None]

    def __post_init__(self) -> None:
        require_at_least_zero(floor=self.floor, noise=self.noise)
        if not self.attributes:
            raise InputError("attributes: expected at least one")

    def meter(self) -> OmegaMeter:
        """A session's own, of which nothing has been asked yet."""
        return OmegaMeter(self)


@final
class OmegaMeter:
    """What one session's answers tell together: the Jacobians of all admitted queries, each made once."""

    def __init__(self, floor: OmegaFloor) -> None:
        self._floor = floor
        self._block = Compressed(floor.records)

    def admit(self, query: Query) -> str | None:
        """Counts ``query`` in; the first attribute that its answer brings below the floor, or None."""
        jacobian = self._floor.jacobian(query)
        if jacobian is None:
            return None
        self._block.add(jacobian)
        return next((name for name, omega in self.omega().items() if omega < self._floor.floor), None)

    def omega(self) -> dict[str, float]:
        """omega_A(eta) of every attribute after the queries admitted so far."""
        return {attribute.name: self._omega(attribute) for attribute in self._floor.attributes}

    def _omega(self, attribute: FloorAttribute) -> float:
        c, rho, eta = attribute.gradient, attribute.radius, self._floor.noise
        if c is None:
            return float(coordinate_moduli(self._block, radius=rho, noise=eta).min())
        return direction_modulus(self._block, c, radius=rho, noise=eta)


def at_centre(centre: Local, rows: Any, name: str) -> Callable[[Query], Array | None]:
    """The Jacobian in coordinate ``name`` of every record, at public ``rows``, seen as ``centre``."""
    submodels = Submodels()

    def jacobian(query: Query) -> Array | None:
        asked = single([AnsweredQuery(query=query, answer=query.answer(centre))])
        explained = [explain(one, centre, rows, submodels) for one in asked]
        found = [one.tangents(rows, name) / centre.n_rows for one in explained if one is not None]
        return np.concatenate(found) if found else None

    return jacobian
