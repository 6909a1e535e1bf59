"""Following a run: its events as lines of JSON in a file, and a live display if standard error is a
terminal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedtmle.errors import DataError, FedTMLEError, RefusedError
from fedtmle.layout import phase_name, shortened
from fedtmle.programs.study import Study
from fedtmle.protocol.plan import roster
from fedtmle.runtime.session import Progress, RoundReport
from fedtmle.studyfile.file import study_plan

# Events of a run as lines of JSON, appended to a file that anyone may follow while it grows.
#
#     start     title, question, algorithm, plan, silos, role
#     round     round, phase, up and down (bits by silo), retired, norm, tolerance
#     silo      silo, status, reason: something happened to one silo (lost, back, refused, ...)
#     finished  text, converged
#     failed    text: the run ended without a result
#
# Every event has `time`, seconds since 1970. All of it is public to the parties of the run; no line
# holds a record's value. `EventLog.round` is a session's progress callback, so that an embedded and a
# deployed run write the same file.

Clock = Callable[[], float]


class EventLog:
    """Append one whole line per event, at once."""

    def __init__(self, path: str | Path, *, clock: Clock = time.time) -> None:
        self._file: IO[bytes] = Path(path).open("ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._clock = clock

    def start(
        self,
        *,
        title: str,
        question: str,
        algorithm: str,
        plan: str,
        silos: Sequence[str],
        role: str = "server",
    ) -> None:
        """Write that a run begins; readers of the file discard the run before it."""
        self.write(
            "start",
            title=title,
            question=question,
            algorithm=algorithm,
            plan=plan,
            silos=list(silos),
            role=role,
        )

    def round(self, report: RoundReport) -> None:
        """Write what one round sent."""
        self.write(
            "round",
            round=report.round,
            phase=report.phase.value,
            up=dict(report.up),
            down=dict(report.down),
            retired=list(report.retired),
            norm=report.gradient_norm,
            tolerance=report.tolerance,
        )

    def silo(self, silo: str, status: str, reason: str = "") -> None:
        """Write what happened to one silo: "lost", "back", "refused" or "failed"."""
        self.write("silo", silo=silo, status=status, reason=reason)

    def failed(self, error: BaseException) -> None:
        """Write that the run ended without a result; an error that names a silo is an event of it too."""
        if isinstance(error, RefusedError):
            self.silo(error.silo, "refused", error.code)
        elif isinstance(error, DataError) and error.silo is not None:
            self.silo(error.silo, "failed", error.message)
        # Only our own errors are known to quote no record.
        text = error.full_text if isinstance(error, FedTMLEError) else f"stopped by {type(error).__name__}"
        self.write("failed", text=text)

    def finished(self, *, text: str, converged: bool) -> None:
        """Write that the run has a result."""
        self.write("finished", text=text, converged=converged)

    def write(self, event: str, **fields: object) -> None:
        """Append one event."""
        line = {"event": event, "time": round(self._clock(), 3), **fields}
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


@contextmanager
def logging_to(path: str | Path | None) -> Iterator[EventLog | None]:
    """Open a log that records a failure of the run; without a path, None, and nothing is written."""
    if path is None:
        yield None
        return
    log = EventLog(path)
    try:
        yield log
    except BaseException as error:
        log.failed(error)
        raise
    finally:
        log.close()


# Following a run: a live display if standard error is a terminal, and a file of events.

TITLE_WIDTH = 14  # characters, so that the rest fits a line of 80


@contextmanager
def live_progress(title: str, *, quiet: bool) -> Iterator[Progress | None]:
    """Yield a callback that updates one line of the terminal, or None if quiet or without a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        short = shortened(title, TITLE_WIDTH)
        task = bar.add_task(f"{short}: reading the silos")

        def report(round_: RoundReport) -> None:
            norm = round_.gradient_norm
            last = "so far" if norm is None else f"so far, {norm:.1e}"
            bar.update(
                task,
                description=f"{short}: round {round_.round}, {phase_name(round_.phase)}, "
                f"{round_.silos} silos, {round_.bits / 1000:.1f} kbit {last}",
            )

        yield report


@contextmanager
def following(path: Path | None, title: str, study: Study, silos: Sequence[str]) -> Iterator[EventLog | None]:
    """Yield a log of events that has recorded the start of the run, or None without a path."""
    with logging_to(path) as log:
        if log is not None:
            names = ["pooled"] if study.algorithm.pools_rows else list(silos)
            log.start(
                title=title,
                question=study.target.question,
                algorithm=type(study.algorithm).__name__,
                plan=study_plan(study, roster(names), silos=tuple(silos)).digest.hex(),
                silos=names,
            )
        yield log


def each(*callbacks: Progress | None) -> Progress | None:
    """Return one callback that calls all of those given, or None if all are None."""
    given = [callback for callback in callbacks if callback is not None]

    def report(round_: RoundReport) -> None:
        for callback in given:
            callback(round_)

    return report if given else None
