"""A finished personalised run (Algorithm 5), followed on the rows, beside the bounds of section 4.4.

`follow_fits` computes each round's local gaps and the improvement that averaging forfeits. The other
functions return what their bounds need. Constants are those of the run's path: zeta is the least for which
eq:local-derivative-comparison holds at the points that the proof uses, so no covering number is needed;
beta_4 comes from second differences of the Hessian along the segments from each fit to the average.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.fit import LocalSolver, fit_local
from fedtmle.model.problem import AbstractProblem, Law, Rows
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.protocol.fits import RetirementRule
from fedtmle.theory import personalized
from fedtmle.theory.path import Basis
from fedtmle.theory.personalized import chi, disagreement
from fedtmle_core.types import Array, Part, unpack

SEGMENT = np.linspace(0.0, 1.0, 5)


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """One round at the server: the fit of each silo asked, zero if the silo retired, and the update."""

    fits: Mapping[str, Array]
    update: Array


@dataclass(frozen=True, kw_only=True)
class FitRound:
    """One round of the active set A_k; arrays are over its silos, in ``active``'s order."""

    active: tuple[str, ...]
    alpha: tuple[float, ...]
    sizes: tuple[int, ...]
    fits: Array  # (s, d), exact ones, before any lattice
    gap: Array  # Delta_m(p^k) = l_{m,k}(0) - l_{m,k}(fit_m)
    decrease: Array  # l_m(p^k) - l_m(p^{k+1})
    score_norm: Array  # norm of the local EIF mean at p^k
    smoothness: float  # beta: bounds every silo's Hessian in this submodel
    smoothness_is_bound: bool  # else the largest Hessian norm at the points visited
    gradient_scale: float  # G_1
    zeta: float
    fourth: float  # beta_4
    retired_mass: float  # sum of alpha_m over the silos that left in this round
    retired_gap: float  # sum of alpha_m Delta_m over them: zero if their fits were
    retired_bound: float  # sum of alpha_m times the bound of Delta_m that their rule of retirement gives
    slope: float  # the largest gradient norm of a silo's loss at its fit as sent, before any lattice
    negative: float  # nu: Hessians at the fits are at least -nu

    @property
    def error(self) -> float:
        """sum over A_k of alpha_m {l_{m,k}(eps^k) - l_{m,k}(fit_m)}: the improvement forfeited."""
        return math.fsum(a * (g - d) for a, g, d in zip(self.alpha, self.gap, self.decrease, strict=True))

    @property
    def chi(self) -> float:
        return chi(self.alpha, self.sizes)

    @property
    def V_2(self) -> float:
        return disagreement(2, self.alpha, self.fits)

    @property
    def V_4(self) -> float:
        return disagreement(4, self.alpha, self.fits)


class _Expansion(NamedTuple):
    """A loss less its value at the origin, its gradient and its Hessian, at one point."""

    loss: float
    gradient: Array
    hessian: Array


class _Public:
    """The normaliser, evaluated once at each point: every silo is asked at the same ones."""

    def __init__(self, normaliser: AbstractNormaliser, dim: int) -> None:
        self.normaliser = normaliser
        self._base = normaliser.value(np.zeros(dim))
        self._known: dict[bytes, _Expansion] = {}

    def at(self, eps: Array) -> _Expansion:
        """Return A(eps) - A(0), gradient and Hessian."""
        key = eps.tobytes()
        if key not in self._known:
            A = self.normaliser
            self._known[key] = _Expansion(A.value(eps) - self._base, A.gradient(eps), A.hessian(eps))
        return self._known[key]


@dataclass(frozen=True)
class _Local:
    """One silo's loss in the current submodel."""

    submodel: AbstractSubmodel
    public: _Public
    n_rows: int

    def at(self, eps: Array) -> _Expansion:
        """Return l_m(eps) - l_m(0), gradient and Hessian."""
        d = len(eps)
        sums = self.submodel.sums(eps, Part.LOSS | Part.GRADIENT | Part.HESSIAN)
        values = sums.values(self.n_rows)
        public = self.public.at(eps)
        return _Expansion(
            loss=float(values[0]) + public.loss,
            gradient=values[1 : 1 + d] + public.gradient,
            hessian=unpack(values[1 + d :], d) + public.hessian,
        )

    def ceiling(self) -> float | None:
        try:
            rows = self.submodel.curvature_ceiling()
        except InputError:  # a loss with no curvature bound on the whole line
            return None
        return float(np.linalg.norm(rows, 2)) + self.public.normaliser.curvature_ceiling(np.eye(len(rows)))


def follow_fits(
    problem: AbstractProblem[Law, Rows],
    law: Law,
    rows: Mapping[str, Rows],
    rounds: Sequence[Uploaded],
    base_weights: Mapping[str, float],
    *,
    rule: RetirementRule,
    solver: LocalSolver,
    radius: float,
    exhaustive: bool,
) -> tuple[FitRound, ...]:
    """Return each round that made an update; ``rule`` and ``solver`` are those of the silos."""
    followed = []
    as_sent = rule == RetirementRule()  # neither rounded nor replaced by zero
    for uploaded in rounds:
        public = _Public(problem.normaliser(law), problem.dim)
        local = {
            name: _Local(problem.submodel(law, rows[name]), public, problem.count(rows[name]))
            for name in uploaded.fits
        }

        def fit_of(name: str, sent: Array, local: Mapping[str, _Local] = local) -> Array:
            if as_sent:
                return sent
            submodel, normaliser = local[name].submodel, local[name].public.normaliser
            return fit_local(
                submodel, normaliser, dim=problem.dim, radius=radius, exhaustive=exhaustive, solver=solver
            ).eps

        fits = {name: fit_of(name, sent) for name, sent in uploaded.fits.items()}
        active = [name for name, sent in uploaded.fits.items() if sent.any()]
        row_gradient = 2.0 ** problem.row_bound(law).gradient
        left = [name for name in uploaded.fits if name not in active]
        spread = {
            name: _variance(problem, law, rows[name]) if rule.noise is not None else 0.0 for name in left
        }
        allowance = _Allowance(rule=rule, variance=spread)
        followed.append(_round(local, active, fits, uploaded.update, base_weights, row_gradient, allowance))
        law = problem.move(law, uploaded.update)
    return tuple(followed)


def _round(
    asked: Mapping[str, _Local],
    active: Sequence[str],
    fits: Mapping[str, Array],
    update: Array,
    alpha: Mapping[str, float],
    row_gradient: float,
    allowance: _Allowance,
) -> FitRound:
    d = len(update)
    local = {name: asked[name] for name in active}
    points = [update, *(fits[name] for name in active)]
    at_update = {name: silo.at(update) for name, silo in local.items()}
    at_fits = {name: [silo.at(fits[other]) for other in active] for name, silo in local.items()}
    values = {name: [at_update[name], *at_fits[name]] for name in active}
    ceilings = [silo.ceiling() for silo in asked.values()]
    bounded = [ceiling for ceiling in ceilings if ceiling is not None]
    visited = max(float(np.linalg.norm(at.hessian, 2)) for of_silo in values.values() for at in of_silo)
    beta = max(bounded) if len(bounded) == len(ceilings) else visited
    public = asked[active[0]].public
    # One row's gradient: the declared bound of the row part, and the public part where it was seen.
    G_1 = math.sqrt(d) * row_gradient + max(float(np.linalg.norm(public.at(p).gradient)) for p in points)
    retired = [name for name in asked if name not in local]
    return FitRound(
        active=tuple(local),
        alpha=tuple(alpha[name] for name in local),
        sizes=tuple(silo.n_rows for silo in local.values()),
        fits=np.array([fits[name] for name in local]),
        gap=np.array([-at_fits[name][m].loss for m, name in enumerate(local)]),
        decrease=np.array([-at_update[name].loss for name in local]),
        score_norm=np.array([np.linalg.norm(silo.at(np.zeros(d)).gradient) for silo in local.values()]),
        smoothness=beta,
        smoothness_is_bound=len(bounded) == len(ceilings),
        gradient_scale=G_1,
        zeta=_zeta(values, {name: silo.n_rows for name, silo in local.items()}, G_1, beta),
        fourth=max(_fourth(silo, fits[name], update) for name, silo in local.items()),
        retired_mass=math.fsum(alpha[name] for name in retired),
        retired_gap=math.fsum(-alpha[name] * asked[name].at(fits[name]).loss for name in retired),
        retired_bound=math.fsum(
            alpha[name] * allowance.gap(asked[name], name, fits[name], beta) for name in retired
        ),
        slope=max(float(np.linalg.norm(at_fits[name][m].gradient)) for m, name in enumerate(local)),
        negative=max(
            max(0.0, -float(np.linalg.eigvalsh(at_fits[name][m].hessian)[0])) for m, name in enumerate(local)
        ),
    )


@dataclass(frozen=True)
class _Allowance:
    """The largest gap that a retirement rule lets a silo leave with."""

    rule: RetirementRule
    variance: Mapping[str, float]  # the largest eigenvalue of the covariance of each such silo's estimate

    def gap(self, local: _Local, name: str, fit: Array, beta: float) -> float:
        d, rule = len(fit), self.rule
        rounded = personalized.lattice_gap_bound(beta, d, rule.lattice or 0.0)
        bound = personalized.tolerance_gap_bound(rule.gap or 0.0, rounded)
        if rule.noise is None:
            return bound
        least = min(float(np.linalg.eigvalsh(local.at(t * fit).hessian)[0]) for t in SEGMENT)
        return max(bound, personalized.noise_gap_bound(rule.noise, d, self.variance[name], least))


def _variance(problem: AbstractProblem[Law, Rows], law: Law, rows: Rows) -> float:
    estimate = problem.finish(law, problem.moments(law, rows), problem.count(rows))
    return float(np.linalg.eigvalsh(estimate.covariance)[-1])


def _zeta(
    values: Mapping[str, Sequence[_Expansion]],
    sizes: Mapping[str, int],
    G_1: float,
    beta: float,
) -> float:
    """Return the least zeta with eq:local-derivative-comparison at every point, for every pair of silos."""
    ratios = [0.0]
    for m, j in itertools.permutations(values, 2):
        scale = math.sqrt(1 / sizes[m] + 1 / sizes[j])
        for here, there in zip(values[m], values[j], strict=True):
            ratios.append(float(np.linalg.norm(here.gradient - there.gradient)) / (G_1 * scale))
            ratios.append(float(np.linalg.norm(here.hessian - there.hessian, 2)) / (beta * scale))
    return max(ratios)


def _fourth(local: _Local, fit: Array, update: Array) -> float:
    """max |d^4/dt^4 l_m(fit + t v)|/||v||^4 on a grid, v = update - fit, from differences of v.H v."""
    v = update - fit
    length = float(np.linalg.norm(v))
    if length == 0:
        return 0.0
    second = np.array([v @ local.at(fit + t * v).hessian @ v for t in SEGMENT])
    return float(np.abs(np.diff(second, 2)).max() / (SEGMENT[1] ** 2 * length**4))


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """One round: the improvement forfeited through averaging, and its two bounds."""

    update: int
    active: int
    error: float
    quadratic_bound: float
    fourth_order_bound: float
    chi: float
    V_2: float
    V_4: float


def averaging_rounds(followed: Sequence[FitRound], *, lattice: float | None) -> tuple[Averaging, ...]:
    """Return lem:local-fourth-order at each round, with the gains of a lattice and of inexact fits.

    ``lattice`` is the spacing that fits were rounded to.
    """
    return tuple(
        Averaging(
            update=k,
            active=len(r.active),
            error=r.error,
            quadratic_bound=_inexact(r)
            + personalized.lattice_quadratic_bound(
                r.smoothness, r.V_2, r.fits.shape[1], lattice or 0.0, math.fsum(r.alpha)
            ),
            fourth_order_bound=_fourth_order(r, lattice or 0.0) + _inexact(r),
            chi=r.chi,
            V_2=r.V_2,
            V_4=r.V_4,
        )
        for k, r in enumerate(followed)
    )


def _inexact(r: FitRound) -> float:
    return personalized.inexact_bound(r.slope, math.fsum(r.alpha), r.V_2, r.negative)


def _fourth_order(r: FitRound, lattice: float) -> float:
    mass, d = math.fsum(r.alpha), r.fits.shape[1]
    return personalized.fourth_order_bound(
        r.gradient_scale, r.smoothness, r.fourth, r.zeta, r.chi, r.V_2, r.V_4
    ) + personalized.lattice_fourth_order(r.smoothness, r.V_2, d, lattice, mass)


def gaps(followed: Sequence[FitRound]) -> Iterator[float]:
    """Yield sum_m alpha_m Delta_m(p_m^k) of each round; a retired silo keeps the gap at its retirement."""
    retired_gaps = itertools.accumulate(r.retired_gap for r in followed)
    for r, retired in zip(followed, retired_gaps, strict=True):
        yield math.fsum(a * float(g) for a, g in zip(r.alpha, r.gap, strict=True)) + retired


def personal_loss_budget(followed: Sequence[FitRound]) -> float:
    """sum_m alpha_m {l_m(p^0) - min of l_m over the laws that m had}: the traversed lower bound."""
    weight: dict[str, float] = {}
    fallen: dict[str, list[float]] = {}
    for r in followed:
        for name, alpha, decrease in zip(r.active, r.alpha, r.decrease, strict=True):
            weight[name] = alpha
            reached = fallen.setdefault(name, [0.0])
            reached.append(reached[-1] + float(decrease))
    return math.fsum(alpha * max(fallen[name]) for name, alpha in weight.items())


def smoothness_basis(followed: Sequence[FitRound]) -> Basis:
    return Basis.BOUND if all(r.smoothness_is_bound for r in followed) else Basis.PATH
