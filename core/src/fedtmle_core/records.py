"""Scores of people who have several records on the same columns, such as periods of follow-up.

Column j of record t is x_j times a public factor f_tj, 0 where the record does not have it. A person's part
of the gradient is then x_j sum_t f_tj w_t rho'_t, and of the Hessian x_j x_k sum_t f_tj f_tk w_t rho''_t:
records are added up before a column is touched, and a part is rounded once, whatever the number of records.
Coordinates with the same factors in every record are a *class*: they share these sums over records, and the
linear predictor is the sum over classes of f_t times a number z of the person.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import TypeAlias, TypeVar, final

import numpy as np

from fedtmle_core import kernels
from fedtmle_core.blocks import Score
from fedtmle_core.exact import Sums
from fedtmle_core.terms import ONE, ZERO, Constant, Term
from fedtmle_core.types import Array, Family, Part, Scaled

Pair: TypeAlias = tuple[int, int]
Key = TypeVar("Key", int, Pair)


@final
@dataclass(frozen=True, eq=False)
class Records:
    """What the records of a score share: the column of each coordinate, and its factors by record."""

    family: Family
    columns: tuple[Term, ...]
    factors: tuple[tuple[float, ...], ...]  # by coordinate, then by record

    @classmethod
    def of(cls, block: Score) -> Records | None:
        """Return what the records have in common, None if they differ in a column or there is but one."""
        if len(block.layers) < 2 or block.part is Part.LOSS:
            return None
        columns: list[Term] = [ZERO] * len(block.at)
        factors = [[0.0] * len(block.layers) for _ in block.at]
        for t, layer in enumerate(block.layers):
            given = zip(layer.X, layer.factors or (1.0,) * len(layer.X), strict=True)
            for j, (x, factor) in enumerate(starmap(_without_constant, given)):
                if factor == 0.0:
                    continue
                if columns[j] not in (ZERO, x):
                    return None
                columns[j], factors[j][t] = x, factor
        return cls(block.family, tuple(columns), tuple(map(tuple, factors)))

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """The coordinates of each class, without those that no record has."""
        found: dict[tuple[float, ...], list[int]] = {}
        for j, factors in enumerate(self.factors):
            if any(factors):
                found.setdefault(factors, []).append(j)
        return tuple(map(tuple, found.values()))

    @cached_property
    def by_record(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The classes that each record has, with their factors."""
        factors = [self.factors[members[0]] for members in self.classes]
        return tuple(
            tuple((a, each[t]) for a, each in enumerate(factors) if each[t])
            for t in range(len(self.factors[0]) if self.factors else 0)
        )

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The classes a <= b that some record has both of."""
        found = {(a, b): None for has in self.by_record for a, _ in has for b, _ in has if a <= b}
        return tuple(found)


def _without_constant(x: Term, factor: float) -> tuple[Term, float]:
    """Return a column that is a number as a multiple of 1."""
    return (ONE, factor * x.value) if isinstance(x, Constant) else (x, factor)


@final
@dataclass
class PersonSums:
    """Sums over the records of each person, by class and by pair of classes, while records are read."""

    records: Records
    n: int
    slopes: dict[int, Array]
    bends: dict[Pair, Array]

    @classmethod
    def over(
        cls,
        records: Records,
        z: Sequence[Array],
        read: Iterator[tuple[Array | None, Array | None, Array | None]],
        n: int,
        parts: Sequence[Part],
    ) -> PersonSums:
        """Return the sums over records; ``read`` yields offset, y and w of each."""
        sums = cls(records, n, {}, {})
        for has, (offset, y, w) in zip(records.by_record, read, strict=True):
            mean = _mean(records.family, _predictor(has, z, offset, n))
            if Part.GRADIENT in parts:
                slope = _slope(records.family, mean, y, w, n)
                for a, f in has:
                    _add(sums.slopes, a, f, slope)
            if Part.HESSIAN in parts:
                bend = _bend(records.family, mean, w, n)
                for a, f in has:
                    for b, g in has:
                        if a <= b:
                            _add(sums.bends, (a, b), f * g, bend)
        return sums

    def gradient(self, X: Sequence[tuple[Array, float]], shifts: tuple[int, ...]) -> Sums:
        """Return the sums of x_j times its class's, each person's rounded once."""
        units = [0] * len(shifts)
        for a, members in enumerate(self.records.classes):
            if a in self.slopes:
                found = _linear([X[j] for j in members], self.slopes[a], shifts[0])
                for j, unit in zip(members, found, strict=True):
                    units[j] = unit
        return Sums(tuple(units), shifts)

    def hessian(self, X: Sequence[tuple[Array, float]], shifts: tuple[int, ...]) -> Sums:
        """Return the sums of x_j x_k times their classes', each person's rounded once."""
        dim, units = len(X), [0] * len(shifts)

        def place(j: int, k: int) -> int:
            j, k = min(j, k), max(j, k)
            return j * dim - j * (j - 1) // 2 + k - j

        for (a, b), bend in self.bends.items():
            of_a, of_b = self.records.classes[a], self.records.classes[b]
            if a == b:
                found = _gram([X[j] for j in of_a], bend, shifts[0])
                places = [place(j, k) for i, j in enumerate(of_a) for k in of_a[i:]]
            else:
                few, many = (of_a, of_b) if len(of_a) < len(of_b) else (of_b, of_a)
                found = tuple(
                    unit
                    for column, factor in (X[k] for k in few)
                    for unit in _linear([X[j] for j in many], bend * column * factor, shifts[0])
                )
                places = [place(j, k) for k in few for j in many]
            for s, unit in zip(places, found, strict=True):
                units[s] = unit
        return Sums(tuple(units), shifts)


def _predictor(has: Sequence[tuple[int, float]], z: Sequence[Array], offset: Array | None, n: int) -> Array:
    """Return offset + sum f z, in a fresh array."""
    eta = np.zeros(n) if offset is None else offset.copy()
    for a, f in has:
        kernels.add_multiple(eta, f, z[a])
    return eta


def _mean(family: Family, eta: Array) -> Array:
    match family:
        case Family.LOGISTIC:
            return kernels.expit(eta)
        case Family.POISSON:
            return kernels.exp(eta)
    return eta


def _slope(family: Family, mean: Array, y: Array | None, w: Array | None, n: int) -> Array:
    """Return w rho'."""
    if family is Family.LINEAR:
        return np.ones(n) if w is None else w
    slope = mean if y is None else mean - y
    return slope if w is None else slope * w


def _bend(family: Family, mean: Array, w: Array | None, n: int) -> Array:
    """Return w rho''."""
    match family:
        case Family.LOGISTIC:
            bend = mean * (1.0 - mean)
        case Family.POISSON:
            bend = mean
        case _:
            bend = np.full(n, float(family is Family.GAUSSIAN))
    return bend if w is None else bend * w


def _add(sums: dict[Key, Array], key: Key, factor: float, values: Array) -> None:
    if key in sums:
        kernels.add_multiple(sums[key], factor, values)
    else:
        sums[key] = factor * values


def _linear(X: Sequence[tuple[Array, float]], w: Array, shift: int) -> tuple[int, ...]:
    """Return the sums of w x, each person's rounded to multiples of 2^-shift."""
    return _summed(Family.LINEAR, X, w, Part.GRADIENT, (shift,) * len(X))


def _gram(X: Sequence[tuple[Array, float]], w: Array, shift: int) -> tuple[int, ...]:
    """Return the sums of w x x', the upper triangle, each person's rounded to multiples of 2^-shift."""
    return _summed(Family.GAUSSIAN, X, w, Part.HESSIAN, (shift,) * (len(X) * (len(X) + 1) // 2))


def _summed(
    family: Family, X: Sequence[tuple[Array, float]], w: Array, part: Part, shifts: tuple[int, ...]
) -> tuple[int, ...]:
    design = Scaled(tuple(column for column, _ in X), np.array([factor for _, factor in X]))
    rows = kernels.glm_rows(family, design, None, None, w)
    return kernels.glm_sums(rows, np.zeros(len(X)), part, shifts)
