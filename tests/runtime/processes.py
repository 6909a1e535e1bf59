"""A server and silos as processes of their own, over sockets and with journals on disk, to be killed.

Importing this runs one small session, so that processes forked from an interpreter that has imported it
start with everything compiled.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from fedtmle.errors import DeadlineError
from fedtmle.protocol.plan import Plan
from fedtmle.runtime import silo as silo_module
from fedtmle.runtime.ledger import Ledger, StudyScope
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Journalled, Session
from fedtmle.runtime.silo import Silo
from fedtmle_core.journal import MAGIC, FileJournal, scan
from fedtmle_core.noise import discrete_gaussian
from tests.runtime.faults import CASES, NOISY, POLICY, key_of, reference

PLANS = {**CASES, **NOISY}
PATIENCE = 60.0
SERVER = "server"


class SlowJournal(FileJournal):
    """Writes piece by piece, so that a process can be killed in the middle of a record."""

    def _write(self, data: bytes) -> None:
        for piece in _pieces(data):
            super()._write(piece)


class SlowLedger(Ledger):
    """The same; what stands after the last whole line is torn."""

    def _write(self, data: bytes) -> None:
        for piece in _pieces(data):
            super()._write(piece)


def _pieces(data: bytes) -> Iterator[bytes]:
    step = 1 + len(data) // 3
    for begin in range(0, len(data), step):
        yield data[begin : begin + step]
        time.sleep(0.002)


@dataclass(frozen=True)
class BudgetMemory:
    """Let the ledger hold the budget that a study with noise takes, once."""

    silo: str

    def refusal(self, _: Plan, /) -> str:
        return ""

    def record_scope(self, plan: Plan, /) -> StudyScope:
        privacy = plan.program.privacy
        assert privacy is not None
        return StudyScope(
            sources=(),
            roster=plan.silos,
            own=self.silo,
            is_masked=plan.is_masked,
            zcdp=str(privacy.taken),
        )


def _append(path: Path, value: object) -> None:
    """Append to a file by one write, which a killed process has made or not."""
    data = msgspec.msgpack.encode(value)
    with open(path, "ab", buffering=0) as file:
        file.write(struct.pack(">I", len(data)) + data)


def appended(path: Path) -> list[Any]:
    """What was appended to a file."""
    data, values, at = path.read_bytes(), [], 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        values.append(msgspec.msgpack.decode(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return values


def be_silo(folder: Path, case: str, name: str) -> None:
    """Answers at a socket until it is killed."""
    plan, rows = PLANS[case]()
    started = time.perf_counter()
    journal = SlowJournal(folder / f"{name}.journal")
    known = len(journal.records)
    ledger, key = SlowLedger(folder / f"{name}.ledger"), key_of(name)
    memory = None if plan.program.privacy is None else BudgetMemory(name)
    keeper = Keeper(
        journal=journal, ledger=ledger, policy=POLICY, key=key, mask_key=key.mask_key, memory=memory
    )
    silo = Silo(name, plan, rows[name], keeper=keeper)
    _note(folder, name, known, time.perf_counter() - started)

    def noted(variance: Any, below: Any) -> int:
        drawn = discrete_gaussian(variance, below)
        _append(folder / f"{name}.draws", drawn)
        time.sleep(0.002)  # a moment in which it can be killed
        return drawn

    mock.patch.object(silo_module, "discrete_gaussian", noted).start()
    place = folder / f"{name}.socket"
    with contextlib.suppress(FileNotFoundError):
        place.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError, EOFError):
                while True:
                    request = _receive(connection)
                    reply = silo.step(request)
                    _append(folder / f"{name}.wire", (request, reply))  # before it leaves
                    _send(connection, reply)


class Sockets:
    """A federation over sockets: a silo that does not answer is asked again until the deadline."""

    def __init__(self, folder: Path, silos: Sequence[str]) -> None:
        self._folder = folder
        self._silos = tuple(silos)

    @property
    def silos(self) -> Sequence[str]:
        return self._silos

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        return {silo: self._ask(silo, request) for silo, request in requests.items()}

    def _ask(self, silo: str, request: bytes) -> bytes:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(5.0)
                    connection.connect(str(self._folder / f"{silo}.socket"))
                    _send(connection, request)
                    return _receive(connection)
            except (OSError, EOFError):
                time.sleep(0.002)
        raise DeadlineError((silo,), PATIENCE)


def be_server(folder: Path, case: str) -> None:
    """Runs the session to its end and writes the transcript."""
    plan, _ = PLANS[case]()
    started = time.perf_counter()
    journal = SlowJournal(folder / f"{SERVER}.journal")
    known = len(journal.records)
    journalled = _Noting(Sockets(folder, plan.silos), journal, plan=plan)
    journalled.resumed = lambda: _note(folder, SERVER, known, time.perf_counter() - started)
    finished = Session(plan, journalled).run()
    (folder / "unfinished").write_bytes(finished.transcript.encode())
    os.replace(folder / "unfinished", folder / "transcript")


class _Noting(Journalled):
    """Notes how long it took until all was as before the crash."""

    resumed: Callable[[], None] | None = None

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        if self.resumed is not None and not self._recorded:
            self.resumed()
            self.resumed = None
        return super().exchange(requests)


def _note(folder: Path, name: str, records: int, seconds: float) -> None:
    line = json.dumps({"name": name, "records": records, "seconds": seconds})
    with open(folder / "resumed", "a") as file:
        file.write(line + "\n")


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack(">I", len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    (length,) = struct.unpack(">I", _exactly(connection, 4))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


@dataclass
class Party:
    """All processes of one run; whoever is killed is started again."""

    folder: Path
    case: str
    context: ForkServerContext
    kills: dict[str, int] = field(default_factory=dict)
    torn: int = 0
    running: dict[str, ForkServerProcess] = field(default_factory=dict)

    def start(self, name: str) -> None:
        target, more = (be_server, ()) if name == SERVER else (be_silo, (name,))
        process = self.context.Process(target=target, args=(self.folder, self.case, *more), daemon=True)
        process.start()
        self.running[name] = process

    def kill(self, name: str) -> None:
        """SIGKILL, by process id; counted if the process was alive."""
        process = self.running[name]
        if process.pid is None or not process.is_alive():
            return
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            self.kills[name] = self.kills.get(name, 0) + 1
            self.torn += self._is_torn(name)

    def _is_torn(self, name: str) -> int:
        path = self.folder / f"{name}.journal"
        data = path.read_bytes() if path.exists() else MAGIC
        ledger = self.folder / f"{name}.ledger"
        lines = ledger.read_bytes() if ledger.exists() else b""
        end = max((stop for _, _, stop in scan(data, path)), default=len(MAGIC))
        return int(end != len(data) or not (lines == b"" or lines.endswith(b"\n")))

    def let_go_on(self) -> None:
        """Waits until something more has been written: kills are to be spread over the run."""
        before = self._written()
        until = time.monotonic() + 5.0
        while self._written() <= before and not self.is_done and time.monotonic() < until:
            time.sleep(0.001)

    def _written(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.journal"))

    @property
    def is_done(self) -> bool:
        return (self.folder / "transcript").exists()

    def resumed(self) -> Iterator[dict[str, Any]]:
        """Every start that found records."""
        for line in (self.folder / "resumed").read_text().splitlines():
            found = json.loads(line)
            if found["records"] > 1:
                yield found


def run_and_kill(folder: Path, case: str, kills: int, seed: int, context: ForkServerContext) -> Party:
    """One run, during which so many processes are killed, each at a random moment; then left to end."""
    rng = random.Random(seed)  # noqa: S311 - moments, not secrets
    names = [*PLANS[case]()[0].silos, SERVER]
    party = Party(folder, case, context)
    try:
        for name in names:
            party.start(name)
        give_up = time.monotonic() + 2 * PATIENCE
        while not party.is_done:
            if time.monotonic() > give_up:
                raise TimeoutError(f"the run of {case} did not end")
            if sum(party.kills.values()) < kills:
                party.let_go_on()
                time.sleep(rng.uniform(0.0, 0.03))
                victim = rng.choice(names)
                party.kill(victim)
                party.start(victim)
            else:
                time.sleep(0.01)
        return party
    finally:
        for process in party.running.values():
            process.kill()
            process.join()


reference("mean, coded")
