"""The loss of a regression: what to ask for its derivatives at a point, and how to read the totals.

The gradient of a softmax is a sum of (p_j - y_j) w x. Its two parts are gradients of losses that are the
linear predictor, of weights p_j w and y_j w; the second is the same at all points. Its curvature is that of
squared losses of weights p_j (1 - p_j) w and p_j p_k w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedtmle.estimation.regression import Regression, softmax_of
from fedtmle_core.blocks import Block, Lattice, Layer, Score
from fedtmle_core.terms import Term, product
from fedtmle_core.types import Array, Family, Part, unpack

# The largest linear predictor that columns within their ranges may have: a core answers up to 700.
LARGEST_PREDICTOR = 640.0


@final
@dataclass
class Loss:
    """The mean loss of a regression over ``n`` people, on unit columns."""

    regression: Regression
    n: int
    layers: tuple[Layer, ...] = field(init=False)
    responses: Array = field(init=False)  # mean of y w x of each class but the first; empty for a GLM

    def __post_init__(self) -> None:
        self.layers = self.regression.layers()
        self.responses = np.zeros(0)

    @property
    def size(self) -> int:
        """How many columns there are."""
        return len(self.regression.design.columns)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of classes but the first, whose curvatures there are; a GLM has one."""
        classes = range(1, self.regression.blocks + 1)
        return [(j, k) for j in classes for k in classes if j <= k]

    def admits(self, eps: Array) -> bool:
        """Return whether a point may be asked for: no linear predictor runs away."""
        design = self.regression.design
        pairs = zip(design.unit_ranges, design.centres, strict=True)
        reach = np.array([max(high - centre, centre - low) for (low, high), centre in pairs])
        return bool(((np.abs(eps.reshape(-1, self.size)) * reach).sum(axis=1) <= LARGEST_PREDICTOR).all())

    def shared_blocks(self, lattice: Lattice | None = None) -> tuple[Block, ...]:
        """Return what is asked once, because the gradients at all points share it."""
        records, classes = self.regression.records, range(1, len(self.regression.classes))
        return tuple(self._linear([record.ys[j] for record in records], lattice) for j in classes)

    def read_shared(self, totals: Sequence[Array]) -> None:
        """Take what `shared_blocks` asked for."""
        if totals:
            self.responses = np.concatenate(totals) / self.n

    def gradient_blocks(self, eps: Array, lattice: Lattice | None = None) -> tuple[Block, ...]:
        """Return what is asked for the gradient at a point."""
        if not self.regression.classes:
            family, at = self.regression.family, tuple(eps.tolist())
            return (Score(family=family, layers=self.layers, at=at, lattice=lattice),)
        probabilities, classes = self._probabilities(eps), range(1, len(self.regression.classes))
        return tuple(self._linear([p[j] for p in probabilities], lattice) for j in classes)

    def gradient(self, totals: Sequence[Array]) -> Array:
        """Return the mean gradient, without the penalty, in the coordinates of the lattice."""
        mean = np.concatenate(totals) / self.n
        return mean - self.responses if self.regression.classes else mean

    def bent(self, eps: Array) -> tuple[Family, list[tuple[Layer, ...]], tuple[float, ...]]:
        """Return the losses whose curvatures make up that at a point, one for each of `pairs`, and where."""
        if not self.regression.classes:
            return self.regression.family, [self.layers], tuple(eps.tolist())
        probabilities, at = self._probabilities(eps), (0.0,) * self.size
        weights = [
            [product(p[j], 1.0 - p[j]) if j == k else product(p[j], p[k]) for p in probabilities]
            for j, k in self.pairs
        ]
        return Family.GAUSSIAN, [self._weighted(each) for each in weights], at

    def hessian_blocks(self, eps: Array) -> tuple[Block, ...]:
        """Return what is asked for the exact curvature at a point."""
        family, losses, at = self.bent(eps)
        return tuple(Score(family=family, layers=each, at=at, part=Part.HESSIAN) for each in losses)

    def hessian(self, totals: Sequence[Array]) -> Array:
        """Return the mean curvature, without the penalty."""
        return self.assembled([unpack(sums / self.n, self.size) for sums in totals])

    def assembled(self, parts: Sequence[Array]) -> Array:
        """Return the curvature of all classes, given that of each of `pairs`."""
        size, blocks = self.size, self.regression.blocks
        matrix = np.zeros((blocks * size, blocks * size))
        for (j, k), part in zip(self.pairs, parts, strict=True):
            rows, columns = slice((j - 1) * size, j * size), slice((k - 1) * size, k * size)
            matrix[rows, columns] = matrix[columns, rows] = part if j == k else -part
        return matrix

    def _weighted(self, weights: Sequence[Term]) -> tuple[Layer, ...]:
        """Return the layers, each with its weight times another."""
        return tuple(
            Layer(X=layer.X, factors=layer.factors, w=w if layer.w is None else product(layer.w, w))
            for layer, w in zip(self.layers, weights, strict=True)
        )

    def _linear(self, weights: Sequence[Term], lattice: Lattice | None) -> Score:
        """Return sums of w x."""
        at = (0.0,) * self.size
        return Score(family=Family.LINEAR, layers=self._weighted(weights), at=at, lattice=lattice)

    def _probabilities(self, eps: Array) -> list[tuple[Term, ...]]:
        raw, design = self.regression.raw(eps), self.regression.design
        return [softmax_of(design, raw, record.world) for record in self.regression.records]
