"""The paper's benchmark data (S.3): two data-generating distributions, client sizes and two partitions.

Every function draws from a numpy Generator that is passed in, in the order of its lines.
"""

from __future__ import annotations

import math

import numpy as np

from fedtmle.errors import InputError
from fedtmle_core.types import Array, IntArray

PROBABILITIES = (0.5, 0.3, 0.2)
MEANS = ((-2.0, 0.0), (1.5, 1.5), (1.5, -1.5))
COVARIANCES = (((0.8, 0.5), (0.5, 1.2)), ((1.0, -0.35), (-0.35, 0.4)), ((0.35, 0.0), (0.0, 0.8)))


def gaussian_mixture(n: int, rng: np.random.Generator) -> Array:
    """DGP 1: an anisotropic mixture of three bivariate Gaussians, shape (n, 2)."""
    component = rng.choice(len(PROBABILITIES), size=n, p=PROBABILITIES)
    z = rng.standard_normal((n, 2))
    factors = np.linalg.cholesky(np.array(COVARIANCES))
    return np.asarray(np.array(MEANS)[component] + np.einsum("ijk,ik->ij", factors[component], z))


def curved_mixture(n: int, rng: np.random.Generator) -> Array:
    """DGP 2: O = (U, U^2/2 + 0.3 sin 2U + (0.35 + 0.15 U^2) Z), U a Gaussian mixture; shape (n, 2)."""
    left = rng.random(n) < 0.4
    u = np.where(left, -1.5, 1.5) + np.where(left, 0.6, 0.9) * rng.standard_normal(n)
    z = rng.standard_normal(n)
    return np.stack([u, 0.5 * u**2 + 0.3 * np.sin(2 * u) + (0.35 + 0.15 * u**2) * z], axis=1)


def client_sizes(n: int, clients: int) -> tuple[int, ...]:
    """N_1..N_M, proportional to 5^((m-1)/(M-1)), by largest remainder; ties go to the lower index."""
    if clients < 1:
        raise InputError(f"clients: expected at least 1, not {clients}")
    weights = [5.0 ** (m / max(clients - 1, 1)) for m in range(clients)]
    quotas = [n * weight / math.fsum(weights) for weight in weights]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(clients), key=lambda m: (sizes[m] - quotas[m], m))
    for m in by_remainder[: n - sum(sizes)]:
        sizes[m] += 1
    if min(sizes) < 1:
        raise InputError(f"clients: {n} rows leave one of {clients} clients without any")
    return tuple(sizes)


def random_partition(sizes: tuple[int, ...], rng: np.random.Generator) -> list[IntArray]:
    """Row indices of each client: successive blocks of a random permutation."""
    return _blocks(rng.permutation(sum(sizes)), sizes)


def spatial_partition(rows: Array, sizes: tuple[int, ...], rng: np.random.Generator) -> list[IntArray]:
    """Row indices of each client, a fifth of them filled in the order of a noisy spatial score.

    The score O_1 + O_2/2 is standardised by its mean and standard deviation over all rows.
    """
    n = sum(sizes)
    if len(rows) != n:
        raise InputError(f"rows: expected {n}, the total of sizes, not {len(rows)}")
    reserved = [size // 5 for size in sizes]  # floor(0.2 N_m)
    chosen = rng.choice(n, size=sum(reserved), replace=False)
    score = rows[:, 0] + 0.5 * rows[:, 1]
    noisy = (score[chosen] - score.mean()) / score.std() + rng.standard_normal(len(chosen))
    ascending = _blocks(chosen[np.argsort(noisy, kind="stable")], reserved)
    others = rng.permutation(np.setdiff1d(np.arange(n), chosen))
    rest = _blocks(others, [size - few for size, few in zip(sizes, reserved, strict=True)])
    return [np.concatenate(parts) for parts in zip(ascending, rest, strict=True)]


def _blocks(indices: IntArray, sizes: tuple[int, ...] | list[int]) -> list[IntArray]:
    return np.split(indices, np.cumsum(sizes)[:-1])
