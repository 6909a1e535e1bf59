"""A finished run of Algorithm 5, followed on the rows at hand: gaps and what averaging forfeits, by round.

Constants are those of the run's path: zeta is the least for which eq:local-derivative-comparison holds at
the points that the proof uses, so no covering number is needed; beta_4 comes from second differences of
the Hessian along the segments from each fit to the average.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.fit import fit_local
from fedtmle.model.problem import AbstractProblem, Law, Rows
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.types import Array, Part, unpack
from fedtmle.theory import personalized
from fedtmle.theory.checks import BoundCheck, check
from fedtmle.theory.path import Basis, Constant
from fedtmle.theory.personalized import chi, disagreement

SEGMENT = np.linspace(0.0, 1.0, 5)


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """What the server saw in one round: the fit of each silo it asked, zero if it retired; the update."""

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
    score_norm: Array  # of the local EIF mean at p^k
    smoothness: float  # beta: bounds every silo's Hessian in this submodel
    smoothness_is_bound: bool  # else the largest Hessian norm at the points visited
    gradient_scale: float  # G_1
    zeta: float
    fourth: float  # beta_4
    retired_mass: float  # sum of alpha_m over the silos that left in this round
    retired_gap: float  # sum of alpha_m Delta_m over them: zero if their fits were

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


class _Public:
    """The normaliser, evaluated once at each point: every silo is asked at the same ones."""

    def __init__(self, normaliser: AbstractNormaliser, dim: int) -> None:
        self.normaliser = normaliser
        self._base = normaliser.value(np.zeros(dim))
        self._known: dict[bytes, tuple[float, Array, Array]] = {}

    def at(self, eps: Array) -> tuple[float, Array, Array]:
        """A(eps) - A(0), gradient and Hessian."""
        key = eps.tobytes()
        if key not in self._known:
            A = self.normaliser
            self._known[key] = (A.value(eps) - self._base, A.gradient(eps), A.hessian(eps))
        return self._known[key]


@dataclass(frozen=True)
class _Local:
    """One silo's loss in the current submodel."""

    submodel: AbstractSubmodel
    public: _Public
    n_rows: int

    def at(self, eps: Array) -> tuple[float, Array, Array]:
        """l_m(eps) - l_m(0), gradient and Hessian."""
        d = len(eps)
        sums = self.submodel.sums(eps, Part.LOSS | Part.GRADIENT | Part.HESSIAN)
        values = sums.values(self.n_rows)
        loss, gradient, hessian = self.public.at(eps)
        return float(values[0]) + loss, values[1 : 1 + d] + gradient, unpack(values[1 + d :], d) + hessian

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
    exact: bool,
    radius: float,
    exhaustive: bool,
) -> tuple[FitRound, ...]:
    """Each round that made an update; ``exact`` says that the fits were sent as they were found."""
    followed = []
    for uploaded in rounds:
        public = _Public(problem.normaliser(law), problem.dim)
        local = {
            name: _Local(problem.submodel(law, rows[name]), public, problem.count(rows[name]))
            for name in uploaded.fits
        }

        def fit_of(name: str, sent: Array, local: Mapping[str, _Local] = local) -> Array:
            if exact:
                return sent
            own = local[name]
            return fit_local(
                own.submodel, own.public.normaliser, dim=problem.dim, radius=radius, exhaustive=exhaustive
            ).eps

        fits = {name: fit_of(name, sent) for name, sent in uploaded.fits.items()}
        active = [name for name, sent in uploaded.fits.items() if sent.any()]
        row_gradient = 2.0 ** problem.row_bound(law).gradient
        followed.append(_round(local, active, fits, uploaded.update, base_weights, row_gradient))
        law = problem.move(law, uploaded.update)
    return tuple(followed)


def _round(
    asked: Mapping[str, _Local],
    active: Sequence[str],
    fits: Mapping[str, Array],
    update: Array,
    alpha: Mapping[str, float],
    row_gradient: float,
) -> FitRound:
    d = len(update)
    local = {name: asked[name] for name in active}
    points = [update, *(fits[name] for name in active)]
    values = {name: [own.at(point) for point in points] for name, own in local.items()}
    ceilings = [own.ceiling() for own in asked.values()]
    bounded = [ceiling for ceiling in ceilings if ceiling is not None]
    visited = max(float(np.linalg.norm(at[2], 2)) for own in values.values() for at in own)
    beta = max(bounded) if len(bounded) == len(ceilings) else visited
    public = asked[active[0]].public
    # One row's gradient: the declared bound of the row part, and the public part where it was seen.
    G_1 = math.sqrt(d) * row_gradient + max(float(np.linalg.norm(public.at(p)[1])) for p in points)
    left = [name for name in asked if name not in local]
    return FitRound(
        active=tuple(local),
        alpha=tuple(alpha[name] for name in local),
        sizes=tuple(own.n_rows for own in local.values()),
        fits=np.array([fits[name] for name in local]),
        gap=np.array([-values[name][1 + m][0] for m, name in enumerate(local)]),
        decrease=np.array([-values[name][0][0] for name in local]),
        score_norm=np.array([np.linalg.norm(own.at(np.zeros(d))[1]) for own in local.values()]),
        smoothness=beta,
        smoothness_is_bound=len(bounded) == len(ceilings),
        gradient_scale=G_1,
        zeta=_zeta(values, {name: own.n_rows for name, own in local.items()}, G_1, beta),
        fourth=max(_fourth(own, fits[name], update) for name, own in local.items()),
        retired_mass=math.fsum(alpha[name] for name in left),
        retired_gap=math.fsum(-alpha[name] * asked[name].at(fits[name])[0] for name in left),
    )


def _zeta(
    values: Mapping[str, Sequence[tuple[float, Array, Array]]],
    sizes: Mapping[str, int],
    G_1: float,
    beta: float,
) -> float:
    """The least zeta with eq:local-derivative-comparison at every point, for every pair of silos."""
    ratios = [0.0]
    for m, own in values.items():
        for j, other in values.items():
            scale = math.sqrt(1 / sizes[m] + 1 / sizes[j])
            for (_, g, H), (_, g_other, H_other) in zip(own, other, strict=True):
                if m != j:
                    ratios.append(float(np.linalg.norm(g - g_other)) / (G_1 * scale))
                    ratios.append(float(np.linalg.norm(H - H_other, 2)) / (beta * scale))
    return max(ratios)


def _fourth(local: _Local, fit: Array, update: Array) -> float:
    """max |d^4/dt^4 l_m(fit + t v)|/||v||^4 on a grid, v = update - fit, from differences of v.H v."""
    v = update - fit
    length = float(np.linalg.norm(v))
    if length == 0:
        return 0.0
    second = np.array([v @ local.at(fit + t * v)[2] @ v for t in SEGMENT])
    return float(np.abs(np.diff(second, 2)).max() / (SEGMENT[1] ** 2 * length**4))


# What averaging forfeited in a personalised run, round by round, beside the bounds of section 4.4.


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """One round: the improvement forfeited through averaging, and its two bounds."""

    update: int
    active: int
    error: float
    quadratic_bound: float
    fourth_order_bound: float | None  # None where fits were rounded: it does not transfer
    chi: float
    V_2: float
    V_4: float


def averaging_rounds(
    followed: Sequence[FitRound], *, lattice: float | None, exact: bool
) -> tuple[Averaging, ...]:
    """lem:local-fourth-order at each round; ``lattice`` is the spacing that fits were rounded to."""
    return tuple(
        Averaging(
            update=k,
            active=len(r.active),
            error=r.error,
            quadratic_bound=personalized.lattice_quadratic_bound(
                r.smoothness, r.V_2, r.fits.shape[1], lattice or 0.0, math.fsum(r.alpha)
            ),
            fourth_order_bound=_fourth_order(r) if exact else None,
            chi=r.chi,
            V_2=r.V_2,
            V_4=r.V_4,
        )
        for k, r in enumerate(followed)
    )


def _fourth_order(r: FitRound) -> float:
    return personalized.fourth_order_bound(
        r.gradient_scale, r.smoothness, r.fourth, r.zeta, r.chi, r.V_2, r.V_4
    )


def personal_constants(followed: Sequence[FitRound]) -> tuple[Constant, ...]:
    """beta, G_1, zeta and beta_4, each the largest over the rounds."""
    if not followed:
        return ()
    return (
        Constant(name="beta", value=max(r.smoothness for r in followed), basis=_smoothness_basis(followed)),
        Constant(name="G_1", value=max(r.gradient_scale for r in followed), basis=Basis.PATH),
        Constant(
            name="zeta",
            value=max(r.zeta for r in followed),
            basis=Basis.PATH,
            note="the least that the derivatives seen allow; no covering number is assumed",
        ),
        Constant(name="beta_4", value=max(r.fourth for r in followed), basis=Basis.PATH),
    )


def personal_checks(
    followed: Sequence[FitRound], rounds: Sequence[Averaging], *, lattice: float | None, covered: bool
) -> tuple[BoundCheck, ...]:
    """The round nearest to its quadratic bound, and eq:personalized-convergence-bound over all rounds.

    ``covered`` is False where silos retired by a rule that the theorem does not cover.
    """
    if not followed:
        return ()
    basis = _smoothness_basis(followed)
    tightest = max(rounds, key=lambda r: r.error / r.quadratic_bound if r.quadratic_bound else 0.0)
    label = f"averaging, round {tightest.update}"
    fourth = "eq:local-fourth-order-error"
    K, d = len(followed), followed[0].fits.shape[1]
    gap = math.fsum(_gaps(followed)) / K
    floor = math.fsum(
        a * personalized.gap_floor(r.smoothness, float(score))
        for r in followed
        for a, score in zip(r.alpha, r.score_norm, strict=True)
    )
    kept = [
        mass * personalized.lattice_gap_bound(r.smoothness, d, lattice or 0.0)
        for r, mass in zip(followed, itertools.accumulate(r.retired_mass for r in followed), strict=True)
    ]
    forfeited = [personalized.averaging_bound(r.quadratic_bound, r.fourth_order_bound) for r in rounds]
    bound = personalized.convergence_bound(loss_budget(followed), forfeited, math.fsum(kept))
    return (
        *check(label, tightest.error, tightest.quadratic_bound, "lem:local-fourth-order", basis),
        *(
            line
            for line in check(
                f"{label}, 4th", tightest.error, tightest.fourth_order_bound, fourth, Basis.PATH
            )
            if line.bound is not None
        ),
        *check("EIF means squared/2beta", floor / K, gap, "eq:proof-retire-gap-score", basis),
        *check("average gap", gap, bound if covered else None, "eq:personalized-convergence-bound", basis),
    )


def _gaps(followed: Sequence[FitRound]) -> Iterator[float]:
    """sum_m alpha_m Delta_m(p_m^k) of each round; a retired silo keeps the gap it left with."""
    kept = itertools.accumulate(r.retired_gap for r in followed)
    for r, retired in zip(followed, kept, strict=True):
        yield math.fsum(a * float(g) for a, g in zip(r.alpha, r.gap, strict=True)) + retired


def loss_budget(followed: Sequence[FitRound]) -> float:
    """sum_m alpha_m {l_m(p^0) - min of l_m over the laws that m had}: the traversed lower bound."""
    weight: dict[str, float] = {}
    fallen: dict[str, list[float]] = {}
    for r in followed:
        for name, alpha, decrease in zip(r.active, r.alpha, r.decrease, strict=True):
            weight[name] = alpha
            reached = fallen.setdefault(name, [0.0])
            reached.append(reached[-1] + float(decrease))
    return math.fsum(alpha * max(fallen[name]) for name, alpha in weight.items())


def _smoothness_basis(followed: Sequence[FitRound]) -> Basis:
    return Basis.BOUND if all(r.smoothness_is_bound for r in followed) else Basis.PATH
