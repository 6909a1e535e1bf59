"""The cells of a table that may be seen where none below a floor may."""

from __future__ import annotations

from collections.abc import Sequence


def visible(counts: Sequence[int], total: int, floor: int) -> tuple[int | None, ...]:
    """The cells of one total that may be seen; what is hidden adds up to the floor at least.

    Without the second rule a single hidden cell would be the total less the others.
    """
    shown: list[int | None] = [count if count >= floor else None for count in counts]
    while True:
        seen = [count for count in shown if count is not None]
        hidden = total - sum(seen)
        if not seen or hidden >= floor or (hidden == 0 and None not in shown):
            return tuple(shown)
        shown[shown.index(min(seen))] = None
