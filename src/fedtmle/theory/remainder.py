"""thm:statistical evaluated on one run: how much of its bound the data of a run can state.

The theorem bounds ||Psi(p^K) - Psi(p_0) - P_n D(p_0)|| by delta + ||R_2|| + a process term + an envelope
term. The last two grow with H_K, the bits that describe how the sample chose the final law. R_2 and the
distance ||D(p^K) - D(p_0)|| in the process term need the truth: the term is stated for the distance
||D(p^K)||, and scales with the share of it that is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtmle.theory.statistical import code_allowance, inference_conditions, process_bound

LEVEL = 0.05  # xi: the bound holds with probability at least 1 - xi
SMALL = 0.1  # of a standard error
DOUBLE = 64  # bits


@dataclass(frozen=True, kw_only=True)
class Remainder:
    """The terms of thm:statistical, in the unit of psi; ``std_error`` is the norm of the standard errors.

    ``process`` is for an influence function that is wrong by its own size; ``largest_share`` is the share of
    that at which the process term is a tenth of a standard error. ``rows_needed`` is the n at which the
    envelope term would be a tenth, with the same history. ``process_alone`` and ``envelope_alone`` are the
    terms if the initial fit came from other records, H_init = 0. All about an unknown envelope is None.
    """

    level: float
    initial_bits: int  # H_init: the broadcasts that fix p^0 and the coordinates, to one silo
    history_bits: int  # H_K - H_init
    residual: float
    process: float
    largest_share: float
    envelope_constant: float | None  # G
    envelope: float | None
    rows_needed: float | None
    process_alone: float
    envelope_alone: float | None
    std_error: float
    condition_process: float  # the second of eq:inference-conditions, over the size of D
    condition_envelope: float | None  # the third, over the size of D


def history_of_doubles(updates: int, dim: int) -> int:
    """Return the bits of a history whose accepted eps are sent as doubles, K + 1 by its gamma code."""
    return 2 * (updates + 1).bit_length() - 1 + DOUBLE * updates * dim


def remainder(
    *,
    n: int,
    dim: int,
    initial_bits: int,
    history_bits: int,
    residual: float,
    std_error: float,
    envelope: float | None,
) -> Remainder:
    """Return the terms for n records; ``envelope`` is G, and ||D(p^K)|| is sqrt(n) times ``std_error``."""
    H, size = initial_bits + history_bits, math.sqrt(n) * std_error
    x, alone = (code_allowance(bits, dim, LEVEL) for bits in (H, history_bits))
    process = process_bound(dim, n, 0.0, x, size)
    of_envelope = None if envelope is None else process_bound(dim, n, envelope, x, 0.0)
    conditions = inference_conditions(n=n, d=dim, H=H, G=envelope or 0.0, eif_distance=size)
    needed = None
    if of_envelope is not None and std_error > 0:
        needed = (
            n * (of_envelope / (SMALL * std_error)) ** 2
        )  # it falls as 1/n, the standard error as its root
    return Remainder(
        level=LEVEL,
        initial_bits=initial_bits,
        history_bits=history_bits,
        residual=residual,
        process=process,
        largest_share=SMALL * std_error / process if process > 0 else math.inf,
        envelope_constant=envelope,
        envelope=of_envelope,
        rows_needed=needed,
        process_alone=process_bound(dim, n, 0.0, alone, size),
        envelope_alone=None if envelope is None else process_bound(dim, n, envelope, alone, 0.0),
        std_error=std_error,
        condition_process=(conditions.process or 0.0) / size if size > 0 else math.nan,
        condition_envelope=None if envelope is None or not size > 0 else conditions.envelope / size,
    )
