"""The conformance suite for targets: does a problem keep what its interface promises?

    report = check_problem(MyTarget(), law, rows)
    report.raise_if_failed()

Every check measures one figure against a tolerance that follows from the grid of the exact sums,
the law's stated accuracy and the arithmetic; derivatives are compared with sixth-order
differences. `docs/target.md` lists what is checked, and what no check can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np

from fedtmle.errors import ContributionError, InputError, NumericalError
from fedtmle.model.check_case import (
    MASS,
    ROUNDING,
    WEIGHT,
    Case,
    Check,
    CheckReport,
    FiniteLaw,
    Gap,
    NotApplicableError,
    Outcome,
    broken_rows,
    compare,
    difference,
    mean_parts,
    quotes,
    requirement,
    take,
    units_apart,
    weighted,
)
from fedtmle.model.problem import AbstractProblem, Law, PoolableRows, Rows
from fedtmle_core.exact import GRID_BITS, Sums, query_shifts
from fedtmle_core.types import Array, Part, unpack

ALL = Part.LOSS | Part.GRADIENT | Part.HESSIAN
FEW_STEPS = range(5, 9)  # for differences of psi: each needs a new law
INFLUENCES = 12  # rows whose weight in psi is varied
FAR = (4, 16, 64, 256, 1023)  # powers of two times the scale: fluctuations that are far from a fit
LARGEST = np.finfo(np.float64).max

__all__ = ["FiniteLaw", "check_problem"]


def check_problem(
    problem: AbstractProblem[Law, Rows],
    law: Law,
    rows: object,
    *,
    finite: FiniteLaw[Law] | None = None,
    finer: tuple[AbstractProblem[Law, Rows], Law] | None = None,
    seed: int = 0,
) -> CheckReport:
    """Check everything that a target promises, on some rows.

    Parameters
    ----------
    problem
        The target.
    law
        The law at which it is checked.
    rows
        Two rows or more, in any form that the target reads.
    finite
        A law with few atoms, at which psi and D are compared with Psi and its derivative.
    finer
        The same problem and law computed more accurately, with which the stated accuracy is compared.
    seed
        The seed of the points that are tried.

    Returns
    -------
    CheckReport
        Each check with its figures. `raise_if_failed` raises.

    Raises
    ------
    DataError
        The rows cannot be read.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> bool(ft.check_problem(problem, problem.start(5.0), [1.0, 2.0, 6.0]).failures)
    False
    """
    case = Case(problem, law, rows, problem.read(rows), seed, finite, finer)
    return CheckReport(checks=tuple(_run(name, partial(check, case)) for name, check in _CHECKS.items()))


def _run(name: str, check: Callable[[], Iterator[Gap]]) -> Check:
    try:
        gaps = list(check())
    except NotApplicableError as reason:
        return Check(name=name, outcome=Outcome.NOT_CHECKED, note=str(reason))
    except Exception as error:  # a target that raises has failed the check, not the suite
        return Check(name=name, outcome=Outcome.FAILED, note=f"raised {type(error).__name__}: {error}")
    if not gaps:
        return Check(name=name, outcome=Outcome.NOT_CHECKED, note="no fluctuation other than 0 was admitted")
    worst = max(gaps, key=lambda gap: (gap.failed, gap.coarse, gap.figure / (gap.tolerance or 1.0)))
    outcome, note = Outcome.PASSED, worst.remark
    if worst.failed:
        outcome, note = Outcome.FAILED, worst.subject
    elif worst.coarse:
        outcome, note = Outcome.NOT_CHECKED, "the sums are too coarse for a comparison by differences"
    return Check(name=name, outcome=outcome, figure=worst.figure, tolerance=worst.tolerance, note=note)


# Checks of a silo's computations on its rows.


def _read(case: Case[Law, Rows]) -> Iterator[Gap]:
    """An error of `read` holds no value of the rows, in whatever way they are broken."""
    for forms in broken_rows(case.raw):
        quoted = all(_quotes(case.problem, rows, value) for _, rows, value in forms)
        yield requirement(not quoted, f"an error quotes a value of the rows, given {forms[0][0]}")


def _quotes(problem: AbstractProblem[Law, Rows], rows: object, value: float) -> bool:
    try:
        with np.errstate(all="ignore"):
            problem.read(rows)
    except Exception as error:
        return quotes(error, value)
    return False


def _base_point(case: Case[Law, Rows]) -> Iterator[Gap]:
    mean, _ = mean_parts(case.submodel, case.zero, Part.LOSS)
    yield Gap(abs(float(mean[0])), 0.0, subject="the rows' loss difference at eps = 0")
    yield Gap(abs(case.normaliser.value(case.zero)), ROUNDING + case.eta, subject="A(0)")
    before = case.problem.losses(case.law, case.rows)
    after = case.problem.losses(case.problem.move(case.law, case.zero), case.rows)
    tolerance = ROUNDING * float(np.abs(before).max()) + case.eta
    yield Gap(float(np.abs(after - before).max()), tolerance, subject="losses after a move by eps = 0")


def _pooled_score(case: Case[Law, Rows]) -> Iterator[Gap]:
    for at in case.moved():
        score, resolution = mean_parts(at.submodel, at.zero, Part.GRADIENT)
        score = score + at.normaliser.gradient(at.zero)
        tolerance = resolution + ROUNDING * float(np.abs(at.eif).max()) + at.eta
        yield Gap(float(np.abs(score - at.eif.mean(axis=0)).max()), tolerance)


def _row_score(case: Case[Law, Rows]) -> Iterator[Gap]:
    """D is the score of each row, plus the row's influence on psi at a fixed law.

    If the law determines psi, the influence is zero. If psi is a pooled mean over the rows, say of Q, the
    influence is Q(o) - psi, whose pooled mean is zero.
    """
    public = case.normaliser.gradient(case.zero)
    largest = float(np.abs(case.eif).max())
    remark = ""
    for row in case.sample[:INFLUENCES]:
        score, resolution = mean_parts(case.submodel.take(row), case.zero, Part.GRADIENT)
        influence, error = _influence(case, case.problem.moments(case.law, case.part(row)))
        if influence.any():
            remark = "D is the score and a term whose pooled mean is zero"
        gap = float(np.abs(score + public + influence - case.eif[row[0]]).max())
        tolerance = resolution + ROUNDING * largest + case.eta + error
        yield Gap(gap, tolerance, size=largest, remark=remark)


def _influence(case: Case[Law, Rows], row: Sums) -> tuple[Array, float]:
    """Return n times the derivative of psi in one row's weight, and a bound of its error.

    The closing message is additive, so its sums can be formed for rows of any weights.
    """

    def psi(change: Array) -> tuple[Array, float]:
        units = round(float(change[0]) * WEIGHT)
        pooled = weighted(case.moments, WEIGHT) + weighted(row, units)
        value = case.problem.finish(case.law, pooled, WEIGHT * case.n + units).psi
        return value, 2.0**-50 * float(np.abs(value).max())

    slope, error = difference(psi, np.zeros(1), np.ones(1))
    return case.n * slope, case.n * error


def _loss_of_moves(case: Case[Law, Rows]) -> Iterator[Gap]:
    before = case.problem.losses(case.law, case.rows)
    for eps in case.points[1:]:
        after = case.problem.losses(case.problem.move(case.law, eps), case.rows)
        mean, resolution = mean_parts(case.submodel, eps, Part.LOSS)
        submodel = float(mean[0]) + case.normaliser.value(eps) - case.normaliser.value(case.zero)
        tolerance = resolution + ROUNDING * float(np.abs(before).max() + np.abs(after).max()) + case.eta
        yield Gap(abs(float((after - before).mean()) - submodel), tolerance)


def _row_gradient(case: Case[Law, Rows]) -> Iterator[Gap]:
    def loss(eps: Array) -> tuple[Array, float]:
        mean, resolution = mean_parts(case.submodel, eps, Part.LOSS)
        return mean, resolution + 2.0**-48 * float(np.abs(mean).max())

    def gradient(eps: Array) -> tuple[Array, float]:
        mean, resolution = mean_parts(case.submodel, eps, Part.GRADIENT)
        return mean[:, None], resolution

    return compare(gradient, loss, case.points, case.scale)


def _row_hessian(case: Case[Law, Rows]) -> Iterator[Gap]:
    def gradient(eps: Array) -> tuple[Array, float]:
        return mean_parts(case.submodel, eps, Part.GRADIENT)

    def hessian(eps: Array) -> tuple[Array, float]:
        mean, resolution = mean_parts(case.submodel, eps, Part.HESSIAN)
        return unpack(mean, case.problem.dim), resolution

    return compare(hessian, gradient, case.points, case.scale)


def _normaliser_gradient(case: Case[Law, Rows]) -> Iterator[Gap]:
    def value(eps: Array) -> tuple[Array, float]:
        a = case.normaliser.value(eps)
        return np.array([a]), 2.0**-48 * max(1.0, abs(a)) if a else 0.0

    def gradient(eps: Array) -> tuple[Array, float]:
        return case.normaliser.gradient(eps)[:, None], case.eta

    return compare(gradient, value, case.points, case.scale)


def _normaliser_hessian(case: Case[Law, Rows]) -> Iterator[Gap]:
    def gradient(eps: Array) -> tuple[Array, float]:
        g = case.normaliser.gradient(eps)
        return g, 2.0**-48 * float(np.abs(g).max())

    def hessian(eps: Array) -> tuple[Array, float]:
        return case.normaliser.hessian(eps), case.eta

    return compare(hessian, gradient, case.points, case.scale)


def _row_bound(case: Case[Law, Rows]) -> Iterator[Gap]:
    bound = case.problem.row_bound(case.law)
    for eps in case.points:
        shifts = query_shifts(bound, eps, ALL)
        pooled = case.submodel.sums(eps, ALL)  # raises if a row exceeds its bound
        yield Gap(float(pooled.shifts != shifts), 0.0, subject="the sums are not on the grid of row_bound")
        for row in case.sample:
            sums = case.submodel.take(row).sums(eps, ALL)
            yield Gap(
                max(map(abs, sums.units)) / 2.0**GRID_BITS, 1.0, subject="one row, relative to its bound"
            )


def _row_ceiling(case: Case[Law, Rows]) -> Iterator[Gap]:
    try:
        ceiling = case.submodel.curvature_ceiling()
    except InputError as reason:
        raise NotApplicableError(f"the submodel declares none: {reason}") from None
    for eps in case.points:
        mean, resolution = mean_parts(case.submodel, eps, Part.HESSIAN)
        hessian = unpack(mean, case.problem.dim)
        tolerance = case.problem.dim * resolution + ROUNDING * float(np.abs(ceiling).max())
        yield Gap(-float(np.linalg.eigvalsh(hessian)[0]), tolerance, subject="a negative curvature")
        yield Gap(-float(np.linalg.eigvalsh(ceiling - hessian)[0]), tolerance, subject="beyond the ceiling")


def _normaliser_ceiling(case: Case[Law, Rows]) -> Iterator[Gap]:
    try:
        ceiling = case.normaliser.curvature_ceiling(np.eye(case.problem.dim))
    except InputError as reason:
        raise NotApplicableError(f"the normaliser declares none: {reason}") from None
    for eps in case.points:
        norm = float(np.linalg.norm(case.normaliser.hessian(eps), 2))
        yield Gap(norm - ceiling, ROUNDING * ceiling + case.eta)


def _split_sums(case: Case[Law, Rows]) -> Iterator[Gap]:
    order = np.random.default_rng(case.seed).permutation(case.n)
    for eps in case.points:
        whole = case.submodel.sums(eps, ALL)
        halves = [case.submodel.take(part).sums(eps, ALL) for part in np.array_split(order, 2)]
        yield Gap(units_apart(whole, halves[0] + halves[1]), 0.0, subject="units, over a split of the rows")
        one = case.submodel.take(order[:1]).sums(eps, ALL)
        twice = case.submodel.take(np.repeat(order[:1], 2)).sums(eps, ALL)
        yield Gap(units_apart(twice, one + one), 0.0, subject="units, a row drawn twice")


def _pooled_rows(case: Case[Law, Rows]) -> Iterator[Gap]:
    problem, law = case.problem, case.law
    shifts = problem.moment_shifts(law)
    yield requirement(case.moments.shifts == shifts, "moments are not on the grid of moment_shifts")
    if not isinstance(problem, PoolableRows):
        raise NotApplicableError("the problem is no PoolableRows: it cannot pool the rows of silos")
    double: Rows = problem.concatenate([case.rows, case.rows])
    yield Gap(abs(problem.count(double) - 2 * case.n), 0.0, subject="rows, of two silos")
    pooled = problem.moments(law, double)
    yield Gap(
        units_apart(pooled, weighted(case.moments, 2)), 0.0, subject="units, the moments of a silo twice"
    )
    order = np.random.default_rng(case.seed).permutation(case.n)
    parts = [problem.moments(law, case.part(rows)) for rows in np.array_split(order, 2)]
    yield Gap(units_apart(case.moments, parts[0] + parts[1]), 0.0, subject="units, the moments of two silos")
    eps = case.points[-1]
    sums = case.submodel.sums(eps, ALL)
    pooled = problem.submodel(law, double).sums(eps, ALL)
    yield Gap(units_apart(pooled, weighted(sums, 2)), 0.0, subject="units, the sums of a silo twice")


def _closing(case: Case[Law, Rows]) -> Iterator[Gap]:
    """Compare the closing covariance with that of D, also at moved laws, where no factor happens to be 1."""
    for each in case.moved():
        yield from _closing_at(each)


def _closing_at(case: Case[Law, Rows]) -> Iterator[Gap]:
    d = case.problem.dim
    shapes = (case.estimate.psi.shape, case.estimate.covariance.shape, case.eif.shape)
    yield Gap(float(shapes != ((d,), (d, d), (case.n, d))), 0.0, subject="the shape of psi, covariance or D")
    yield Gap(float(not np.isfinite(case.estimate.psi).all()), 0.0, subject="psi is not finite")
    T = np.eye(d) if case.estimate.correction is None else case.estimate.correction
    influence = case.eif @ T.T
    covariance = np.cov(influence, rowvar=False).reshape(d, d) / case.n
    gap = float(np.abs(covariance - case.estimate.covariance).max())
    # The sums hold squares of uncentred terms: their size, not the variance's, sets the rounding.
    size = float((np.abs(influence) + np.abs(case.estimate.psi)).max()) ** 2 / case.n
    yield Gap(gap, ROUNDING * size + case.eta, subject="covariance, against that of D over the rows")


# Checks of the computations that every party makes from a law.


def _path(case: Case[Law, Rows]) -> Iterator[Gap]:
    """The path of a moved law is the path before it and eps; the silo's `max_path` bounds its length."""
    for at in case.moved():
        for eps in case.points[1:]:
            if not case.problem.admits(at.law, eps):
                continue
            before, after = case.problem.path(at.law), case.problem.path(case.problem.move(at.law, eps))
            expected = (*_floats(before), *_floats([eps]))
            yield requirement(_floats(after) == expected, "move does not append eps to the path of the law")


def _floats(steps: Iterable[Iterable[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, step)) for step in steps)


def _displacement(case: Case[Law, Rows]) -> Iterator[Gap]:
    """Each row has the same gradient at the same point of the common submodel, reached from any law."""
    origin = case.problem.displacement(case.law)
    if origin is None:
        raise NotApplicableError("displacement is None: laws share no submodel")
    for at in case.moved():
        here = at.problem.displacement(at.law)
        if here is None or np.shape(here) != (at.problem.dim,):
            yield requirement(False, "displacement is None, or of another shape than (d,), at a moved law")
            continue
        for eps in case.points:
            for row in case.sample:
                expected, resolution = mean_parts(case.submodel.take(row), eps, Part.GRADIENT)
                actual, other = mean_parts(at.submodel.take(row), eps + (origin - here), Part.GRADIENT)
                tolerance = resolution + other + ROUNDING * float(np.abs(case.eif).max())
                subject = "a row's gradient at one point, reached from two laws"
                yield Gap(float(np.abs(actual - expected).max()), tolerance, subject=subject)


def _admits(case: Case[Law, Rows]) -> Iterator[Gap]:
    """Small fluctuations are admitted; one that is not finite, or leads to no law, is refused."""
    problem, law = case.problem, case.law
    near = problem.admits(law, case.zero) and len(case.points) > 1
    yield requirement(near, "admits refuses eps = 0 or every small eps")
    signs = np.random.default_rng(case.seed).choice([-1.0, 1.0], problem.dim)
    with np.errstate(all="ignore"):
        for value in (math.nan, math.inf, -math.inf):
            for eps in np.where(np.eye(problem.dim), value, 0.0):
                yield requirement(not problem.admits(law, eps), "admits an eps that is not finite")
                yield requirement(_refuses(case, eps), "move accepts an eps that is not finite")
        for power in FAR:
            for sign in (-1.0, 1.0):
                far = np.clip(np.ldexp(sign * signs * case.scale, power), -LARGEST, LARGEST)
                if problem.admits(law, far):
                    yield requirement(_leads_to_a_law(case, far), "admits an eps that leads to no law")
                else:
                    yield requirement(_refuses(case, far), "move accepts an eps that admits refuses")


def _refuses(case: Case[Law, Rows], eps: Array) -> bool:
    try:
        case.problem.move(case.law, eps)
    except NumericalError:
        return True
    return False


def _leads_to_a_law(case: Case[Law, Rows], eps: Array) -> bool:
    """Whether `move` refuses eps, or p(eps) has a finite psi, finite losses and rows within their bound."""
    try:
        at = case.at(case.problem.move(case.law, eps))
    except NumericalError:  # refused after all
        return True
    try:
        at.submodel.sums(at.zero, Part.GRADIENT)
        losses = at.problem.losses(at.law, at.rows)
    except (ContributionError, NumericalError):
        return False
    try:
        psi = at.estimate.psi
    except NumericalError:  # the rows do not determine the estimate at this law: an error, not a wrong number
        psi = at.zero
    return bool(np.isfinite(losses).all() and np.isfinite(psi).all())


def _curvature(case: Case[Law, Rows]) -> Iterator[Gap]:
    """The curvature of the population loss is -dPsi(p(eps))/deps at eps = 0.

    E_p(eps)[grad L(p(eps))] = 0 along the submodel. Its derivative is Hess + E[grad L s^T] with s the
    submodel's score, and dPsi = E[D s^T] with D = grad L: eq. (local-score).
    """
    curvature = case.problem.curvature(case.law)
    if curvature is None:
        raise NotApplicableError("the law does not know its curvature")
    d = case.problem.dim
    yield requirement(curvature.shape == (d, d), f"curvature: expected shape {(d, d)}")

    def psi(eps: Array) -> tuple[Array, float]:
        value = case.at(case.problem.move(case.law, eps)).estimate.psi
        return value, 2.0**-48 * max(1.0, float(np.abs(value).max()))

    def derivative(_: Array) -> tuple[Array, float]:
        return -curvature, case.eta

    for gap in compare(derivative, psi, (case.zero,), case.scale, steps=FEW_STEPS):
        yield replace(gap, subject=f"psi or the curvature, {gap.subject}")


def _fixed_ceilings(case: Case[Law, Rows]) -> Iterator[Gap]:
    if not case.problem.curvature_is_fixed:
        raise NotApplicableError("the problem does not state that its curvature ceilings are fixed")
    first, *others = (_ceilings(at) for at in case.moved())
    for other in others:
        gap, size = float(np.abs(other - first).max()), float(np.abs(first).max())
        yield Gap(gap, ROUNDING * size, subject="a curvature ceiling, at a moved law against the first")


def _ceilings(case: Case[Law, Rows]) -> Array:
    """Return the curvature ceilings of the rows and of the normaliser, those that exist, as one vector."""
    identity = np.eye(case.problem.dim)
    ceilings = [np.zeros(0)]
    for ceiling in (case.submodel.curvature_ceiling, lambda: case.normaliser.curvature_ceiling(identity)):
        try:
            ceilings.append(np.ravel(ceiling()))
        except InputError:  # this loss has no curvature bound on the whole line
            continue
    return np.concatenate(ceilings)


def _accuracy(case: Case[Law, Rows]) -> Iterator[Gap]:
    """The stated accuracy is a bound: it is not zero if A, at least, is computed with rounding."""
    yield requirement(0 <= case.eta < math.inf, "accuracy is negative or not finite")
    normaliser = case.normaliser
    is_zero = not any(normaliser.value(eps) or normaliser.gradient(eps).any() for eps in case.points)
    yield requirement(is_zero or case.eta > 0, "accuracy is 0, although A is computed with rounding")


def _finer_accuracy(case: Case[Law, Rows]) -> Iterator[Gap]:
    if case.finer is None:
        raise NotApplicableError("give `finer` to compare the accuracy with the actual error")
    problem, law = case.finer
    finer = Case(problem, law, case.raw, problem.read(case.raw), case.seed)
    tolerance = case.eta + finer.eta
    pairs = [
        ("psi", case.estimate.psi, finer.estimate.psi),
        ("D", case.eif, finer.eif),
    ]
    for name, coarse, fine in pairs:
        yield _distance(coarse, fine, tolerance, f"the error of {name}")
    for eps in case.points:
        tolerance = case.problem.accuracy_at(case.law, eps) + problem.accuracy_at(law, eps)
        coarse, fine = case.normaliser.gradient(eps), finer.normaliser.gradient(eps)
        yield _distance(coarse, fine, tolerance, f"the error of grad A at eps {'!=' if eps.any() else '='} 0")


def _distance(coarse: Array, fine: Array, tolerance: float, subject: str) -> Gap:
    gap, size = float(np.abs(coarse - fine).max()), float(np.abs(fine).max())
    return Gap(gap, tolerance + ROUNDING * max(1.0, size), subject=subject)


# Psi itself, at a law with finitely many atoms.


def _finite(case: Case[Law, Rows]) -> FiniteLaw[Law]:
    if case.finite is None:
        raise NotApplicableError("give a FiniteLaw to check psi and the EIF themselves")
    return case.finite


def _psi_at(case: Case[Law, Rows], masses: Array) -> Array:
    """Return the Psi of the `FiniteLaw`; of a target with one coordinate it may be a number."""
    value = np.atleast_1d(np.asarray(_finite(case).psi(masses), dtype=np.float64))
    if value.shape != (case.problem.dim,):
        raise InputError(
            f"psi of the FiniteLaw: return an array of shape {(case.problem.dim,)}, not {value.shape}"
        )
    return value


def _finite_eif(case: Case[Law, Rows]) -> Array:
    finite = _finite(case)
    return case.problem.eif(finite.law, case.problem.read(finite.support), _psi_at(case, finite.masses))


def _psi(case: Case[Law, Rows]) -> Iterator[Gap]:
    finite, problem = _finite(case), case.problem
    expected = _psi_at(case, finite.masses)
    counts = [round(MASS * float(mass)) for mass in finite.masses]

    def moments(atom: int) -> Sums:
        return problem.moments(finite.law, problem.read(take(finite.support, np.array([atom]))))

    pooled = reduce(add, (weighted(moments(atom), count) for atom, count in enumerate(counts)))
    psi = problem.finish(finite.law, pooled, sum(counts)).psi
    tolerance = ROUNDING * float(np.abs(expected).max() + 1) + problem.accuracy(finite.law)
    yield Gap(float(np.abs(psi - expected).max()), tolerance)


def _centred(case: Case[Law, Rows]) -> Iterator[Gap]:
    finite, eif = _finite(case), _finite_eif(case)
    tolerance = ROUNDING * float(np.abs(eif).max()) + case.problem.accuracy(finite.law)
    yield Gap(float(np.abs(finite.masses @ eif).max()), tolerance)


def _pathwise(case: Case[Law, Rows]) -> Iterator[Gap]:
    finite, eif = _finite(case), _finite_eif(case)
    masses, accuracy = finite.masses, case.problem.accuracy(finite.law)
    rng = np.random.default_rng(case.seed)
    for _ in range(8):
        score = rng.uniform(-1, 1, len(masses))
        score -= masses @ score
        score /= 2 * np.abs(score).max()  # 1 + t score stays positive for |t| < 2

        def along(t: Array, score: Array = score) -> tuple[Array, float]:
            value = _psi_at(case, masses * (1 + t[0] * score))
            return value, 2.0**-48 * float(np.abs(value).max())

        def derivative(_: Array, score: Array = score) -> tuple[Array, float]:
            return ((masses * score) @ eif)[None, :], accuracy

        yield from compare(derivative, along, (np.zeros(1),), np.ones(1), size=float(np.abs(eif).max()))


_CHECKS: dict[str, Callable[[Case[Any, Any]], Iterator[Gap]]] = {
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
    "fixed curvature ceilings": _fixed_ceilings,
    "sums add up over rows": _split_sums,
    "rows pool": _pooled_rows,
    "closing message gives the covariance": _closing,
    "curvature = -dPsi/deps": _curvature,
    "accuracy is stated": _accuracy,
    "accuracy bounds the error": _finer_accuracy,
    "admitted fluctuations": _admits,
    "path of accepted fluctuations": _path,
    "displacement of laws": _displacement,
    "read quotes no value": _read,
    "psi is Psi": _psi,
    "D is centred": _centred,
    "D is the derivative of Psi": _pathwise,
}
