"""A study before it is run: what the theorems allow it to cost, and which tolerance it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedtmle.errors import InputError
from fedtmle.theory.communication import planned_bit_bound, round_bound, step_bound, universal_bit_bound
from fedtmle.theory.statistical import history_bits_ceiling, negligible_tolerance, tolerance_schedule


@dataclass(frozen=True, kw_only=True)
class PilotConstants:
    """The constants of an observed run, in its coordinates; b = ||C^-1|| takes a tolerance to them."""

    source: str
    beta: float
    kappa: float
    Delta: float
    G: float
    b: float
    std_error: float  # the smallest over psi's coordinates
    n: int  # the standard error's
    rounds: int
    bits: int


# `fedtmle demo --study transport`, observed, to three digits; `test_planning` measures it again.
BENCHMARK = PilotConstants(
    source="the paper's benchmark, DGP 1 (n = 10,000, 10 silos, tolerance 1e-3)",
    beta=1.07,
    kappa=1.04,
    Delta=0.00137,
    G=0.0962,
    b=26.1,
    std_error=0.109,
    n=10_000,
    rounds=7,
    bits=6_696,
)


@dataclass(frozen=True, kw_only=True)
class CostPlan:
    """Worst-case cost of a coded run, and tolerances that make its numerical error negligible."""

    rounds: float
    steps: float
    bits: float
    bits_universal: float
    bits_per_silo: float
    seconds: float
    seconds_like_pilot: float  # no bound: if it takes as many rounds and bits as the pilot did
    history_bits_per_update: float
    std_error: float
    tolerance_over_std_error: float
    negligible_tolerance: float
    scheduled_tolerance: float


def plan(
    *,
    n: int,
    M: int,
    d: int,
    tolerance: float,
    pilot: PilotConstants,
    latency: float,
    bandwidth: float,
    share: float,
) -> CostPlan:
    """Return the cost that thm:communication allows at the pilot's constants.

    ``latency`` is the seconds of one upload-broadcast round, ``bandwidth`` one silo's bits per second,
    ``share`` the part of a standard error that counts as negligible. The standard error goes as
    n^(-1/2); the schedule is cor:inference's with a_n = log n in units of sqrt(n) times it.
    """
    for name, value in (("n", n - 2), ("silos", M), ("dim", d)):
        if value < 1:
            least = 3 if name == "n" else 1  # log n is a divisor
            raise InputError(f"{name}: expected at least {least}")
    amounts = {"tolerance": tolerance, "bandwidth": bandwidth, "share": share}
    amounts |= {"beta": pilot.beta, "scale": pilot.b, "std_error": pilot.std_error}
    for name, amount in amounts.items():
        if not (math.isfinite(amount) and amount > 0):
            raise InputError(f"{name}: expected a number above zero, not {amount}")
    zero_or_more = {"delta_loss": pilot.Delta, "kappa": pilot.kappa, "gradient": pilot.G, "latency": latency}
    for name, amount in zero_or_more.items():
        if not (math.isfinite(amount) and amount >= 0):
            raise InputError(f"{name}: expected a number of at least zero, not {amount}")
    delta = tolerance / pilot.b
    rounds = round_bound(pilot.beta, pilot.Delta, delta)
    constants = (pilot.beta, pilot.kappa, pilot.Delta, pilot.G, delta)
    bits = planned_bit_bound(M, d, *constants)
    std_error = pilot.std_error * math.sqrt(pilot.n / n)
    return CostPlan(
        rounds=rounds,
        steps=step_bound(pilot.beta, pilot.Delta, delta),
        bits=bits,
        bits_universal=universal_bit_bound(M, d, *constants),
        bits_per_silo=bits / M,
        seconds=rounds * latency + bits / M / bandwidth,
        seconds_like_pilot=pilot.rounds * latency + pilot.bits / M / bandwidth,
        history_bits_per_update=history_bits_ceiling(1, d, pilot.beta, pilot.Delta, delta),
        std_error=std_error,
        tolerance_over_std_error=tolerance / std_error,
        negligible_tolerance=negligible_tolerance(std_error, share),
        scheduled_tolerance=std_error * math.sqrt(n) * tolerance_schedule(n, math.log(n)),
    )


def pilot_from_result(document: Mapping[str, Any], source: str) -> PilotConstants:
    """Return the constants in the JSON (`Result.to_dict`) of a coded run that was observed."""
    certificate = document.get("certificate") or {}
    known = {line["name"]: line["value"] for line in certificate.get("constants", ())}
    missing = {"beta", "kappa", "Delta", "G", "delta/b"} - set(known)
    if missing:
        raise InputError(
            f"pilot: {source} lacks {', '.join(sorted(missing))}; it must be the JSON of a coded run that "
            "was observed: `fedtmle run study.toml --observe --out FILE`, or observe=True in Python"
        )
    return PilotConstants(
        source=source,
        beta=known["beta"],
        kappa=known["kappa"],
        Delta=known["Delta"],
        G=known["G"],
        b=certificate["tolerance"] / known["delta/b"],
        std_error=min(document["std_error"]),
        n=document["n"],
        rounds=document["rounds"],
        bits=document["bits"],
    )
