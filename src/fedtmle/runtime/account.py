"""The account: rounds, and every bit that crossed a link, by phase and by silo."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fedtmle.protocol.query import Phase


@dataclass
class Account:
    """Payload bits are the codes themselves; wire bytes add padding and envelopes."""

    rounds: Counter[Phase] = field(default_factory=Counter)
    bits_up: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    bits_down: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down: Counter[str] = field(default_factory=Counter)

    def bits(self, *phases: Phase) -> int:
        """Payload bits over all links in the given phases."""
        return sum(
            count
            for book in (self.bits_up, self.bits_down)
            for (phase, _), count in book.items()
            if phase in phases
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data: rounds by phase, bits up and down by silo and phase, bytes by silo."""

        def by_silo(book: Counter[tuple[Phase, str]]) -> dict[str, dict[str, int]]:
            table: dict[str, dict[str, int]] = {}
            for (phase, silo), count in book.items():
                table.setdefault(silo, {})[phase.value] = count
            return table

        return {
            "rounds": {phase.value: count for phase, count in self.rounds.items()},
            "bits_up": by_silo(self.bits_up),
            "bits_down": by_silo(self.bits_down),
            "bytes_up": dict(self.bytes_up),
            "bytes_down": dict(self.bytes_down),
        }
