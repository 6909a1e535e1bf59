"""An answer as means over the silo's rows: what an audit needs to know of a query.

Every answer of this kind is, up to public terms and rounding, M t with t the mean over the rows of some
terms of one row. Answers that are no such means (levels, exponents, whole models) have no `RowMeans`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, final

from fedtmle.model.problem import AbstractModel, AbstractProblem
from fedtmle.model.statistics import AbstractBoundedColumns
from fedtmle.model.types import Array, IntArray, Part


@final
@dataclass(frozen=True)
class Derivatives:
    """Parts of the row's loss at (law, eps), over all rows or a pooled batch."""

    model: AbstractModel[Any, Any]
    law: Any
    eps: Array
    parts: Part
    batch: IntArray | None = None


@final
@dataclass(frozen=True)
class CurvatureBound:
    """A bound of the row's Hessian at every eps, upper triangle."""

    model: AbstractModel[Any, Any]
    law: Any


@final
@dataclass(frozen=True)
class ClosingTerms:
    """The row's terms of the closing sums."""

    problem: AbstractProblem[Any, Any]
    law: Any


@final
@dataclass(frozen=True)
class ColumnTerms:
    """Named columns."""

    columns: AbstractBoundedColumns[Any]


RowTerms: TypeAlias = Derivatives | CurvatureBound | ClosingTerms | ColumnTerms


@final
@dataclass(frozen=True, kw_only=True)
class RowMeans:
    """G = M t with t the mean over rows of ``terms``, one after the other; |G - sent| <= ``box``.

    ``mix`` is M, or None for the identity. ``sent`` holds the numbers that were sent, less their public
    part; None if the audit does not need them. ``is_rounded`` says that rounding moved them visibly.
    """

    label: str
    terms: tuple[RowTerms, ...]
    box: Array  # (p,)
    mix: Array | None = None
    sent: Array | None = None
    is_rounded: bool = False
