"""The elementary functions: accuracy against extended precision, edges, and one source for two backends."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedtmle_core import kernels, parallel
from fedtmle_core.kernels import _elementary
from fedtmle_core.types import Array

Long = np.longdouble
needs_extended = pytest.mark.skipif(np.finfo(Long).nmant < 63, reason="longdouble is not extended here")

FUNCTIONS = {name: getattr(kernels, name) for name in ("exp", "log", "expit", "softplus", "logit")}
BACKENDS = ("numba", "numpy")


def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


def uniform(low: float, high: float, n: int = 100_000) -> Array:
    return rng().uniform(low, high, n)


def long_softplus(x: Array) -> Array:
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def long_logit(p: Array) -> Array:
    central = np.clip(2 * p - 1, -0.5, 0.5)
    near = np.abs(2 * p - 1) < 0.5
    return np.asarray(np.where(near, 2 * np.arctanh(central), np.log(p) - np.log1p(-p)))


def ulps(got: Array, want: np.ndarray) -> float:
    return float(np.max(np.abs(got.astype(Long) - want) / np.spacing(np.abs(want.astype(np.float64)))))


ACCURACY: list[tuple[str, Callable[[np.ndarray], np.ndarray], Array, float]] = [
    ("exp", np.exp, uniform(-708, 709.78), 0.7),
    ("exp", np.exp, uniform(-1, 1), 0.7),
    ("exp", np.exp, uniform(-1e-9, 1e-9), 0.51),
    ("log", np.log, uniform(0.5, 2), 0.9),
    ("log", np.log, np.float64(2) ** uniform(-1074, 1023), 0.9),
    ("log", np.log, 1 + uniform(-1e-7, 1e-7), 0.6),
    ("expit", lambda x: 1 / (1 + np.exp(-x)), uniform(-708, 708), 2.5),
    ("expit", lambda x: 1 / (1 + np.exp(-x)), uniform(-5, 5), 2.5),
    ("softplus", long_softplus, uniform(-708, 708), 2.2),
    ("softplus", long_softplus, uniform(-40, 40), 2.2),
    ("logit", long_logit, uniform(0, 1), 2.0),
    ("logit", long_logit, 0.5 + uniform(-1e-6, 1e-6), 2.0),
    ("logit", long_logit, 10 ** uniform(-300, -1), 2.0),
    ("logit", long_logit, 1 - 10 ** uniform(-15, -1), 2.0),
]


@needs_extended
@pytest.mark.parametrize(("name", "reference", "x", "bound"), ACCURACY)
def test_error_in_units_of_the_last_place(
    name: str, reference: Callable[[np.ndarray], np.ndarray], x: Array, bound: float
) -> None:
    assert ulps(FUNCTIONS[name](x), reference(x.astype(Long))) <= bound


@needs_extended
def test_helpers_keep_relative_accuracy() -> None:
    small = np.concatenate([uniform(-64, 64), np.sign(uniform(-1, 1)) * 10 ** uniform(-300, 0)])
    assert ulps(_elementary.expm1_near(small), np.expm1(small.astype(Long))) <= 3
    positive = np.concatenate([uniform(0, 3), 10 ** uniform(-300, 28)])
    assert ulps(_elementary.log1p(positive), np.log1p(positive.astype(Long))) <= 2


def anything() -> Array:
    """Random bit patterns: every exponent, subnormals, infinities and NaN among them."""
    patterns = rng().integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, 500_000)
    return np.concatenate([patterns.view(np.float64), uniform(-750, 750, 500_000), uniform(-2, 2, 500_000)])


EDGES = np.array(
    [0.0, -0.0, 0.5, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, 5e-324, 2.0**-1022, np.nextafter(1, 0), 1e308]
    + [x for edge in (-745.0, -709.79, -708.0, 709.782712893384, 0.41421356) for x in (edge, -edge)]
    + [np.nextafter(edge, side) for edge in (-708.0, 709.782712893384) for side in (-np.inf, np.inf)]
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_backends_give_the_same_bits(name: str) -> None:
    x = np.concatenate([EDGES, anything()])
    with kernels.using_backend("numba"):
        compiled = FUNCTIONS[name](x)
    with kernels.using_backend("numpy"):
        twin = FUNCTIONS[name](x)
    same = (compiled.view(np.int64) == twin.view(np.int64)) | (np.isnan(compiled) & np.isnan(twin))
    assert same.all(), x[~same][:5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_limits(backend: str) -> None:
    inf, nan = math.inf, math.nan
    table = {
        "exp": [(-inf, 0), (-708.001, 0), (0, 1), (709.79, inf), (inf, inf), (nan, nan)],
        "log": [(0, -inf), (-0.0, -inf), (1, 0), (inf, inf), (-1, nan), (-inf, nan), (nan, nan)],
        "expit": [(-inf, 0), (0, 0.5), (800, 1), (inf, 1), (nan, nan)],
        "softplus": [(-inf, 0), (-800, 0), (800, 800), (inf, inf), (nan, nan)],
        "logit": [(0, -inf), (0.5, 0), (1, inf), (-0.1, nan), (1.1, nan), (inf, nan), (nan, nan)],
    }
    with kernels.using_backend(backend):
        for name, pairs in table.items():
            got = FUNCTIONS[name](np.array([x for x, _ in pairs]))
            np.testing.assert_array_equal(got, [value for _, value in pairs], err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_and_scalars(backend: str) -> None:
    with kernels.using_backend(backend):
        assert kernels.exp(np.zeros((2, 0, 3))).shape == (2, 0, 3)
        x = uniform(-1, 1, 12).reshape(3, 4)
        np.testing.assert_array_equal(kernels.exp(x.T), kernels.exp(x).T)  # not contiguous
        value = kernels.log(2.0)
        assert type(value) is float
        assert value == kernels.log(np.array([2.0]))[0] == math.log(2.0)


def test_threads_do_not_change_a_bit() -> None:
    x = uniform(-30, 30, 300_001)
    results = []
    for n in (1, 2, 3):
        parallel.set_threads(n)
        results.append(kernels.softplus(x))
    parallel.set_threads(None)
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
