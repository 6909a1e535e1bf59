"""Start-up: time of importing the package and of the command line's help, each in a fresh process."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.table import Row

CASES = {
    "import fedtmle": (["-c", "import fedtmle"], 0.5),
    "fedtmle --help": (["-m", "fedtmle", "--help"], 0.3),
    "import fedtmle and all its names": (
        ["-c", "import fedtmle as ft; [getattr(ft, name) for name in ft.__all__]"],
        None,
    ),
}


def rows(quick: bool) -> Iterator[Row]:
    for what, (arguments, limit) in CASES.items():
        taken = [_once(arguments) for _ in range(3 if quick else 10)]
        cpu, wall = min(t[0] for t in taken), min(t[1] for t in taken)
        yield Row(
            group="start-up",
            what=what,
            against="the limit" if limit else "",
            unit="s",
            ours=wall,
            theirs=limit,
            most=1.0 if limit else None,
            note=f"{cpu:.2f} s of CPU",
        )


def _once(arguments: list[str]) -> tuple[float, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)  # noqa: S603
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall
