"""Follow a growing file: the events of a run, or a silo's ledger as events.

A silo's owner sees on the same page what the silo has sent so far.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedtmle.errors import JournalError
from fedtmle.runtime.accounts import walk
from fedtmle.runtime.documents import Document
from fedtmle.runtime.ledger import LedgerLine, read
from fedtmle.watch.state import RunView, SiloView

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
    for line, answer, plan in walk(lines):
        time = datetime.datetime.fromisoformat(line["time"]).timestamp()
        study = f"study {plan[:8]}" if plan else "unknown study"
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
