"""The columns of all models of one response, judged together.

At the start of their fits, two models of the same response disclose sums of the same residuals times
different columns, and hence sums for the differences of columns between the models. A silo keeps the columns
that were asked for each response, and judges their union whenever a model adds columns to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.model.submodel import LOOK_ROWS, AbstractSubmodel, GeneralisedLinear
from fedtmle.model.types import Array, scaled
from fedtmle.protocol.query import Model


@dataclass
class _Response:
    """A response and its weights, shape (N,), and the columns that models of it have, by name."""

    y: Array | None
    w: Array | None
    columns: dict[str, Array] = field(default_factory=dict)

    def is_of(self, submodel: GeneralisedLinear) -> bool:
        return _same(self.y, submodel.y) and _same(self.w, submodel.w)

    def rows(self) -> Iterator[PersonRows]:
        columns = list(self.columns.values())
        for start in range(0, len(columns[0]), LOOK_ROWS):
            part = slice(start, start + LOOK_ROWS)
            rows = np.stack([column[part] for column in columns])
            yield PersonRows(rows if self.w is None else rows * self.w[part])


@dataclass
class Designs:
    """The columns that were asked in one session, by response."""

    _responses: list[_Response] = field(default_factory=list)
    _known: dict[int, Model] = field(default_factory=dict)  # models that were added, by id

    def add(self, model: Model, submodel: AbstractSubmodel, enough: float) -> float:
        """Return the largest leverage in the columns of all models of the response, this one included.

        It is 0 if the model adds no columns. An upper bound may be returned if it is at most ``enough``.
        """
        names = model.design_names
        if id(model) in self._known or names is None or not isinstance(submodel, GeneralisedLinear):
            return 0.0
        self._known[id(model)] = model
        response = next((each for each in self._responses if each.is_of(submodel)), None)
        if response is None:
            response = _Response(submodel.y, submodel.w)
            self._responses.append(response)
        design = scaled(submodel.X)
        before = len(response.columns)
        for name, column in zip(names, design.columns, strict=True):
            response.columns.setdefault(name, column)
        if not before or len(response.columns) == before:
            return 0.0  # the model's own columns are judged wherever it is evaluated
        return largest_leverage(response.rows, enough=enough)


def _same(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return left is right or np.array_equal(left, right)
