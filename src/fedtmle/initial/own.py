"""Intercepts of the silos' own: what C(silo) is where no other term has the silo.

An indicator column that one silo alone fills would make the total of that column this silo's own sum, masks
or not. So each silo fits its intercept itself, at whatever coefficients the parties are (`model.submodels`),
and keeps it. The fit is that of indicator columns. A silo's intercept is a function of the coefficients and
of its rows, so that nothing of it is sent or stored.

The intercept minimises a convex loss in one variable. At the solution the slopes of the silo's rows add up to
zero. Where every response of a silo is 0, or every one is 1, there is no finite solution; the intercept then
stops where nothing of that silo is left in the exact sums, or where each prediction is within e^-`CERTAIN` of
the response. The other silos' fit is then that of a study without this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.errors import ContributionError, DataError
from fedtmle.initial.glm import (
    AbstractOwnIntercept,
    AbstractRegressionModel,
    AbstractResponse,
    FittedGLM,
    GLMModel,
    Levels,
    OffsetResponse,
    Ridge,
    over_long,
)
from fedtmle.initial.syntax import Categorical, Formula
from fedtmle.model import kernels
from fedtmle.model.problem import JudgedTogether
from fedtmle.model.submodel import AbstractSubmodel
from fedtmle.model.submodels import Profiled, SiloRows
from fedtmle.model.table import SILO, AnyTable, StreamedTable, Table, over_batches
from fedtmle.model.types import Array, Family, Part, RowBound

Result = TypeVar("Result")

CERTAIN = 36.0  # e^-36 is below the resolution of a double at 1
STEPS = 200  # of a search that halves a bracket in the worst case
RESOLUTION = 2.0**-50  # relative to the size of the intercept
WITHIN = " within silos"  # marks the columns of such a model: centred, they are others than a plain model's
INTERCEPT = Formula(intercept=True, terms=())


def own_formula(formula: Formula, levels: Levels) -> Formula | None:
    """Return the formula with an intercept in place of C(silo), None if C(silo) is not such an intercept.

    It is if it is a term of the formula, if no other term has the silo, and if there are several silos.
    """
    with_silo = [term for term in formula.terms if any(_is_silo(variable) for variable in term)]
    if len(with_silo) != 1 or len(with_silo[0]) > 1 or len(levels.get(SILO, ())) < 2:
        return None
    return Formula(intercept=True, terms=tuple(term for term in formula.terms if term != with_silo[0]))


def _is_silo(variable: object) -> bool:
    return isinstance(variable, Categorical) and variable.name == SILO


@final
@dataclass(frozen=True, kw_only=True)
class ProfiledModel(AbstractRegressionModel):
    """The profile of a GLM's loss over an intercept of each silo's own.

    ``whole`` is the model of one silo, whose first column is the intercept.
    """

    whole: GLMModel

    @property
    def dim(self) -> int:
        return self.whole.dim - 1

    @property
    def scales(self) -> tuple[int, ...]:
        return self.whole.scales[1:]

    @property
    def design_names(self) -> tuple[str, ...]:
        return within_names(self.whole.columns)

    @property
    def known_people(self) -> tuple[tuple[str, int], ...]:
        return self.whole.known_people

    @property
    def judged_together(self) -> JudgedTogether | None:
        facts = self.whole.judged_together
        if facts is None:
            return None
        # Columns are centred within a silo, and the intercept moves against the other coefficients.
        ranges = tuple((low - high, high - low) for low, high in facts.ranges[1:])
        references = tuple(
            tuple((j - 1, factor) for j, factor in combination if j) for combination in facts.references
        )
        return facts._replace(ranges=ranges, references=references)

    def submodel(self, law: None, rows: AnyTable) -> AbstractSubmodel:
        return Profiled(
            silos=tuple(self._silo(part) for _, part in by_silo(rows)),
            dim=self.dim,
            family=self.whole.family,
            bound=self.row_bound(law),
        )

    def _silo(self, rows: AnyTable) -> SiloRows:
        return SiloRows(
            whole=self.whole.submodel(None, rows), intercept=lambda eps: self.intercept(eps, rows)
        )

    def intercept(self, eps: Array, rows: AnyTable) -> float:
        """Return alpha_m(eps) of the rows of one silo, on the scale of the intercept's column."""
        alone = OffsetResponse(response=self.whole.response, offset_model=self._at(eps))
        scale = self.whole.scales[0]
        low, high = _ends(alone, rows)
        # At the first no predicted mean of a count is above 1.
        start = -high if self.whole.family is Family.POISSON else -0.5 * (low + high)
        search = _Search(
            submodel=replace(
                self.whole, formula=INTERCEPT, scales=(scale,), ranges=None, response=alone, ridge=0.0
            ).submodel(None, rows),
            family=self.whole.family,
            scale=scale,
            lowest=math.ldexp(-high - CERTAIN, scale),
            highest=math.ldexp(-low + CERTAIN, scale),
        )
        return search.root(math.ldexp(start, scale))

    def _at(self, eps: Array) -> FittedGLM:
        """Return the linear predictor without the intercept."""
        return FittedGLM(
            formula=self.whole.formula,
            levels=self.whole.levels,
            family=Family.GAUSSIAN,
            coefficients=(0.0, *np.ldexp(eps, -np.array(self.scales, dtype=np.int64)).tolist()),
        )

    def normaliser(self, law: None) -> Ridge:  # noqa: ARG002 - there is no law
        return self._ridge

    @cached_property
    def _ridge(self) -> Ridge:
        return Ridge(self.whole.ridge, np.zeros(self.dim))

    def row_bound(self, law: None) -> RowBound:
        return self.whole.row_bound(law)


def within_names(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the columns of such a model, given those of a silo's, the intercept first."""
    return tuple(name + WITHIN for name in columns[1:])


def by_silo(rows: AnyTable) -> Iterator[tuple[str, AnyTable]]:
    """Yield the name of each silo that has some of the rows, and its rows."""
    counts = dict(zip(rows.levels(SILO), rows.counts(SILO), strict=True))
    present = [silo for silo, count in counts.items() if count]
    if len(present) == 1 or isinstance(rows, StreamedTable):  # a streamed table is one silo's
        yield from ((silo, rows) for silo in present)
        return
    factor = rows.factors[SILO]
    for silo in present:
        yield silo, rows.take(np.flatnonzero(factor.codes == factor.levels.index(silo)))


def _over(response: AbstractResponse, rows: AnyTable, work: Callable[[Table], Result]) -> Iterator[Result]:
    """Yield ``work`` of the regression's rows, piece by piece."""
    if response.periods:
        return over_long(response, rows, lambda long, _: work(long))
    return over_batches(rows, work)


def _ends(response: OffsetResponse, rows: AnyTable) -> tuple[float, float]:
    """Return the least and the largest offset."""

    def ends(table: Table) -> tuple[float, float]:
        offset = response.offset(table)
        return float(offset.min(initial=math.inf)), float(offset.max(initial=-math.inf))

    pieces = list(_over(response, rows, ends))
    low, high = min(low for low, _ in pieces), max(high for _, high in pieces)
    return (low, high) if low <= high else (0.0, 0.0)


@final
@dataclass(frozen=True, kw_only=True)
class _Search:
    """The search for the root of the slope of a convex loss in one variable, between two ends."""

    submodel: AbstractSubmodel
    family: Family
    scale: int  # the loss has the column 2^-scale
    lowest: float
    highest: float

    def root(self, start: float) -> float:
        """Return the root by Newton's method, or by halving where that leaves what brackets the root.

        Every sum is exact, so that the result depends on the rows alone, not on their order.
        """
        at, low, high = start, self.lowest, self.highest
        for _ in range(STEPS):
            slope, step = self._step(at)
            if slope == 0.0:
                return at
            low, high = (low, at) if slope > 0 else (at, high)
            ahead = at + step
            if not low < ahead < high:
                end = low if slope > 0 else high
                is_end = step != 0.0 and end in (self.lowest, self.highest)
                ahead = end if is_end else 0.5 * (low + high)
            if abs(ahead - at) <= RESOLUTION * max(1.0, abs(ahead)):
                return ahead
            at = ahead
        return at

    def _step(self, at: float) -> tuple[float, float]:
        """Return the slope, and Newton's step or, for counts, the step to the solution itself."""
        try:
            sums = self.submodel.sums(np.array([at]), Part.GRADIENT | Part.HESSIAN)
        except ContributionError:
            if self.family is not Family.POISSON:
                raise
            return math.inf, 0.0  # a predicted mean beyond all bounds
        slope, bend = sums.values(self.submodel.n_rows).tolist()
        if not bend > 0:
            return slope, math.copysign(math.inf, -slope)
        if self.family is not Family.POISSON:
            return slope, -slope / bend
        # sum w e^(offset + a) = sum w y, and both sides are known from slope and bend.
        column = 2.0**-self.scale
        ratio = 1.0 - slope * column / bend
        return slope, kernels.log(ratio) / column if ratio > 0 else -math.inf


@final
@dataclass(frozen=True, kw_only=True)
class OwnIntercept(AbstractOwnIntercept):
    """The intercept of each silo's own in a model that was fitted; ``eps`` are its coefficients."""

    label: str
    model: ProfiledModel
    eps: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"\0own intercept of {self.label}"

    def of(self, rows: AnyTable) -> float:
        response = self.model.whole.response
        if not any(_over(response, rows, lambda table: bool(np.any(response.of(table)[1])))):
            raise DataError(
                f"{self.label}: this silo has no row to which its own intercept, C(silo), can be fitted; use "
                "fewer folds, or leave C(silo) out"
            )
        return math.ldexp(self.model.intercept(np.array(self.eps), rows), -self.model.whole.scales[0])
