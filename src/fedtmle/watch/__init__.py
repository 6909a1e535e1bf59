"""The live view: follows the events of a running session on a page of this machine.

A file of events, or a silo's ledger, becomes events; events become a state; a small server shows it.
"""

from __future__ import annotations

import datetime
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fedtmle.errors import JournalError
from fedtmle.layout import phase_name
from fedtmle.runtime.ledger import LedgerLine, read, walk
from fedtmle_core.journal import Document

# The view of a run that the page shows, updated event by event, without a file or a clock.

MAX_POINTS = 600
MAX_EVENTS = 200
RECENT_ROUNDS = 10  # rounds from which the remaining time is estimated
LAST_ROUNDS = 2  # rounds after the tolerance is met: the sums at the new origin, and the closing sums


@dataclass
class SiloView:
    """One silo's part in the run so far."""

    status: str = "waiting"
    reason: str = ""
    rounds: int = 0
    up: int = 0
    down: int = 0
    last: float | None = None


@dataclass
class RunView:
    """The run so far; `apply` takes the next event, `show` returns plain data for the page."""

    about: dict[str, str] = field(default_factory=dict)
    status: str = "waiting"
    text: str = "no run has started"
    started: float | None = None
    updated: float | None = None
    silos: dict[str, SiloView] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    round: int = 0
    phase: str = ""
    norms: list[tuple[int, float]] = field(default_factory=list)
    tolerance: float | None = None
    times: list[float] = field(default_factory=list)
    log: list[Document] = field(default_factory=list)
    sent: dict[str, dict[str, int]] = field(default_factory=dict)  # from a ledger: counts by kind of message
    events: int = 0

    def apply(self, event: Document) -> None:
        """Update the view by one event; an event of an unknown kind is only listed."""
        self.events += 1
        kind = str(event.get("event", ""))
        self.updated = float(event["time"])
        if kind == "start":
            self._start(event)
        elif kind == "round":
            self._round(event)
        elif kind == "silo":
            self._silo(event)
        elif kind in ("finished", "failed"):
            self._end(event, kind)
        else:
            self._log(event, kind or "unknown event", "other")

    def _start(self, event: Document) -> None:
        self.about = {
            key: str(event.get(key, "")) for key in ("title", "question", "algorithm", "plan", "role")
        }
        self.silos = {str(name): SiloView() for name in event.get("silos", [])}
        self.status, self.text = "running", "running"
        self.started = float(event["time"])
        self._log(event, f"started with {len(self.silos)} silo(s)", "start")

    def _round(self, event: Document) -> None:
        self.round, phase = int(event["round"]), str(event["phase"])
        if phase != self.phase:
            self._log(event, f"round {self.round}: {phase_name(phase)}", "phase")
            self.phase = phase
        self.rounds[phase] = self.rounds.get(phase, 0) + 1
        for name, bits in event["up"].items():
            silo = self.silos.setdefault(name, SiloView())
            silo.status, silo.reason, silo.last = "answering", "", float(event["time"])
            silo.up += int(bits)
            silo.rounds += 1
        for name, bits in event["down"].items():
            self.silos.setdefault(name, SiloView()).down += int(bits)
        for name in event.get("retired", []):
            self.silos.setdefault(name, SiloView()).status = "retired"
            self._log(event, f"{name} retired", "silo")
        if event.get("norm") is not None:
            self.norms.append((self.round, float(event["norm"])))
        if event.get("tolerance"):
            self.tolerance = float(event["tolerance"])
        if "message" in event:
            kind = self.sent.setdefault(str(event["message"]), {"times": 0, "numbers": 0, "bits": 0})
            kind["times"] += 1
            kind["numbers"] += int(event["numbers"])
            kind["bits"] += sum(map(int, event["up"].values()))
        self.times = [*self.times, float(event["time"])][-RECENT_ROUNDS - 1 :]

    def _silo(self, event: Document) -> None:
        silo = self.silos.setdefault(str(event["silo"]), SiloView())
        silo.status = "answering" if event["status"] == "back" else str(event["status"])
        silo.reason = str(event.get("reason", ""))
        why = f": {silo.reason}" if silo.reason else ""
        self._log(event, f"{event['silo']} {event['status']}{why}", "silo")

    def _end(self, event: Document, kind: str) -> None:
        converged = bool(event.get("converged"))
        self.status = kind if kind == "failed" or converged else "not converged"
        self.text = str(event["text"])
        for silo in self.silos.values():
            if silo.status in ("answering", "waiting"):
                silo.status = "done" if kind == "finished" else "stopped"
        self._log(event, f"{kind}: {self.text}", kind)

    def _log(self, event: Document, text: str, kind: str) -> None:
        self.log = [*self.log, {"time": event["time"], "text": text, "kind": kind}][-MAX_EVENTS:]

    def seconds_left(self) -> float | None:
        """Estimate the remaining time from the recent decay of the log residual; None if unknown."""
        recent = [(r, norm) for r, norm in self.norms[-RECENT_ROUNDS:] if norm > 0]
        if self.status != "running" or not self.tolerance or len(recent) < 3 or len(self.times) < 3:
            return None
        x = [float(r) for r, _ in recent]
        y = [math.log(norm) for _, norm in recent]
        mx, my = sum(x) / len(x), sum(y) / len(y)
        slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
        gap = y[-1] - math.log(self.tolerance) if self.norms[-1][1] > 0 else 0.0
        if slope >= 0 and gap > 0:
            return None
        pace = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        return pace * (max(gap, 0.0) / -slope + LAST_ROUNDS) if slope < 0 else pace * LAST_ROUNDS

    def show(self) -> Document:
        """Return plain data for the page; a long path of residuals is thinned but keeps its ends."""
        step = max(1, math.ceil(len(self.norms) / MAX_POINTS))
        norms = self.norms[::step]
        if self.norms and norms[-1] != self.norms[-1]:
            norms.append(self.norms[-1])
        return {
            "seen": self.events,
            "about": self.about,
            "status": self.status,
            "text": self.text,
            "started": self.started,
            "updated": self.updated,
            "round": self.round,
            "phase": self.phase,
            "rounds": self.rounds,
            "bits": {
                "up": sum(silo.up for silo in self.silos.values()),
                "down": sum(silo.down for silo in self.silos.values()),
            },
            "silos": [{"name": name, **vars(silo)} for name, silo in self.silos.items()],
            "sent": [{"message": message, **totals} for message, totals in self.sent.items()],
            "norms": norms,
            "tolerance": self.tolerance,
            "seconds_left": self.seconds_left(),
            "events": self.log,
        }


# Follow a growing file: the events of a run, or a silo's ledger as events.
#
# A silo's owner sees on the same page what the silo has sent so far.

THIS_SILO = "this silo"
QUESTION = "What has this silo sent so far?"


class EventTail:
    """Keep a view of a file of events up to date; the file may not exist yet, or be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._view = RunView()
        self._offset = 0

    def look(self) -> Document:
        """Read the whole lines added since the last look, and return the data that the page shows."""
        try:
            size = self.path.stat().st_size
            if size < self._offset:  # the file was replaced
                self._view, self._offset = RunView(), 0
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return self._view.show()
        whole = data.rfind(b"\n") + 1  # the last line may be half written
        self._offset += whole
        for line in data[:whole].splitlines():
            self._apply(line)
        return self._view.show()

    def _apply(self, line: bytes) -> None:
        """Apply one line; ignore a line that is not an event, so that the view goes on."""
        try:
            event = json.loads(line)
            if event.get("event") == "start":  # a new run in the same file
                self._view = RunView(events=self._view.events)
            self._view.apply(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            return


class RunTail:
    """Keep a view of a deployed run up to date: its events, and its state between attempts."""

    def __init__(self, folder: Path) -> None:
        from fedtmle.engine.runs import RunFolder  # needs the packages of the deployment extra

        self._run = RunFolder(folder)
        self._events = EventTail(self._run.events)

    def look(self) -> Document:
        """Return the data that the page shows, including the silos that a run waits for."""
        shown, status = self._events.look(), self._run.look()
        awaited = {silo: words for silo, words in status.silos.items() if words != "ready"}
        for silo in shown["silos"]:
            if silo["name"] in awaited:
                silo["status"], silo["reason"] = "awaited", awaited.pop(silo["name"])
        if status.state.is_over and shown["status"] != "running":
            return shown
        shown["silos"] += [
            {**vars(SiloView()), "name": silo, "status": "awaited", "reason": words}
            for silo, words in awaited.items()
        ]
        if str(status.state) != "running":
            shown["status"] = "failed" if status.state.is_over else "waiting"
            shown["text"] = ": ".join(filter(None, (str(status.state), status.why)))
        return shown


class LedgerTail:
    """Keep a view of a ledger up to date; it is checked from its first line whenever it has grown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._view = RunView()
        self._size = -1

    def look(self) -> Document:
        """Read the ledger if it has changed, and return the data that the page shows."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return self._view.show()
        if len(data) != self._size and data.endswith(b"\n"):  # otherwise its last line is still being written
            self._size = len(data)
            self._view = self._read()
        return self._view.show()

    def _read(self) -> RunView:
        view = RunView()
        try:
            for event in ledger_events(read(self.path)):
                if event["event"] == "start":
                    view = RunView(events=view.events)
                view.apply(event)
        except JournalError as error:
            view.status, view.text = "failed", str(error)
        return view


def ledger_events(lines: Iterable[LedgerLine]) -> Iterator[Document]:
    """Yield the lines of a ledger, over all studies, as events of one view."""
    time = 0.0
    seen: set[str] = set()
    closed: set[str] = set()
    for line, answer in walk(lines):
        time = datetime.datetime.fromisoformat(line["time"]).timestamp()
        plan = line["plan"]
        study = f"study {plan[:8]}"
        if not seen:
            yield {
                "event": "start",
                "time": time,
                "title": "",
                "question": QUESTION,
                "algorithm": "",
                "plan": "",
                "silos": [THIS_SILO],
                "role": "silo",
            }
        if plan not in seen:
            seen.add(plan)
            yield {"event": f"{study} began", "time": time}
        if answer is not None:
            yield {
                "event": "round",
                "time": time,
                "round": line["round"],
                "phase": line["phase"],
                "up": {THIS_SILO: answer.bits},
                "down": {},
                "message": f"{study}: {answer.words}",
                "numbers": answer.numbers,
            }
        elif line["decision"] == "answered":
            yield {"event": f"{study}: answered {line['request']}", "time": time}
            if line["request"] == "compare":
                closed.add(plan)
        elif line["decision"] == "refused":
            why = f"{study}: {line['reason']}" + (f" (policy: {line['key']})" if line["key"] else "")
            yield {"event": "silo", "time": time, "silo": THIS_SILO, "status": "refused", "reason": why}
        else:
            yield {"event": f"{study}: {line['decision']} {line['request']}", "time": time}
    if seen and closed == seen:
        yield {"event": "finished", "time": time, "text": "every study is closed", "converged": True}


# A small HTTP server for one page and its data, on this machine by default.

Look = Callable[[], Document]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'nonce-{}'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class WatchServer(ThreadingHTTPServer):
    """Serve the data that ``look`` returns; refuse requests for another host name (DNS rebinding)."""

    daemon_threads = True

    def __init__(self, host: str, port: int, look: Look, *, silence: float = 30.0) -> None:
        self._look = look
        self._silence = silence  # seconds without an event after which the page warns
        self._lock = threading.Lock()
        self.page = files("fedtmle.watch").joinpath("page.html").read_text(encoding="utf-8")
        super().__init__((host, port), _Handler)
        self.allowed = {*LOOPBACK, host} if host in LOOPBACK else {*LOOPBACK, host, ""}

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"

    def state(self) -> Document:
        """Return the data that the page shows, with this machine's time."""
        with self._lock:  # one reader at a time, because `look` updates the view
            return {**self._look(), "now": round(time.time(), 3), "silence": self._silence}


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if "" not in self.server.allowed and host not in self.server.allowed:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is served to this machine only")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            nonce = secrets.token_urlsafe(16)
            page = self.server.page.replace("NONCE", nonce).encode()
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page, nonce=nonce)
        elif address.path == "/state":
            state = self.server.state()
            last = parse_qs(address.query).get("seen", [""])[0]
            if last == str(state["seen"]):
                self._send(HTTPStatus.NO_CONTENT, "application/json", b"")
            else:
                self._send(HTTPStatus.OK, "application/json", json.dumps(state, allow_nan=False).encode())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is only one page here")

    def _send(self, status: HTTPStatus, kind: str, body: bytes, *, nonce: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY.format(nonce))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for a request: the terminal belongs to the user."""
