"""Bins of few people, put together with their neighbours once all hospitals are added up.

Only then the true number of people in a bin is known: no hospital hides anything beforehand. Within a group
neighbouring bins are joined until each has nobody or as many people as the floor says. Nobody is left out, so
that the total of the shown bins, which other sums tell, gives none away.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle_core.blocks import Cells
from fedtmle_core.plan import Question


def shown(question: Question, totals: Sequence[int], floor: int) -> tuple[int, ...]:
    """Return the totals of a question as a program may see them, in the order of its lanes."""
    found: list[int] = []
    for block in question.blocks:
        part = totals[len(found) : len(found) + block.numbers]
        found += joined(block, part, floor) if isinstance(block, Cells) else part
    return tuple(found)


def joined(block: Cells, totals: Sequence[int], floor: int) -> list[int]:
    """Return the counts and sums of a block's bins; those of joined bins are in the fullest one.

    A group of fewer people than the floor is shown as empty.
    """
    size = 1 + len(block.sums)
    cells = [list(totals[k * size : (k + 1) * size]) for k in range(block.cells)]
    result: list[int] = []
    for first in range(0, block.cells, block.bins):
        group = cells[first : first + block.bins]
        for run in _runs([cell[0] for cell in group], floor):
            together = [sum(column) for column in zip(*(group[b] for b in run), strict=True)]
            fullest = max(run, key=lambda b: group[b][0])
            for b in run:
                group[b] = [0] * size
            if together[0] >= floor:
                group[fullest] = together
        result += [number for cell in group for number in cell]
    return result


def _runs(counts: Sequence[int], floor: int) -> list[list[int]]:
    """Return consecutive bins that are shown together: each run has at least ``floor`` people, if it can."""
    runs: list[list[int]] = []
    people = 0
    for b, count in enumerate(counts):
        if runs and people < floor:
            runs[-1].append(b)
        elif count:
            runs.append([b])
            people = 0
        else:
            continue  # an empty bin between two that are shown alone
        people += count
    if len(runs) > 1 and people < floor:
        runs[-2:] = [runs[-2] + list(range(runs[-2][-1] + 1, runs[-1][-1] + 1))]
    return runs
