"""Counts of people, rounded so that nobody learns of a group of 1 to k - 1: see `cut`.

This holds for any k, table by table: the tests try all small ones. It does not cover two tables that divide
the same few people in two ways: of all small pairs of such tables, tried in the same way, many give a cell
away with k = 3 and 4, and few with 5. So the policy's own floor is five.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedtmle_core.errors import InputError


class NotPublishableError(InputError):
    """The document as a whole may not go out; the message names no number of it."""


def is_safe(counts: Sequence[int], k: int) -> bool:
    """Return whether each count is 0 or at least k."""
    return all(count == 0 or count >= k for count in counts)


def multiple(count: float, k: int) -> int:
    """Return the nearest multiple of k, at least 0."""
    return max(0, k * math.floor(count / k + 0.5))


def moved(counts: Sequence[int], k: int) -> list[int]:
    """Return the cells of a table as they are, but those of 1 to k - 1 people as 0 or k, the nearer one.

    The largest cell gives or takes the difference, so that the total, at least k, stays. A published 0 may
    be 0 or less than k/2 people, a k may be k or fewer: that a cell was moved is not seen.
    """
    largest, total = counts.index(max(counts)), sum(counts)
    for few_is in (multiple, lambda _count, _k: 0):  # to 0 only, where the largest cell has nothing to give
        found = [count if count == 0 or count >= k else few_is(count, k) for count in counts]
        found[largest] = total - sum(found[:largest]) - sum(found[largest + 1 :])
        if found[largest] >= k:
            return found
    raise NotPublishableError(f"a table of fewer than {k} people")


def cut(count: float, total: int, k: int) -> int:
    """Return the size of a group of ``total`` people, so that neither it nor the rest is 1 to k - 1.

    Each number stands for at least k consecutive sizes, but for 0 and ``total``, which stand for themselves
    and those nearer than k/2. So a second group inside this one may have the same size, or the difference may
    be k or more: it is never known to be in 1..k-1. The same holds for exact counts of other groups.
    """
    if 2 * (total - count) < k:
        return total
    nearest = multiple(count, k)
    return nearest if total - nearest >= k else max(0, k * ((total - k) // k))


def cells(counts: Sequence[float], total: int, k: int) -> list[int]:
    """Return a table's cells so that each sum of neighbours is rounded by `cut`, and all add up to ``total``.

    ``total`` is how many people the table has, as it is published elsewhere. Rounding each cell by itself
    would not do: where the total is known so is the sum of the errors, and if that is the largest possible so
    is every cell (k = 10: 4 and 14 of 18 would be 0 and 10, and nothing else would).
    """
    sums, so_far = [0], 0.0
    for count in counts:
        so_far += max(count, 0.0)
        sums.append(cut(so_far, total, k))
    sums[-1] = total
    return [after - before for before, after in pairwise(sums)]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The counts of the one exact table, as they are published."""

    omitted: int
    n: int
    arms: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...] = ()  # by arm, those with an outcome by its kind (causes of events)

    @property
    def observed(self) -> tuple[int, ...]:
        """People with an outcome, by arm."""
        return tuple(map(sum, self.parts))


def flow(k: int, *, n: int, omitted: int, arms: Sequence[int], parts: Sequence[Sequence[int]] = ()) -> Flow:
    """Return the published table of those left out, the arms, and each arm's ``parts`` with an outcome.

    All counts are as they are, but for cells of 1 to k - 1 people: few left out, or few in a part of an arm,
    are `moved`. An arm of so few is no study that anyone may read.
    """
    if n < k or not is_safe([*arms, max(n - sum(arms), 0)], k):
        raise NotPublishableError(f"fewer than {k} people were analysed, or are in an arm")
    inner = [
        moved([*part, arm - sum(part)], k)[:-1] if arm else [0] * len(part)
        for arm, part in zip(arms, parts, strict=False)
    ]
    return Flow(
        omitted=omitted if is_safe([omitted], k) else multiple(omitted, k),
        n=n,
        arms=tuple(arms),
        parts=tuple(map(tuple, inner)),
    )
