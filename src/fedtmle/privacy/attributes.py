"""Attributes phi of a silo's data: value, gradient and H_phi at a dataset x, shape (N, q)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array


class AbstractAttribute(ABC):
    """A prespecified scalar function of the data."""

    @abstractmethod
    def value(self, x: Array) -> float:
        """phi(x)."""

    @abstractmethod
    def gradient(self, x: Array) -> Array:
        """The gradient of phi at x, flattened record by record; shape (N q,)."""

    @property
    @abstractmethod
    def bend(self) -> float:
        """H_phi: a Lipschitz constant of the gradient, eq:attribute-smoothness."""


@final
@dataclass(frozen=True, kw_only=True)
class Coordinate(AbstractAttribute):
    """One coordinate of one record."""

    record: int
    column: int

    def value(self, x: Array) -> float:
        return float(x[self.record, self.column])

    def gradient(self, x: Array) -> Array:
        found = np.zeros(x.shape)
        found[self.record, self.column] = 1.0
        return found.ravel()

    @property
    def bend(self) -> float:
        return 0.0


@final
@dataclass(frozen=True, kw_only=True)
class ColumnMean(AbstractAttribute):
    """The mean of one column."""

    column: int

    def value(self, x: Array) -> float:
        return float(x[:, self.column].mean())

    def gradient(self, x: Array) -> Array:
        found = np.zeros(x.shape)
        found[:, self.column] = 1.0 / len(x)
        return found.ravel()

    @property
    def bend(self) -> float:
        return 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Linear(AbstractAttribute):
    """sum of weights times entries, the weights of the shape of the data."""

    weights: Array

    def value(self, x: Array) -> float:
        return float((self.weights * x).sum())

    def gradient(self, x: Array) -> Array:
        if x.shape != self.weights.shape:
            raise InputError(f"weights: expected the shape of the data, {x.shape}, not {self.weights.shape}")
        return np.asarray(self.weights, dtype=np.float64).ravel()

    @property
    def bend(self) -> float:
        return 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Smooth(AbstractAttribute):
    """A function of the data with its gradient and H_phi, all given by its author."""

    function: Callable[[Array], float]
    slope: Callable[[Array], Array]
    H_phi: float

    def value(self, x: Array) -> float:
        return float(self.function(x))

    def gradient(self, x: Array) -> Array:
        return np.asarray(self.slope(x), dtype=np.float64).ravel()

    @property
    def bend(self) -> float:
        return self.H_phi
