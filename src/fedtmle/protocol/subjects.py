"""Subjects that the guard judges: rows, columns of several models, batches; and its advice to the owner.

A subject says whose rows are meant and at which point, how large they can be, and how fast their sums of
squares can shrink when the point moves. All of that is public; the rows themselves stay with the silos.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import final

import numpy as np

from fedtmle.model.leverage import (
    LEAST_RESIDUAL,
    PersonRows,
    Pieces,
    RowSpace,
    heaviest_combination,
    largest_leverage,
)
from fedtmle.model.problem import ClosingBlock, JudgedTogether, LeftOut
from fedtmle.model.submodel import (
    LOOK_ROWS,
    AbstractRowsSubmodel,
    AbstractSubmodel,
    GeneralisedLinear,
    StreamedLinear,
)
from fedtmle.model.submodels import GroupedLinear, Profiled
from fedtmle.protocol.flows import ViewedQuery
from fedtmle.protocol.query import Evaluation, Local, Model, Query
from fedtmle_core.types import Array, Family, IntArray, Part, matrix, scaled

# The farthest that a linear predictor may have moved since a look: S shrinks by at most a third.
NEAR = {Family.LOGISTIC: 0.28125, Family.GAUSSIAN: LEAST_RESIDUAL * 0.125}


class AbstractSubject(ABC):
    """Rows that silos judge together."""

    facts: JudgedTogether
    has_floor = True  # whether `min_support` holds for the people of its columns

    @property
    def is_summed(self) -> bool:
        """Whether the rows of a person are added up."""
        return False

    @cached_property
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

    @cached_property
    def combinations(self) -> Array:
        """The combinations of columns that may be zero for everyone, one in each row."""
        combined = self.facts.combinations
        vectors = np.zeros((len(combined), len(self.facts.ranges)))
        for vector, combination in zip(vectors, combined, strict=True):
            for j, factor in combination:
                vector[j] = factor
        return vectors

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of these combinations: columns and reference levels."""
        named = ((self.names[each[-1][0]], len(each)) for each in self.facts.combinations)
        return tuple(name if size == 1 else f"the reference level of {name}" for name, size in named)

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
    Several such responses are judged together (`Hazards`).
    """

    models: tuple[Model, ...]
    columns: Mapping[str, tuple[int, int]]
    facts: JudgedTogether

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    @property
    def is_summed(self) -> bool:
        return self.facts.may_cancel

    @property
    def is_judged(self) -> bool:
        """Whether the union discloses more than its models by themselves."""
        return len(self.models) > 1 or self.is_summed

    @cached_property
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


class AbstractStartingRows(AbstractSubject):
    """Rows at zero, where fits start: they are never judged at another point."""

    def has_columns_of(self, other: AbstractSubject) -> bool:
        return other is self

    def distance(self, point: Evaluation) -> float:
        return 0.0

    def shrunk(self, point: Evaluation) -> float:
        return 1.0


@final
@dataclass(frozen=True, eq=False)
class FoldRows(AbstractStartingRows):
    """The rows of one fold, with the columns of a union of models that leave out the fold after it.

    At zero, the sums without each of three folds or more disclose those over each of them.
    """

    union: Union
    left_out: LeftOut

    has_floor = False  # whoever counts people with and without each fold counts those in it

    @property
    def facts(self) -> JudgedTogether:  # type: ignore[override]  # derived here, a field elsewhere
        return self.union.facts

    @property
    def names(self) -> tuple[str, ...]:
        return self.union.names

    @property
    def is_summed(self) -> bool:
        return self.union.is_summed

    @property
    def largest(self) -> Array:
        return self.union.largest

    def rows(self, local: Local) -> Iterator[PersonRows]:
        return self._within(self.union.rows(local), local)

    def counted(self, local: Local) -> Iterator[PersonRows]:
        return self._within(self.union.counted(local), local)

    def _within(self, pieces: Iterator[PersonRows], local: Local) -> Iterator[PersonRows]:
        fold, folds = self.left_out
        is_in, start = local.evaluate(folds.of) == (fold - 1) % folds.count, 0
        for piece in pieces:
            size = piece.rows.shape[1] if piece.counts is None else len(piece.counts)
            inside = is_in[start : start + size]
            yield PersonRows(piece.rows * (inside if piece.counts is None else inside.repeat(piece.counts)))
            start += size


@final
@dataclass(frozen=True, eq=False)
class Hazards(AbstractStartingRows):
    """The sums over the periods of several responses, such as events of two causes, or on two grids.

    Each union has its person's sums, with the signs of the residuals at zero. Who stays to the end without
    an event has known residuals in all of them, so that a combination is made of those who leave alone.
    """

    unions: tuple[Union, ...]

    @property
    def is_summed(self) -> bool:
        return True

    @property
    def facts(self) -> JudgedTogether:  # type: ignore[override]  # derived here, a field elsewhere
        parts, references, first = [union.facts for union in self.unions], [], 0
        for part in parts:
            references += [tuple((first + j, factor) for j, factor in each) for each in part.references]
            first += len(part.ranges)
        return parts[0]._replace(
            response=None,
            ranges=tuple(ends for part in parts for ends in part.ranges),
            weight=max(part.weight for part in parts),
            periods=max(part.periods for part in parts),
            references=tuple(references),
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for union in self.unions for name in union.names)

    @property
    def largest(self) -> Array:
        return np.concatenate([union.largest for union in self.unions])

    def people(self, local: Local) -> IntArray:
        return np.array(self.counts([tuple(union.people(local).tolist()) for union in self.unions]))

    def counts(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the people with each of `combinations`, from those with each one of every union."""
        split = [(part[:k], part[k:]) for part, k in zip(parts, self._sizes, strict=True)]
        return tuple(count for half in zip(*split, strict=True) for counts in half for count in counts)

    @property
    def _sizes(self) -> list[int]:
        return [len(union.facts.ranges) for union in self.unions]

    def rows(self, local: Local) -> Iterator[PersonRows]:
        return _side_by_side([union.rows(local) for union in self.unions])

    def counted(self, local: Local) -> Iterator[PersonRows]:
        return self.rows(local)


def all_periods(unions: Sequence[Union]) -> Union | Hazards:
    """Return what is judged of the sums over periods of some responses: all of them together."""
    return unions[0] if len(unions) == 1 else Hazards(tuple(unions))


def _side_by_side(parts: Sequence[Iterator[PersonRows]]) -> Iterator[PersonRows]:
    """Yield the columns of several parts, each with one row a person, whatever the sizes of their pieces."""
    rest: list[Array | None] = [None] * len(parts)
    while True:
        for k, part in enumerate(parts):
            held = rest[k]
            if held is None or not held.shape[1]:
                piece = next(part, None)
                rest[k] = None if piece is None else piece.rows
        full = [each for each in rest if each is not None]
        if len(full) < len(parts):
            return
        size = min(each.shape[1] for each in full)
        yield PersonRows(np.concatenate([each[:, :size] for each in full]))
        rest = [each[:, size:] for each in full]


@final
@dataclass(frozen=True, eq=False)
class ClosingRows(AbstractSubject):
    """Columns behind closing sums, at one level of their size; ``kept`` are their places in the block.

    Most values of an uneven column are far below its bound, by an unknown factor. At level k rows are
    measured by 2^-k of the bound; a look scales larger rows down to that.
    """

    query: Query
    block: ClosingBlock
    kept: tuple[int, ...]
    level: int = 0

    @classmethod
    def of(cls, query: Query, block: ClosingBlock) -> ClosingRows:
        return cls(query, block, tuple(range(len(block.columns))))

    @property
    def facts(self) -> JudgedTogether:  # type: ignore[override]  # derived here, a field elsewhere
        sizes = [self.block.sizes[j] for j in self.kept]
        alike = [self.kept.index(j) for j in self.block.alike if j in self.kept]
        return JudgedTogether(
            family=Family.LINEAR,
            response=None,
            ranges=tuple((-size, size) for size in sizes),
            weight=1.0,
            references=tuple(((j, 1.0), (k, -1.0)) for j, k in combinations(alike, 2)),
        )

    @cached_property
    def largest(self) -> Array:
        sizes = ((self.block.sizes[j], self.block.uneven[j]) for j in self.kept)
        return np.array([math.ldexp(size, -self.level) if uneven else size for size, uneven in sizes])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.block.names[j] for j in self.kept)

    def distinct(self, people: Sequence[Sequence[int]]) -> tuple[ClosingRows, tuple[tuple[int, ...], ...]]:
        """Return the columns that anyone has, one of those that are equal for everyone, and their people.

        ``people`` counts, by group of silos, those who have each combination of `facts`.
        """
        totals = dict(zip(self.facts.combinations, map(sum, zip(*people, strict=True)), strict=True))
        left_out = {j for j in range(len(self.kept)) if not totals[((j, 1.0),)]}
        for (j, _), (k, _) in self.facts.references:
            if j not in left_out and not totals[(j, 1.0), (k, -1.0)]:
                left_out.add(k)
        places = [j for j in range(len(self.kept)) if j not in left_out] or [0]
        chosen = replace(self, kept=tuple(self.kept[j] for j in places))
        moved = [tuple((places[j], f) for j, f in each) for each in chosen.facts.combinations]
        by_group = (dict(zip(totals, counts, strict=True)) for counts in people)
        return chosen, tuple(tuple(own[each] for each in moved) for own in by_group)

    def loses_nothing(self, local: Local) -> bool:
        """Return whether each column that was left out is, in a silo's own rows, zero or equal to one kept.

        A silo that lies might have left one out that others have.
        """
        block = self.block
        kept = [block.columns[j] for j in self.kept]
        others = [column for column in block.columns if column not in kept]
        disclosed = self.query.disclosed_columns(local)
        for piece in () if disclosed is None else disclosed.pieces():
            for column in others:
                alike = (piece[j] for j in kept)
                if piece[column].any() and not any(np.array_equal(piece[column], each) for each in alike):
                    return False
        return True

    def has_columns_of(self, other: AbstractSubject) -> bool:
        return other is self

    def distance(self, point: Evaluation) -> float:
        return math.inf

    def shrunk(self, point: Evaluation) -> float:
        return math.inf

    def rows(self, local: Local) -> Iterator[PersonRows]:
        columns = [self.block.columns[j] for j in self.kept]
        disclosed = self.query.disclosed_columns(local)
        for piece in () if disclosed is None else disclosed.pieces():
            yield PersonRows(piece[columns])

    def counted(self, local: Local) -> Iterator[PersonRows]:
        return self.rows(local)


def subjects_of(query: Query) -> Iterator[Subject]:
    """Yield the rows behind a query that silos can judge together."""
    for member in query.members:
        if member.noise is not None or isinstance(member, ViewedQuery) or member.lanes is None:
            continue
        for point in member.evaluations():
            facts = point.model.judged_together
            if facts is not None and point.batch is None:
                yield from (Subject(point, part, facts) for part in point.parts)


# The columns of all models whose residuals are the same, judged together.
#
# At the start of their fits, two models of the same response disclose sums of the same residuals times
# different columns, and hence sums for the differences of columns between the models. A silo keeps the
# columns that were asked for each response, and judges their union whenever a model adds columns to it.
# Models that leave out other rows, such as one fold each, have other columns, which are zero in these rows.
# Columns of one name are several where models are fitted to several completions of the same records. So are
# those of models that share residuals but not weights, such as the fluctuations under several rules.
#
# Columns of rows in memory are kept. Those of person-periods, which are made anew at every pass, are
# evaluated again for the models that are judged together.


@dataclass
class _Response:
    """A response, shape (N,), or what models share instead, and their columns by name, each with its weights.

    Models of a response that are fitted to other rows, such as those without a fold, have other weights. At
    zero their gradients disclose sums of the same residuals, so that the differences are sums over a fold.
    """

    y: Array | None
    w: Array | None
    shared: Hashable = None
    columns: dict[str, list[tuple[Array, Array | None]]] = field(default_factory=dict)

    def is_of(self, submodel: GeneralisedLinear) -> bool:
        return self.shared is None and _same(self.y, submodel.y) and _agree(self.w, submodel.w)

    def add(self, name: str, column: Array, weights: Array | None, by_name: bool) -> bool:
        """Keep a column unless it (or, ``by_name``, one of its name) is known; return whether it is new."""
        known = self.columns.setdefault(name, [])
        for each, w in known:
            if _same(w, weights) and (by_name or _same(each, column)):
                return False
        known.append((column, weights))
        return True

    @property
    def has_completions(self) -> bool:
        """Whether a column came twice with other values but the same rows, as imputed data sets have it."""
        return any(
            _same(w, weights)
            for known in self.columns.values()
            for (_, w), (_, weights) in combinations(known, 2)
        )

    def rows(self) -> Iterator[PersonRows]:
        columns = [each for known in self.columns.values() for each in known]
        for start in range(0, len(columns[0][0]), LOOK_ROWS):
            part = slice(start, start + LOOK_ROWS)
            yield PersonRows(np.stack([x[part] if w is None else x[part] * w[part] for x, w in columns]))


@dataclass
class _LongResponse:
    """A response over person-periods: its models, and where the columns of each name are."""

    response: object
    submodels: list[GroupedLinear | Profiled] = field(default_factory=list)
    columns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], submodel: GroupedLinear | Profiled, by_name: bool) -> bool:
        """Keep the columns that are not known, as `_Response.add` does; return whether there are any."""
        self.submodels.append(submodel)
        last = len(self.submodels) - 1
        new = {j for j, name in enumerate(names) if not (by_name and self.columns.get(name))}
        same = {(j, place) for j in new for place in self.columns.get(names[j], ())}
        if same:
            for pieces in self._pieces():
                mine = pieces[last].rows
                same = {(j, (m, k)) for j, (m, k) in same if np.array_equal(pieces[m].rows[k], mine[j])}
        new -= {j for j, _ in same}
        for j in new:
            self.columns.setdefault(names[j], []).append((last, j))
        if not new:
            self.submodels.pop()
        return bool(new)

    def _pieces(self) -> Iterator[tuple[PersonRows, ...]]:
        """Yield the same people's rows of all models, with the residuals at zero."""
        disclosed = [submodel.disclosed_rows(np.zeros(submodel.dim)) for submodel in self.submodels]
        return zip(*disclosed, strict=True)

    def rows(self) -> Iterator[PersonRows]:
        places = [place for known in self.columns.values() for place in known]
        for pieces in self._pieces():
            rows = np.stack([pieces[m].rows[k] for m, k in places])
            yield PersonRows(rows, pieces[0].counts)


@dataclass
class Designs:
    """The columns that were asked in one session, by response.

    Columns of the same name but with other values, as in several completions of the same records, count as
    several unless ``by_name``: under masks the records of all silos hide what differs between completions.
    """

    by_name: bool = False
    _responses: list[_Response] = field(default_factory=list)
    _long: list[_LongResponse] = field(default_factory=list)
    _known: dict[int, Model] = field(default_factory=dict)  # models that were added, by id

    @property
    def has_completions(self) -> bool:
        """Whether a column of some response was asked with several values, as imputed ones are."""
        plain = (response for response in self._responses if response.shared is None)
        sizes = (len(known) for response in self._long for known in response.columns.values())
        return any(response.has_completions for response in plain) or max(sizes, default=0) > 1

    def add(self, model: Model, submodel: AbstractSubmodel, enough: float) -> float:
        """Return the largest leverage in the columns of all models of the response, this one included.

        It is 0 if the model adds no columns. An upper bound may be returned if it is at most ``enough``.
        """
        names = model.design_names
        if id(model) in self._known or names is None:
            return 0.0
        shared = model.shared_residuals
        columns: Iterable[Array]
        weights: Array | None = None
        if shared is not None:
            response, columns = self._sharing(shared), _disclosed(submodel, model.dim)
        elif isinstance(submodel, GeneralisedLinear):
            response, weights, columns = self._response_of(submodel), submodel.w, scaled(submodel.X).columns
        elif isinstance(submodel, Profiled) and (in_memory := submodel.in_memory) is not None:
            whole, columns = in_memory
            response, weights = self._response_of(whole), whole.w
        else:
            return self._add_long(model, names, submodel, enough)
        self._known[id(model)] = model
        is_first = not response.columns
        is_new = [
            response.add(name, column, weights, self.by_name and shared is None)
            for name, column in zip(names, columns, strict=True)
        ]
        if is_first or not any(is_new):
            return 0.0  # the model's own columns are judged wherever it is evaluated
        return largest_leverage(response.rows, enough=enough)

    def _add_long(
        self, model: Model, names: tuple[str, ...], submodel: AbstractSubmodel, enough: float
    ) -> float:
        """Return what `add` does, for person-periods."""
        facts = model.judged_together
        if facts is None or not isinstance(submodel, GroupedLinear | Profiled):
            return 0.0
        self._known[id(model)] = model
        known = next((each for each in self._long if each.response == facts.response), None)
        if known is None:
            known = _LongResponse(facts.response)
            self._long.append(known)
        is_first = not known.columns
        if not known.add(names, submodel, self.by_name) or is_first:
            return 0.0
        return largest_leverage(known.rows, enough=enough)

    def _response_of(self, submodel: GeneralisedLinear) -> _Response:
        for known in self._responses:
            if known.is_of(submodel):
                return known
        self._responses.append(_Response(submodel.y, submodel.w))
        return self._responses[-1]

    def _sharing(self, shared: Hashable) -> _Response:
        for known in self._responses:
            if known.shared == shared:
                return known
        self._responses.append(_Response(None, None, shared))
        return self._responses[-1]


def _disclosed(submodel: AbstractSubmodel, dim: int) -> Array:
    """Return what a gradient discloses of each person, without the residual that models share, (d, N)."""
    match submodel:
        case GeneralisedLinear():
            X = matrix(submodel.X)
            return X if submodel.w is None else X * submodel.w
        case StreamedLinear():
            parts = list(submodel.table.map(lambda batch: _disclosed(submodel.design(batch), dim)))
        case _:
            parts = [piece.rows for piece in submodel.disclosed_rows(np.zeros(dim))]
    return np.concatenate(parts, axis=1)


def _agree(left: Array | None, right: Array | None) -> bool:
    """Return whether two models weigh a person alike, unless one of them leaves the person out."""
    if left is None or right is None:
        weights = left if right is None else right
        return weights is None or bool(((weights == 0.0) | (weights == 1.0)).all())
    return left is right or bool(((left == right) | (left == 0.0) | (right == 0.0)).all())


def _same(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return left is right or np.array_equal(left, right)


# Batches drawn anew at each step, as in Algorithm 2 with SGD, and what their sums disclose together.
#
# Sums over batches that overlap disclose single rows by subtraction. If a server keeps eps fixed, each batch
# with counts c of the silo's rows discloses the sum of c_i t_i over gradients t_i, and all batches together
# disclose every linear combination of these sums. With k batches, person i contributes (c_1i t_i, ..., c_ki
# t_i), and the largest leverage (`model.leverage`) of these vectors may not exceed 1/min_people. The sum over
# all rows, which the EIF check asks for, counts as one more batch. A silo of N rows whose gradients have d
# coordinates therefore answers at most N/(d min_people) different batches, and fewer if the batches are
# nearly dependent.


@final
class FreshBatches:
    """The batches of one session; each is stored as how often it contains each of the silo's rows."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._counts: dict[bytes, IntArray] = {}
        self.add(np.arange(n_rows))

    def add(self, rows: IntArray) -> None:
        """Add a batch of row numbers, which may repeat; a batch that was added before changes nothing."""
        counts = np.bincount(rows, minlength=self._n_rows).astype(np.int64)
        self._counts.setdefault(counts.tobytes(), counts)

    def largest_leverage(self, submodel: AbstractRowsSubmodel, eps: Array, enough: float) -> float:
        """Return the largest leverage in the sums over all batches, as if all were disclosed at ``eps``.

        ``submodel`` has all rows of the silo. An upper bound may be returned if it is at most ``enough``.
        """

        def pieces() -> Iterator[PersonRows]:
            start = 0
            for piece in submodel.disclosed_rows(eps):
                stop = start + piece.rows.shape[1]
                disclosed = [piece.rows * counts[start:stop] for counts in self._counts.values()]
                yield PersonRows(np.concatenate(disclosed))
                start = stop

        return largest_leverage(pieces, enough=enough)


# Advice about a refusal, written for the silo's owner alone: the columns that caused it, and a remedy.
#
# The server learns the code of a refusal and nothing else. The silo's ledger holds the text, which names
# columns of models but no value of a record.

RARE_BELOW = 10  # people in a column
SHARE = 0.5  # a column is named if its part in a combination is at least this share of the largest part
MOST_NAMED = 4  # columns

RARE = "merge the level with another (levels in the silo file), or leave the variable out of the model"
EXTREME = "put log({name}) or a spline into the formula instead, or leave the variable out of the model"
SEVERAL = "leave some of them out of the model, or merge rare levels"
TRUST = "More silos, or colluders = 0 if all owners trust each other, would help (docs/masks.md)."


def about_support(names: Sequence[str] | None, is_rare: Sequence[bool]) -> str:
    """Return advice about columns in which this silo has too few people."""
    if names is None:
        return ""
    rare = [name for name, few in zip(names, is_rare, strict=True) if few]
    return f"Too few people of this silo are in {_listed(rare)}: {RARE}."


def about_rare(names: Sequence[str]) -> str:
    """Return advice about columns and levels that too few people have, counted over all silos."""
    return f"Too few people of all silos are in {_listed(names)}: {RARE}."


def about_completions(names: Sequence[str]) -> str:
    """Return advice about groups of people whom more sums single out than they can hide."""
    return (
        f"Too few people of all silos are in {_listed(names)} for so many imputed data sets: their sums "
        "differ in these people alone. Impute fewer data sets, or leave products with the variable out."
    )


def about_alone(names: Sequence[str]) -> str:
    """Return advice about columns and levels that the silo has alone, as far as the others are believed."""
    return (
        f"As far as the other silos are believed, yours alone has people in {_listed(names)}: totals over "
        "all silos are your silo's own sums there, and masks do not hide them. Leave these columns out, or "
        "merge their levels."
    )


def about_combination(names: Sequence[str] | None, pieces: Pieces, space: RowSpace | None = None) -> str:
    """Return advice about the combination of a model's columns in which one person's share is largest.

    ``space`` is a pooled one, by default that of the rows themselves.
    """
    if names is None:
        return ""
    order, people = _heaviest_columns(pieces, space)
    named = [names[j] for j in order]
    if len(order) == 1 and people[order[0]] >= RARE_BELOW:
        return f"One person is most of {_listed(named)}: {EXTREME.format(name=named[0])}."
    if any(people[j] < RARE_BELOW for j in order):
        rare = [names[j] for j in order if people[j] < RARE_BELOW]
        return f"One person dominates {_listed(rare)}: {RARE}."
    return f"One person is most of a combination of {_listed(named)}: {SEVERAL}."


def about_periods(names: Sequence[str] | None, pieces: Pieces, space: RowSpace | None = None) -> str:
    """Return advice about a hazard model whose sums of two periods differ by too few people.

    ``space`` is a pooled one, by default that of the rows themselves.
    """
    if names is None:
        return ""
    named = [names[j] for j in _heaviest_columns(pieces, space)[0]]
    return (
        f"Too few people leave in a period, and one of them is most of a combination of {_listed(named)}: "
        "have fewer and longer periods, put period instead of C(period) into the formula, or leave products "
        "with the period out of it."
    )


def _heaviest_columns(pieces: Pieces, space: RowSpace | None) -> tuple[list[int], IntArray]:
    """Return the columns of the combination in which one person's share is largest, and people by column."""
    parts, people = heaviest_combination(pieces, space)
    return [int(j) for j in np.argsort(-parts, kind="stable") if parts[j] >= SHARE][:MOST_NAMED], people


def about_models(names: Sequence[str] | None, *, shared: bool = False, imputed: bool = False) -> str:
    """Return advice about models of one response whose columns differ for too few people.

    If they are ``shared``, the models share residuals and belong to rules that are compared; if ``imputed``,
    they differ in imputed values alone.
    """
    if names is None:
        return ""
    if shared:
        return (
            "Two rules differ in too few people of this silo: leave one of them out, or compare rules that "
            "more people follow differently."
        )
    if imputed:
        return (
            f"Too few people of this silo lack a value that is imputed, in the model with {_listed(names)}: "
            "imputed data sets differ in these people alone. Leave these records out of the table, or ask "
            "for masked sums."
        )
    return (
        f"The model with {_listed(names)} differs from another model of the same response in too few people: "
        "use the same columns in both."
    )


def about_answer(explanation: str, column: str = "") -> str:
    """Return advice about an answer, other than a model's sums, that rests mostly on one person.

    ``column`` is the one of a fitted model in which that person stands out most, "" if there is none.
    """
    which = f"The person stands out most in {_listed([column])} of a model. " if column else ""
    return (
        f"One person is most of a sum in this answer: {explanation}. {which}Leave variables with extreme or "
        "rare values out of the models, or take logarithms; where weights are asked, truncate them more."
    )


def _listed(names: Sequence[str]) -> str:
    shown = [f"'{name}'" for name in names[:MOST_NAMED]]
    more = ", ..." if len(names) > MOST_NAMED else ""
    return f"the column{'s'[: len(names) != 1]} {', '.join(shown)}{more}"
