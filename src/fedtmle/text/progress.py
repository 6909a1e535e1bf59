"""Following a run: a live display where standard error is a terminal, and a file of events."""

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

TITLE = 14  # characters of a title that leave a line of 80 room for the rest


@contextmanager
def live_progress(what: str, *, quiet: bool) -> Iterator[Progress | None]:
    """A callback that keeps one line up to date; None, and nothing shown, if quiet or no terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        short = shortened(what, TITLE)
        task = bar.add_task(f"{short}: reading the silos")

        def report(round_: RoundReport) -> None:
            known = round_.gradient_norm
            last = "so far" if known is None else f"so far, {known:.1e}"  # the residual on its way down
            bar.update(
                task,
                description=f"{short}: round {round_.round}, {phase_name(round_.phase)}, "
                f"{round_.silos} silos, {round_.bits / 1000:.1f} kbit {last}",
            )

        yield report


@contextmanager
def following(path: Path | None, title: str, study: Study, silos: Sequence[str]) -> Iterator[EventLog | None]:
    """A log of events that has said what starts; None without a path."""
    with logging_to(path) as log:
        if log is not None:
            names = ["pooled"] if study.algorithm.pools_rows else list(silos)
            log.start(
                title=title,
                question=study.target.question,
                algorithm=type(study.algorithm).__name__,
                plan=study_plan(study, roster(names)).digest.hex(),
                silos=names,
            )
        yield log


def each(*callbacks: Progress | None) -> Progress | None:
    """One callback for all that are there."""
    there = [callback for callback in callbacks if callback is not None]

    def report(round_: RoundReport) -> None:
        for callback in there:
            callback(round_)

    return report if there else None
