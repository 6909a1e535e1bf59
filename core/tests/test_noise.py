"""The sampler of discrete Gaussian noise, against its law."""

from __future__ import annotations

import ast
import inspect
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2, norm

from fedtmle_core import noise
from fedtmle_core.noise import discrete_gaussian


def draws(deviation: float, size: int, seed: int, factor: Fraction = Fraction(1)) -> list[int]:
    variance = Fraction(deviation) ** 2 * factor
    below = random.Random(seed).randrange  # noqa: S311 - a test
    return [discrete_gaussian(variance, below) for _ in range(size)]


def p_value(found: list[int], deviation: float) -> float:
    """The chi-square test of draws against the exact law, with at least 10 expected in each of its cells."""
    size = len(found)
    if deviation <= 50:
        reach = math.ceil(12 * deviation) + 2
        support = np.arange(-reach, reach + 1)
        weight = np.exp(-0.5 * (support / deviation) ** 2)
        cdf = np.cumsum(weight / weight.sum())
    else:  # cells of many integers: the law at their ends is the normal one to 1e-12 (Poisson summation)
        support = np.unique(np.rint(norm.ppf(np.linspace(0.01, 0.99, 60)) * deviation)).astype(np.int64)
        cdf = norm.cdf((support + 0.5) / deviation)
    ends, last = [], 0.0
    for value, below in zip(support, cdf, strict=True):
        if (below - last) * size >= 10 and (1 - below) * size >= 10:
            ends.append(value)
            last = below
    at = np.searchsorted(support, ends)
    expected = np.diff([0.0, *cdf[at], 1.0]) * size
    counts = np.bincount(np.searchsorted(ends, found), minlength=len(ends) + 1)
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1))


@pytest.mark.parametrize("deviation", [0.3, 0.5, 1.0, 4.5, 49.0, 1e3, 1e4, 1e6])
def test_draws_have_the_exact_law(deviation: float) -> None:
    assert p_value(draws(deviation, 3000, 7), deviation) > 1e-3


@pytest.mark.parametrize("deviation", [1.0, 1e6])
def test_the_test_notices_another_variance(deviation: float) -> None:
    assert p_value(draws(deviation, 3000, 7, Fraction(4, 5)), deviation) < 1e-6


def test_large_variances_need_no_floats() -> None:
    variance = Fraction(10**70, 3)  # beyond 2^53 and beyond what a float's square root would keep
    found = [discrete_gaussian(variance, random.Random(k).randrange) for k in range(400)]  # noqa: S311 - a test
    scaled = np.array([float(Fraction(x * x) / variance) for x in found])
    assert abs(scaled.mean() - 1) < 5 * math.sqrt(2 / 400)
    assert len({x % 1000 for x in found}) > 300  # the last digits are random too


def test_no_floating_point_between_randomness_and_draw() -> None:
    tree = ast.parse(inspect.getsource(noise))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in ("discrete_gaussian", "_discrete_laplace", "_exp_coin", "_small_exp_coin"):
        for node in ast.walk(functions[name]):
            assert not isinstance(node, ast.Div), name
            assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), name


@pytest.mark.parametrize("deviation", [0.3, 4.5, 1e6])
def test_draws_are_those_of_opendp(deviation: float) -> None:
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64"), 4000), dp.l2_distance(T="i64")
    theirs = (space >> dp.m.then_gaussian(scale=deviation))([0] * 4000)
    assert p_value(list(theirs), deviation) > 1e-4
    ours = draws(deviation, 4000, 11)
    edges = np.unique(np.rint(norm.ppf(np.linspace(0.005, 0.995, 20)) * deviation))
    table = np.array(
        [np.bincount(np.searchsorted(edges, x), minlength=len(edges) + 1) for x in (ours, theirs)]
    )
    table = table[:, table.sum(axis=0) > 0]
    assert table.shape[1] >= 3
    expected = table.sum(axis=0) / 2
    assert chi2.sf(((table - expected) ** 2 / expected).sum(), table.shape[1] - 1) > 1e-4
