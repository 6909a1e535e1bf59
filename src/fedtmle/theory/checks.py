"""Realised quantities of a coded run beside their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedtmle.protocol.lattice import Lattice, floating
from fedtmle.theory import communication, statistical
from fedtmle.theory.path import (
    Basis,
    Constant,
    TargetingPath,
    first_gradient,
    loss_budget,
    realised_smoothness,
    recentering,
    step_decreases_hold,
    weakest,
)

LOSS_ROUNDING = 1e-13  # of a pooled loss difference, for comparisons that hold in exact arithmetic


@dataclass(frozen=True, kw_only=True)
class BoundCheck:
    """One realised quantity beside its bound; ``slack`` is bound over realised, None where either is open."""

    name: str
    realised: float
    bound: float | None
    slack: float | None
    statement: str  # the paper's label
    basis: Basis | None


def check(
    name: str, realised: float | None, bound: float | None, statement: str, basis: Basis
) -> Iterator[BoundCheck]:
    """Yield one check, or none if nothing was realised."""
    if realised is None or not np.isfinite(realised):
        return
    yield BoundCheck(
        name=name,
        realised=float(realised),
        bound=bound,
        slack=bound / realised if bound is not None and realised > 0 else None,
        statement=statement,
        basis=None if bound is None else basis,
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a coded run cost and certified, as every party knows it."""

    M: int
    d: int
    R: int
    bits: int
    S: int
    K: int
    history_bits: int
    tolerance: float
    residual_bound: float
    fixed_width: int | None  # J, where absolute integers were sent
    one_step: bool  # whether every step was an update at once


def open_checks(cost: Cost) -> tuple[BoundCheck, ...]:
    """Return the checks of a run without its rows: Delta and kappa are unknown, so most bounds stay open."""
    return (
        *check("residual bound", cost.residual_bound, cost.tolerance, "thm:communication", Basis.BOUND),
        *check("rounds R", cost.R, None, "eq:main-communication", Basis.BOUND),
        *check("steps S", cost.S, None, "eq:proof-energy-and-steps", Basis.BOUND),
        *check("updates K", cost.K, cost.S, "eq:proof-rounds", Basis.BOUND),
        *check("bits B", cost.bits, None, "eq:pathwise-bit-bound", Basis.BOUND),
        *check("history bits H_K", cost.history_bits, None, "eq:history-length", Basis.BOUND),
    )


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of thm:communication for one run, in its coordinates."""

    beta: Constant  # the run's own
    realised: Constant
    kappa: Constant
    Delta: Constant
    G: Constant
    delta: float  # the tolerance in the run's coordinates
    descends: bool  # whether every step decreased the loss as a valid beta implies

    @property
    def effective_kappa(self) -> float:
        """kappa + 2 (beta_m - beta)^+, beta_m the realised slope of a silo's own gradient.

        Descent needs only the pooled smoothness. Where a silo's is larger, its variation is at most
        beta_m/beta times each step and (kappa + beta_m)/beta times each update, that is
        (2 + kappa'/beta) sqrt(6 beta Delta S) with this kappa'.
        """
        return self.kappa.value + 2 * max(0.0, self.realised.value - self.beta.value)

    def __iter__(self) -> Iterator[Constant]:
        scaled = Constant(
            name="delta/b", value=self.delta, basis=Basis.BOUND, note="in the run's coordinates"
        )
        yield from (self.beta, self.realised, self.kappa, self.Delta, self.G, scaled)


def run_constants(path: TargetingPath, lattice: Lattice, beta: Constant) -> Constants:
    """Return the constants of a followed run; a beta that a step disproves is only assumed."""
    descends = step_decreases_hold(path, beta.value, LOSS_ROUNDING)
    return Constants(
        beta=beta if descends else replace(beta, basis=Basis.ASSUMED, note="disproved by a step"),
        realised=realised_smoothness(path),
        kappa=recentering(path),
        Delta=loss_budget(path),
        G=first_gradient(path),
        delta=communication.scaled_tolerance(lattice),
        descends=descends,
    )


def coded_checks(
    path: TargetingPath, lattice: Lattice, cost: Cost, known: Constants
) -> tuple[BoundCheck, ...]:
    """Check thm:communication and the code length of thm:statistical on a followed run."""
    beta, kappa, Delta, delta = known.beta.value, known.effective_kappa, known.Delta.value, known.delta
    basis, with_kappa = weakest(known.beta, known.Delta), weakest(known.beta, known.Delta, known.kappa)
    ends_at_origin = path.step[-1] == 0
    residual = float(np.linalg.norm(floating(lattice.B) @ path.pooled[-1])) if ends_at_origin else None
    rounds = communication.one_step_round_bound if cost.one_step else communication.round_bound
    R_bound, S_bound = (f(beta, Delta, delta) for f in (rounds, communication.step_bound))
    energy = float((path.rounded_norms(beta) ** 2).sum())
    variation = communication.variation_bound(beta, kappa, Delta, cost.S)
    H_bound = statistical.history_bits_ceiling(cost.K, cost.d, beta, Delta, delta)
    return (
        *check("residual r^K", residual, cost.residual_bound, "thm:communication", Basis.BOUND),
        *check("residual bound", cost.residual_bound, cost.tolerance, "thm:communication", Basis.BOUND),
        *check("rounds R", cost.R, R_bound, "eq:main-communication", basis),
        *check("steps S", cost.S, S_bound, "eq:proof-energy-and-steps", basis),
        *check("updates K", cost.K, cost.S, "eq:proof-rounds", Basis.BOUND),
        *_bit_checks(cost, known, with_kappa),
        *check("history bits H_K", cost.history_bits, H_bound, "eq:history-length", basis),
        *check("energy", energy, communication.energy_bound(beta, Delta), "eq:variation-summary", basis),
        *check(
            "largest variation", float(path.variation().max()), variation, "eq:variation-summary", with_kappa
        ),
    )


def _bit_checks(cost: Cost, known: Constants, basis: Basis) -> Iterator[BoundCheck]:
    M, d, R = cost.M, cost.d, cost.R
    if cost.fixed_width is not None:
        width = communication.fixed_width_bits(cost.fixed_width, 1.0)
        price = communication.fixed_width_cost(M, d, width, R)
        yield from check("bits B, fixed width", cost.bits, price, "thm:communication", Basis.BOUND)
        return
    constants = (known.beta.value, known.effective_kappa, known.Delta.value, known.G.value, known.delta)
    pathwise = communication.pathwise_bit_bound(M, d, R, cost.S, *constants)
    universal = communication.universal_bit_bound(M, d, *constants)
    yield from check("bits B, this path", cost.bits, pathwise, "eq:pathwise-bit-bound", basis)
    yield from check("bits B, any path", cost.bits, universal, "eq:main-communication", basis)
