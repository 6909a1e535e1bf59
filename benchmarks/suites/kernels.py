"""Kernels: the fused gradient beside memory and C, a kernel density beside scipy, scikit-learn and C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks import native
from benchmarks.table import Row, beside
from fedtmle_core import kernels, parallel
from fedtmle_core.types import Family, Part

SHIFTS = (44,) * 3  # the grid of rows bounded by 2^6
EPS = np.array([0.3, -0.2, 0.1])


def rows(quick: bool) -> Iterator[Row]:
    yield from _gradient(1_000_000 if quick else 10_000_000, repeats=7)
    yield from _density(2_000, 10_000 if quick else 100_000)


def _sums(X: np.ndarray, threads: int) -> tuple[int, ...]:
    parallel.set_threads(threads)
    return kernels.glm_sums(kernels.glm_rows(Family.LOGISTIC, X), EPS, Part.GRADIENT, SHIFTS)


def _gradient(n: int, repeats: int) -> Iterator[Row]:
    X = np.random.default_rng(0).normal(size=(3, n))
    one, two = _sums(X, 1), _sums(X, 2)
    with kernels.using_backend("numpy"):
        twin = _sums(X, 1)
    same = "the same bits" if one == two == twin else "NOT THE SAME BITS"
    note = f"{same} for 1 and 2 threads and the numpy twin"
    clocks: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "CPU": time.process_time}
    for threads in (1, 2):
        for clock, read in clocks.items():
            memory, loop, ours = beside(
                [
                    lambda threads=threads: native.memory_pass(X, threads),
                    lambda threads=threads: native.gradient(X, EPS, threads),
                    lambda threads=threads: _sums(X, threads),
                ],
                repeats=repeats,
                clock=read,
            )
            what = f"gradient, n = {n:.0e}, d = 3, {threads} thread(s), {clock} time"
            goal = threads == 2  # by both clocks: on a busy machine a short call may slip between others'
            for against, theirs, most in (
                ("memory pass (C)", memory, 3.5),
                ("C loop, -ffast-math", loop, 1.5),
            ):
                yield Row(
                    group="kernel",
                    what=what,
                    against=against,
                    unit="ns/row",
                    ours=1e9 * ours / n,
                    theirs=1e9 * theirs / n,
                    most=most if goal else None,
                    note=note if goal else "",
                )
    parallel.set_threads(None)


def _density(centres: int, points: int) -> Iterator[Row]:
    from scipy.stats import gaussian_kde
    from sklearn.neighbors import KernelDensity

    from fedtmle_paper.density.kernel import log_mean_kernel

    rng = np.random.default_rng(1)
    c, p = rng.normal(size=(2, centres)), rng.normal(size=(2, points))
    reference = gaussian_kde(c)
    sklearn = KernelDensity(bandwidth=1.0, kernel="gaussian", rtol=0).fit(c.T)
    calls = {
        "scipy gaussian_kde": lambda: reference.logpdf(p),
        "scikit-learn KernelDensity": lambda: sklearn.score_samples(p.T),
        "C loop, -ffast-math, 1 thread": lambda: native.kernel_density(p, c, 1),
    }
    for threads in (1, 2):
        parallel.set_threads(threads)
        found = beside([lambda: log_mean_kernel(p, c), *calls.values()], repeats=2)
        for (against, _), theirs in zip(calls.items(), found[1:], strict=True):
            yield Row(
                group="kernel density",
                what=f"{centres:,} kernels, {points:.0e} points, {threads} thread(s)",
                against=against,
                unit="ns/pair",
                ours=1e9 * found[0] / (centres * points),
                theirs=1e9 * theirs / (centres * points),
                faster=True,
                least=10.0 if "scipy" in against and threads == 2 else None,
            )
    parallel.set_threads(None)
