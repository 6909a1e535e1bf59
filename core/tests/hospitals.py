"""Hospitals for tests of the protocol: keys, a plan, and runs that are opened and settled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fedtmle_core.dictionary import Dictionary, Numeric
from fedtmle_core.leaves import Number
from fedtmle_core.plan import Model, Plan
from fedtmle_core.seal import Consortium, Identity, Opening, Place, Seal, Session
from fedtmle_core.terms import ONE

NAMES = ("east", "north", "south", "west")
RUN = b"run " * 4
QUESTION = hashlib.sha256(b"question").digest()
PLACE = Place(3, b"heard" * 6, QUESTION)


def identity(name: str) -> Identity:
    """Return the secrets of a hospital."""
    return Identity(hashlib.sha256(name.encode()).digest())


def consortium(names: Sequence[str] = NAMES) -> Consortium:
    """Return the list of some hospitals."""
    return Consortium(tuple(identity(name).member(name) for name in names))


def plan(names: Sequence[str] = NAMES, **changed: object) -> Plan:
    """Return a plan for some hospitals; ``changed`` are fields."""
    named: dict[str, object] = {
        "dictionary": Dictionary((Numeric(name="x", low=0.0, high=1.0),)),
        "models": (Model(columns=(ONE, Number("x", 0))),),
        "members": consortium(names).members,
        "study": b"study",
        "author": "author",
    }
    return Plan(**named | changed)  # type: ignore[arg-type]


def session(name: str, *, run: bytes = RUN, table: bytes = b"", of: Plan | None = None) -> Session:
    """Return one hospital's view of a run."""
    return Session(
        identity(name), name, consortium(), of or plan(), run, table or b"rows of " + name.encode()
    )


def openings(sessions: Sequence[Session]) -> tuple[Opening, ...]:
    """Return what all say when they open."""
    return tuple(each.opening for each in sessions)


def sealed(sessions: Sequence[Session]) -> list[Seal]:
    """Return the seals of a run that these hospitals settle, in order."""
    rosters = [each.settle(openings(sessions)) for each in sessions]
    copies = (None, *rosters[0].copies())
    return [roster.seal(copy) for roster, copy in zip(rosters, copies, strict=True)]


def four() -> list[Session]:
    """Return the sessions of all four hospitals."""
    return [session(name) for name in NAMES]
