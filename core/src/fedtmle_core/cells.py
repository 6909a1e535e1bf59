"""What a program reads of totals that were not judged: bins of many people, and coarse sums.

Only after all hospitals are added up the true number of people in a bin is known: no hospital hides anything
beforehand. Within a group neighbouring bins are joined until each has nobody or as many people as the floor
says. Nobody is left out, so that the total of the shown bins, which other sums tell, gives none away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from fedtmle_core.admit import Judged
from fedtmle_core.blocks import Cells, Intervals, Moments, size
from fedtmle_core.plan import Question


def shown(question: Question, totals: Sequence[int], judged: Judged) -> tuple[int, ...]:
    """Return the totals of a question as a program may read them, in the order of its lanes."""
    found: list[int] = []
    for block in question.blocks:
        part = totals[len(found) : len(found) + block.numbers]
        match block:
            case Cells():
                found += joined(block, part, judged.plan.floor)
            case Moments():
                found += coarse(block, part, judged, question.intervals(judged.plan))
            case _:
                found += part
    return tuple(found)


def coarse(block: Moments, totals: Sequence[int], judged: Judged, intervals: Intervals) -> list[int]:
    """Return sums as they are if they are of judged columns, else in multiples of what two people change."""
    result: list[int] = []
    for places, shift, total in zip(block.products, block.shifts(intervals), totals, strict=True):
        terms = [block.columns[j] for j in places]
        step = 1
        if not judged.is_exact(terms):
            most = math.prod(size(intervals[term]) for term in terms)
            step = max(1, math.ceil(math.ldexp(2.0 * most, shift)))
        result.append(step * round(Fraction(total, step)))
    return result


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
