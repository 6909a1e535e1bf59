"""The account: rounds, and every bit that crossed a link, by phase, by silo and by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from fedtmle.protocol.query import Phase


@dataclass(frozen=True, kw_only=True)
class RoundBits:
    """Payload bits of one round by silo: its answer up, the broadcast down if it is still in the run."""

    phase: Phase
    up: Mapping[str, int]
    down: Mapping[str, int]


@dataclass
class Account:
    """Payload bits are the codes themselves; wire bytes add padding and envelopes."""

    rounds: Counter[Phase] = field(default_factory=Counter)
    bits_up: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    bits_down: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down: Counter[str] = field(default_factory=Counter)
    by_round: list[RoundBits] = field(default_factory=list)

    def book(self, booked: RoundBits) -> None:
        """Enters one round."""
        self.rounds[booked.phase] += 1
        self.by_round.append(booked)
        for book, sent in ((self.bits_up, booked.up), (self.bits_down, booked.down)):
            for silo, count in sent.items():
                book[booked.phase, silo] += count

    def bits(self, *phases: Phase) -> int:
        """Payload bits over all links in the given phases."""
        return sum(
            count
            for book in (self.bits_up, self.bits_down)
            for (phase, _), count in book.items()
            if phase in phases
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data: rounds by phase, bits up and down by silo and phase, bytes by silo, bits by round.

        By round: the phases as runs, and for each silo what it sent in rounds 1, 2, ... until it left;
        a broadcast has one length for all that hear it.
        """

        def by_silo(book: Counter[tuple[Phase, str]]) -> dict[str, dict[str, int]]:
            table: dict[str, dict[str, int]] = {}
            for (phase, silo), count in book.items():
                table.setdefault(silo, {})[phase.value] = count
            return table

        up: dict[str, list[int]] = {}
        for booked in self.by_round:
            for silo, count in booked.up.items():
                up.setdefault(silo, []).append(count)
        runs = groupby(self.by_round, key=lambda booked: booked.phase)
        return {
            "rounds": {phase.value: count for phase, count in self.rounds.items()},
            "bits_up": by_silo(self.bits_up),
            "bits_down": by_silo(self.bits_down),
            "bytes_up": dict(self.bytes_up),
            "bytes_down": dict(self.bytes_down),
            "by_round": {
                "phases": [[phase.value, len(list(run))] for phase, run in runs],
                "up": up,
                "down": [max(booked.down.values(), default=0) for booked in self.by_round],
            },
        }
