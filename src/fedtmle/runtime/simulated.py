"""A network on a virtual clock: delay, loss, duplication, reordering, crashes and restarts, from a seed.

Every fault is drawn from one generator in the order of events, and events are ordered by the virtual
clock, so a run is a function of its seed. A request that is not answered is sent again, ever more
seldom; silos that have not answered by the deadline are named in a `DeadlineError`.

A reply travels with the digest of the request that it answers, so that a late one is not taken for
the answer to something else.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtmle.errors import DeadlineError, ProtocolError, RefusedError
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.faults import DiskFullError, Fate, Faults, Kind, PowerCut, SimulatedJournal
from fedtmle.runtime.federation import Journalled
from fedtmle.runtime.journal import Journal
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.session import Finished, Session
from fedtmle.runtime.silo import Silo

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
