"""What stands around a core: its records, its owner's decisions, and what its program says and hears."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

from fedtmle_core.journal import Journal
from fedtmle_core.judgement import Judge
from fedtmle_core.ledger import Ledger
from fedtmle_core.plan import Plan, Question
from fedtmle_core.seal import Consortium, Identity
from fedtmle_core.terms import Term


class Records(Protocol):
    """The checked records of the hospital."""

    @property
    def digest(self) -> bytes:
        """A digest of all records; it stays here."""
        ...

    def answer(self, question: Question, plan: Plan, /) -> Sequence[int]:
        """Return the integers of a question, in the order of its lanes."""
        ...


class Rules(Protocol):
    """What is judged, what may be asked, what the program sees, and what may be published (`court`)."""

    def before_fits(self, hospitals: int, /) -> Judge | None:
        """Return the judgement before the first question, None if the plan needs none."""
        ...

    def before_targeting(self, terms: tuple[Term, ...], hospitals: int, /) -> Judge:
        """Return the judgement of the terms that the program names."""
        ...

    def admit(self, question: Question, /) -> None:
        """Raise `FedTMLEError` unless the question asks for sums of judged columns."""
        ...

    def shown(self, question: Question, totals: Sequence[int], /) -> tuple[int, ...]:
        """Return the totals that the program may see; all hospitals find the same."""
        ...

    def publish(self, exact: bytes, /) -> bytes:
        """Return what everybody may read of a result; raise `FedTMLEError` if nothing may go out."""
        ...


class Office(Protocol):
    """What the owner decides, and what the hospital's home remembers beyond one run."""

    def refuses(self, plan: Plan, /) -> str:
        """Return why the plan may not be opened, empty if it may; the reason is for the owner alone."""
        ...

    def has_withdrawn(self, plan: Plan, /) -> bool:
        """Return whether the owner has withdrawn the approval since."""
        ...

    def settles(self, plan: Plan, run: bytes, roster: bytes, /) -> bool:
        """Remember the roster of a run; return False if the plan has had another one.

        Of two runs with different rosters, a hospital that reads totals learns the difference.
        """
        ...

    def charge(self, plan: Plan, /) -> None:
        """Charge a refusal that depends on records to the plan's author; a plan is charged once."""
        ...


def utc_now() -> datetime.datetime:
    """Return the time; it is in the ledger alone."""
    return datetime.datetime.now(datetime.UTC)


@final
@dataclass(frozen=True, kw_only=True)
class Hospital:
    """One hospital: its name and secrets, whom it knows, and where it keeps what it does."""

    name: str
    identity: Identity
    consortium: Consortium
    office: Office
    journal: Journal
    ledger: Ledger | None = None
    clock: Callable[[], datetime.datetime] = utc_now


@final
@dataclass(frozen=True)
class Reply:
    """Bytes for the server; the program has nothing to do."""

    data: bytes


@final
@dataclass(frozen=True)
class Totals:
    """What the program hears: totals over all hospitals, in the order of its question's lanes.

    There are none before its first question, and none after it has named terms.
    """

    round: int
    values: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class Named:
    """The program is about to ask for sums of these terms, and has them judged."""

    terms: tuple[Term, ...]


@final
@dataclass(frozen=True)
class Result:
    """The program has ended: the result's exact bytes, which stay at the hospitals."""

    exact: bytes


Heard: TypeAlias = Reply | Totals
Asked: TypeAlias = Question | Named | Result
