"""A regression over the records of all hospitals, and its fit, as values.

Every regression has one loss: over people and their records, sum w rho(offset + x . beta, y). A hazard has a
record for each period, and a multinomial regression a response for each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.estimation.vocabulary import Design
from fedtmle.estimation.worlds import AS_IT_IS, World
from fedtmle_core.blocks import Layer
from fedtmle_core.terms import ONE, ZERO, Apply, Constant, Kept, Softmax, Term, product, total
from fedtmle_core.types import Array, Family


@final
@dataclass(frozen=True, kw_only=True)
class Record:
    """One record of each person in a regression: the person once, or a period of follow-up.

    ``y`` is the response, or the indicator of each class. ``w`` is a weight that is not negative, 0 for whom
    the record does not exist. The columns of the design are those of a ``world``.
    """

    y: Term | tuple[Term, ...]
    w: Term | None = None
    offset: Term | None = None
    world: World = AS_IT_IS

    @property
    def ys(self) -> tuple[Term, ...]:
        return self.y if isinstance(self.y, tuple) else (self.y,)

    def weighted(self, by: Term) -> Record:
        """Return the record with its weight times another."""
        return replace(self, w=by if self.w is None else product(self.w, by))


@final
@dataclass(frozen=True, kw_only=True)
class Regression:
    """A model to fit to the people of all hospitals together.

    ``constant`` is the message if the response is the same for everybody. ``ridge`` penalises the squared
    coefficients of unit columns, the intercept's excepted. A multinomial regression names its ``classes``.
    """

    label: str  # in messages, such as "treatment model"
    family: Family
    design: Design
    records: tuple[Record, ...]
    ridge: float = 0.0
    classes: tuple[str, ...] = ()
    constant: str = "the response is the same for everybody it is fitted on"
    whole: Regression | None = None  # the same with everybody, if some are left out

    def __post_init__(self) -> None:
        if not self.records:
            raise InputError(f"{self.label}: a regression needs a record of each person")
        if any(len(record.ys) != max(len(self.classes), 1) for record in self.records):
            raise InputError(f"{self.label}: expected a response, or an indicator of each class")
        if self.classes and any(record.offset is not None for record in self.records):
            raise InputError(f"{self.label}: a multinomial regression has no offset")

    def without(self, fold: Term, name: str) -> Regression:
        """Return the same regression on those who are not in a fold: ``fold`` is 1 for its people."""
        records = tuple(record.weighted(1.0 - fold) for record in self.records)
        return replace(self, label=f"{self.label} ({name})", records=records, whole=self.whole or self)

    @property
    def blocks(self) -> int:
        """How many coefficients a column has: one, or one for each class but the first."""
        return max(len(self.classes) - 1, 1)

    @property
    def dim(self) -> int:
        return self.blocks * len(self.design.columns)

    @property
    def coefficient_names(self) -> tuple[str, ...]:
        """The names of the columns, for each class but the first."""
        if not self.classes:
            return self.design.names
        return tuple(f"{name} (arm {arm})" for arm in self.classes[1:] for name in self.design.names)

    def layers(self) -> tuple[Layer, ...]:
        """Return the records as layers of one loss; of a multinomial regression without the response."""
        return tuple(
            self.design.layer(
                record.world, y=None if self.classes else record.ys[0], w=record.w, offset=record.offset
            )
            for record in self.records
        )

    @property
    def penalty(self) -> Array:
        """The matrix R of the penalty eps . R eps / 2 on the mean loss, eps of unit columns.

        Several classes are penalised around their mean, that of the reference being zero, so that it does not
        matter which is the reference: for two classes it is the ridge of a logistic regression.
        """
        free = np.array([float(name != "1") for name in self.design.names])
        spread = np.eye(1)
        if self.classes:
            spread = 2.0 * (np.eye(self.blocks) - 1.0 / len(self.classes))
        return np.asarray(self.ridge * np.kron(spread, np.diag(free)))

    def raw(self, eps: Array) -> tuple[tuple[float, ...], ...]:
        """Return the coefficients of the raw columns, given those of unit columns."""
        return tuple(self.design.raw(row) for row in eps.reshape(self.blocks, len(self.design.columns)))


@final
@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted regression: coefficients of the formula's raw columns, for each class but the first.

    ``error`` bounds how far a rounded fit is from the exact one: the root mean square of the difference of
    their linear predictors over that of a standard error; 0 for an exact fit.
    """

    regression: Regression
    coefficients: tuple[tuple[float, ...], ...]
    error: float = 0.0

    def predictor(self, world: World = AS_IT_IS) -> Term:
        """Return the linear predictor of a GLM, without an offset."""
        (row,) = self.coefficients
        return self.regression.design.predictor(row, world)

    def mean(self, world: World = AS_IT_IS, *, offset: Term | None = None) -> Term:
        """Return the mean of the response of a GLM, as it is in a world."""
        if self.regression.classes:
            raise InputError(f"{self.regression.label}: a multinomial model has a mean of each class")
        eta = self.predictor(world) if offset is None else total([offset, self.predictor(world)])
        return mean_of(self.regression.family, eta)

    def means(self, world: World = AS_IT_IS) -> tuple[Term, ...]:
        """Return the probability of each class, or the one mean of a GLM."""
        if not self.regression.classes:
            return (self.mean(world),)
        return softmax_of(self.regression.design, self.coefficients, world)


@final
@dataclass(frozen=True, kw_only=True)
class CrossFit:
    """Fits of one regression, each without one fold; everybody's mean is that of the fit without them."""

    fits: tuple[Fit, ...]
    folds: tuple[Term, ...]

    @property
    def regression(self) -> Regression:
        return self.fits[0].regression

    def mean(self, world: World = AS_IT_IS) -> Term:
        """Return the mean of the response of a GLM, as it is in a world."""
        return self._chosen([fit.mean(world) for fit in self.fits])

    def means(self, world: World = AS_IT_IS) -> tuple[Term, ...]:
        """Return the probability of each class, or the one mean of a GLM."""
        by_fold = [fit.means(world) for fit in self.fits]
        return tuple(self._chosen(of_class) for of_class in zip(*by_fold, strict=True))

    def _chosen(self, terms: Sequence[Term]) -> Term:
        return total([product(fold, term) for fold, term in zip(self.folds, terms, strict=True)])


def mean_of(family: Family, eta: Term) -> Term:
    """Return the mean of a response whose linear predictor is a term."""
    match family:
        case Family.LOGISTIC:
            return Constant(0.5) if eta == ZERO else Apply("expit", eta)
        case Family.POISSON:
            return ONE if eta == ZERO else Apply("exp", eta)
        case Family.GAUSSIAN:
            return eta
    raise InputError("a regression is binomial, Gaussian or Poisson")


def softmax_of(design: Design, coefficients: Sequence[Sequence[float]], world: World) -> tuple[Term, ...]:
    """Return the probability of each class; the linear predictor of the first is 0."""
    etas = (ZERO, *(design.predictor(row, world) for row in coefficients))
    return tuple(Softmax(etas, place) for place in range(len(etas)))


def kept(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Return terms whose columns stay in memory at each hospital, because later questions read them again."""
    return tuple(term if isinstance(term, Kept | Constant) else Kept(term) for term in terms)
