"""Following a growing file of events: whole lines only, from where the last look ended."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedtmle.errors import JournalError
from fedtmle.runtime.events import EventRecord
from fedtmle.runtime.ledger import read
from fedtmle.watch.state import View


class Follower:
    """Keeps a `View` of a file up to date; the file may not be there yet, or be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._view = View()
        self._offset = 0

    def look(self) -> dict[str, Any]:
        """Reads what is new and returns what the page shows."""
        try:
            size = self.path.stat().st_size
            if size < self._offset:  # another file took its place
                self._view, self._offset = View(), 0
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return self._view.show()
        whole = data.rfind(b"\n") + 1  # the last line may be half written
        self._offset += whole
        for line in data[:whole].splitlines():
            self._hear(line)
        return self._view.show()

    def _hear(self, line: bytes) -> None:
        """A line that is no event is passed over: one bad line must not blind the view."""
        try:
            event = json.loads(line)
            if event.get("event") == "start":  # a new run; the one before is history
                self._view = View(heard=self._view.heard)
            self._view.hear(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            return


# A silo's own ledger as events, so that its owner has the same view: what have I sent so far?


OWN = "this silo"
QUESTION = "What has this silo sent so far?"


def events(lines: Iterable[Mapping[str, Any]]) -> Iterator[EventRecord]:
    """Each line of a ledger as an event; a ledger's running totals become what each answer added."""
    session, bits, functionals = "", 0, 0
    for line in lines:
        time = datetime.datetime.fromisoformat(line["time"]).timestamp()
        if line["session"] != session:
            session, bits, functionals = line["session"], 0, 0
            yield {
                "event": "start",
                "time": time,
                "title": "",
                "question": QUESTION,
                "algorithm": f"session {session[:16]}",
                "plan": "",
                "silos": [OWN],
                "role": "silo",
            }
        if line["decision"] == "answered" and line["query"]:
            yield {
                "event": "round",
                "time": time,
                "round": line["round"],
                "phase": line["phase"],
                "up": {OWN: line["bits"] - bits},
                "down": {},
                "message": line["query"],
                "numbers": line["functionals"] - functionals,
            }
            bits, functionals = line["bits"], line["functionals"]
        elif line["decision"] == "answered":
            yield {"event": f"answered {line['request']}", "time": time}
            if line["request"] == "compare":
                yield {"event": "finished", "time": time, "text": "the session is closed", "converged": True}
        elif line["decision"] == "refused":
            why = f"{line['reason']}" + (f" (policy: {line['key']})" if line["key"] else "")
            yield {"event": "silo", "time": time, "silo": OWN, "status": "refused", "reason": why}
        else:
            yield {"event": f"{line['decision']}: {line['request']}, round {line['round']}", "time": time}


class LedgerFollower:
    """The view of a ledger, which is checked from its first line whenever it has grown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._view = View()
        self._size = -1

    def look(self) -> dict[str, Any]:
        """Reads the ledger if it changed and returns what the page shows."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return self._view.show()
        if len(data) != self._size and data.endswith(b"\n"):  # else its last line is being written
            self._size = len(data)
            self._view = self._read()
        return self._view.show()

    def _read(self) -> View:
        view = View()
        try:
            for event in events(read(self.path)):
                if event["event"] == "start":
                    view = View(heard=view.heard)
                view.hear(event)
        except JournalError as error:
            view.status, view.text = "failed", str(error)
        return view
