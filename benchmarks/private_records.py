"""The sums of a study with privacy over simulated records, in floats and once per set of records.

The product adds exact integers, block by block. A table of coverage needs some 10^5 studies, so that here the
scaled covariates and the Gram matrix are computed once for all budgets, and sums are products of matrices.
`tests/studies/test_private_table.py` compares each sum, and the result, with the product's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import scipy.special

from fedtmle.initial.design import column_names
from fedtmle.initial.glm import FittedGLM
from fedtmle.programs import noisy, noisy_fit
from fedtmle.protocol.sums import PLACES, NoisySums
from fedtmle.targets.effects.noisy import (
    COUNT_SCALE,
    TRUNCATED_SCALE,
    GradientColumns,
    GramColumns,
    OneStepColumns,
    PrivateDesign,
)
from fedtmle.targets.effects.prepare import Q_MARGIN
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, upper_pairs

Columns = dict[str, Array]


def expit(x: Array) -> Array:
    return np.asarray(scipy.special.expit(x))


class Records:
    """Simulated records with covariates x0, x1, ..., a treatment a, an outcome y and perhaps a known g."""

    def __init__(self, columns: Columns) -> None:
        self.a, self.n = columns["a"], len(columns["a"])
        self.observed = np.isfinite(columns["y"]).astype(np.float64)
        self.y = np.nan_to_num(columns["y"])
        self.known = columns.get("known")
        self.names = [name for name in columns if name.startswith("x")]
        self.raw = np.stack([np.ones(self.n), *(columns[name] for name in self.names)])
        self._scaled: Array | None = None
        self._gram: Array | None = None

    def sums(self, query: NoisySums) -> Sums:
        """Return the sums that a query asks for."""
        columns = query.columns
        match columns:
            case GramColumns():
                if self._gram is None:
                    self._gram = self._products(columns)
                values = self._gram
            case GradientColumns():
                values = self._gradients(columns)
            case OneStepColumns():
                values = self._moments(columns)
            case _:
                raise TypeError("not a query of a study with privacy")
        return Sums(tuple(round(v * (1 << PLACES)) for v in values.tolist()), query.shifts)

    def _ones_and_covariates(self, design: PrivateDesign) -> Array:
        """Return 1 and the covariates in [-1, 1], shape (1 + p, n)."""
        if self._scaled is None:
            place = {name: k for k, name in enumerate(self.names, 1)}
            self._scaled = np.ones((1 + len(design.covariates), self.n))
            for k, ((role, j), name) in enumerate(zip(design.covariates, design.names, strict=True), 1):
                model = design.models[role]
                scaled = (self.raw[place[name]] - model.centres[j]) / model.halves[j]
                np.clip(scaled, -1.0, 1.0, out=self._scaled[k])
        return self._scaled

    @cached_property
    def _weight_square(self) -> Array:
        if self._scaled is None:
            raise AssertionError("the covariates come first")
        return np.asarray(np.einsum("ij,ij->j", self._scaled, self._scaled))

    def _weight(self, design: PrivateDesign) -> Array:
        self._ones_and_covariates(design)
        return np.minimum(np.sqrt(float(design.squared_radius) / self._weight_square), 1.0)

    def _products(self, columns: GramColumns) -> Array:
        z = [*self._ones_and_covariates(columns.design), 2.0 * self.a - 1.0]
        if "observed" in columns.labels:
            z.append(2.0 * self.observed - 1.0)
        z.append((2.0 * np.clip(self.y, 0.0, 1.0) - 1.0) * self.observed)
        weighted = np.stack(z) * self._weight(columns.design)
        products = weighted @ weighted.T
        return np.array(
            [products[j, k] * (1.0 if j == k else math.sqrt(2.0)) for j, k in upper_pairs(len(products))]
        )

    def predicted(self, fit: FittedGLM, a: Array | float) -> Array:
        """Return the mean of a model with everyone in an arm, or in their own."""
        by_name = dict(zip(column_names(fit.formula, fit.levels), fit.coefficients, strict=True))
        by_name = {name.removeprefix("C(").removesuffix(")"): c for name, c in by_name.items()}
        slopes = np.array([by_name.get(name, 0.0) for name in ("1", *self.names)])
        return expit(slopes @ self.raw + by_name.get("a", 0.0) * a)

    def _gradients(self, columns: GradientColumns) -> Array:
        design, found = columns.design, []
        x, weight = self._ones_and_covariates(design), self._weight(design)
        for role, fit in columns.fits.items():
            model, used = design.models[role], self.observed if role == "outcome" else 1.0
            y = {"outcome": self.y, "treatment": self.a, "missingness": self.observed}[role]
            residual = (y - self.predicted(fit, self.a)) * used * weight
            score = x @ residual
            found.append(score[[0, *(1 + k for k in model.covariates)]])
            if model.treated is not None:
                found.append(np.array([(2.0 * self.a - 1.0) @ residual]))
        return np.concatenate(found)

    def _moments(self, columns: OneStepColumns) -> Array:
        prepared: Any = columns.problem.prepare  # a `Preparation`
        u, truncated = [], []
        for arm in range(columns.arms):
            g = self.known if self.known is not None else self.predicted(prepared.treatment[0], 0.0)
            share: Any = g if arm else 1.0 - g
            if prepared.missingness:
                share = share * self.predicted(prepared.missingness[0], float(arm))
            truncated.append(TRUNCATED_SCALE * float(np.count_nonzero(share < prepared.g_floor)))
            Q = np.clip(self.predicted(prepared.outcome[0], float(arm)), Q_MARGIN, 1 - Q_MARGIN)
            taken = (self.a == arm) * self.observed
            u.append(Q + taken * (self.y - Q) / np.maximum(share, prepared.g_floor))
        t = (np.array(columns.problem.combination) @ np.stack(u) - columns.centre) / columns.radius
        t /= np.maximum(np.sqrt(np.einsum("ij,ij->j", t, t)), 1.0)
        found: list[float] = []
        for level in columns.strata or (None,):
            place = 1 + self.names.index(str(columns.columns.strata)) if level is not None else 0
            part = t if level is None else t[:, self.raw[place] == float(level)]
            second = part @ part.T * columns.scale
            found += [] if level is None else [COUNT_SCALE * part.shape[1]]
            found += part.sum(axis=1).tolist()
            found += [second[j, k] * (1.0 if j == k else math.sqrt(2.0)) for j, k in upper_pairs(len(t))]
        return np.array([*found, *truncated])


@contextmanager
def floats() -> Iterator[None]:
    """Let the flows between the rounds use numpy's products and sums in the place of exact ones.

    The formulas are the product's, and the numbers agree to rounding.
    """

    def means(columns: Array, terms: Sequence[tuple[int, ...]]) -> Array:
        if len(terms[0]) == 1:
            return np.asarray(columns.mean(axis=1)[[j for (j,) in terms]])
        products = columns @ columns.T
        return np.asarray(products[[j for j, _ in terms], [k for _, k in terms]] / columns.shape[1])

    def averages(columns: Array, weight: Array | float) -> Array:
        return np.asarray((columns * weight) @ columns.T / columns.shape[1])

    def mean_of(*columns: Array) -> Array:
        return np.array([column.mean() for column in columns])

    def congruence(C: Array, H: Array) -> Array:
        product = C @ H @ C.T
        return np.asarray((product + product.T) / 2)

    def probability(columns: Array, beta: Array) -> Array:
        return expit(beta @ columns)

    quick = {"multiply": np.matmul, "congruence": congruence, "invert": np.linalg.inv}
    quick |= {"_means": means, "averages": averages, "mean_of": mean_of}
    quick |= {"probability": probability, "_combined": np.matmul}
    modules = (noisy, noisy, noisy_fit)
    places = [(m, name, by) for m in modules for name, by in quick.items() if hasattr(m, name)]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, by in places:
            setattr(module, name, by)
        yield
    finally:
        for module, name, by in before:
            setattr(module, name, by)
