"""A network on a virtual clock, and faults drawn from a seed: a test helper that anyone may import.

Delay, loss, duplication, reordering, crashes, restarts and full disks are drawn from one generator in the
order of events, and the virtual clock orders events, so a run is a function of its seed. The server sends a
request that is not answered again, at growing intervals; a `DeadlineError` names the silos that have not
answered by the deadline. A reply travels with the digest of the request that it answers, so that the server
does not take a late reply for the answer to another request.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtmle.errors import DeadlineError, JournalError, ProtocolError, RefusedError
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Finished, Journalled, Session
from fedtmle.runtime.silo import Silo
from fedtmle_core.journal import MAGIC, START, Journal, frame, scan


class PowerCut(BaseException):  # no handler of errors may catch it
    """A party stops here; what it had not written is lost."""


class DiskFullError(JournalError):
    """A write that found no room; there is room again after the restart."""


class Kind(enum.StrEnum):
    """What can go wrong; one that was drawn is counted."""

    LOSS = "message lost"
    DUPLICATION = "message delivered twice"
    REORDERING = "message overtaken by a later one"
    STRAGGLING = "message delayed a hundredfold"
    MISSED = "message to a silo that was down"
    CRASH_BEFORE_WRITE = "crash before a write"
    CRASH_IN_WRITE = "crash that tore a write"
    CRASH_AFTER_WRITE = "crash after a write"
    CRASH_ON_RECEIPT = "crash on receipt of a message"
    CRASH_BEFORE_REPLY = "crash before a reply was sent"
    SERVER_CRASH = "crash of the server"
    DISK_FULL = "disk full"
    DEATH = "silo that never came back"


WRITING = (Kind.CRASH_BEFORE_WRITE, Kind.CRASH_IN_WRITE, Kind.CRASH_AFTER_WRITE, Kind.DISK_FULL)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The chance of each kind, per message, write or crash; times in seconds of the virtual clock."""

    chances: Mapping[Kind, float] = field(default_factory=dict)
    most_crashes: int = 8  # in one run, so that it ends
    delay: float = 0.05  # on average
    downtime: float = 2.0
    retry: float = 0.5  # before a request is sent again; doubled each time
    patience: float = 60.0  # for one exchange

    @classmethod
    def drawn(cls, rng: random.Random) -> Faults:
        """Some kinds at some rates: half of the kinds in a run, and one run in ten may lose a silo."""
        chances = {kind: rng.choice((0.02, 0.1, 0.3)) for kind in Kind if rng.random() < 0.5}
        for kind in WRITING:
            if kind in chances:
                chances[kind] /= 4  # a run has many writes
        if rng.random() < 0.8:
            chances.pop(Kind.DEATH, None)
        return cls(chances=chances)


class Fate:
    """The generator behind a run, and the count of what it drew."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - a schedule, not a secret
        self.faults = faults or Faults.drawn(self.rng)
        self.counts: Counter[Kind] = Counter()
        self._crashes = self.faults.most_crashes

    def befalls(self, kind: Kind) -> bool:
        chance = self.faults.chances.get(kind, 0.0)
        if chance == 0.0 or self.rng.random() >= chance:
            return False
        self.counts[kind] += 1
        return True

    def strikes(self, *kinds: Kind) -> Kind | None:
        """Which crash, if any, happens now; there is only so much bad luck in one run."""
        for kind in kinds:
            if self._crashes and self.befalls(kind):
                self._crashes -= 1
                return kind
        return None

    def write(self, medium: bytearray, data: bytes) -> None:
        """Writes, unless the power or the room ends before, within or after it."""
        struck = self.strikes(*WRITING)
        if struck is Kind.DISK_FULL:
            raise DiskFullError("the simulated medium is full")
        if struck is Kind.CRASH_IN_WRITE:
            medium += data[: self.rng.randrange(1, len(data))]
        elif struck is not Kind.CRASH_BEFORE_WRITE:
            medium += data
        if struck is not None:
            raise PowerCut

    def delay(self) -> float:
        slow = 100.0 if self.befalls(Kind.STRAGGLING) else 1.0
        return slow * self.rng.expovariate(1.0 / self.faults.delay)


class SimulatedJournal:
    """A journal whose medium outlives crashes: the bytes of a `FileJournal`, torn where the power went."""

    def __init__(self, medium: bytearray, fate: Fate) -> None:
        self._medium = medium
        self._fate = fate
        if MAGIC.startswith(medium):
            medium[:] = MAGIC
        self._chain, end = START, len(MAGIC)
        self.records: list[bytes] = []
        for payload, chain, stop in scan(bytes(medium), "the simulated medium"):
            self.records.append(payload)
            self._chain, end = chain, stop
        del medium[end:]

    def append(self, payload: bytes, /) -> None:
        data, chain = frame(payload, self._chain)
        self._fate.write(self._medium, data)
        self._chain = chain
        self.records.append(payload)

    def close(self) -> None:
        """The medium stays as it is."""


class SimulatedLedger(Ledger):
    """A ledger on disk whose writes can be cut off."""

    def __init__(self, path: str | Path, fate: Fate) -> None:
        self._fate = fate
        super().__init__(path, sync=False)

    def _write(self, data: bytes) -> None:
        written = bytearray()
        try:
            self._fate.write(written, data)
        finally:
            super()._write(bytes(written))


MOST_SESSIONS = 100


@dataclass(order=True)
class _Event:
    time: float
    number: int
    happens: Callable[[], None] = field(compare=False)


@dataclass(frozen=True)
class _Wire:
    """One direction of one silo's link."""

    silo: str
    up: bool


class SimulatedNetwork:
    """A federation whose silos are started by ``hosts``, again after every crash."""

    def __init__(self, hosts: Mapping[str, Callable[[], Silo]], fate: Fate) -> None:
        self.now = 0.0
        self.told: dict[tuple[str, bytes], set[bytes]] = {}  # all that silos ever replied
        self.dead: set[str] = set()
        self._hosts = hosts
        self._fate = fate
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._running: dict[str, Silo] = {}
        self._awaited: dict[str, bytes] = {}  # silo -> digest of the request that it has not answered
        self._replies: dict[str, bytes] = {}
        self._sent: Counter[_Wire] = Counter()
        self._latest: Counter[_Wire] = Counter()  # number of the latest message that arrived
        for silo in hosts:
            self._start(silo)

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self._hosts)

    def silo(self, name: str) -> Silo | None:
        """The silo as it runs now; None while it is down."""
        return self._running.get(name)

    def restart(self, silo: str) -> None:
        """What an operator does."""
        self._running.pop(silo, None)
        self._start(silo)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        faults = self._fate.faults
        self._awaited = {silo: _digest(request) for silo, request in requests.items()}
        self._replies = {}
        deadline = self.now + faults.patience
        for silo, request in requests.items():
            self._server_may_crash()
            self._ask(silo, request, faults.retry)
        while self._awaited:
            if not self._events or self._events[0].time > deadline:
                self.now = deadline
                raise DeadlineError(tuple(self._awaited), faults.patience)
            event = heapq.heappop(self._events)
            self.now = event.time
            event.happens()
        return {silo: self._replies[silo] for silo in requests}

    def _ask(self, silo: str, request: bytes, retry: float) -> None:
        """Sends the request, and again until it is answered or no longer asked."""
        if self._awaited.get(silo) != _digest(request):
            return
        self._send(_Wire(silo, up=False), lambda: self._receive(silo, request))
        self._after(retry, lambda: self._ask(silo, request, 2 * retry))

    def _receive(self, silo: str, request: bytes) -> None:
        """At the silo."""
        running = self._running.get(silo)
        if running is None:
            self._fate.counts[Kind.MISSED] += 1
            return
        try:
            if self._fate.strikes(Kind.CRASH_ON_RECEIPT):
                raise PowerCut
            reply = running.step(request)
            if self._fate.strikes(Kind.CRASH_BEFORE_REPLY):
                raise PowerCut
        except PowerCut:
            self._crash(silo)
            return
        self.told.setdefault((silo, request), set()).add(reply)
        digest = _digest(request)
        self._send(_Wire(silo, up=True), lambda: self._hear(silo, digest, reply))

    def _hear(self, silo: str, digest: bytes, reply: bytes) -> None:
        """At the server."""
        self._server_may_crash()
        if self._awaited.get(silo) == digest:
            del self._awaited[silo]
            self._replies[silo] = reply

    def _server_may_crash(self) -> None:
        if self._fate.strikes(Kind.SERVER_CRASH):
            self._awaited = {}
            raise PowerCut

    def _crash(self, silo: str) -> None:
        self._running.pop(silo, None)
        if self._fate.befalls(Kind.DEATH):
            self.dead.add(silo)
        else:
            downtime = self._fate.rng.expovariate(1.0 / self._fate.faults.downtime)
            self._after(downtime, lambda: self._start(silo))

    def _start(self, silo: str) -> None:
        if silo in self._running or silo in self.dead:
            return
        try:
            self._running[silo] = self._hosts[silo]()
        except (PowerCut, DiskFullError):  # the first record of a journal is a write too
            self._crash(silo)

    def _send(self, wire: _Wire, arrive: Callable[[], None]) -> None:
        self._sent[wire] += 1
        number = self._sent[wire]

        def arrival() -> None:
            if number < self._latest[wire]:
                self._fate.counts[Kind.REORDERING] += 1
            self._latest[wire] = max(number, self._latest[wire])
            arrive()

        copies = 2 if self._fate.befalls(Kind.DUPLICATION) else 1
        for _ in range(copies):
            if not self._fate.befalls(Kind.LOSS):
                self._after(self._fate.delay(), arrival)

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, _Event(self.now + seconds, next(self._numbers), happens))


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """How a run ended: ``finished``, or the error that no restart could mend."""

    finished: Finished | None
    error: ProtocolError | None
    network: SimulatedNetwork
    sessions: int  # one more than the server was started again
    counts: Mapping[Kind, int]
    media: Mapping[str, bytes]  # what stands in each silo's journal


def run_until_done(
    plan: Plan,
    rows: Mapping[str, Any],
    seed: int,
    *,
    faults: Faults | None = None,
    keeper: Callable[[str, Journal, Fate], Keeper] = lambda _, journal, __: Keeper(journal=journal),
) -> SimulatedRun:
    """A whole run through the faults of ``seed``: whoever crashes is started again and resumes.

    ``rows`` are as `read_rows` gives; ``keeper`` makes what stands behind a silo, at each of its starts.
    """
    fate = Fate(seed, faults)
    media = {silo: bytearray() for silo in plan.silos}
    own = bytearray()

    def host(name: str) -> Callable[[], Silo]:
        return lambda: Silo(
            name, plan, rows[name], keeper=keeper(name, SimulatedJournal(media[name], fate), fate)
        )

    network = SimulatedNetwork({name: host(name) for name in plan.silos}, fate)
    finished: Finished | None = None
    error: ProtocolError | None = None
    sessions = 0
    while finished is None and sessions < MOST_SESSIONS:
        sessions += 1
        try:
            journalled = Journalled(network, SimulatedJournal(own, fate), plan=plan)
            finished, error = Session(plan, journalled).run(), None
        except (PowerCut, DiskFullError):
            continue
        except DeadlineError as late:
            error = late
            if network.dead:
                break
        except RefusedError as refused:
            error = refused
            if refused.code != Reason.CANNOT_RECORD:
                break
            network.restart(refused.silo)
    return SimulatedRun(
        finished=finished,
        error=error,
        network=network,
        sessions=sessions,
        counts=fate.counts,
        media={silo: bytes(medium) for silo, medium in media.items()},
    )
