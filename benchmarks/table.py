"""A row of the table of ratios, and how two things are timed beside each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: ``ratio`` is ours over theirs, or theirs over ours where ``faster``."""

    group: str
    what: str
    against: str
    unit: str
    ours: float | None = None
    theirs: float | None = None
    faster: bool = False  # the ratio says how many times faster we are
    most: float | None = None  # what the ratio must not exceed
    least: float | None = None  # what it must reach
    note: str = ""

    @property
    def ratio(self) -> float | None:
        if not self.ours or not self.theirs:
            return None
        return self.theirs / self.ours if self.faster else self.ours / self.theirs

    @property
    def goal(self) -> str:
        if self.most is not None:
            return f"<= {self.most:g}"
        return f">= {self.least:g}" if self.least is not None else ""

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None where there is none, or nothing was measured."""
        if self.ratio is None or not self.goal:
            return None
        return self.ratio <= self.most if self.most is not None else self.ratio >= (self.least or 0.0)


Clock = Callable[[], float]


def beside(
    calls: Sequence[Callable[[], object]], *, repeats: int, clock: Clock = time.perf_counter
) -> list[float]:
    """The least seconds of each call, taken in turns, so that a busy machine disturbs all alike."""
    least = [float("inf")] * len(calls)
    for call in calls:
        call()  # compiles, and fills caches
    for _ in range(repeats):
        for k, call in enumerate(calls):
            begin = clock()
            call()
            least[k] = min(least[k], clock() - begin)
    return least
