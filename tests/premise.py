"""Count how often the premise of a test holds, and fail if that is too seldom.

A property "if A then B" that is tested on draws where A is never true passes whatever the code does.
A `Premise` counts the draws, and the test fails if A holds in less than a stated share of them:

    skipped = Premise("the guard skips the look", at_least=0.5)

    @skipped
    @given(...)
    def test_a_skipped_look_would_not_refuse(...):
        if skipped.holds(seen.distance(move) <= seen.radius(share)):
            assert ...

In a loop it is a context manager: ``with Premise(...) as premise: for ...``. ``pytest --premises`` prints a
table of all premises with the share of draws in which each held.
"""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class Count:
    """How often a premise held in one test."""

    test: str
    statement: str
    held: int
    draws: int
    at_least: float

    @property
    def share(self) -> float:
        """The share of draws in which the premise held, 0 if there were none."""
        return self.held / self.draws if self.draws else 0.0


COUNTS: list[Count] = []  # of this process, in the order in which the tests ended


class Premise(ContextDecorator):
    """Counts draws; on a normal exit it fails if the premise held in less than ``at_least`` of them.

    ``statement`` completes the sentence "In this draw ...". Used as a decorator, it stands above `given`, so
    that it counts all draws of one test. It does not judge a test that failed for another reason.
    """

    def __init__(self, statement: str, *, at_least: float) -> None:
        if not 0 < at_least <= 1:
            raise ValueError(f"at_least must be a share above 0 and at most 1, got {at_least}")
        self.statement = statement
        self.at_least = at_least
        self.draws = 0
        self.held = 0

    def holds(self, condition: object) -> bool:
        """Return whether ``condition`` is true, and count the draw."""
        self.draws += 1
        self.held += bool(condition)
        return bool(condition)

    def __enter__(self) -> Premise:
        self.draws = self.held = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        count = Count(test, self.statement, self.held, self.draws, self.at_least)
        COUNTS.append(count)
        if count.share < self.at_least:
            raise AssertionError(
                f"premise '{self.statement}' held in {self.held} of {self.draws} draws ({count.share:.1%}), "
                f"expected at least {self.at_least:.0%}. Repair the draws, not the share"
            )
