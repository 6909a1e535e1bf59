"""The columns of all models whose residuals are the same, judged together.

At the start of their fits, two models of the same response disclose sums of the same residuals times
different columns, and hence sums for the differences of columns between the models. A silo keeps the columns
that were asked for each response, and judges their union whenever a model adds columns to it. Columns of one
name are several where models are fitted to several completions of the same records. So are those of models
that share residuals but not weights, such as the fluctuations under several rules.

Columns of rows in memory are kept. Those of person-periods, which are made anew at every pass, are evaluated
again for the models that are judged together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fedtmle.model.grouped import GroupedLinear
from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.model.profile import Profiled
from fedtmle.model.submodel import LOOK_ROWS, AbstractSubmodel, GeneralisedLinear, StreamedLinear
from fedtmle.model.types import Array, matrix, scaled
from fedtmle.protocol.query import Model


@dataclass
class _Response:
    """A response and its weights, shape (N,), or what models share instead, and their columns by name."""

    y: Array | None
    w: Array | None
    shared: Hashable = None
    columns: dict[str, list[Array]] = field(default_factory=dict)

    def is_of(self, submodel: GeneralisedLinear) -> bool:
        return self.shared is None and _same(self.y, submodel.y) and _same(self.w, submodel.w)

    def add(self, name: str, column: Array, by_name: bool) -> bool:
        """Keep a column unless it (or, ``by_name``, one of its name) is known; return whether it is new."""
        known = self.columns.setdefault(name, [])
        if (by_name and known) or any(_same(each, column) for each in known):
            return False
        known.append(column)
        return True

    def rows(self) -> Iterator[PersonRows]:
        columns = [column for known in self.columns.values() for column in known]
        for start in range(0, len(columns[0]), LOOK_ROWS):
            part = slice(start, start + LOOK_ROWS)
            rows = np.stack([column[part] for column in columns])
            yield PersonRows(rows if self.w is None else rows * self.w[part])


@dataclass
class _LongResponse:
    """A response over person-periods: its models, and where the columns of each name are."""

    response: object
    submodels: list[GroupedLinear] = field(default_factory=list)
    columns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], submodel: GroupedLinear, by_name: bool) -> bool:
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
        sizes = [len(known) for response in plain for known in response.columns.values()]
        sizes += [len(known) for response in self._long for known in response.columns.values()]
        return max(sizes, default=0) > 1

    def add(self, model: Model, submodel: AbstractSubmodel, enough: float) -> float:
        """Return the largest leverage in the columns of all models of the response, this one included.

        It is 0 if the model adds no columns. An upper bound may be returned if it is at most ``enough``.
        """
        names = model.design_names
        if id(model) in self._known or names is None:
            return 0.0
        shared = model.shared_residuals
        columns: Iterable[Array]
        if shared is not None:
            response, columns = self._sharing(shared), _disclosed(submodel, model.dim)
        elif isinstance(submodel, GeneralisedLinear):
            response, columns = self._response_of(submodel), scaled(submodel.X).columns
        elif isinstance(submodel, Profiled) and (whole := submodel.in_memory) is not None:
            response, columns = self._response_of(whole), _within(whole)
        else:
            return self._add_long(model, names, submodel, enough)
        self._known[id(model)] = model
        is_first = not response.columns
        is_new = [
            response.add(name, column, self.by_name and shared is None)
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
        if facts is None or not isinstance(submodel, GroupedLinear):
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


def _within(whole: GeneralisedLinear) -> Array:
    """Return the columns but the first, centred: with the mean response taken away, these are disclosed."""
    X = matrix(whole.X)[1:]
    mass = np.ones(whole.n_rows) if whole.w is None else whole.w
    total = float(mass.sum())
    return X - ((X * mass).sum(axis=1) / total)[:, None] if total > 0 else X


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


def _same(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return left is right or np.array_equal(left, right)
