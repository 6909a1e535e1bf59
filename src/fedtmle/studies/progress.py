"""The live display of a run: on standard error, and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedtmle.runtime.session import Progress, RoundReport


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
        task = bar.add_task(f"{what}: reading the silos")

        def report(round_: RoundReport) -> None:
            bar.update(
                task,
                description=f"{what}: round {round_.round}, {round_.phase}, {round_.silos} silos, "
                f"{round_.bits / 1000:.1f} kbit so far",
            )

        yield report
