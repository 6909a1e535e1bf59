"""Coefficients of the silos' own: what terms with C(silo) are.

An indicator column that one silo alone fills would make the total of that column this silo's own sum, masks
or not. So each silo fits the coefficients of such columns itself, at whatever common coefficients the parties
are (`model.submodels`), and keeps them: an intercept for C(silo), a slope for x:C(silo). The fit is that of
indicator columns. A silo's own coefficients are a function of the common ones and of its rows, so that
nothing of them is sent or stored.

The block of own coefficients minimises a convex loss. At the solution the slopes of the silo's rows times the
block's columns add up to zero. Where the block separates a silo's responses, as an intercept does where every
one is 0, there is no finite solution; the search then stops where nothing of the separated rows is left in
the exact sums, or, of an intercept, where each prediction is within e^-`CERTAIN` of the response. The other
silos' fit is then that of a study without these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.errors import ContributionError, DataError
from fedtmle.initial.design import DesignPart, column_names, design_columns
from fedtmle.initial.glm import (
    AbstractOwnBlock,
    AbstractRegressionModel,
    AbstractResponse,
    ClassRidge,
    FittedGLM,
    FittedMultinomial,
    GLMModel,
    Levels,
    MultinomialModel,
    OffsetResponse,
    Ridge,
    over_long,
)
from fedtmle.initial.syntax import Categorical, Formula, Term
from fedtmle.model.linear import cholesky, dot, solve_factored
from fedtmle.model.problem import JudgedTogether, KnownPeople
from fedtmle.model.submodel import AbstractSubmodel
from fedtmle.model.submodels import Profiled, SiloRows
from fedtmle.model.table import (
    SILO,
    AbstractBoundedColumns,
    AnyTable,
    PerTable,
    StreamedTable,
    Table,
    TableView,
    over_batches,
)
from fedtmle_core import kernels
from fedtmle_core.types import Array, Family, Part, RowBound, unpack

Result = TypeVar("Result")

CERTAIN = 36.0  # e^-36 is below the resolution of a double at 1
STEPS = 200  # of a search that halves a bracket in the worst case
RESOLUTION = 2.0**-50  # relative to the size of the coefficients
STALLED = 2.0**-40  # a step below this that does not halve is rounding
OVERSHOT = 0.5  # largest slope ahead of a step, relative to the one before it
DEPENDENT = 1e-10  # treat a column of the block as determined if its pivot in the Gram matrix is below
SEPARATED = 1e-7  # treat a block as separated if less of the columns' mean squares is left in the curvature
WITHIN = " within silos"  # marks the columns of such a model: centred, they are others than a plain model's
INTERCEPT = Formula(intercept=True, terms=())


class OwnFormula(NamedTuple):
    """A formula of one silo: ``own`` has the columns whose coefficients are the silo's, ``whole`` all."""

    whole: Formula
    own: Formula


def own_formula(formula: Formula, levels: Levels) -> OwnFormula | None:
    """Return the formula of one silo, None if no term has the silo or there is but one silo.

    Each term with C(silo) is a term of the block, without the silo. Terms that the block spans are left out:
    x*C(silo) has the block 1 + x and no other column. None is returned too if the columns of the block and
    the others cannot be told apart because factors were joined, as in C(a):C(b) + C(a):C(c):C(d):C(silo).
    """
    with_silo = [term for term in formula.terms if any(map(_is_silo, term))]
    if not with_silo or len(levels.get(SILO, ())) < 2:
        return None
    stripped = dict.fromkeys(tuple(part for part in term if not _is_silo(part)) for term in with_silo)
    terms = tuple(term for term in stripped if term)
    pieces = {_piece(column) for column in design_columns(Formula(() in stripped, terms), levels)}

    def is_spanned(column: tuple[DesignPart, ...]) -> bool:
        numbers, factors = _piece(column)
        return any(numbers == of and factors <= known for of, known in pieces)

    def is_left(term: Term) -> bool:
        return not all(map(is_spanned, design_columns(Formula(intercept=False, terms=(term,)), levels)))

    own = Formula(intercept=is_spanned(()), terms=terms)
    others = tuple(term for term in formula.terms if term not in with_silo and is_left(term))
    whole = Formula(intercept=own.intercept or formula.intercept, terms=(*terms, *others))
    names, of_block = column_names(whole, levels), column_names(own, levels)
    rest = [
        column
        for column, name in zip(design_columns(whole, levels), names, strict=True)
        if name not in of_block
    ]
    if not set(of_block) <= set(names) or any(map(is_spanned, rest)):
        return None
    return OwnFormula(whole, own)


def _is_silo(variable: object) -> bool:
    return isinstance(variable, Categorical) and variable.name == SILO


def _piece(column: tuple[DesignPart, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the numbers and the factors that a column multiplies.

    The product of some factors with all their levels spans that of fewer factors.
    """
    factors = frozenset(part.variable.name for part in column if isinstance(part.variable, Categorical))
    return frozenset(part.label for part in column if not isinstance(part.variable, Categorical)), factors


@final
@dataclass(frozen=True, kw_only=True)
class ProfiledModel(AbstractRegressionModel):
    """The profile of a regression's loss over a block of each silo's own coefficients.

    ``whole`` is the model of one silo. ``own`` has the columns of the block, some of those of the whole.
    """

    whole: GLMModel | MultinomialModel
    own: Formula = INTERCEPT

    @cached_property
    def own_columns(self) -> tuple[int, ...]:
        """The places of the block's columns, in their order, among those of the whole."""
        names = column_names(self.whole.formula, self.whole.levels)
        return tuple(names.index(name) for name in column_names(self.own, self.whole.levels))

    @cached_property
    def common_columns(self) -> tuple[int, ...]:
        return tuple(j for j in range(len(self.whole.scales)) if j not in self.own_columns)

    @property
    def blocks(self) -> int:
        """How many coefficients a column has: one, or one for each class but the first."""
        return self.whole.classes - 1 if isinstance(self.whole, MultinomialModel) else 1

    @property
    def is_level(self) -> bool:
        """Whether the block is an intercept alone, of a generalised linear model."""
        return self.own == INTERCEPT and isinstance(self.whole, GLMModel)

    @property
    def dim(self) -> int:
        return self.blocks * len(self.common_columns)

    @property
    def scales(self) -> tuple[int, ...]:
        return tuple(self.whole.scales[j] for j in self.common_columns)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the common columns."""
        return within_names(self.whole.formula, self.own, self.whole.levels)

    @property
    def design_names(self) -> tuple[str, ...] | None:
        return self.columns if isinstance(self.whole, GLMModel) else None

    @property
    def shared_residuals(self) -> Hashable:
        return self.whole.shared_residuals

    @property
    def known_people(self) -> tuple[KnownPeople, ...]:
        return self.whole.known_people

    @property
    def judged_together(self) -> JudgedTogether | None:
        facts = self.whole.judged_together
        if facts is None:
            return None
        ranges = tuple(self._range_within(*facts.ranges[j]) for j in self.common_columns)
        places = {j: k for k, j in enumerate(self.common_columns)}
        references = (
            tuple((places[j], factor) for j, factor in combination if j in places)
            for combination in facts.references
        )
        return facts._replace(
            ranges=ranges,
            references=tuple(combination for combination in references if combination),
            is_bounded=self.is_level,
        )

    def _range_within(self, low: float, high: float) -> tuple[float, float]:
        """Return the range of a column that is centred within a silo.

        An intercept moves against the other coefficients, no further. A look scales down the rows of columns
        that are further off after regression on the block.
        """
        reach = high - low if self.is_level else max(high - low, -low, high)
        return -reach, reach

    def submodel(self, law: None, rows: AnyTable) -> Profiled:
        return Profiled(
            silos=tuple(self._silo(part) for _, part in by_silo(rows)),
            dim=self.dim,
            family=self._family,
            bound=self.row_bound(law),
            is_level=self.is_level,
        )

    def _silo(self, rows: AnyTable) -> SiloRows:
        size = len(self.whole.scales)
        return SiloRows(
            whole=self.whole.submodel(None, rows),
            dim=self.whole.dim,
            own=tuple(block * size + j for block in range(self.blocks) for j in self.own_columns),
            block=lambda eps: self.block(eps, rows),
        )

    def block(self, eps: Array, rows: AnyTable) -> Array:
        """Return gamma_m(eps) of the rows of one silo, on the scales of the block's columns."""
        if self.is_level:
            return np.array([self._intercept(eps, rows)])
        start, gram = np.zeros(self.blocks * len(self.own_columns)), self._gram(rows)
        if not gram.any():  # no row has a weight
            return start
        self._require_determined(gram)
        if self.own.intercept and isinstance(self.whole, GLMModel):
            start[0] = self._intercept(eps, rows)
        alone = self._alone(eps).submodel(None, rows)
        return _BlockSearch(submodel=alone, family=self._family).minimum(start)

    def is_separated(self, eps: Array, rows: AnyTable) -> bool:
        """Return whether the block of one silo has no finite solution: it predicts some response perfectly.

        The curvature of the loss is then less than `SEPARATED` of that at zero in some direction.
        """
        gram = self._gram(rows)
        if not gram.any() or self._family is Family.GAUSSIAN:
            return False
        alone = self._alone(eps).submodel(None, rows)
        block = self.block(eps, rows)
        hessian = unpack(alone.sums(block, Part.HESSIAN).values(alone.n_rows), len(block))
        at_zero = np.kron(np.eye(self.blocks), gram)
        return cholesky(hessian - SEPARATED * at_zero) is None

    @property
    def _family(self) -> Family:
        return self.whole.family if isinstance(self.whole, GLMModel) else Family.LOGISTIC

    def _gram(self, rows: AnyTable) -> Array:
        """Return the mean of o o^T with the weights of the regression."""
        squares = GLMModel(
            formula=self.own,
            levels=self.whole.levels,
            scales=self._own_scales,
            family=Family.GAUSSIAN,
            response=self.whole.response,
            weight_ceiling=self.whole.weight_ceiling,
        ).submodel(None, rows)
        size = len(self.own_columns)
        return unpack(squares.sums(np.zeros(size), Part.HESSIAN).values(squares.n_rows), size)

    def _require_determined(self, gram: Array) -> None:
        """Refuse rows that do not determine the silo's own coefficients."""
        size = np.sqrt(np.diag(gram))
        names, rest = column_names(self.own, self.whole.levels), gram.copy()
        for j, name in enumerate(names):
            pivot = rest[j, j]
            if pivot <= DEPENDENT * size[j] ** 2:
                raise DataError(
                    f"C(silo): this silo's rows do not determine its own coefficient of {name}, because the "
                    "column is constant here, or follows from the others that C(silo) multiplies. Leave "
                    "C(silo) out of this term, use fewer folds, or leave this silo out"
                )
            rest = rest - np.outer(rest[:, j], rest[j]) / pivot

    @property
    def _own_scales(self) -> tuple[int, ...]:
        return tuple(self.whole.scales[j] for j in self.own_columns)

    def _alone(self, eps: Array) -> GLMModel | MultinomialModel:
        """Return the model of the block's columns, with the predictor of the others as offset."""
        if isinstance(self.whole, MultinomialModel):
            offset_model, whole = self._classes_at(eps), self.whole
            return replace(
                whole, formula=self.own, scales=self._own_scales, ridge=0.0, offset_model=offset_model
            )
        response = OffsetResponse(response=self.whole.response, offset_model=self._at(eps))
        return replace(
            self.whole,
            formula=self.own,
            scales=self._own_scales,
            ridge=0.0,
            response=response,
            ranges=None,
        )

    def _intercept(self, eps: Array, rows: AnyTable) -> float:
        """Return the intercept that minimises the loss if the rest of the block is zero."""
        if isinstance(self.whole, MultinomialModel):
            raise TypeError("a multinomial model has several intercepts")
        alone = OffsetResponse(response=self.whole.response, offset_model=self._at(eps))
        scale = self.whole.scales[self.own_columns[0]]
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

    def coefficients(self, eps: Array) -> tuple[tuple[float, ...], ...]:
        """Return the coefficients of the whole's columns, those of the block zero, by class."""
        beta = np.zeros((self.blocks, len(self.whole.scales)))
        scales = np.array(self.scales, dtype=np.int64)
        beta[:, self.common_columns] = np.ldexp(eps.reshape(self.blocks, len(scales)), -scales)
        return tuple(map(tuple, beta.tolist()))

    def _at(self, eps: Array) -> FittedGLM:
        """Return the linear predictor without the block."""
        return FittedGLM(
            formula=self.whole.formula,
            levels=self.whole.levels,
            family=Family.GAUSSIAN,
            coefficients=self.coefficients(eps)[0],
        )

    def _classes_at(self, eps: Array) -> FittedMultinomial:
        return FittedMultinomial(
            formula=self.whole.formula, levels=self.whole.levels, coefficients=self.coefficients(eps)
        )

    def normaliser(self, law: None) -> Ridge | ClassRidge:  # noqa: ARG002 - there is no law
        return self._ridge

    @cached_property
    def _ridge(self) -> Ridge | ClassRidge:
        free = np.array([float(name.startswith(f"1{WITHIN}")) for name in self.columns])
        if isinstance(self.whole, MultinomialModel):
            return ClassRidge(self.whole.ridge, free, self.whole.classes)
        return Ridge(self.whole.ridge, free)

    def row_bound(self, law: None) -> RowBound:
        return self.whole.row_bound(law)


def within_names(whole: Formula, own: Formula, levels: Levels) -> tuple[str, ...]:
    """Return the names of the common columns of such a model; they differ from one block to another."""
    of_block = column_names(own, levels)
    given = "" if own == INTERCEPT else f" given {', '.join(of_block)}"
    return tuple(name + WITHIN + given for name in column_names(whole, levels) if name not in of_block)


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
class _BlockSearch:
    """The search for the minimum of a convex loss in several variables.

    Newton's method takes steps that are halved while the slope along them is positive and more than
    `OVERSHOT` of the one at their start. Every sum is exact, so that the result depends on the rows alone.
    """

    submodel: AbstractSubmodel
    family: Family

    def minimum(self, start: Array) -> Array:
        """Return the minimum or, if there is none, a point where nothing of some rows is left in the sums."""
        at, last, here = start, math.inf, self._at(start)
        for _ in range(STEPS):
            left = here.left
            factor = cholesky(here.hessian[np.ix_(left, left)])
            if factor is None or not here.gradient[left].any():
                break
            step = np.zeros(len(at))
            step[left] = -solve_factored(factor, here.gradient[left])
            ahead, here = self._ahead(at, step, here)
            moved = float((np.abs(ahead - at) / np.maximum(1.0, np.abs(ahead))).max())
            at = ahead
            if moved <= RESOLUTION or (moved <= STALLED and moved > 0.5 * last):
                break
            last = moved
        return at

    def _ahead(self, at: Array, step: Array, here: _Derivatives) -> tuple[Array, _Derivatives]:
        """Return the point after a step, or a shorter one, and the derivatives there."""
        allowed = -OVERSHOT * dot(here.gradient.tolist(), step.tolist())
        while True:
            try:
                there = self._at(at + step)
            except ContributionError:
                if self.family is not Family.POISSON:
                    raise
            else:
                slope = dot(there.gradient.tolist(), step.tolist())
                if slope <= allowed or float(np.abs(step).max()) <= RESOLUTION:
                    return at + step, there
            step, allowed = 0.5 * step, 0.5 * allowed

    def _at(self, point: Array) -> _Derivatives:
        sums = self.submodel.sums(point, Part.GRADIENT | Part.HESSIAN)
        size, values = len(point), sums.values(self.submodel.n_rows)
        return _Derivatives(values[:size], unpack(values[size:], size), 2.0 ** -sums.shifts[-1])


class _Derivatives(NamedTuple):
    """Means of gradient and Hessian, and the unit to which each row's share in the latter is rounded."""

    gradient: Array
    hessian: Array
    unit: float

    @property
    def left(self) -> list[int]:
        """The coordinates whose curvature, given those before them, is more than rounding error."""
        left, rest = [], self.hessian
        for j in range(len(rest)):
            if rest[j, j] > self.unit:
                left.append(j)
                rest = rest - np.outer(rest[:, j], rest[j]) / rest[j, j]
        return left


@final
@dataclass(frozen=True, kw_only=True)
class OwnBlock(AbstractOwnBlock):
    """The coefficients of each silo's own in a model that was fitted; ``eps`` are the common ones.

    ``view`` shows the rows on which the model was fitted, None if they are the study's.
    """

    label: str
    model: ProfiledModel
    eps: tuple[float, ...]
    view: TableView | None = None
    _found: PerTable[dict[str, tuple[float, ...]]] = field(
        init=False, default_factory=PerTable, compare=False, repr=False
    )

    @property
    def places(self) -> tuple[int, ...]:
        return self.model.own_columns

    @property
    def names(self) -> tuple[str, ...]:
        size = self.model.blocks * len(self.places)
        return tuple(f"\0own coefficient {k} of {self.label}" for k in range(size))

    def by_silo(self, rows: AnyTable, show: Callable[[], AnyTable]) -> Mapping[str, tuple[float, ...]]:
        return self._found.of(rows, lambda _: {silo: self.of(part) for silo, part in by_silo(show())})

    def of(self, rows: AnyTable) -> tuple[float, ...]:
        rows, response = self._fitted_on(rows), self.model.whole.response
        if not any(_over(response, rows, lambda table: bool(np.any(response.of(table)[1])))):
            raise DataError(
                f"{self.label}: this silo has no row to which its own intercept, C(silo), can be fitted; use "
                "fewer folds, or leave C(silo) out"
            )
        block = self.model.block(np.array(self.eps), rows)
        scales = np.array([self.model.whole.scales[j] for j in self.places] * self.model.blocks)
        return tuple(np.ldexp(block, -scales).tolist())

    def is_separated(self, rows: AnyTable) -> bool:
        return self.model.is_separated(np.array(self.eps), self._fitted_on(rows))

    def _fitted_on(self, rows: AnyTable) -> AnyTable:
        return rows if self.view is None else self.view.of(rows)


@final
@dataclass(frozen=True, kw_only=True)
class SeparatedBlocks(AbstractBoundedColumns[AnyTable]):
    """For each model 1 in one row of a silo whose own coefficients predict some response perfectly."""

    blocks: tuple[AbstractOwnBlock, ...]

    @property
    def label(self) -> str:
        return "a response that your silo's own coefficients, C(silo), predict perfectly"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(block.label for block in self.blocks)

    @property
    def exponents(self) -> tuple[int, ...]:
        return (0,) * len(self.blocks)

    def over(self, rows: AnyTable, work: Callable[[AnyTable], Result]) -> Iterator[Result]:
        return (work(part) for _, part in by_silo(rows))

    def evaluate(self, piece: AnyTable) -> Array:
        return np.array([[float(block.is_separated(piece))] for block in self.blocks])
