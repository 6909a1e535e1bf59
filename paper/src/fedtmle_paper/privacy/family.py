"""omega_T(eta): the infimum of the design modulus over accepted blocks, eq:proof-design-infimum.

A block is T queries of K accepted ones, repetitions allowed. A certified lower bound for all of them comes
from one direction u that hides from each query alone: if ||u|| <= rho and ||A_k u|| <= eta/sqrt(T) for
every k, then ||A u|| <= eta in every block, so c . u <= omega_T(eta). The best such u is the saddle point of
the design problem with real instead of integer repetitions, exchanged by a multiplicative rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle_core.types import Array
from fedtmle_paper.privacy.design import design_modulus, kernel_floor, modulus_forms

EXHAUSTIVE = 5_000  # blocks that are all tried
ITERATIONS = 400
GREEDY = 4_000  # moduli that the greedy start may cost
SWEEPS = 3


@final
@dataclass(frozen=True, kw_only=True)
class Infimum:
    """``value`` is attained by the block ``chosen`` (numbers of queries); no block is below ``lower``."""

    value: float
    lower: float
    chosen: tuple[int, ...]
    exact: bool

    @property
    def gap(self) -> float:
        return 0.0 if self.exact else self.value - self.lower


def design_infimum(queries: Sequence[Array], c: Array, *, T: int, radius: float, noise: float) -> Infimum:
    """omega_T(eta) over blocks of T of the K ``queries``, each a Jacobian (d, q): eq:proof-design-infimum.

    Exact if there are at most 5,000 blocks; else the best block exchanged, with a certified gap.
    """
    if not queries or T < 1:
        raise InputError("queries, T: expected at least one query and T >= 1")
    queries = [np.asarray(A, dtype=np.float64) for A in queries]

    def modulus(block: Sequence[int]) -> float:
        counts = np.bincount(block, minlength=len(queries))
        stacked = [math.sqrt(n) * queries[k] for k, n in enumerate(counts) if n]
        return design_modulus(np.concatenate(stacked), c, radius=radius, noise=noise)

    if math.comb(len(queries) + T - 1, T) <= EXHAUSTIVE:
        blocks = itertools.combinations_with_replacement(range(len(queries)), T)
        best, block = min((modulus(block), block) for block in blocks)
        return Infimum(value=best, lower=best, chosen=block, exact=True)
    lower, shares = _relaxed(queries, c, T=T, radius=radius, noise=noise)
    starts = [_rounded(shares, T)]
    if T * len(queries) <= GREEDY:
        greedy: list[int] = []
        for _ in range(T):
            greedy.append(min(range(len(queries)), key=lambda k: modulus([*greedy, k])))
        starts.append(greedy)
    value, chosen = min(
        (_swapped(start, len(queries), modulus) for start in starts), key=lambda pair: pair[0]
    )
    return Infimum(value=value, lower=min(lower, value), chosen=tuple(sorted(chosen)), exact=False)


def _relaxed(
    queries: Sequence[Array], c: Array, *, T: int, radius: float, noise: float
) -> tuple[float, Array]:
    """The certified lower bound, and real shares of each query that nearly attain it."""
    shares = np.full(len(queries), 1 / len(queries))
    if noise == 0:  # exact answers: what no query sees at all
        return kernel_floor(np.concatenate(queries), c, radius=radius), shares
    lower = 0.0
    for _ in range(ITERATIONS):
        block = np.concatenate([math.sqrt(T * p) * A for p, A in zip(shares, queries, strict=True)])
        forms = modulus_forms(block, c, radius=radius, noise=noise)
        responses = np.array([float(np.linalg.norm(A @ forms.direction)) for A in queries])
        allowed = noise / math.sqrt(T)
        lower = max(lower, forms.primal * min(1.0, allowed / max(float(responses.max()), 1e-300)))
        if forms.dual - lower <= 1e-9 * forms.dual or not responses.any():
            break
        shares = shares * responses**2
        shares = shares / shares.sum()
    return lower, shares


def _rounded(shares: Array, T: int) -> list[int]:
    """T queries in about these shares, by largest remainders."""
    counts = np.floor(T * shares).astype(int)
    for k in np.argsort(counts - T * shares, kind="stable")[: T - int(counts.sum())]:
        counts[k] += 1
    return np.repeat(np.arange(len(shares)), counts).tolist()


def _swapped(
    block: list[int], count: int, modulus: Callable[[Sequence[int]], float]
) -> tuple[float, list[int]]:
    """Exchange one query for another while that lowers the modulus."""
    value = float(modulus(block))
    for _ in range(SWEEPS):
        before = value
        for leaving in sorted(set(block)):
            rest = list(block)
            rest.remove(leaving)
            for entering in range(count):
                exchanged = float(modulus([*rest, entering]))
                if exchanged < value:
                    value, block = exchanged, [*rest, entering]
                    break
        if value >= before:
            break
    return value, block
