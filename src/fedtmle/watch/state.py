"""The view of a run that the page shows, updated event by event, without a file or a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fedtmle.layout import phase_name
from fedtmle.runtime.documents import Document

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
        if event.get("norm"):
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
        recent = self.norms[-RECENT_ROUNDS:]
        if self.status != "running" or not self.tolerance or len(recent) < 3 or len(self.times) < 3:
            return None
        x = [float(r) for r, _ in recent]
        y = [math.log(norm) for _, norm in recent]
        mx, my = sum(x) / len(x), sum(y) / len(y)
        slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
        gap = y[-1] - math.log(self.tolerance)
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
