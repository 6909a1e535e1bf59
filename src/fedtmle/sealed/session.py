"""Hospitals of a sealed run: each has a core and a program, and all programs are one flow.

A `Party` takes requests from the server to its core, and totals from its core to its program. Deployed, every
hospital has its own flow. `run_sealed` runs all of them in one process, where the flow is computed once and
each party checks that it has read the same totals; the bytes are those of a deployed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, final

from fedtmle.errors import ProtocolError
from fedtmle.estimation.flow import Flow, blocks_of, named_by
from fedtmle.sealed.relay import Published, Relay, Replies, Requests
from fedtmle_core import messages
from fedtmle_core.around import Asked, Hospital, Named, Office, Reply, Result, Rules, Totals
from fedtmle_core.core import Core
from fedtmle_core.court import Court
from fedtmle_core.evaluate import Workspace, values_of
from fedtmle_core.journal import MemoryJournal
from fedtmle_core.messages import Answered, Ask
from fedtmle_core.plan import Plan, Question
from fedtmle_core.recorder import recorded
from fedtmle_core.seal import Consortium, Identity
from fedtmle_core.sheet import Sheet

T = TypeVar("T")
Program: TypeAlias = Generator[Asked, tuple[int, ...], T]


def program(flow: Flow[T], plan: Plan, encode: Callable[[T], bytes]) -> Program[T]:
    """Ask what a flow asks, and end with the bytes of its result, on which hospitals agree."""
    try:
        asked = next(flow)
        while True:
            if terms := named_by(asked):
                yield Named(terms)
            values = []
            if blocks := blocks_of(asked):
                question = Question(blocks=blocks)
                values = values_of(question, (yield question), plan)
            asked = flow.send(values)
    except StopIteration as stop:
        result: T = stop.value
    yield Result(encode(result))
    return result


@final
class Shared(Generic[T]):
    """A program that several parties of one process follow: it is computed once."""

    def __init__(self, program: Program[T]) -> None:
        self._program = program
        self._heard: list[tuple[int, ...]] = []
        self._asked: list[Asked] = []

    def asks(self, number: int, totals: tuple[int, ...]) -> Asked:
        """Return what the program asks after ``number`` earlier totals and these."""
        if number == len(self._heard):
            asked = self._program.send(totals) if number else next(self._program)
            self._heard.append(totals)
            self._asked.append(asked)
        if self._heard[number] != totals:
            raise ProtocolError("two hospitals of one process have read different totals")
        return self._asked[number]

    @property
    def result(self) -> T:
        """The program's result, once it has asked for nothing more."""
        try:
            self._program.send(())
        except StopIteration as stop:
            result: T = stop.value
            return result
        raise ProtocolError("the run ended before its program did")


@final
class Party(Generic[T]):
    """One hospital: requests in, replies out. It begins with what its journal holds."""

    def __init__(self, hospital: Hospital, plan: Plan, workspace: Workspace, program: Shared[T]) -> None:
        rules: Rules = Court(plan, workspace)
        self.core = Core(hospital, plan, workspace, rules)
        self._program = program
        self._totals: list[Totals] = []
        for request in recorded(hospital.journal):
            self.step(request)

    def step(self, request: bytes) -> bytes:
        """Return the reply to a request."""
        heard = self.core.hear(request)
        if isinstance(heard, Reply):
            return heard.data
        if heard not in self._totals:  # they are heard again if a failure came before the answer
            self._totals.append(heard)
        return self.core.answer(self._program.asks(len(self._totals) - 1, heard.values))


@final
class NoOffice(Office):
    """The owner of all hospitals of one process, who has started the run and remembers nothing."""

    def refuses(self, _plan: Plan, /) -> str:
        """Return nothing: the run was started here."""
        return ""

    def has_withdrawn(self, _plan: Plan, /) -> bool:
        """Return False."""
        return False

    def settles(self, _plan: Plan, _run: bytes, _roster: bytes, /) -> bool:
        """Return True: nobody but this process reads totals."""
        return True

    def charge(self, _plan: Plan, /) -> None:
        """Charge nobody."""


@final
@dataclass
class Account:
    """What crossed the wire: rounds of sums, payload bits by hospital, and all bytes, in both directions."""

    rounds: int
    up: dict[str, int]
    down: dict[str, int]
    bytes: int

    @classmethod
    def of(cls, names: tuple[str, ...]) -> Account:
        """Return the account of a run that has not begun."""
        return cls(0, dict.fromkeys(names, 0), dict.fromkeys(names, 0), 0)

    @property
    def bits(self) -> int:
        """Payload bits of all hospitals, up and down."""
        return sum(self.up.values()) + sum(self.down.values())

    def book(self, requests: Requests, replies: Replies) -> None:
        """Add one exchange."""
        has_round = False
        for name, data in requests.items():
            request = messages.decode_request(data)
            self.down[name] += 8 * len(request.summed) if isinstance(request, Ask) else 0
        for name, data in replies.items():
            reply = messages.decode_reply(data)
            if isinstance(reply, Answered):
                self.up[name] += 8 * len(reply.sealed)
                has_round = True
        self.rounds += has_round
        self.bytes += sum(map(len, [*requests.values(), *replies.values()]))


@final
@dataclass(frozen=True, kw_only=True)
class SealedRun(Generic[T]):
    """The exact result, what is published of it, and what the run took."""

    result: T
    published: Published
    account: Account


def identities_of(names: tuple[str, ...]) -> dict[str, Identity]:
    """Return keys made from names: there is nothing to hide from anybody in one process."""
    return {name: Identity(hashlib.sha256(f"fedtmle {name}".encode()).digest()) for name in names}


def consortium_of(names: tuple[str, ...]) -> Consortium:
    """Return the list of the hospitals of one process."""
    return Consortium(tuple(identity.member(name) for name, identity in identities_of(names).items()))


def run_sealed(
    flow: Flow[T],
    sheets: Mapping[str, Sheet | Workspace],
    plan: Plan,
    encode: Callable[[T], bytes],
    *,
    run: bytes = bytes(messages.RUN_BYTES),
) -> SealedRun[T]:
    """Run a flow over the sheets of several hospitals, sealed, in one process.

    ``plan`` has the members of `consortium_of`. ``encode`` turns the flow's result into a document.
    """
    names = tuple(sorted(sheets))
    shared = Shared(program(flow, plan, encode))
    identities, consortium = identities_of(names), consortium_of(names)
    office, account = NoOffice(), Account.of(names)
    parties = {}
    for name in names:
        hospital = Hospital(
            name=name,
            identity=identities[name],
            consortium=consortium,
            office=office,
            journal=MemoryJournal(),
        )
        sheet = sheets[name]
        workspace = sheet if isinstance(sheet, Workspace) else Workspace(sheet)
        parties[name] = Party(hospital, plan, workspace, shared)

    def exchange(requests: Requests) -> Replies:
        replies = {name: parties[name].step(request) for name, request in requests.items()}
        account.book(requests, replies)
        return replies

    published = Relay(names, plan.digest, run, least=plan.min_hospitals).run(exchange)
    return SealedRun(result=shared.result, published=published, account=account)
