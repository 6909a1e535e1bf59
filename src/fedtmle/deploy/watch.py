"""A run as people follow it: one line per change, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from fedtmle.federations.runs import State, Status
from fedtmle.studies.text import phase_name


def show(statuses: Iterable[Status], *, quiet: bool, to: TextIO | None = None) -> Status:
    """Prints who is connected, who has approved and how far the run is; returns the last status."""
    out = sys.stderr if to is None else to
    said, last = "", None
    for last in statuses:
        line = _line(last, live=out.isatty())
        if not quiet and line and line != said:
            print(line, file=out, flush=True)
            said = line
    if last is None:
        raise AssertionError("a run has a status")
    return last


def _line(status: Status, *, live: bool) -> str:
    if status.state is State.SUBMITTED:
        return f"submitted; {_silos(status)}" if status.silos else "submitted"
    if status.state is State.WAITING:
        return f"waiting; {_silos(status)}" if status.silos else ""
    if status.state is State.RUNNING:
        if not status.round:
            return "all silos are ready; running"
        phase = phase_name(status.phase)
        return f"round {status.round}, {phase}, {status.bits / 1000:.1f} kbit so far" if live else ""
    if status.state is State.STOPPED:
        return f"stopped after round {status.round}: {status.why}"
    return f"done in {status.round} rounds, {sum(status.seconds):.1f} s"


def _silos(status: Status) -> str:
    by_words: dict[str, list[str]] = {}
    for silo, words in status.silos.items():
        by_words.setdefault(words, []).append(silo)
    return "; ".join(f"{words}: {', '.join(silos)}" for words, silos in by_words.items())
