"""Rounded fits: gradients on a lattice, in easy coordinates, up to a fraction of a standard error.

Coefficients are eps = C' u, with the C of `gram`, so that |u - u*| is the root mean square of the difference
of two linear predictors. One question asks for the matrix of products of columns and, for each regression,
the sums of weights and responses and the gradient at zero. From these follow the fit of the intercept alone
and a first step. Then every round asks for the gradient at one point, and once, where the point is near
already, for the curvature, rounded to several people; the rest is learned from gradients (BFGS). The fit ends
when the estimated distance that is left after a step,

    rho |p| + e |p| / |g|,   rho = max(2 |p| / |p'|, |p'| / |p''|), at most 1/2, p' and p'' the steps before,
                             e a bound of the rounding of g,

is at most the goal. The first part is how far the next step would go, an estimate; the second bounds
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import numpy as np

from fedtmle.errors import FitError
from fedtmle.estimation.algebra import (
    cholesky,
    congruence,
    dot,
    invert_lower,
    multiply,
    norm,
    on_grid,
    solve_factored,
)
from fedtmle.estimation.flow import Flow, ask, both, together
from fedtmle.estimation.gram import COUNTED, Gram, ask_gram, centred, columns_of, curvatures, refuse_hidden
from fedtmle.estimation.loss import Loss
from fedtmle.estimation.regression import Fit, Regression
from fedtmle.model.refusals import FLAT, refuse_runaway, refuse_separated, spread_of
from fedtmle_core import kernels
from fedtmle_core.blocks import Lattice, Moments
from fedtmle_core.terms import ONE, product, total
from fedtmle_core.types import Array, Family

# The unit of a linear predictor in which an error counts: standard errors in u are at least 2/sqrt(n) of a
# logistic regression, and some 1/16 of that of a response on [0, 1].
UNITS = {Family.LOGISTIC: 1.0, Family.GAUSSIAN: 2.0**-4, Family.POISSON: 2.0**-4}
FIRST_PLACES = 12  # binary places of the gradient at zero
FINER = (
    2.0**-14
)  # rounding of the next gradient over the norm of this one: a step squares the distance at best
FINEST = 46  # binary places of the finest lattice: sums of numbers bounded by 1 have 50
# In u, the root mean square change of the linear predictor; a mean that grows by e^4 may be beyond its bound.
LONGEST_STEP = {Family.LOGISTIC: 4.0, Family.GAUSSIAN: 4.0, Family.POISSON: 1.0}
CURVATURE_ROUND = 2  # the curvature at the first point is that of a point too far from the fit
NEAR, FAR = 2.0**-6, 2.0**-3  # steps: a curvature is worth nothing below, and soon out of date above
SHORTEST, LONGEST = 0.125, 0.5  # parts of a step that went too far
COARSE = 2.0**-6  # share of a curvature that rounding may be: steps learn the rest
SLOW = 0.25  # ratio of the lengths of two steps above which another curvature is worth its numbers
MOST_CURVATURES = 6  # rare events and long tails need more than one
MOST_PAIRS = 6  # of classes but the first, each of which has a curvature: those of four classes
MAX_ROUNDS = 80
MINORITY = 2.0**-20  # treat the response as constant if the minority's share of the weight is below this
SEPARATED = 1e-5  # treat as separated if this share of the first curvature is left along a step


@final
@dataclass(frozen=True, kw_only=True)
class First:
    """Means over people at the start of a fit: of weights, of weighted responses, of the gradient at zero."""

    weight: float
    responses: tuple[float, ...]  # of each class but the first
    gradient: Array  # in the coordinates A x, class by class
    rounding: float  # of each coordinate


def fit_rounded(regressions: Sequence[Regression], n: int, accuracy: float) -> Flow[list[Fit]]:
    """Return the fits of regressions to ``n`` people, each within ``accuracy`` standard errors."""
    grams, firsts = yield from both(
        together([ask_gram(each, n) for each in _covering([r.whole or r for r in regressions])]),
        together([_first(each, n) for each in regressions]),
    )
    borrowed: dict[str, Array] = {}
    fits, led = [], set[str]()
    for regression, first in zip(regressions, firsts, strict=True):
        gram = next(gram for gram in grams if gram.covers(regression.whole or regression)).of(regression)
        refuse_hidden(gram, regression)
        refuse_no_response(regression, first)
        leads = regression.whole is not None and regression.whole.label not in led
        led |= {regression.whole.label} if regression.whole else set()
        fits.append(Search(regression, gram, first, n, accuracy, leads, borrowed).run())
    return (yield from together(fits))


def _covering(regressions: Sequence[Regression]) -> list[Regression]:
    """Return the regressions whose matrices cover those of all."""
    chosen: list[Regression] = []
    for each in sorted(regressions, key=lambda each: -len(each.design.columns)):
        if not any(_is_among(each, other) for other in chosen):
            chosen.append(each)
    return chosen


def _is_among(one: Regression, other: Regression) -> bool:
    layers, others = one.layers(), other.layers()
    same = tuple(layer.w for layer in layers) == tuple(layer.w for layer in others)
    return same and set(columns_of(layers)) <= set(columns_of(others))


def _first(regression: Regression, n: int) -> Flow[First]:
    """Ask for the sums of weights and responses, and the gradient at zero."""
    loss, A = Loss(regression, n), centred(regression)
    records, classes = regression.records, range(1, len(regression.classes)) if regression.classes else [0]
    weights = [ONE if record.w is None else record.w for record in records]
    sums = [total(weights)]
    for j in classes:
        sums.append(total([product(w, record.ys[j]) for w, record in zip(weights, records, strict=True)]))
    lattice = Lattice(places=FIRST_PLACES, C=_rows(A))
    zero = np.zeros(regression.dim)
    blocks = loss.shared_blocks(lattice) if regression.classes else loss.gradient_blocks(zero, lattice)
    (counted, *parts) = yield from ask(Moments.of(sums, places=COUNTED), *blocks)
    weight, *responses = (counted / n).tolist()
    return First(
        weight=weight,
        responses=tuple(responses),
        gradient=np.concatenate(parts) / n,
        rounding=2.0 ** -(FIRST_PLACES + 1),
    )


def _rows(C: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in C.tolist())


def refuse_no_response(regression: Regression, first: First) -> None:
    """Refuse a response that has no weight or is the same in every record, and a class without records."""
    if not first.weight > 0.0:
        raise FitError("arm", f"{regression.label}: no row has a positive weight")
    smallest = MINORITY * first.weight
    rest = first.weight - math.fsum(first.responses)
    is_constant = regression.family is not Family.GAUSSIAN and min(first.responses) <= smallest
    if is_constant or (regression.family is Family.LOGISTIC and rest <= smallest):
        raise FitError("arm", f"{regression.label}: {regression.constant}")


class Step(NamedTuple):
    """A step s of u, the change y of the gradient along it, and s . y."""

    s: Array
    y: Array
    along: float


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quasi-Newton model of the curvature: a factored matrix, and the steps since it was made."""

    factor: Array
    weakest: float  # the largest entry of the inverse: how far rounding may move a fit
    steps: tuple[Step, ...] = ()

    @classmethod
    def of(cls, matrix: Array) -> Metric:
        """Return the model of a matrix, which is lifted just enough to make it positive definite."""
        scale, lift = math.fsum(np.diag(matrix).tolist()) / len(matrix), 0.0
        while True:
            factor = cholesky(matrix, shift=lift, floor=2.0**-10 * scale)
            if factor is not None:
                inverse = invert_lower(factor)
                return cls(factor=factor, weakest=float((inverse * inverse).sum(axis=0).max()))
            lift = 4.0 * lift if lift else 2.0**-8 * scale

    def solve(self, gradient: Array) -> Array:
        """Return the step that brings the gradient to zero if the model is right (two-loop recursion)."""
        q, shares = gradient, []
        for step in reversed(self.steps):
            share = dot(step.s, q) / step.along
            shares.append(share)
            q = q - share * step.y
        r = solve_factored(self.factor, q)
        for step, share in zip(self.steps, reversed(shares), strict=True):
            r = r + (share - dot(step.y, r) / step.along) * step.s
        return -r


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """A point of the search, its gradient, and a bound of the gradient's rounding."""

    u: Array
    gradient: Array
    norm: float
    rounding: float

    @property
    def size(self) -> float:
        """How large the gradient may be."""
        return self.norm + self.rounding


def _back(base: Place, place: Place) -> float:
    """Return which part of a step to take instead; 1 if it was good.

    The loss is convex: it has fallen all along a step at whose end it still falls.
    """
    moved = place.u - base.u
    before, after = dot(base.gradient, moved), dot(place.gradient, moved)
    if place.size < base.size or after <= 0.0:
        return 1.0
    return min(max(-before / (after - before), SHORTEST), LONGEST)


@final
@dataclass
class Search:
    """The search for one fit; fits of one regression without single folds share a curvature."""

    regression: Regression
    gram: Gram
    first: First
    n: int
    accuracy: float
    leads: bool
    borrowed: dict[str, Array]
    loss: Loss = field(init=False)
    C: Array = field(init=False)  # of one class
    products: Array = field(init=False)  # the mean of products of the columns C x
    goal: float = field(init=False)

    def __post_init__(self) -> None:
        self.loss, self.C = Loss(self.regression, self.n), self.gram.whitener
        self.products = np.eye(len(self.C))
        if self.regression.ridge:
            # The penalty is a part of the curvature: with it the coordinates are easy.
            bend = math.fsum(np.diag(self._bend()).tolist()) / self.regression.blocks
            of_class = self.regression.penalty[: len(self.C), : len(self.C)]
            factor = cholesky(self.products + congruence(self.C, of_class) / bend)
            if factor is not None:
                root = invert_lower(factor)
                self.C, self.products = on_grid(multiply(root, self.C)), multiply(root, root.T)
        self.goal = UNITS[self.regression.family] * self.accuracy / math.sqrt(self.n)

    def run(self) -> Flow[Fit]:
        """Return the fit."""
        u, previous, curvature, expected = self._start()
        mean = math.fsum(np.diag(curvature).tolist()) / len(curvature)
        metric, initial = Metric.of(curvature), max(expected, mean * previous)
        base: Place | None = None
        now, asked = 0.0, 0  # the ratio of the last two steps, and how many curvatures there were
        least = 0.125 * self.goal * mean  # rounding of a gradient that the goal allows
        longest = LONGEST_STEP[self.regression.family]
        for number in range(1, MAX_ROUNDS + 1):
            tolerance = max(least, FINER * expected)
            asks = number >= CURVATURE_ROUND and self._is_worth(asked, previous, now)
            place, matrix = yield from self._evaluate(u, tolerance, mean if asks else None)
            asked += matrix is not None
            if base is not None:
                ahead = _back(base, place)
                if ahead < 1.0:
                    u, now = base.u + ahead * (place.u - base.u), 1.0
                    continue
                metric = self._learned(metric, base, place, mean)
            metric = metric if matrix is None else Metric.of(matrix + self._penalty())
            base, step = place, metric.solve(place.gradient)
            length = norm(step)
            before, now = now, length / previous if previous else 1.0
            share = max(length / base.norm if base.norm else 0.0, metric.weakest)
            rate = max(2.0 * now, before) if number > 1 else 0.5  # not luckier than the step before
            left = min(rate, 1.0) * length + base.rounding * share
            if left <= self.goal:
                return self._fit(base.u + step, left)
            previous, least = length, min(least, 0.125 * self.goal / share)
            expected = base.norm
            u = base.u + step * min(1.0, longest / (length or 1.0))
            if not self.loss.admits(self._eps(u)):
                self._refuse_runaway(base, initial)
        raise FitError(
            "convergence",
            f"{self.regression.label}: the fit did not converge; give it a small ridge, or fewer terms",
        )

    def _is_worth(self, asked: int, previous: float, now: float) -> bool:
        """Return whether to ask for a curvature: far from the fit, and again where steps hardly shorten."""
        if self.regression.family is Family.GAUSSIAN or len(self.loss.pairs) > MOST_PAIRS:
            return False
        is_slow = asked < MOST_CURVATURES and (previous > FAR or now > SLOW)
        return previous > NEAR and (asked == 0 or is_slow)

    def _start(self) -> tuple[Array, float, Array, float]:
        """Return the first point, how far it is from that of the intercepts, curvature, and gradient norm."""
        regression, C, first = self.regression, self.C, self.first
        family, size, blocks = regression.family, len(C), regression.blocks
        move = multiply(C, invert_lower(centred(regression)))
        doubt = np.tile(first.rounding * np.array([math.fsum(row) for row in np.abs(move).tolist()]), blocks)
        gradient = np.concatenate([multiply(move, part) for part in first.gradient.reshape(blocks, size)])
        gradient = -gradient if regression.classes else gradient
        gradient = np.where(
            np.abs(gradient) > 2.0 * doubt, gradient, 0.0
        )  # those of narrow columns are not known
        means, start = np.array(first.responses) / first.weight, np.zeros(regression.dim)
        has_offset = any(record.offset is not None for record in regression.records)
        if regression.design.has_intercept and family is not Family.GAUSSIAN and not has_offset:
            # At the fit of the intercepts alone their gradients are 0. The others are those at zero, because
            # the columns C x are uncorrelated with the first one, a constant.
            constant = math.ldexp(float(C[0, 0]), -regression.design.exponents[0])
            reference = 1.0 - math.fsum(means.tolist()) if family is Family.LOGISTIC else 1.0
            for j in range(blocks):
                start[j * size] = kernels.log(float(means[j]) / reference) / constant
                gradient[j * size] = 0.0
        elif regression.classes:
            gradient = np.zeros_like(gradient)  # the mean of the columns is not known
        curvature = np.kron(self._bend(), self.products) + self._penalty()
        factor, longest = cholesky(curvature), LONGEST_STEP[family]
        step = np.zeros_like(start) if factor is None else -solve_factored(factor, gradient)
        length = norm(step)
        step = step * min(1.0, longest / (length or 1.0))
        return start + step, min(length, longest), curvature, norm(gradient)

    def _bend(self) -> Array:
        """Return the second derivative of a record's loss at the fit of the intercepts alone, by class."""
        share, first = 1.0, self.first
        means = np.array(first.responses) / first.weight
        if self.regression.whole is not None and self.regression.design.has_intercept:
            # The matrix is that of everybody, folds that are left out included.
            share = first.weight / math.ldexp(
                float(self.gram.raw()[0, 0]), 2 * self.regression.design.exponents[0]
            )
        match self.regression.family:
            case Family.LOGISTIC:
                return np.asarray(share * (np.diag(means) - np.multiply.outer(means, means)))
            case Family.POISSON:
                return np.asarray(share * np.diag(means))
        return np.array([[share]])

    def _penalty(self) -> Array:
        """Return the curvature of the penalty in u."""
        return congruence(self._per_class(), self.regression.penalty)

    def _per_class(self) -> Array:
        return np.asarray(np.kron(np.eye(self.regression.blocks), self.C))

    def _eps(self, u: Array) -> Array:
        parts = u.reshape(self.regression.blocks, len(self.C))
        return on_grid(np.concatenate([multiply(self.C.T, part) for part in parts]))

    def _evaluate(self, u: Array, tolerance: float, bend: float | None) -> Flow[tuple[Place, Array | None]]:
        """Return the gradient at u with rounding of at most a tolerance.

        The curvature is asked too if its mean is given, as far as it is known.
        """
        eps, dim, rows = self._eps(u), self.regression.dim, _rows(self.C)
        places = min(math.ceil(math.log2(0.5 * math.sqrt(dim) / tolerance)), FINEST)
        blocks = self.loss.gradient_blocks(eps, Lattice(places=places, C=rows))
        is_first = bool(self.regression.classes) and not len(self.loss.responses)
        # The part that all gradients share is asked once, finely enough for the last of them.
        shared = self.loss.shared_blocks(Lattice(places=FINEST, C=rows)) if is_first else ()
        key = None if self.regression.whole is None else self.regression.whole.label
        matrix = None
        if bend is not None and (key is None or self.leads):
            totals, (parts, _) = yield from both(
                ask(*shared, *blocks),
                curvatures(*self.loss.bent(eps), self.C, self.n, bend=bend, enough=COARSE * bend),
            )
            matrix = self.loss.assembled(parts)
            if key is not None:
                self.borrowed[key] = matrix / self.first.weight
        else:
            totals = yield from ask(*shared, *blocks)
            if bend is not None and key in self.borrowed:  # the one that leads has had its totals already
                matrix = self.borrowed[key] * self.first.weight
        self.loss.read_shared(totals[: len(shared)])
        penalty = multiply(self._per_class(), multiply(self.regression.penalty, eps))
        gradient = self.loss.gradient(totals[len(shared) :]) + penalty
        rounding = math.sqrt(dim) * 2.0 ** -(places + 1)
        return Place(u=u, gradient=gradient, norm=norm(gradient), rounding=rounding), matrix

    def _learned(self, metric: Metric, base: Place, place: Place, mean: float) -> Metric:
        """Return the model that also knows the change of the gradient between two points."""
        moved, change = place.u - base.u, place.gradient - base.gradient
        along, square = dot(moved, change), dot(moved, moved)
        noise = base.rounding + place.rounding
        if square and along < SEPARATED * mean * square and norm(change) > noise:
            self._refuse_separated(self._eps(moved))
        if along <= 2.0 * noise * math.sqrt(square):  # rounding alone may explain the change
            return metric
        return replace(metric, steps=(*metric.steps, Step(moved, change, along)))

    def _refuse_runaway(self, base: Place, initial: float) -> None:
        """Refuse a fit whose linear predictor runs away."""
        names, eps = self.regression.coefficient_names, self._eps(base.u)
        if self.regression.family is Family.LOGISTIC and base.norm < FLAT * initial:
            self._refuse_separated(eps)
        refuse_runaway(eps, names, self.regression.label)

    def _refuse_separated(self, direction: Array) -> None:
        if self.regression.family is not Family.LOGISTIC:
            return
        spread = np.tile(
            spread_of(self.gram.raw(), self.regression.design.has_intercept), self.regression.blocks
        )
        refuse_separated(direction, spread, self.regression.coefficient_names, self.regression.label)

    def _fit(self, u: Array, left: float) -> Fit:
        error = left * math.sqrt(self.n) / UNITS[self.regression.family]
        return Fit(regression=self.regression, coefficients=self.regression.raw(self._eps(u)), error=error)
