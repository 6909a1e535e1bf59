"""Regressions across silos, generalised linear and multinomial: specified, to be fitted, and fitted.

The coefficients are the eps of a model without a law: the loss of row i is
w_i rho(x_i . beta, y_i), its sums are exact, and Newton's method on the pooled sums gives the
pooled fit. Columns are scaled by public powers of two so that |x| <= 1 bounds a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar, final

import numpy as np

from fedtmle.defects import expect, expect_number
from fedtmle.errors import InputError
from fedtmle.initial.design import Range, column_names, in_place, reference_columns, scaled_design
from fedtmle.initial.syntax import Formula, parse_formula
from fedtmle.model.problem import AbstractModel, JudgedTogether, KnownPeople, LeftOut
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel, GeneralisedLinear, StreamedLinear
from fedtmle.model.submodels import GroupedLinear, LongRows, Multinomial
from fedtmle.model.table import (
    AnyTable,
    StreamedTable,
    Table,
    people_blocks,
)
from fedtmle_core import kernels
from fedtmle_core.parallel import done, mapped
from fedtmle_core.types import Array, Family, IntArray, Response, RowBound, Scaled, exponent, is_one

Result = TypeVar("Result")
Levels = Mapping[str, tuple[str, ...]]
FAMILIES = {"binomial": Family.LOGISTIC, "gaussian": Family.GAUSSIAN, "poisson": Family.POISSON}
BY_RESPONSE: Mapping[Response, Literal["binomial", "gaussian", "poisson"]] = {
    "binary": "binomial",
    "continuous": "gaussian",
    "count": "poisson",
}
LARGEST_COEFFICIENT = 2.0**14  # on scaled columns


@final
@dataclass(frozen=True)
class GLM:
    """A generalised linear model, fitted to the records of all silos together.

    Parameters
    ----------
    formula
        The right-hand side, such as ``"age + C(sex)"``. ``C(x)`` is a factor, ``I(...)`` arithmetic,
        ``a*b`` main effects and interaction, ``spline(x, knots=[...])`` a natural cubic spline, and
        ``C(silo)`` the silo itself: an intercept that each silo fits and keeps, in ``x:C(silo)`` a slope.
    family
        "binomial", "gaussian" or "poisson". "auto" is binomial for a binary response, poisson for a count
        and else gaussian.
    ridge
        The penalty on the squared coefficients of the scaled columns. No intercept is penalised.

    Raises
    ------
    InputError
        The formula cannot be read. The message says where.

    Examples
    --------
    >>> ft.GLM("treated + age + C(sex)")
    GLM(formula='treated + age + C(sex)', family='auto', ridge=0.0)
    """

    formula: str
    family: Literal["auto", "binomial", "gaussian", "poisson"] = "auto"
    ridge: float = 0.0

    def __post_init__(self) -> None:
        expect("formula", self.formula, str, 'text such as "age + C(sex)"')
        expect_number("ridge", self.ridge)
        self.parsed  # noqa: B018 - raises where the formula is outside the grammar
        if self.family not in ("auto", *FAMILIES):
            raise InputError(f"family: expected 'auto' or one of {tuple(FAMILIES)}, not {self.family!r}")
        if not self.ridge >= 0:
            raise InputError(f"ridge: expected a number of at least 0, not {self.ridge}")

    @cached_property
    def parsed(self) -> Formula:
        return parse_formula(self.formula)

    def family_for(self, response: Response) -> Literal["binomial", "gaussian", "poisson"]:
        """Return the name of the family for a response."""
        return BY_RESPONSE[response] if self.family == "auto" else self.family


class AbstractResponse(ABC):
    """The response of a nuisance regression: one for each row of the table or, if it has several
    ``periods``, one for each of the long rows that `expand` makes of a person's row."""

    @abstractmethod
    def of(self, table: Table) -> tuple[Array, Array]:
        """Return y on the unit scale and the weights, shape (N,) each, for the long rows if there are any."""

    def offset(self, table: Table) -> Array | None:  # noqa: ARG002 - most regressions have none
        """Return the offset of the linear predictor, shape (N,), or None if there is none."""
        return None

    @property
    def periods(self) -> int:
        """The most long rows of one person; 0 if the regression is over the table's own rows."""
        return 0

    @property
    def is_public(self) -> bool:
        """Whether anyone knows y of every long row, so that the rows of one person may cancel in a sum."""
        return False

    @property
    def shared_residuals(self) -> Hashable:
        """See `AbstractModel.shared_residuals`."""
        return None

    @property
    def left_out(self) -> LeftOut | None:
        """The fold of the rows that the regression leaves out, None if it has all of them."""
        return None

    @property
    def known_people(self) -> tuple[KnownPeople, ...]:
        """See `AbstractModel.known_people`."""
        return ()

    @property
    def every_row(self) -> AbstractResponse:
        """The response 1, of weight 1, in every row that the regression may use.

        Regressions with the same one share a Gram matrix.
        """
        return EveryRow()

    def mark(self, table: Table) -> Table:
        """Return a whole table with what its parts could not know by themselves, such as folds."""
        return table

    def long(self, table: Table) -> Table:
        """Return all rows of the regression from a whole table: the table itself if it has no long rows."""
        return self.expand(self.mark(table))[0] if self.periods else table

    def expand(self, table: Table) -> tuple[Table, IntArray]:
        """Return the long rows of a part of a marked table, and how many each person has."""
        return table, np.ones(table.n_rows, dtype=np.int64)


@final
@dataclass(frozen=True)
class EveryRow(AbstractResponse):
    """The response 1 in every row, with weight 1: the gradient at zero is the mean of the columns."""

    def of(self, table: Table) -> tuple[Array, Array]:
        ones = np.broadcast_to(np.float64(1.0), (table.n_rows,))
        return ones, ones


def over_long(
    response: AbstractResponse, table: AnyTable, work: Callable[[Table, IntArray], Result]
) -> Iterator[Result]:
    """Yield ``work(rows, counts)`` for the long rows of consecutive people, with each person's count."""
    whole = response.mark(table) if isinstance(table, Table) else table
    blocks = people_blocks(whole, response.periods)
    return mapped(lambda block: work(*response.expand(block)), blocks)


@final
@dataclass(frozen=True)
class Ridge(AbstractNormaliser):
    """A(beta) = ridge |beta|^2 / 2 on scaled columns, the intercept left free."""

    ridge: float
    free: Array

    def value(self, eps: Array) -> float:
        return 0.5 * self.ridge * float(np.sum((eps * (1 - self.free)) ** 2))

    def gradient(self, eps: Array) -> Array:
        return self.ridge * eps * (1 - self.free)

    def hessian(self, eps: Array) -> Array:  # noqa: ARG002 - constant
        return np.diag(self.ridge * (1 - self.free))

    def curvature_ceiling(self, C: Array) -> float:
        return self.ridge * float(np.linalg.norm(C, 2)) ** 2


class AbstractRegressionModel(AbstractModel[None, AnyTable]):
    """A model without a law, whose eps are coefficients on scaled columns."""

    def admits(self, law: None, eps: Array) -> bool:  # noqa: ARG002 - there is no law
        return bool((np.abs(eps) <= LARGEST_COEFFICIENT).all())

    def path(self, law: None) -> tuple[tuple[float, ...], ...]:  # noqa: ARG002 - there is no law
        return ()

    def curvature(self, law: None) -> None:  # noqa: ARG002 - it is a sum over rows
        return None

    def accuracy(self, law: None) -> float:  # noqa: ARG002 - no quadrature
        return 0.0


@final
@dataclass(frozen=True, kw_only=True)
class GLMModel(AbstractRegressionModel):
    """The loss whose minimiser is the fit of ``response`` on the columns of ``formula``."""

    formula: Formula
    levels: Levels
    scales: tuple[int, ...]  # column j is divided by 2^scales[j]
    family: Family
    response: AbstractResponse
    weight_ceiling: float = 1.0
    ridge: float = 0.0
    ranges: tuple[Range, ...] | None = None  # ranges of the columns before they are divided, if known

    @property
    def dim(self) -> int:
        return len(self.scales)

    @cached_property  # the guard and the looks ask for the names many times a round
    def columns(self) -> tuple[str, ...]:
        return column_names(self.formula, self.levels)

    @property
    def design_names(self) -> tuple[str, ...]:
        return self.columns

    @property
    def shared_residuals(self) -> Hashable:
        return self.response.shared_residuals

    @property
    def known_people(self) -> tuple[KnownPeople, ...]:
        return self.response.known_people

    @cached_property  # the guard and the looks ask for it many times in a round
    def judged_together(self) -> JudgedTogether | None:
        if self.family not in (Family.LOGISTIC, Family.GAUSSIAN):
            return None
        ranges = ((-1.0, 1.0),) * self.dim
        if self.ranges is not None:
            pairs = zip(self.ranges, self.scales, strict=True)
            ranges = tuple((math.ldexp(low, -e), math.ldexp(high, -e)) for (low, high), e in pairs)
        periods = max(self.response.periods, 1)
        references = tuple(
            tuple((j, math.ldexp(sign, self.scales[j])) for j, sign in combination)
            for combination in reference_columns(self.formula, self.levels)
        )
        may_cancel = periods > 1 and self.family is Family.LOGISTIC and not self.response.is_public
        return JudgedTogether(
            self.family,
            self.response,
            ranges,
            self.weight_ceiling,
            periods,
            references,
            may_cancel,
            left_out=self.response.left_out,
        )

    def submodel(self, law: None, rows: AnyTable) -> AbstractSubmodel:
        if self.response.periods:
            return GroupedLinear(
                people=rows.n_rows,
                dim=self.dim,
                family=self.family,
                bound=self.row_bound(law),
                over=lambda work: over_long(self.response, rows, lambda *long: work(self._long(*long))),
                are_public=self.response.is_public,
            )
        if isinstance(rows, StreamedTable):
            return StreamedLinear(
                table=rows,
                family=self.family,
                dim=self.dim,
                bound=self.row_bound(law),
                design=self.design,
            )
        return self.design(rows)

    def design(self, rows: Table) -> GeneralisedLinear:
        """Return the submodel of rows in memory."""
        y, w = self.response.of(rows)
        return GeneralisedLinear(
            family=self.family,
            X=scaled_design(self.formula, rows, self.levels, self.scales),
            offset=self.response.offset(rows),
            y=y,
            w=None if is_one(w) else w,
            bound=self.row_bound(None),
            y_largest=1.0,  # responses are on the unit scale
        )

    def _long(self, table: Table, counts: IntArray) -> LongRows:
        return LongRows(self.design(table), counts)

    def normaliser(self, law: None) -> Ridge:  # noqa: ARG002 - there is no law
        return self._ridge

    @cached_property
    def _ridge(self) -> Ridge:
        return Ridge(self.ridge, np.array([float(name == "1") for name in self.columns]))

    def row_bound(self, law: None) -> RowBound:  # noqa: ARG002 - there is no law
        # |mu - y| <= 1 for a binomial response; responses are on a unit scale elsewhere, and a
        # linear or log-linear prediction may leave it for a while during the fit.
        slope, bend = {Family.LOGISTIC: (1.0, 0.25), Family.GAUSSIAN: (64.0, 1.0)}.get(
            self.family, (4096.0, 4096.0)
        )
        most = self.weight_ceiling * max(self.response.periods, 1)  # weight of all long rows of a person
        return RowBound(gradient=exponent(slope * most), curvature=exponent(bend * most))


class AbstractOwnBlock(ABC):
    """Coefficients that each silo fits for itself and keeps (`initial.own`); ``label`` names their model."""

    label: str

    @property
    @abstractmethod
    def places(self) -> tuple[int, ...]:
        """The columns of the model's formula that they belong to."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Their columns in a silo's table, once the rows are seen through `programs.superlearner`.

        There is one for each place or, of a multinomial model, for each class but the first and each place.
        """

    @abstractmethod
    def of(self, rows: AnyTable) -> tuple[float, ...]:
        """Return the coefficients of the silo whose rows these are: all of them, as they are."""

    @abstractmethod
    def by_silo(self, rows: AnyTable, show: Callable[[], AnyTable]) -> Mapping[str, tuple[float, ...]]:
        """Return the coefficients of each silo that has some of the rows, found once per table.

        ``show`` returns the rows with the own coefficients of the models whose predictions are the response.
        """

    @abstractmethod
    def is_separated(self, rows: AnyTable) -> bool:
        """Return whether they predict some response of the silo perfectly, so that they are not finite."""


def _with_own(X: Scaled, own: AbstractOwnBlock, names: Sequence[str], table: Table) -> Scaled:
    """Return the columns, those of the block times the silo's own coefficients."""
    columns = list(X.columns)
    for place, name in zip(own.places, names, strict=True):
        columns[place] = columns[place] * table.numeric[name]
    return Scaled(tuple(columns), X.factors)


def _with_ones(coefficients: Sequence[float], own: AbstractOwnBlock) -> Array:
    """Return the coefficients, each of the block a one."""
    beta = np.array(coefficients)
    beta[list(own.places)] = 1.0
    return beta


@final
@dataclass(frozen=True, kw_only=True)
class FittedGLM:
    """A fitted GLM: coefficients in the order of the formula's columns.

    Those of each silo's ``own`` are 0 here.

    A coded fit is near the pooled one: ``error`` bounds the root mean square of the difference of their
    linear predictors, in units of 1 (logistic) or 1/16 of the response's scale, and ``bits`` is the length
    of the code of the coefficients. An exact fit has neither.
    """

    formula: Formula
    levels: Levels
    family: Family
    coefficients: tuple[float, ...]
    error: float = 0.0
    bits: int | None = None
    own: AbstractOwnBlock | None = None

    def predict(self, table: Table) -> Array:
        """Return the mean of the response, shape (N,): the same bits in any partition."""
        if in_place(self.formula, self.levels):
            return self._mean(table)
        mean = np.empty(table.n_rows)

        def fill(place: tuple[slice, Table]) -> None:
            rows, block = place
            mean[rows] = self._mean(block)

        done(fill, table.placed_blocks())
        return mean

    def _mean(self, table: Table) -> Array:
        zeros = [0] * len(self.coefficients)
        X = scaled_design(self.formula, table, self.levels, zeros)
        if self.own is None:
            return kernels.glm_means(kernels.glm_rows(self.family, X), np.array(self.coefficients))
        with_own = _with_own(X, self.own, self.own.names, table)
        return kernels.glm_means(
            kernels.glm_rows(self.family, with_own), _with_ones(self.coefficients, self.own)
        )


@final
@dataclass(frozen=True, kw_only=True)
class OffsetResponse(AbstractResponse):
    """Another response, with the linear predictor of a model that is near the fit added to its offset."""

    response: AbstractResponse
    offset_model: FittedGLM

    @property
    def periods(self) -> int:
        return self.response.periods

    def mark(self, table: Table) -> Table:
        return self.response.mark(table)

    def expand(self, table: Table) -> tuple[Table, IntArray]:
        return self.response.expand(table)

    def of(self, table: Table) -> tuple[Array, Array]:
        return self.response.of(table)

    def offset(self, table: Table) -> Array:
        predictor = replace(self.offset_model, family=Family.GAUSSIAN).predict(table)
        offset = self.response.offset(table)
        return predictor if offset is None else predictor + offset


@final
@dataclass(frozen=True)
class Supplied:
    """Predictions that each silo already has as columns.

    Parameters
    ----------
    columns
        The names of the columns. An outcome model needs one per arm, a treatment model the probability of
        each arm (or of each but the first), and a missingness model the probability of being observed, in
        one column or one per arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Supplied("q0", "q1").columns
    ('q0', 'q1')
    """

    columns: tuple[str, ...]

    def __init__(self, *columns: str) -> None:
        if not columns:
            raise InputError('Supplied: expected at least one name of a column, as in Supplied("p")')
        for column in columns:
            expect("Supplied", column, str, 'names of columns, as in Supplied("p", "q")')
        object.__setattr__(self, "columns", columns)


# Multinomial regression across silos: one softmax model of all arms, the same in whichever order they are.
#
# The reference class only fixes coordinates: the fitted probabilities do not depend on it. A ridge penalises
# the coefficients of each column around their mean over all classes, that of the reference being zero,
#
#     A = ridge sum_a {sum_j beta_ja^2 - (sum_j beta_ja)^2 / J},
#
# which does not depend on the reference either, and for two classes is the ridge of a logistic GLM.


@final
@dataclass(frozen=True)
class ClassRidge(AbstractNormaliser):
    """The penalty A above; ``free`` marks the intercept among the columns, shape (p,)."""

    ridge: float
    free: Array
    classes: int

    @cached_property
    def _matrix(self) -> Array:
        spread = np.eye(self.classes - 1) - 1.0 / self.classes
        return np.asarray(2.0 * self.ridge * np.kron(spread, np.diag(1.0 - self.free)), dtype=np.float64)

    def value(self, eps: Array) -> float:
        return 0.5 * math.fsum(eps * self.gradient(eps))

    def gradient(self, eps: Array) -> Array:
        return np.array([math.fsum(row * eps) for row in self._matrix])  # the same bits at every party

    def hessian(self, eps: Array) -> Array:  # noqa: ARG002 - constant
        return self._matrix

    def curvature_ceiling(self, C: Array) -> float:
        return 2.0 * self.ridge * float(np.linalg.norm(C, 2)) ** 2


@final
@dataclass(frozen=True, kw_only=True)
class MultinomialModel(AbstractRegressionModel):
    """The loss whose minimiser is the softmax fit of the classes of ``response`` on the formula's columns."""

    formula: Formula
    levels: Levels
    scales: tuple[int, ...]  # column a is divided by 2^scales[a]
    classes: int
    response: AbstractResponse
    weight_ceiling: float = 1.0
    ridge: float = 0.0
    offset_model: FittedMultinomial | None = None  # its predictors are added

    @property
    def dim(self) -> int:
        return (self.classes - 1) * len(self.scales)

    def submodel(self, law: None, rows: AnyTable) -> AbstractSubmodel:
        if isinstance(rows, StreamedTable):
            return StreamedLinear(
                table=rows,
                family=Family.LOGISTIC,
                dim=self.dim,
                bound=self.row_bound(law),
                design=self.design,
            )
        return self.design(rows)

    def design(self, rows: Table) -> Multinomial:
        """Return the submodel of rows in memory."""
        y, w = self.response.of(rows)
        return Multinomial(
            X=scaled_design(self.formula, rows, self.levels, self.scales),
            y=y.astype(np.int64),
            w=w,
            classes=self.classes,
            bound=self.row_bound(None),
            offset=None if self.offset_model is None else self.offset_model.predictors(rows),
        )

    def normaliser(self, law: None) -> ClassRidge:  # noqa: ARG002 - there is no law
        return self._ridge

    @cached_property
    def _ridge(self) -> ClassRidge:
        names = column_names(self.formula, self.levels)
        return ClassRidge(self.ridge, np.array([float(name == "1") for name in names]), self.classes)

    def row_bound(self, law: None) -> RowBound:  # noqa: ARG002 - there is no law
        return RowBound(gradient=exponent(self.weight_ceiling), curvature=exponent(self.weight_ceiling / 4))


@final
@dataclass(frozen=True, kw_only=True)
class FittedMultinomial:
    """A fitted softmax model: coefficients of each class but the first, in the order of the columns.

    ``error`` and ``bits`` are those of a coded fit, as of `FittedGLM`, and so is each silo's ``own``.
    """

    formula: Formula
    levels: Levels
    coefficients: tuple[tuple[float, ...], ...]
    error: float = 0.0
    bits: int | None = None
    own: AbstractOwnBlock | None = None

    def predict(self, table: Table) -> Array:
        """Return the probability of each class, shape (J, N): the same bits in any partition."""
        return self._filled(table, lambda block: kernels.softmax(self._block(block)))

    def predictors(self, table: Table) -> Array:
        """Return the linear predictor of each class, shape (J, N), the first one zero."""
        return self._filled(table, self._block)

    def _filled(self, table: Table, of: Callable[[Table], Array]) -> Array:
        result = np.empty((len(self.coefficients) + 1, table.n_rows))

        def fill(place: tuple[slice, Table]) -> None:
            rows, block = place
            result[:, rows] = of(block)

        done(fill, table.placed_blocks())
        return result

    def _block(self, table: Table) -> Array:
        zeros = [0] * len(self.coefficients[0])
        X = scaled_design(self.formula, table, self.levels, zeros)
        eta = np.zeros((len(self.coefficients) + 1, table.n_rows))
        for j, beta in enumerate(self.coefficients, start=1):
            of_class, coefficients = X, np.array(beta)
            if self.own is not None:
                size = len(self.own.places)
                names = self.own.names[(j - 1) * size : j * size]
                of_class, coefficients = _with_own(X, self.own, names, table), _with_ones(beta, self.own)
            rows = kernels.glm_rows(Family.GAUSSIAN, of_class)  # the Gaussian mean is the predictor
            eta[j] = kernels.glm_means(rows, coefficients)
        return eta
