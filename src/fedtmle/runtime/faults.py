"""What can go wrong, drawn from a seed: crashes, full disks, and media that are torn where the power went."""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedtmle.errors import JournalError
from fedtmle.runtime.journal import MAGIC, START, frame, scan
from fedtmle.runtime.ledger import Ledger


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
