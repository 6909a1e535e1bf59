"""A limit on disclosure: refuse the query after which a named attribute would be known too well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array
from fedtmle.privacy.answers import Submodels, explain, single
from fedtmle.privacy.modulus import Compressed, coordinate_moduli, direction_modulus, require_at_least_zero
from fedtmle.protocol.query import AnsweredQuery, Local, Query


@final
@dataclass(frozen=True, kw_only=True)
class LimitedAttribute:
    """A named attribute by its gradient c at a public centre, and how well an attacker knows the data: rho.

    Without a gradient the attribute is the value of each record, and the record known best counts.
    """

    name: str
    gradient: Array | None  # c, (q,)
    radius: float


@final
@dataclass(frozen=True, kw_only=True)
class DisclosureLimit:
    """A part of a silo's policy: no answer may bring omega of an attribute below ``smallest_omega``.

        jacobian = at_centre(centre, rows, "outcome")
        limit = DisclosureLimit(
            attributes=(...), smallest_omega=0.5, noise=0.01, records=len(rows), jacobian=jacobian
        )
        meter = limit.meter()               # one per session
        name = meter.admit(query)           # before each answer
        if name is not None: refuse         # a refusal ends the run and is charged

    ``jacobian`` gives the response Jacobian of a query, (m, q), at a *public* centre of q ``records``, or
    None if the audit does not cover the answer: a refusal must not depend on the silo's own records.
    ``noise`` is the declared norm of all errors together; at 0 an attribute that any answer determines
    exactly has omega 0.
    """

    attributes: tuple[LimitedAttribute, ...]
    smallest_omega: float
    noise: float
    records: int
    jacobian: Callable[[Query], Array | None]

    def __post_init__(self) -> None:
        require_at_least_zero(smallest_omega=self.smallest_omega, noise=self.noise)
        if not self.attributes:
            raise InputError("attributes: expected at least one")

    def meter(self) -> AttributeMeter:
        """Return the meter of a new session."""
        return AttributeMeter(self)


@final
class AttributeMeter:
    """The disclosure of one session's answers together, from the Jacobians of all admitted queries."""

    def __init__(self, limit: DisclosureLimit) -> None:
        self._limit = limit
        self._block = Compressed(limit.records)

    def admit(self, query: Query) -> str | None:
        """Count ``query`` in; return the first attribute that its answer brings below the limit, or None."""
        jacobian = self._limit.jacobian(query)
        if jacobian is None:
            return None
        self._block.add(jacobian)
        smallest = self._limit.smallest_omega
        return next((name for name, omega in self.omega().items() if omega < smallest), None)

    def omega(self) -> dict[str, float]:
        """Return omega_A(eta) of every attribute after the queries admitted so far."""
        return {attribute.name: self._omega(attribute) for attribute in self._limit.attributes}

    def _omega(self, attribute: LimitedAttribute) -> float:
        c, rho, eta = attribute.gradient, attribute.radius, self._limit.noise
        if c is None:
            return float(coordinate_moduli(self._block, radius=rho, noise=eta).min())
        return direction_modulus(self._block, c, radius=rho, noise=eta)


def at_centre(centre: Local, rows: object, name: str) -> Callable[[Query], Array | None]:
    """Return the Jacobian of a query's answer in coordinate ``name`` of every record, at public ``rows``.

    ``centre`` are the same rows as a query sees them.
    """
    submodels = Submodels()

    def jacobian(query: Query) -> Array | None:
        asked = single([AnsweredQuery(query=query, answer=query.answer(centre))])
        explained = [explain(one, centre, rows, submodels) for one in asked]
        blocks = [one.tangents(rows, name) / centre.n_rows for one in explained if one is not None]
        return np.concatenate(blocks) if blocks else None

    return jacobian
