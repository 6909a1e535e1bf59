"""Each record's share in the sums that a silo sends, and how it moves with the record's values.

The share of one row in the sums of a generalised linear submodel is

    loss      w [rho(eta, y) - rho(offset, y)],   eta = offset + eps . X
    gradient  w rho'(eta, y) X
    Hessian   w rho''(eta, y) X X^T, upper triangle

A chart of a target names the continuous coordinates of a record, in the record's own units, and gives the
derivatives of X, offset, y and w and of the closing sums in each of them. `chart_of` returns the chart of a
target; a target from outside registers its own with ``@chart_of.register``. Discrete columns (treatment, a
binary outcome) have no coordinate: for them the audit enumerates the values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Generic, NamedTuple, TypeAlias, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.problem import Law, Rows
from fedtmle.model.submodel import AbstractRowsSubmodel, GeneralisedLinear
from fedtmle.model.submodels import Blocks
from fedtmle.protocol.query import View
from fedtmle.targets.mean import Mean, MeanLaw
from fedtmle_core import kernels
from fedtmle_core.types import Array, Family, Part, matrix


@final
@dataclass(frozen=True, kw_only=True)
class Tangent:
    """Derivatives of X (d, N), offset, y and w (N,) of each row in one coordinate of its record.

    None means zero.
    """

    X: Array | None = None
    offset: Array | None = None
    y: Array | None = None
    w: Array | None = None


def blocks_of(submodel: AbstractRowsSubmodel) -> Blocks:
    """Return a generalised linear submodel as blocks."""
    if isinstance(submodel, Blocks):
        return submodel
    if not isinstance(submodel, GeneralisedLinear):
        raise InputError(f"the disclosure audit does not know the rows of a {_kind(submodel)}")
    return Blocks(blocks=(submodel,), places=(tuple(range(len(submodel.X))),))


@singledispatch
def row_terms(submodel: AbstractRowsSubmodel, eps: Array, parts: Part) -> Array:
    """Return each row's share in the requested sums, shape (p, N), in the order of the wire."""
    whole = blocks_of(submodel)
    return whole.joined(
        parts,
        [
            _block_terms(block, eps[list(place)], parts)
            for block, place in zip(whole.blocks, whole.places, strict=True)
        ],
    )


@singledispatch
def row_tangents(
    submodel: AbstractRowsSubmodel, eps: Array, parts: Part, tangents: tuple[Tangent, ...]
) -> Array:
    """Return the derivative of `row_terms` in a coordinate of each row's record, shape (p, N)."""
    whole = blocks_of(submodel)
    return whole.joined(
        parts,
        [
            _block_tangents(block, eps[list(place)], parts, tangent)
            for block, place, tangent in zip(whole.blocks, whole.places, tangents, strict=True)
        ],
    )


def _block_terms(submodel: GeneralisedLinear, eps: Array, parts: Part) -> Array:
    offset, y, w = _columns(submodel)
    X = matrix(submodel.X)
    eta = offset + eps @ X
    terms = []
    if Part.LOSS in parts:
        terms.append((w * (_rho(submodel.family, eta, y) - _rho(submodel.family, offset, y)))[None, :])
    if Part.GRADIENT in parts:
        terms.append(w * _slope(submodel.family, eta, y) * X)
    if Part.HESSIAN in parts:
        upper, lower = np.triu_indices(len(X))
        terms.append(w * _bend(submodel.family, eta) * X[upper] * X[lower])
    return np.concatenate(terms)


def _block_tangents(submodel: GeneralisedLinear, eps: Array, parts: Part, tangent: Tangent) -> Array:
    offset, y, w = _columns(submodel)
    family, X = submodel.family, matrix(submodel.X)
    zero = np.zeros(submodel.n_rows)
    dX = np.zeros_like(X) if tangent.X is None else tangent.X
    d_offset = zero if tangent.offset is None else tangent.offset
    dy = zero if tangent.y is None or family is Family.LINEAR else tangent.y
    dw = zero if tangent.w is None else tangent.w
    eta = offset + eps @ X
    d_eta = d_offset + eps @ dX
    slope, bend = _slope(family, eta, y), _bend(family, eta)
    tangents = []
    if Part.LOSS in parts:
        # rho_y = y for the Gaussian loss less eta, -eta for the others; in differences -(eta - offset) each.
        moved = slope * d_eta - _slope(family, offset, y) * d_offset - (eta - offset) * dy
        change = _rho(family, eta, y) - _rho(family, offset, y)
        tangents.append((dw * change + w * moved)[None, :])
    if Part.GRADIENT in parts:
        tangents.append(dw * slope * X + w * (bend * d_eta - dy) * X + w * slope * dX)
    if Part.HESSIAN in parts:
        upper, lower = np.triu_indices(len(X))
        rate = dw * bend + w * _third(family, eta) * d_eta
        tangents.append(rate * X[upper] * X[lower] + w * bend * (dX[upper] * X[lower] + X[upper] * dX[lower]))
    return np.concatenate(tangents)


def _columns(submodel: GeneralisedLinear) -> tuple[Array, Array, Array]:
    n = submodel.n_rows
    return (
        np.zeros(n) if submodel.offset is None else submodel.offset,
        np.zeros(n) if submodel.y is None else submodel.y,
        np.ones(n) if submodel.w is None else submodel.w,
    )


def _rho(family: Family, eta: Array, y: Array) -> Array:
    if family is Family.LINEAR:
        return eta
    if family is Family.GAUSSIAN:
        return np.asarray(0.5 * (eta - y) ** 2)
    base = kernels.softplus(eta) if family is Family.LOGISTIC else kernels.exp(eta)
    return np.asarray(base - y * eta)


def _slope(family: Family, eta: Array, y: Array) -> Array:
    if family is Family.LINEAR:
        return np.ones_like(eta)
    if family is Family.GAUSSIAN:
        return np.asarray(eta - y)
    return np.asarray((kernels.expit(eta) if family is Family.LOGISTIC else kernels.exp(eta)) - y)


def _bend(family: Family, eta: Array) -> Array:
    if family is Family.LOGISTIC:
        mean = kernels.expit(eta)
        return np.asarray(mean * (1 - mean))
    if family is Family.POISSON:
        return kernels.exp(eta)
    return np.full_like(eta, 1.0 if family is Family.GAUSSIAN else 0.0)


def _third(family: Family, eta: Array) -> Array:
    if family is Family.LOGISTIC:
        mean = kernels.expit(eta)
        return np.asarray(mean * (1 - mean) * (1 - 2 * mean))
    return kernels.exp(eta) if family is Family.POISSON else np.zeros_like(eta)


class Lift(NamedTuple):
    """A point of the submodel, and a matrix by which its rows' shares give those in the sums; None: as is."""

    eps: Array
    mix: Array | None = None

    def mixed(self, shares: Array) -> Array:
        return shares if self.mix is None else np.asarray(self.mix @ shares)


class AbstractChart(ABC, Generic[Law, Rows]):
    """How the sums over a target's rows move with the continuous coordinates of each row's record."""

    @property
    def coordinates(self) -> tuple[str, ...]:
        """The continuous coordinates of a record; empty if they are the numeric columns of the table."""
        return ()

    @property
    def is_numeric(self) -> bool:
        """Whether the audit takes derivatives by central differences, since the chart knows none."""
        return False

    @abstractmethod
    def submodel(self, law: Law, rows: Rows) -> AbstractRowsSubmodel:
        """Return the submodel of these rows at the law."""

    def lift(self, eps: Array, parts: Part, rows: Rows) -> Lift:  # noqa: ARG002 - for profiled models
        """Return where the rows of the submodel are evaluated for sums at eps, and how the sums mix them."""
        return Lift(eps)

    @abstractmethod
    def submodel_tangent(self, law: Law, rows: Rows, name: str) -> Tangent | tuple[Tangent, ...]:
        """Return the derivatives of each block's columns in coordinate ``name`` of each row's record."""

    def closing_terms(self, law: Law, rows: Rows, base: Rows) -> Array:  # noqa: ARG002 - for targets
        """Return each row's share in the closing sums, shape (p, N); ``base`` holds the true rows.

        With clusters, a row's share uses its cluster's totals: those of ``base`` plus the row's difference to
        ``base``.
        """
        raise InputError(f"{_kind(self)}: the disclosure audit does not know the closing sums")

    def closing_terms_tangent(self, law: Law, rows: Rows, name: str) -> Array:  # noqa: ARG002 - as above
        """Return the derivative of `closing_terms` in coordinate ``name`` of each row's record."""
        raise InputError(f"{_kind(self)}: the disclosure audit does not know the closing sums")

    def require_coordinate(self, name: str) -> None:
        """Raise `InputError` unless the target's records have this coordinate."""
        if name not in self.coordinates:
            known = ", ".join(self.coordinates)
            raise InputError(f"attribute: a record has no continuous '{name}'; it has {known}")


class AbstractMomentsChart(AbstractChart[Law, Rows]):
    """The chart of a target that closes with sums of columns m and of their products m_j m_k, j <= k.

    Those are the sums of `model.problem.second_moments`.
    """

    @abstractmethod
    def closing_columns(self, law: Law, rows: Rows) -> Array:
        """Return the columns m, shape (k, N)."""

    @abstractmethod
    def closing_tangent(self, law: Law, rows: Rows, name: str) -> Array:
        """Return the derivative of `closing_columns` in coordinate ``name`` of each row's record."""

    def closing_terms(self, law: Law, rows: Rows, base: Rows) -> Array:  # noqa: ARG002 - no clusters
        m = self.closing_columns(law, rows)
        upper, lower = np.triu_indices(len(m))
        return np.concatenate([m, m[upper] * m[lower]])

    def closing_terms_tangent(self, law: Law, rows: Rows, name: str) -> Array:
        m, dm = self.closing_columns(law, rows), self.closing_tangent(law, rows, name)
        upper, lower = np.triu_indices(len(m))
        return np.concatenate([dm, dm[upper] * m[lower] + m[upper] * dm[lower]])


Chart: TypeAlias = AbstractChart[Any, Any]


@singledispatch
def chart_of(model: object) -> Chart:
    """Return the chart of a target or of a nuisance regression; `InputError` if none is registered."""
    raise InputError(f"the disclosure audit does not know the records of a {_kind(model)}")


@singledispatch
def held_view(view: View, rows: object) -> View:  # noqa: ARG001 - most views look at one record at a time
    """Return the view in which what depends on all records stays as with these, when single ones move."""
    return view


def _kind(model: object) -> str:
    return type(model).__name__


@final
@dataclass(frozen=True)
class MeanChart(AbstractMomentsChart[MeanLaw, Array]):
    """The mean: a record is the outcome itself."""

    coordinates = ("outcome",)

    problem: Mean

    def submodel(self, law: MeanLaw, rows: Array) -> GeneralisedLinear:
        return self.problem.submodel(law, rows)

    def submodel_tangent(self, law: MeanLaw, rows: Array, name: str) -> Tangent:  # noqa: ARG002
        self.require_coordinate(name)
        return Tangent(y=np.ones(len(rows)))

    def closing_columns(self, law: MeanLaw, rows: Array) -> Array:  # noqa: ARG002 - the same at every law
        low, high = self.problem.bounds
        return (rows - 0.5 * (low + high))[None, :]

    def closing_tangent(self, law: MeanLaw, rows: Array, name: str) -> Array:  # noqa: ARG002 - as above
        self.require_coordinate(name)
        return np.ones((1, len(rows)))


chart_of.register(Mean, MeanChart)
