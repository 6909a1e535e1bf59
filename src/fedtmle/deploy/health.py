"""A party's health as numbers, for a monitoring system: from its own files and processes, nothing of records.

`samples` reads them. A supervisor serves them on a loopback port as Prometheus reads them (`/metrics`), and
whether the party is well (`/health`: 200 or 503). Studies and plans are not named.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import psutil

from fedtmle.deploy.kits import Kit, Role
from fedtmle.deploy.presence import presence
from fedtmle.deploy.processes import descendants, running
from fedtmle.engine.post import approvals_of, last_contact, silo_folder, studies_folder
from fedtmle.engine.runs import RunFolder, RunState
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.runtime.accounts import walk
from fedtmle.runtime.documents import read_document, write_document
from fedtmle.runtime.ledger import read

LONGEST_SILENCE = 30.0  # seconds
ENGINE = "nvflare.private.fed.app."  # the module that `processes.engine_command` starts
HELP = {
    "up": "Whether the party's engine runs.",
    "build_info": "The installed version.",
    "start_time_seconds": "When the party was started, seconds since 1970.",
    "certificate_expiry_seconds": "When a certificate ends, seconds since 1970.",
    "disk_free_bytes": "Free space where the party writes its records.",
    "connected": "Whether the silo has heard the server within 30 s.",
    "connected_silos": "How many silos the server hears.",
    "runs": "Runs at the server, by state.",
    "rounds_total": "Rounds of all runs at the server.",
    "bits_total": "Bits of all runs at the server.",
    "studies": "Studies that came to the silo, by its owner's decision.",
    "requests_total": "Requests in the silo's ledger, by decision.",
    "answered_bits_total": "Bits of all answers that left the silo.",
    "record_bytes": "Size of the party's records, by kind.",
    "ledger_intact": "Whether the ledger is unbroken.",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One number of a party."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in self.labels.items())
        value = f"{self.value:.0f}" if self.value == int(self.value) else repr(self.value)
        return f"fedtmle_{self.name}{{{labels}}} {value}" if labels else f"fedtmle_{self.name} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def samples(kit: Kit) -> list[Sample]:
    """Return the numbers of a server or a silo."""
    reading = _server(kit) if kit.role is Role.SERVER else _silo(kit)
    return [*_common(kit), *reading]


def is_well(read: Iterable[Sample]) -> bool:
    """Return whether a party's engine runs; a silo is well even if its server does not answer."""
    return any(sample.name == "up" and sample.value == 1 for sample in read)


def exposition(read: Iterable[Sample]) -> str:
    """Return samples as text that Prometheus reads."""
    lines: list[str] = []
    by_name: dict[str, list[Sample]] = {}
    for sample in read:
        by_name.setdefault(sample.name, []).append(sample)
    for name, group in by_name.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP fedtmle_{name} {HELP[name]}", f"# TYPE fedtmle_{name} {kind}", *map(str, group)]
    return "\n".join(lines) + "\n"


def _common(kit: Kit) -> Iterator[Sample]:
    supervisor = running(kit)
    alive = supervisor is not None and any(map(_is_engine, descendants(supervisor)))
    if kit.role is Role.SERVER:
        seen = presence(kit.path)
        alive = alive and seen is not None and seen.alive
    yield Sample(name="up", value=float(alive), labels={"role": str(kit.role), "party": kit.site})
    yield Sample(name="build_info", value=1.0, labels={"version": version("fedtmle")})
    if supervisor is not None:
        yield Sample(name="start_time_seconds", value=round(supervisor.create_time()))
    for whose, path in (("party", kit.certificate), ("authority", kit.authority)):
        with suppress(OSError, ValueError):
            stat = path.stat()
            end = _expiry(path, stat.st_mtime_ns)
            yield Sample(name="certificate_expiry_seconds", value=end, labels={"of": whose})


def _is_engine(process: psutil.Process) -> bool:
    try:
        return any(ENGINE in word for word in process.cmdline())
    except psutil.Error:
        return False


@lru_cache(maxsize=16)
def _expiry(path: Path, _written: int) -> float:
    from cryptography import x509

    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()


def _server(kit: Kit) -> Iterator[Sample]:
    seen = presence(kit.path)
    yield Sample(name="connected_silos", value=0 if seen is None else len(seen.sites))
    states, rounds, bits, journals = Counter[RunState](), 0, 0, 0
    for run in RunFolder.every(kit.path / "runs"):
        with suppress(InputError, OSError):
            status = run.look()
            states[status.state] += 1
            rounds, bits = rounds + status.round, bits + status.bits
        journals += _size(run.journal)
    for state in RunState:
        yield Sample(name="runs", value=states[state], labels={"state": str(state)})
    yield Sample(name="rounds_total", value=rounds)
    yield Sample(name="bits_total", value=bits)
    yield Sample(name="record_bytes", value=journals, labels={"kind": "journals"})
    yield _free(kit.path)


def _silo(kit: Kit) -> Iterator[Sample]:
    contact = last_contact(kit.home)
    is_heard = bool(contact) and time.time() - float(contact["heard"]) < LONGEST_SILENCE
    yield Sample(name="connected", value=float(is_heard))
    try:
        folder = silo_folder(kit.home)
    except (OSError, ValueError, KeyError, TypeError):
        return
    with suppress(FedTMLEError, OSError):
        decisions = approvals_of(kit.home).current()
        words = {None: "waiting", True: "approved", False: "rejected"}
        plans = [path.stem for path in studies_folder(folder).glob("[0-9a-f]*.toml")]
        decided = [words[None if plan not in decisions else decisions[plan].approved] for plan in plans]
        for word in words.values():
            yield Sample(name="studies", value=decided.count(word), labels={"decision": word})
    path = folder / "ledger.jsonl"
    counts, bits, intact = _ledger(path, _size(path))
    for decision in ("answered", "refused", "repeated"):
        yield Sample(name="requests_total", value=counts[decision], labels={"decision": decision})
    yield Sample(name="answered_bits_total", value=bits)
    yield Sample(name="ledger_intact", value=float(intact))
    sizes = {"ledger": _size(path), "journals": sum(map(_size, folder.glob("*.journal")))}
    for kind, size in sizes.items():
        yield Sample(name="record_bytes", value=size, labels={"kind": kind})
    yield _free(folder)


@lru_cache(maxsize=2)
def _ledger(path: Path, _bytes: int) -> tuple[Counter[str], int, bool]:
    """Return the decisions, the bits that left, and whether the ledger is unbroken; read again if it grew."""
    counts, bits = Counter[str](), 0
    try:
        for line, answer, _ in walk(read(path) if path.exists() else ()):
            counts[line["decision"]] += 1
            bits += 0 if answer is None else answer.bits
    except (FedTMLEError, OSError):
        return counts, bits, False
    return counts, bits, True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _free(folder: Path) -> Sample:
    disk = os.statvfs(folder)
    return Sample(name="disk_free_bytes", value=disk.f_bavail * disk.f_frsize)


def set_port(kit: Kit, port: int) -> None:
    """Write into the kit on which port its supervisor serves the numbers; 0 turns that off."""
    write_document(kit.home / "health.json", {"port": port})


def serve(kit: Kit) -> ThreadingHTTPServer | None:
    """Serve a kit's numbers on the loopback port that the kit names, in a thread; None if it names none.

    Raise `OSError` if the port is taken.
    """
    try:
        port = int(read_document(kit.home / "health.json")["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if port == 0:
        return None
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(kit))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="fedtmle-health", daemon=True).start()
    return server


def _handler(kit: Kit) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            read = samples(kit)
            if self.path == "/metrics":
                self._send(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", exposition(read))
            elif self.path == "/health":
                well = is_well(read)
                status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
                self._send(status, "application/json", json.dumps({"well": well}))
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "there are /metrics and /health\n")

        def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write nothing for a request: the log belongs to the engine."""

    return Handler
