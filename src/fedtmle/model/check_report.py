"""The report of the conformance suite: named checks, figures, and a verdict."""

from __future__ import annotations

import enum
import textwrap
from dataclasses import dataclass
from typing import final

from fedtmle.errors import CheckFailedError


class Outcome(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_CHECKED = "not checked"


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """One named check: passed if ``figure`` <= ``tolerance``."""

    name: str
    outcome: Outcome
    figure: float | None = None
    tolerance: float | None = None
    note: str = ""

    def __str__(self) -> str:
        figures = "".join(f"{x:>10.1e}" if x is not None else " " * 10 for x in (self.figure, self.tolerance))
        lines = [f"{self.name:<40} {self.outcome.value:<12}{figures}".rstrip()]
        lines += textwrap.wrap(self.note, width=76, initial_indent="    ", subsequent_indent="    ")
        return "\n".join(lines)


@final
@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The checks of a problem, in order."""

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is Outcome.FAILED)

    def raise_if_failed(self) -> None:
        """Raise `CheckFailedError` with the failed checks, if there are any."""
        if self.failures:
            raise CheckFailedError("\n".join(["the problem fails these checks:", *map(str, self.failures)]))

    def __str__(self) -> str:
        header = f"{'check':<40} {'outcome':<12}{'figure':>10}{'tolerance':>10}"
        return "\n".join([header, "-" * len(header), *map(str, self.checks)])
