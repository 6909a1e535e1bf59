"""Simulated parallel time of a synchronous federation whose silos really run one after another.

A round lasts as long as its slowest silo's compute, plus the server's work until it can ask again, plus
one link latency. The clock is an argument: here CPU time of this thread, so that other programs on
the machine do not count, plus what `publicwork` charges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedtmle.runtime.silo import Silo


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Seconds of one round: the slowest silo, all silos together, and the server after them."""

    slowest: float
    silos: float
    server: float

    @property
    def compute(self) -> float:
        """What the round adds to the parallel time, before latency."""
        return self.slowest + self.server


class TimedFederation:
    """All silos in this process, one at a time, each step timed."""

    def __init__(self, silos: Sequence[Silo], *, clock: Callable[[], float]) -> None:
        self._silos = {silo.name: silo for silo in silos}
        self._clock = clock
        self._steps: list[list[float]] = []
        self._entered: list[float] = []
        self._left: list[float] = []

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self._silos)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        self._entered.append(self._clock())
        replies, steps = {}, []
        for silo, request in requests.items():
            before = self._clock()
            replies[silo] = self._silos[silo].step(request)
            steps.append(self._clock() - before)
        self._steps.append(steps)
        self._left.append(self._clock())
        return replies

    def rounds(self) -> tuple[RoundTime, ...]:
        """Every round of a finished session, in order, without the opening and closing greetings."""
        server = (after - left for left, after in zip(self._left[1:], self._entered[2:], strict=False))
        return tuple(
            RoundTime(slowest=max(steps), silos=sum(steps), server=spent)
            for steps, spent in zip(self._steps[1:-1], server, strict=True)
        )
