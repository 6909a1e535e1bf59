"""The conformance suite for targets: does a problem keep what its interface promises?

    report = check_problem(MyTarget(), law, rows)
    report.raise_if_failed()

Every check measures one figure against a tolerance that follows from the grid of the exact sums,
the law's stated accuracy and the arithmetic; derivatives are compared with sixth-order
differences. With a `FiniteLaw` the EIF itself is checked against the derivative of Psi.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Generic, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.check_report import Check, CheckReport, Outcome
from fedtmle.model.exact import GRID_BITS, Sums, query_shifts
from fedtmle.model.problem import AbstractProblem, Estimate, Law, Rows
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.types import Array, IntArray, Part, unpack

ALL = Part.LOSS | Part.GRADIENT | Part.HESSIAN
ROUNDING = 2.0**-44  # of a mean of computed terms, relative to the largest
SAMPLE = 50  # rows looked at one by one
POINTS = 3  # random fluctuations tried
USEFUL = 1e-4  # a tolerance above this share of what it bounds checks nothing


@final
@dataclass(frozen=True, kw_only=True)
class FiniteLaw(Generic[Law]):
    """A law p with finitely many atoms, to compare D(p) with the derivative of Psi at p.

    ``support`` holds one row per atom, as `read` accepts it; ``masses`` their probabilities;
    ``law`` is p as the problem's law, and ``psi`` is Psi, written longhand, as a function of
    any masses on the support.
    """

    support: object
    masses: Array
    law: Law
    psi: Callable[[Array], Array]


def check_problem(
    problem: AbstractProblem[Law, Rows],
    law: Law,
    rows: object,
    *,
    finite: FiniteLaw[Law] | None = None,
    seed: int = 0,
) -> CheckReport:
    """Check ``problem`` at ``law`` on ``rows`` (whatever `read` accepts, two rows or more)."""
    case = _Case(problem, law, problem.read(rows), seed)
    checks = [_run(name, partial(check, case)) for name, check in _CHECKS.items()]
    for name, finite_check in _FINITE_CHECKS.items():
        if finite is None:
            note = "give a FiniteLaw to check the EIF itself"
            checks.append(Check(name=name, outcome=Outcome.NOT_CHECKED, note=note))
        else:
            checks.append(_run(name, partial(finite_check, problem, finite, seed)))
    return CheckReport(checks=tuple(checks))


@dataclass(frozen=True)
class _Gap:
    """Two numbers that should agree differ by ``figure``; ``size`` is theirs, to judge the tolerance.

    ``what`` names them in a failure; ``remark`` is worth saying of a success too.
    """

    figure: float
    tolerance: float
    size: float = math.inf
    what: str = ""
    remark: str = ""

    @property
    def failed(self) -> bool:
        return not self.figure <= self.tolerance  # written so that NaN fails

    @property
    def coarse(self) -> bool:
        return self.tolerance > USEFUL * self.size > 0


class _NotApplicable(Exception):  # noqa: N818 - a signal, caught in `_run`
    pass


def _run(name: str, check: Callable[[], Iterator[_Gap]]) -> Check:
    try:
        gaps = list(check())
    except _NotApplicable as reason:
        return Check(name=name, outcome=Outcome.NOT_CHECKED, note=str(reason))
    except Exception as error:  # a target that raises has failed the check, not the suite
        return Check(name=name, outcome=Outcome.FAILED, note=f"raised {type(error).__name__}: {error}")
    worst = max(gaps, key=lambda gap: (gap.failed, gap.coarse, gap.figure / (gap.tolerance or 1.0)))
    outcome, note = Outcome.PASSED, worst.remark
    if worst.failed:
        outcome, note = Outcome.FAILED, worst.what
    elif worst.coarse:
        outcome, note = Outcome.NOT_CHECKED, "the sums are too coarse for a comparison by differences"
    return Check(name=name, outcome=outcome, figure=worst.figure, tolerance=worst.tolerance, note=note)


@dataclass(frozen=True)
class _Case(Generic[Law, Rows]):
    """A problem at a law on rows, with what the checks share computed once."""

    problem: AbstractProblem[Law, Rows]
    law: Law
    rows: Rows
    seed: int

    @cached_property
    def n(self) -> int:
        return self.problem.count(self.rows)

    @cached_property
    def eta(self) -> float:
        return self.problem.accuracy(self.law)

    @cached_property
    def zero(self) -> Array:
        return np.zeros(self.problem.dim)

    @cached_property
    def submodel(self) -> AbstractSubmodel:
        return self.problem.submodel(self.law, self.rows)

    @cached_property
    def normaliser(self) -> AbstractNormaliser:
        return self.problem.normaliser(self.law)

    @cached_property
    def estimate(self) -> Estimate:
        return self.problem.finish(self.law, self.problem.moments(self.law, self.rows), self.n)

    @cached_property
    def eif(self) -> Array:
        return self.problem.eif(self.law, self.rows, self.estimate.psi)

    @cached_property
    def scale(self) -> Array:
        """The fluctuation that the rows can tell from zero: sd(D_j) / H_jj, shrunk until admitted."""
        mean, _ = _mean(self.submodel, self.zero, Part.HESSIAN)
        curvature = np.diag(unpack(mean, self.problem.dim) + self.normaliser.hessian(self.zero))
        spread = self.eif.std(axis=0)
        smallest = 2.0 ** -self.problem.row_bound(self.law).gradient
        informed = (curvature > 0) & (spread > 0)
        scale = np.divide(spread, curvature, out=np.full(self.problem.dim, smallest), where=informed)
        for _ in range(60):
            if all(self.problem.admits(self.law, sign * scale) for sign in (-1, 1)):
                break
            scale = scale / 2
        return np.asarray(scale)

    @cached_property
    def points(self) -> tuple[Array, ...]:
        """Zero and a few random admitted fluctuations."""
        rng = np.random.default_rng(self.seed)
        random = [self.scale * rng.uniform(-1, 1, self.problem.dim) for _ in range(POINTS)]
        return (self.zero, *(eps for eps in random if self.problem.admits(self.law, eps)))

    @cached_property
    def sample(self) -> tuple[IntArray, ...]:
        """Some rows, each as a batch of one."""
        order = np.random.default_rng(self.seed).permutation(self.n)[:SAMPLE]
        return tuple(np.array([row]) for row in order)

    def moved(self) -> Iterator[_Case[Law, Rows]]:
        """The same rows at the law and at laws that fluctuations lead to."""
        yield self
        for eps in self.points[1:]:
            yield _Case(self.problem, self.problem.move(self.law, eps), self.rows, self.seed)


def _mean(submodel: AbstractSubmodel, eps: Array, parts: Part) -> tuple[Array, float]:
    """Means of the asked parts, and the largest error that the grid allows in one."""
    sums = submodel.sums(eps, parts)
    return sums.values(submodel.n_rows), max(2.0 ** -(shift + 1) for shift in sums.shifts)


def _base_point(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    mean, _ = _mean(case.submodel, case.zero, Part.LOSS)
    yield _Gap(abs(float(mean[0])), 0.0, what="the rows' loss difference at eps = 0")
    yield _Gap(abs(case.normaliser.value(case.zero)), ROUNDING + case.eta, what="A(0)")
    before = case.problem.losses(case.law, case.rows)
    after = case.problem.losses(case.problem.move(case.law, case.zero), case.rows)
    tolerance = ROUNDING * float(np.abs(before).max()) + case.eta
    yield _Gap(float(np.abs(after - before).max()), tolerance, what="losses after a move by eps = 0")


def _pooled_score(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    for at in case.moved():
        score, resolution = _mean(at.submodel, at.zero, Part.GRADIENT)
        score = score + at.normaliser.gradient(at.zero)
        tolerance = resolution + ROUNDING * float(np.abs(at.eif).max()) + at.eta
        yield _Gap(float(np.abs(score - at.eif.mean(axis=0)).max()), tolerance)


def _row_score(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    public = case.normaliser.gradient(case.zero)
    figure = tolerance = 0.0
    for row in case.sample:
        score, resolution = _mean(case.submodel.take(row), case.zero, Part.GRADIENT)
        figure = max(figure, float(np.abs(score + public - case.eif[row[0]]).max()))
        tolerance = resolution + ROUNDING * float(np.abs(case.eif).max()) + case.eta
    if figure <= tolerance:
        yield _Gap(figure, tolerance)
    else:  # allowed if what D has beyond the score has pooled mean zero, at every law
        for gap in _pooled_score(case):
            yield _Gap(gap.figure, gap.tolerance, remark="up to a term of D whose pooled mean is zero")


def _loss_of_moves(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    before = case.problem.losses(case.law, case.rows)
    for eps in case.points[1:]:
        after = case.problem.losses(case.problem.move(case.law, eps), case.rows)
        mean, resolution = _mean(case.submodel, eps, Part.LOSS)
        submodel = float(mean[0]) + case.normaliser.value(eps) - case.normaliser.value(case.zero)
        tolerance = resolution + ROUNDING * float(np.abs(before).max() + np.abs(after).max()) + case.eta
        yield _Gap(abs(float((after - before).mean()) - submodel), tolerance)


def _row_gradient(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    def loss(eps: Array) -> tuple[Array, float]:
        mean, resolution = _mean(case.submodel, eps, Part.LOSS)
        return mean, resolution + 2.0**-48 * float(np.abs(mean).max())

    def gradient(eps: Array) -> tuple[Array, float]:
        mean, resolution = _mean(case.submodel, eps, Part.GRADIENT)
        return mean[:, None], resolution

    return _compare(gradient, loss, case.points, case.scale)


def _row_hessian(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    def gradient(eps: Array) -> tuple[Array, float]:
        return _mean(case.submodel, eps, Part.GRADIENT)

    def hessian(eps: Array) -> tuple[Array, float]:
        mean, resolution = _mean(case.submodel, eps, Part.HESSIAN)
        return unpack(mean, case.problem.dim), resolution

    return _compare(hessian, gradient, case.points, case.scale)


def _normaliser_gradient(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    def value(eps: Array) -> tuple[Array, float]:
        a = case.normaliser.value(eps)
        return np.array([a]), 2.0**-48 * max(1.0, abs(a)) if a else 0.0

    def gradient(eps: Array) -> tuple[Array, float]:
        return case.normaliser.gradient(eps)[:, None], case.eta

    return _compare(gradient, value, case.points, case.scale)


def _normaliser_hessian(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    def gradient(eps: Array) -> tuple[Array, float]:
        g = case.normaliser.gradient(eps)
        return g, 2.0**-48 * float(np.abs(g).max())

    def hessian(eps: Array) -> tuple[Array, float]:
        return case.normaliser.hessian(eps), case.eta

    return _compare(hessian, gradient, case.points, case.scale)


def _row_bound(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    bound = case.problem.row_bound(case.law)
    for eps in case.points:
        shifts = query_shifts(bound, eps, ALL)
        pooled = case.submodel.sums(eps, ALL)  # an error if a row is beyond
        yield _Gap(float(pooled.shifts != shifts), 0.0, what="the sums are not on the grid of row_bound")
        for row in case.sample:
            sums = case.submodel.take(row).sums(eps, ALL)
            yield _Gap(max(map(abs, sums.units)) / 2.0**GRID_BITS, 1.0, what="one row, relative to its bound")


def _row_ceiling(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    try:
        ceiling = case.submodel.curvature_ceiling()
    except InputError as reason:
        raise _NotApplicable(f"the submodel declares none: {reason}") from None
    for eps in case.points:
        mean, resolution = _mean(case.submodel, eps, Part.HESSIAN)
        hessian = unpack(mean, case.problem.dim)
        tolerance = case.problem.dim * resolution + ROUNDING * float(np.abs(ceiling).max())
        yield _Gap(-float(np.linalg.eigvalsh(hessian)[0]), tolerance, what="a negative curvature")
        yield _Gap(-float(np.linalg.eigvalsh(ceiling - hessian)[0]), tolerance, what="beyond the ceiling")


def _normaliser_ceiling(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    try:
        ceiling = case.normaliser.curvature_ceiling(np.eye(case.problem.dim))
    except InputError as reason:
        raise _NotApplicable(f"the normaliser declares none: {reason}") from None
    for eps in case.points:
        norm = float(np.linalg.norm(case.normaliser.hessian(eps), 2))
        yield _Gap(norm - ceiling, ROUNDING * ceiling + case.eta)


def _split_sums(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    order = np.random.default_rng(case.seed).permutation(case.n)
    for eps in case.points:
        whole = case.submodel.sums(eps, ALL)
        halves = [case.submodel.take(part).sums(eps, ALL) for part in np.array_split(order, 2)]
        yield _Gap(_units_apart(whole, halves[0] + halves[1]), 0.0, what="units, over a split of the rows")
        one = case.submodel.take(order[:1]).sums(eps, ALL)
        twice = case.submodel.take(np.repeat(order[:1], 2)).sums(eps, ALL)
        yield _Gap(_units_apart(twice, one + one), 0.0, what="units, a row drawn twice")


def _pooled_rows(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    problem, law = case.problem, case.law
    double = problem.concatenate([case.rows, case.rows])
    yield _Gap(abs(problem.count(double) - 2 * case.n), 0.0, what="rows, of two silos")
    once, twice = problem.moments(law, case.rows), problem.moments(law, double)
    yield _Gap(_units_apart(twice, once + once), 0.0, what="units, the moments of two silos")
    yield _Gap(float(once.shifts != problem.moment_shifts(law)), 0.0, what="moments are not on moment_shifts")
    eps = case.points[-1]
    sums = case.submodel.sums(eps, ALL)
    pooled = problem.submodel(law, double).sums(eps, ALL)
    yield _Gap(_units_apart(pooled, sums + sums), 0.0, what="units, the sums of two silos")


def _closing(case: _Case[Law, Rows]) -> Iterator[_Gap]:
    d = case.problem.dim
    shapes = (case.estimate.psi.shape, case.estimate.covariance.shape, case.eif.shape)
    yield _Gap(float(shapes != ((d,), (d, d), (case.n, d))), 0.0, what="the shape of psi, covariance or D")
    yield _Gap(float(not np.isfinite(case.estimate.psi).all()), 0.0, what="psi is not finite")
    T = np.eye(d) if case.estimate.correction is None else case.estimate.correction
    influence = case.eif @ T.T
    covariance = np.cov(influence, rowvar=False).reshape(d, d) / case.n
    gap = float(np.abs(covariance - case.estimate.covariance).max())
    # The sums hold squares of uncentred terms: their size, not the variance's, sets the rounding.
    size = float((np.abs(influence) + np.abs(case.estimate.psi)).max()) ** 2 / case.n
    yield _Gap(gap, ROUNDING * size + case.eta, what="covariance, against that of D over the rows")


def _centred(problem: AbstractProblem[Law, Rows], finite: FiniteLaw[Law], seed: int) -> Iterator[_Gap]:  # noqa: ARG001
    eif = problem.eif(finite.law, problem.read(finite.support), finite.psi(finite.masses))
    tolerance = ROUNDING * float(np.abs(eif).max()) + problem.accuracy(finite.law)
    yield _Gap(float(np.abs(finite.masses @ eif).max()), tolerance)


def _pathwise(problem: AbstractProblem[Law, Rows], finite: FiniteLaw[Law], seed: int) -> Iterator[_Gap]:
    masses = finite.masses
    eif = problem.eif(finite.law, problem.read(finite.support), finite.psi(masses))
    rng = np.random.default_rng(seed)
    for _ in range(8):
        score = rng.uniform(-1, 1, len(masses))
        score -= masses @ score
        score /= 2 * np.abs(score).max()  # 1 + t score stays positive for |t| < 2

        def along(t: Array, score: Array = score) -> tuple[Array, float]:
            psi = np.asarray(finite.psi(masses * (1 + t[0] * score)), dtype=np.float64)
            return psi, 2.0**-48 * float(np.abs(psi).max())

        def derivative(_: Array, score: Array = score) -> tuple[Array, float]:
            return ((masses * score) @ eif)[None, :], problem.accuracy(finite.law)

        yield from _compare(derivative, along, (np.zeros(1),), np.ones(1), size=float(np.abs(eif).max()))


Computed = Callable[[Array], tuple[Array, float]]  # a function of eps, and a bound of its error


def _compare(
    derivative: Computed, f: Computed, points: tuple[Array, ...], scale: Array, *, size: float = 0.0
) -> Iterator[_Gap]:
    """Row j of ``derivative`` at each point against differences of f along e_j."""
    derivatives = [derivative(eps) for eps in points]
    size = max(size, *(float(np.abs(value).max()) for value, _ in derivatives))
    for eps, (value, resolution) in zip(points, derivatives, strict=True):
        for j, axis in enumerate(np.diag(scale)):
            difference, error = _difference(f, eps, axis)
            gap = float(np.abs(value[j] - difference / scale[j]).max())
            tolerance = resolution + error / float(scale[j]) + ROUNDING * size
            yield _Gap(gap, tolerance, size=size, what=f"along coordinate {j}")


def _difference(f: Computed, eps: Array, axis: Array) -> tuple[Array, float]:
    """The derivative of f(eps + t axis) at t = 0 by sixth-order differences, and a bound of its error.

    A step's truncation error is bounded by the change from twice that step, of which it is 1/63;
    of several steps we take the one with the least sum of that and of f's own errors.
    """

    def central(step: float) -> tuple[Array, float]:
        terms = [
            (w, f(eps + k * step * axis), f(eps - k * step * axis)) for k, w in ((1, 45), (2, -9), (3, 1))
        ]
        slope = np.sum([w * (up[0] - down[0]) for w, up, down in terms], axis=0) / (60 * step)
        return slope, sum(abs(w) * (up[1] + down[1]) for w, up, down in terms) / (60 * step)

    slopes = [central(2.0**-k) for k in range(3, 11)]
    errors = [float(np.abs(fine[0] - coarse[0]).max()) + fine[1] for coarse, fine in pairwise(slopes)]
    best = int(np.argmin(errors))
    return slopes[best + 1][0], errors[best]


def _units_apart(a: Sums, b: Sums) -> float:
    return float(max(abs(x - y) for x, y in zip(a.units, b.units, strict=True)))


_CHECKS: dict[str, Callable[[_Case[Any, Any]], Iterator[_Gap]]] = {
    "base point p(0) = p": _base_point,
    "score = D, pooled": _pooled_score,
    "score = D, row by row": _row_score,
    "loss of moves = loss of the submodel": _loss_of_moves,
    "gradient of the rows' loss": _row_gradient,
    "Hessian of the rows' loss": _row_hessian,
    "gradient of the normaliser": _normaliser_gradient,
    "Hessian of the normaliser": _normaliser_hessian,
    "row bound": _row_bound,
    "curvature ceiling of the rows": _row_ceiling,
    "curvature ceiling of the normaliser": _normaliser_ceiling,
    "sums add up over rows": _split_sums,
    "rows pool": _pooled_rows,
    "closing message gives the covariance": _closing,
}
_FINITE_CHECKS: dict[str, Callable[[AbstractProblem[Any, Any], FiniteLaw[Any], int], Iterator[_Gap]]] = {
    "D is centred": _centred,
    "D is the derivative of Psi": _pathwise,
}
