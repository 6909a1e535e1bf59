"""What averaging forfeited in a personalised run, round by round, beside the bounds of section 4.4."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedtmle.theory import personalized
from fedtmle.theory.checks import BoundCheck, check
from fedtmle.theory.constants import Basis, Constant
from fedtmle.theory.fits import FitRound


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
