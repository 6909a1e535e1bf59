"""Whole runs for tests of the core: hospitals with records and a program, and a server that may lie."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hospitals import NAMES, RUN, consortium, identity, plan

from fedtmle_core import messages
from fedtmle_core.around import Asked, Hospital, Named, Reply, Result, Totals
from fedtmle_core.blocks import Moments
from fedtmle_core.core import Core
from fedtmle_core.court import Court
from fedtmle_core.dictionary import Dictionary, Numeric
from fedtmle_core.errors import InputError
from fedtmle_core.evaluate import Workspace
from fedtmle_core.journal import Journal, MemoryJournal
from fedtmle_core.judgement import Judge
from fedtmle_core.leaves import Number
from fedtmle_core.ledger import Ledger
from fedtmle_core.masks import add
from fedtmle_core.messages import (
    Answered,
    Ask,
    Close,
    Closed,
    Commitment,
    Finished,
    Keys,
    Open,
    Opened,
    Refused,
    Settle,
    Settled,
)
from fedtmle_core.plan import Model, Plan, Question
from fedtmle_core.recorder import recorded
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, Term, product

X, Z = Number("x", 0), Number("z", 0)
DICTIONARY = Dictionary((Numeric(name="x", low=0.0, high=1.0), Numeric(name="z", low=0.0, high=1.0)))
FIRST = Question(blocks=(Moments.of((ONE, X)),))
NAMED = (product(X, X),)
LAST = Question(blocks=(Moments.of(NAMED),))
Program = Callable[[], Generator[Asked, tuple[int, ...], None]]
Rows = dict[str, np.ndarray]


def study() -> Generator[Asked, tuple[int, ...], None]:
    """Ask for sums, name a term, ask for its sum, and tell all."""
    first = yield FIRST
    yield Named(NAMED)
    last = yield LAST
    yield Result(repr((first, last)).encode())


def study_plan(columns: Sequence[Term] = (ONE, X), **changed: object) -> Plan:
    """Return the plan of a study of all hospitals."""
    return plan(dictionary=DICTIONARY, models=(Model(columns=tuple(columns)),), people=1000, **changed)


def rows(name: str, n: int = 40) -> Rows:
    """Return a hospital's records."""
    draws = np.random.default_rng(list(name.encode()))
    return {"x": draws.uniform(0.1, 1.0, n), "z": draws.uniform(0.1, 1.0, n)}


class LostError(Exception):
    """A crash in a test."""


@dataclass
class Table:
    """A hospital's records; ``fails`` raises instead of the answer to a question."""

    workspace: Workspace
    fails: Callable[[Question], None] = lambda _: None
    passes: int = 0

    @property
    def digest(self) -> bytes:
        return self.workspace.digest

    def answer(self, question: Question, plan: Plan) -> Sequence[int]:
        self.fails(question)
        self.passes += 1
        return self.workspace.answer(question, plan)


@dataclass
class Rules:
    """The court of a plan, which publishes a word."""

    inner: Court
    meddle: Callable[[Judge], Judge] = lambda judge: judge
    flips: bool = False  # show minus the totals
    seen: int = 0

    def before_fits(self, hospitals: int) -> Judge | None:
        return self.meddle(self.inner.before_fits(hospitals))

    def before_targeting(self, terms: tuple[Term, ...], hospitals: int) -> Judge:
        return self.meddle(self.inner.before_targeting(terms, hospitals))

    def admit(self, question: Question) -> None:
        self.inner.admit(question)

    def shown(self, question: Question, totals: Sequence[int]) -> tuple[int, ...]:
        self.seen += 1
        return tuple(-total for total in self.inner.shown(question, totals)) if self.flips else tuple(totals)

    def publish(self, exact: bytes) -> bytes:
        if exact == b"nothing":
            raise InputError("nothing may be published")
        return b"published"


@dataclass
class Office:
    """What a hospital's owner decided, and what its home remembers."""

    why: str = ""
    withdrawn: bool = False
    roster: tuple[bytes, bytes] | None = None
    charges: int = 0
    charged: set[bytes] = field(default_factory=set)

    def refuses(self, plan: Plan) -> str:
        return self.why or ("it was refused before" if plan.digest in self.charged else "")

    def has_withdrawn(self, _plan: Plan) -> bool:
        return self.withdrawn

    def settles(self, _plan: Plan, run: bytes, roster: bytes) -> bool:
        self.roster = self.roster or (run, roster)
        return self.roster == (run, roster)

    def charge(self, plan: Plan) -> None:
        self.charges += 1
        self.charged.add(plan.digest)


@dataclass
class Site:
    """One hospital: its core and its program, which `restart` begins anew."""

    name: str
    plan: Plan = field(default_factory=study_plan)
    rows: Rows | None = None
    program: Program = study
    journal: Journal = field(default_factory=MemoryJournal)
    ledger: Ledger | None = None
    office: Office = field(default_factory=Office)
    fails: Callable[[Question], None] = lambda _: None
    meddle: Callable[[Judge], Judge] = lambda judge: judge
    dies: Callable[[str], None] = lambda _: None  # raise `LostError` before "hear", "answer" or "send"
    flips: bool = False
    heard: list[Totals] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew from the journal."""
        columns = self.rows or rows(self.name)
        workspace = Workspace(Sheet.read(DICTIONARY, columns, {}))
        self.table = Table(workspace, self.fails)
        who = Hospital(
            name=self.name,
            identity=identity(self.name),
            consortium=consortium(),
            office=self.office,
            journal=self.journal,
            ledger=self.ledger,
        )
        self.rules = Rules(Court(self.plan, workspace), self.meddle, self.flips)
        self.core = Core(who, self.plan, self.table, self.rules)
        self.heard, self.flow, self.asked = [], self.program(), None
        for request in recorded(self.journal):
            self.exchange(request)

    def exchange(self, request: bytes) -> bytes:
        """Return the reply to a request."""
        heard = self.core.hear(request)
        if isinstance(heard, Reply):
            self.dies("send")
            return heard.data
        self.dies("answer")
        if heard not in self.heard:
            self.heard.append(heard)
            self.asked = self.flow.send(heard.values) if heard.round else next(self.flow)
        reply = self.core.answer(self.asked)
        self.dies("send")
        return reply

    def step(self, request: bytes) -> bytes:
        """Return the reply to a request, after as many crashes as there are."""
        while True:
            try:
                self.dies("hear")
                return self.exchange(request)
            except LostError:
                self.restart()


def sites(**changed: object) -> list[Site]:
    """Return all hospitals; each keyword is a field, for all or by name."""
    return [
        Site(
            name, **{key: value[name] if isinstance(value, dict) else value for key, value in changed.items()}
        )
        for name in NAMES
    ]


@dataclass
class Server:
    """A server: it adds, and ``meddle`` may change what it sends to a hospital."""

    sites: Sequence[Site]
    run: bytes = RUN
    meddle: Callable[[int, str, messages.Request], messages.Request] = lambda _round, _name, request: request
    seen: list[tuple[list[bytes], list[bytes]]] = field(default_factory=list)

    def send(self, requests: Sequence[messages.Request]) -> list[messages.Reply]:
        """Return the replies to one request each."""
        number = len(self.seen)
        data = [
            messages.encode(self.meddle(number, site.name, request))
            for site, request in zip(self.sites, requests, strict=True)
        ]
        replies = [site.step(request) for site, request in zip(self.sites, data, strict=True)]
        self.seen.append((data, replies))
        return list(map(messages.decode_reply, replies))

    def all(self, request: messages.Request) -> list[messages.Reply]:
        return self.send([request] * len(self.sites))

    def go(self) -> list[messages.Reply]:
        """Run to the end; return the last replies."""
        opened = self.all(Open(messages.FORMAT, self.run, self.sites[0].plan.digest))
        if any(isinstance(reply, Refused) for reply in opened):
            return opened
        settled = self.all(Settle(self.run, tuple(r.opening for r in opened if isinstance(r, Opened))))
        if not isinstance(settled[0], Settled) or any(isinstance(reply, Refused) for reply in settled):
            return settled
        replies = self.send([Keys(self.run, copy) for copy in (None, *settled[0].copies)])
        while all(isinstance(reply, Answered) for reply in replies):
            summed = add([reply.sealed for reply in replies if isinstance(reply, Answered)])
            number = max(reply.round for reply in replies if isinstance(reply, Answered))
            replies = self.all(Ask(self.run, number, summed))
        if not all(isinstance(reply, Finished) for reply in replies):
            return replies
        named = zip(self.sites, replies, strict=True)
        given = tuple(Commitment(s.name, r.commitment) for s, r in named if isinstance(r, Finished))
        return self.all(Close(self.run, given))


def codes(replies: Sequence[messages.Reply]) -> set[str]:
    """Return the codes of refusals, and the kinds of other replies."""
    return {reply.code.name if isinstance(reply, Refused) else type(reply).__name__ for reply in replies}


def published(replies: Sequence[messages.Reply]) -> list[bytes]:
    """Return the documents that closing replies carry."""
    return [reply.document for reply in replies if isinstance(reply, Closed) and reply.document]
