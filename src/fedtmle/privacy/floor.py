"""A floor on omega: the query after which a named attribute would be known too well is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array
from fedtmle.privacy.answers import Answered, Submodels, explain
from fedtmle.privacy.modulus import design_modulus, require_at_least_zero
from fedtmle.protocol.query import AbstractQuery, Local

Query = AbstractQuery[Any, Any]


@final
@dataclass(frozen=True, kw_only=True)
class FloorAttribute:
    """A named attribute by its gradient at a public centre, and how well an attacker knows the data: rho."""

    name: str
    gradient: Array  # c, (q,)
    radius: float


@final
@dataclass(frozen=True, kw_only=True)
class OmegaFloor:
    """Refuses the query that would bring omega of an attribute below ``floor``.

    For a silo's policy, before it answers:

        jacobian = at_centre(centre, rows, "outcome")
        floor = OmegaFloor(attributes=(...), floor=0.5, noise=0.01, jacobian=jacobian)
        name = floor.crossed(answered, query)     # the queries answered so far, and the next one
        if name is not None: refuse               # a refusal ends the run and is charged

    ``jacobian`` gives the response Jacobian of a query, (m, q), at a *public* centre, or None where the
    audit does not cover the answer: what is refused must not depend on the records. ``noise`` is the
    declared norm of all errors together; at 0 an attribute that any answer sees exactly has omega 0.
    """

    attributes: tuple[FloorAttribute, ...]
    floor: float
    noise: float
    jacobian: Callable[[Query], Array | None]

    def __post_init__(self) -> None:
        require_at_least_zero(floor=self.floor, noise=self.noise)
        if not self.attributes:
            raise InputError("attributes: expected at least one")

    def omega(self, queries: Sequence[Query]) -> dict[str, float]:
        """omega_A(eta) of every attribute after these queries."""
        blocks = [block for query in queries if (block := self.jacobian(query)) is not None]
        found = {}
        for attribute in self.attributes:
            q = len(attribute.gradient)
            A = np.concatenate(blocks) if blocks else np.zeros((1, q))
            found[attribute.name] = design_modulus(
                A, attribute.gradient, radius=attribute.radius, noise=self.noise
            )
        return found

    def crossed(self, answered: Sequence[Query], query: Query) -> str | None:
        """The first attribute that answering ``query`` as well would bring below the floor, or None."""
        for name, omega in self.omega([*answered, query]).items():
            if omega < self.floor:
                return name
        return None


def at_centre(centre: Local, rows: Any, name: str) -> Callable[[Query], Array | None]:
    """The Jacobian in coordinate ``name`` of every record, at public ``rows``, seen as ``centre``."""
    submodels = Submodels()

    def jacobian(query: Query) -> Array | None:
        explained = explain(Answered(query=query, answer=query.answer(centre)), centre, rows, submodels)
        return None if explained is None else explained.tangents(rows, name) / centre.n_rows

    return jacobian
