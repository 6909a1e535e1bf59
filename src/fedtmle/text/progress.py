"""Following a run: a live display if standard error is a terminal, and a file of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedtmle.layout import phase_name, shortened
from fedtmle.programs.study import Study
from fedtmle.protocol.plan import roster
from fedtmle.runtime.events import EventLog, logging_to
from fedtmle.runtime.session import Progress, RoundReport
from fedtmle.studyfile.file import study_plan

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
