"""Rows that silos judge together: the gradient or the Hessian of a model, or the columns of several.

A subject says whose rows are meant and at which point, how large they can be, and how fast their sums of
squares can shrink when the point moves. All of that is public; the rows themselves stay with the silos.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model.families import Family
from fedtmle.model.grouped import GroupedLinear
from fedtmle.model.leverage import LEAST_RESIDUAL, PersonRows
from fedtmle.model.problem import JudgedTogether
from fedtmle.model.profile import Profiled
from fedtmle.model.types import Array, IntArray, Part
from fedtmle.protocol.query import Evaluation, Local, Model, Query
from fedtmle.protocol.views import ViewedQuery

# The farthest that a linear predictor may have moved since a look: S shrinks by at most a third.
NEAR = {Family.LOGISTIC: 0.28125, Family.GAUSSIAN: LEAST_RESIDUAL * 0.125}


class AbstractSubject(ABC):
    """Rows that silos judge together."""

    facts: JudgedTogether

    @property
    def largest(self) -> Array:
        """A bound of |t_j| by column; a look scales down larger rows, which makes S smaller."""
        return self.weight * np.array(self.facts.sizes)

    @property
    def weight(self) -> float:
        return self.facts.weight

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""

    @property
    def combinations(self) -> Array:
        """The combinations of columns that may be zero for everyone, one in each row."""
        combined = self.facts.combinations
        vectors = np.zeros((len(combined), len(self.facts.ranges)))
        for vector, combination in zip(vectors, combined, strict=True):
            for j, factor in combination:
                vector[j] = factor
        return vectors

    def people(self, local: Local) -> IntArray:
        """Return how many people of a silo have each combination of columns that is not zero."""
        vectors = self.combinations
        found = np.zeros(len(vectors), dtype=np.int64)
        for piece in self.counted(local):
            is_in = (vectors @ piece.rows) != 0
            if piece.counts is not None:  # a person counts if any of their rows does
                ends = np.concatenate([np.zeros((len(is_in), 1), np.int64), is_in.cumsum(axis=1)], axis=1)
                stops = np.cumsum(piece.counts)
                is_in = ends[:, stops] > ends[:, stops - piece.counts]
            found += is_in.sum(axis=1)
        return found

    @abstractmethod
    def has_columns_of(self, other: AbstractSubject) -> bool:
        """Return whether the columns are those of another subject, perhaps at another point."""

    @abstractmethod
    def distance(self, point: Evaluation) -> float:
        """Return how far another point is, in units of the farthest at which a look can hold."""

    @abstractmethod
    def shrunk(self, point: Evaluation) -> float:
        """Return the largest factor by which S may be smaller at another point; infinite if that is far."""

    @abstractmethod
    def rows(self, local: Local) -> Iterator[PersonRows]:
        """Yield a silo's rows."""

    @abstractmethod
    def counted(self, local: Local) -> Iterator[PersonRows]:
        """Yield rows that are zero where a person does not have a column."""


@final
@dataclass(frozen=True, eq=False)
class Subject(AbstractSubject):
    """The rows of a model's gradient at a point, or the roots of its Hessian."""

    point: Evaluation
    part: Part
    facts: JudgedTogether

    @property
    def weight(self) -> float:
        return self.facts.weight if self.part is Part.GRADIENT else math.sqrt(self.facts.weight)

    @property
    def names(self) -> tuple[str, ...]:
        return self.point.model.design_names or ()

    def has_columns_of(self, other: AbstractSubject) -> bool:
        return isinstance(other, Subject) and other.is_of(self.point.model)

    def is_of(self, model: Model) -> bool:
        return self.point.model is model or bool(self.point.model == model)

    def distance(self, point: Evaluation) -> float:
        if self.part is Part.HESSIAN and self.facts.family is Family.GAUSSIAN:
            return 0.0
        pairs = zip(point.eps.tolist(), self.point.eps.tolist(), strict=True)
        return self.facts.largest_move([a - b for a, b in pairs]) / NEAR[self.facts.family]

    def shrunk(self, point: Evaluation) -> float:
        distance, family = self.distance(point), self.facts.family
        if not distance <= 1.0:
            return math.inf
        delta = distance * NEAR[family]
        return math.exp(delta) if family is Family.LOGISTIC else (1.0 - delta / LEAST_RESIDUAL) ** -2

    def rows(self, local: Local) -> Iterator[PersonRows]:
        return local.submodel(self.point.model, self.point.law).disclosed_rows(self.point.eps, self.part)

    def counted(self, local: Local) -> Iterator[PersonRows]:
        return local.submodel(self.point.model, self.point.law).counted_rows(self.point.eps, self.part)


@final
@dataclass(frozen=True, eq=False)
class Union(AbstractSubject):
    """The columns of all models of one response, with the residuals at zero.

    At zero, two models disclose sums of the same residuals times different columns, and hence sums for the
    differences of columns between the models. ``columns`` maps the name of each column to its model and its
    place there.

    If the response has several periods, the sums of two periods differ, at zero, by those who leave between
    them alone: the rows of all others cancel. There a person's row is the sum over the periods at risk, with
    the signs of the residuals, and one model is judged too.
    """

    models: tuple[Model, ...]
    columns: Mapping[str, tuple[int, int]]
    facts: JudgedTogether

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    @property
    def is_summed(self) -> bool:
        """Whether the rows of a person are added up."""
        return self.facts.may_cancel

    @property
    def is_judged(self) -> bool:
        """Whether the union discloses more than its models by themselves."""
        return len(self.models) > 1 or self.is_summed

    @property
    def largest(self) -> Array:
        return self.weight * self.facts.periods * np.array(self.facts.sizes)

    @classmethod
    def of(cls, model: Model, facts: JudgedTogether) -> Union:
        return cls((model,), {name: (0, j) for j, name in enumerate(model.design_names or ())}, facts)

    def joined(self, model: Model, facts: JudgedTogether) -> Union:
        """Return the union with another model, or this one if it has no new column."""
        new = {name: (len(self.models), j) for j, name in enumerate(model.design_names or ())}
        new = {name: place for name, place in new.items() if name not in self.columns}
        if not new:
            return self
        columns, names = {**self.columns, **new}, model.design_names or ()
        places = {name: place for place, name in enumerate(columns)}
        moved = (tuple((places[names[j]], factor) for j, factor in each) for each in facts.references)
        references = tuple(dict.fromkeys((*self.facts.references, *moved)))
        ranges = (*self.facts.ranges, *(facts.ranges[j] for _, j in new.values()))
        joined = self.facts._replace(ranges=ranges, references=references)
        return Union((*self.models, model), columns, joined)

    def has_columns_of(self, other: AbstractSubject) -> bool:
        if len(self.models) == 1 and isinstance(other, Subject):
            return other.is_of(self.models[0])
        return other is self

    def distance(self, point: Evaluation) -> float:
        return 0.0

    def shrunk(self, point: Evaluation) -> float:
        return 1.0

    def rows(self, local: Local) -> Iterator[PersonRows]:
        if not self.is_summed:
            submodels = ((local.submodel(model, None), np.zeros(model.dim)) for model in self.models)
            return self._joined(submodel.disclosed_rows(zero) for submodel, zero in submodels)
        return self._joined(
            submodel.summed_rows(np.zeros(model.dim))
            for model in self.models
            if isinstance(submodel := local.submodel(model, None), GroupedLinear | Profiled)
        )

    def counted(self, local: Local) -> Iterator[PersonRows]:
        submodels = ((local.submodel(model, None), np.zeros(model.dim)) for model in self.models)
        return self._joined(submodel.counted_rows(zero) for submodel, zero in submodels)

    def _joined(self, disclosed: Iterable[Iterator[PersonRows]]) -> Iterator[PersonRows]:
        """Yield the columns of the union, from the rows of each of its models."""
        for pieces in zip(*disclosed, strict=True):
            rows = np.stack([pieces[k].rows[j] for k, j in self.columns.values()])
            yield PersonRows(rows, pieces[0].counts)


def subjects_of(query: Query) -> Iterator[Subject]:
    """Yield the rows behind a query that silos can judge together."""
    for member in query.members:
        if member.noise is not None or isinstance(member, ViewedQuery) or member.lanes is None:
            continue
        for point in member.evaluations():
            facts = point.model.judged_together
            if facts is not None and point.batch is None:
                yield from (Subject(point, part, facts) for part in point.parts)
