"""Following a growing file of events: whole lines only, from where the last look ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
