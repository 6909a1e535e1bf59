"""In which order terms are computed for some people, and when a column is let go.

Groups of terms are asked for one after another, such as the columns of one record of each person, then those
of the next. Each term is computed once, parts first, when a group first needs it, and its column is let go
after its last use: where there are many records of a person, few of their columns are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from fedtmle_core.terms import Rows, Term
from fedtmle_core.types import Array


@final
@dataclass(frozen=True)
class Step:
    """A term, the places of its parts, and the places whose columns nobody needs after it."""

    term: Term
    parts: tuple[int, ...]
    frees: tuple[int, ...]


@final
@dataclass(frozen=True)
class Group:
    """Steps up to ``stop``, after which the columns at ``roots`` are there; then some are let go."""

    stop: int
    roots: tuple[int, ...]
    frees: tuple[int, ...]


@final
@dataclass(frozen=True)
class Recipe:
    """Steps in their order; ``most`` is the largest number of columns in memory at once."""

    steps: tuple[Step, ...]
    groups: tuple[Group, ...]
    most: int

    def values(self, kept: Sequence[Array | None], rows: slice, part: Rows) -> Iterator[list[Array]]:
        """Yield the columns of each group for consecutive people, shape (people,) each.

        ``kept`` has the columns of all people of the terms that are at hand, by step.
        """
        columns: list[Array | None] = [None] * len(self.steps)
        done = 0
        for group in self.groups:
            for k in range(done, group.stop):
                step, column = self.steps[k], kept[k]
                if column is not None:
                    columns[k] = column[rows]
                else:
                    columns[k] = step.term.values([_present(columns[j]) for j in step.parts], part)
                for j in step.frees:
                    columns[j] = None
            done = group.stop
            yield [_present(columns[root]) for root in group.roots]
            for j in group.frees:
                columns[j] = None

    def at_hand(self, kept: Mapping[Term, Array]) -> list[Array | None]:
        """Return the kept columns by step, None where there is none."""
        return [kept.get(step.term) for step in self.steps]


@lru_cache(maxsize=64)
def recipe(groups: tuple[tuple[Term, ...], ...], kept: frozenset[Term]) -> Recipe:
    """Return the recipe of groups of terms, where the columns of those ``kept`` are at hand."""
    place: dict[Term, int] = {}
    stops = []
    for group in groups:
        waiting: list[tuple[Term, bool]] = [(root, False) for root in reversed(group)]
        while waiting:
            term, is_ready = waiting.pop()
            if term in place:
                continue
            if is_ready or term in kept or not term.parts:
                place[term] = len(place)
            else:
                waiting.append((term, True))
                waiting += [(part, False) for part in reversed(term.parts)]
        stops.append(len(place))
    terms = list(place)
    parts = [() if term in kept else tuple(place[part] for part in term.parts) for term in terms]
    roots = [tuple(place[root] for root in group) for group in groups]
    return _with_frees(terms, parts, stops, roots)


def _with_frees(
    terms: Sequence[Term],
    parts: Sequence[tuple[int, ...]],
    stops: Sequence[int],
    roots: Sequence[tuple[int, ...]],
) -> Recipe:
    """Return the recipe that lets each column go after its last use: a step, or a group that asks for it."""
    last_step = {j: k for k, needed in enumerate(parts) for j in needed}
    last_group = {j: g for g, needed in enumerate(roots) for j in needed}
    after_step: list[list[int]] = [[] for _ in terms]
    after_group: list[list[int]] = [[] for _ in roots]
    for j in range(len(terms)):
        group = last_group.get(j, -1)
        step = last_step.get(j, j)
        if group >= 0 and stops[group] > step:
            after_group[group].append(j)
        else:
            after_step[step].append(j)
    most = held = start = 0
    for stop, freed in zip(stops, after_group, strict=True):
        for k in range(start, stop):
            held += 1
            most = max(most, held)
            held -= len(after_step[k])
        held -= len(freed)
        start = stop
    steps = zip(terms, parts, map(tuple, after_step), strict=True)
    listed = zip(stops, roots, map(tuple, after_group), strict=True)
    return Recipe(tuple(Step(*step) for step in steps), tuple(Group(*group) for group in listed), most)


def _present(values: Array | None) -> Array:
    if values is None:
        raise AssertionError("a term is computed before those that are made of it")
    return values
