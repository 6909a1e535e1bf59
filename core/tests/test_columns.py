"""Exact sums of products of columns and by bin: against exact rationals, and the same however computed."""

import multiprocessing
import time
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from fedtmle_core import kernels, parallel
from fedtmle_core.errors import ContributionError, InputError
from fedtmle_core.exact import CHUNK, Sums, beyond_bound, query_shifts
from fedtmle_core.kernels import OUTSIDE, binned_sums, column_sums
from fedtmle_core.types import Array, Family, Part, RowBound, UnitScaled

BACKENDS = ("numba", "numpy")
TERMS = [(0,), (1, 1), (2,), (0, 2), (2, 1)]
EXPONENTS = (3, 6, 3, 6, 6)


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    yield
    parallel.set_threads(None)


def columns(n: int) -> Array:
    return np.random.default_rng(n).uniform(-7, 7, (3, n))


def rational(own: Array, term: tuple[int, ...]) -> Fraction:
    """The sum of a column, or of the rounded products of two."""
    return sum(map(Fraction, np.prod(own[list(term)], axis=0).tolist()), Fraction(0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [0, 1, CHUNK + 3])
def test_products_are_summed_to_the_last_digit(backend: str, n: int) -> None:
    own = columns(n)
    own[np.abs(own) < 2.0**-15] = 1.0  # the last bits of their products would lie below the fine grid
    with kernels.using_backend(backend):
        sums = column_sums(own, EXPONENTS, what="term", terms=TERMS)
    assert sums.fractions() == [rational(own, term) for term in TERMS]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_terms_and_products_with_one_are_summed_once(backend: str) -> None:
    x, y = columns(CHUNK + 3)[:2]
    one = np.broadcast_to(np.float64(1.0), x.shape)
    terms = [(0,), (0, 1), (1, 0), (1,), (1, 1), (1, 3), (0, 2), (0, 2), (0,), (2, 3)]
    exponents = (3, 3, 3, 1, 1, 1, 6, 6, 4, 3)
    bins = (x > 0).astype(np.uint8)
    with kernels.using_backend(backend):
        sums = column_sums([x, one, y, one], exponents, what="term", terms=terms)
        by_bin = binned_sums([x, one, y, one], bins, 2, exponents, what="term", terms=terms)
        in_memory = column_sums([x, one.copy(), y, one.copy()], exponents, what="term", terms=terms)
        halves = [column_sums(np.ones((1, len(x)))[:, bins == b], (1,), what="term") for b in (0, 1)]
    assert sums == in_memory == by_bin[0] + by_bin[1]
    assert [each.units[3] for each in by_bin] == [half.units[0] for half in halves]
    asked = kernels._terms([x, one, y, one], terms, kernels._scale(exponents))
    assert asked.places.tolist() == [[0, -1], [1, -1], [0, 2], [0, -1], [2, -1]]


def test_threads_partition_and_backend_change_nothing() -> None:
    own = columns((1 << 17) + CHUNK + 77)

    def summed(part: Array) -> Sums:
        return column_sums(part, EXPONENTS, what="term", terms=TERMS)

    parallel.set_threads(1)
    want = summed(own)
    for threads in (2, 3):
        parallel.set_threads(threads)
        assert summed(own) == want
    one, other = np.split(own[:, np.random.default_rng(1).permutation(own.shape[1])], [4097], axis=1)
    assert summed(one) + summed(other) == want
    with kernels.using_backend("numpy"):
        assert summed(own) == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_beyond_its_bound_is_counted(backend: str) -> None:
    own = np.ones((2, 10))
    own[:, 4] = own[:, 9] = 3.0
    with kernels.using_backend(backend):
        column_sums(own, (2, 4), what="term", terms=[(0,), (0, 1)])
        with pytest.raises(ContributionError) as error:
            column_sums(own, (2, 3), what="term", terms=[(0,), (0, 1)])
    assert str(error.value) == beyond_bound(2, "term")


@pytest.mark.parametrize("n", [0, 1, 2 * CHUNK + 5, 40 * CHUNK])
def test_bins_are_the_sums_of_their_rows(n: int) -> None:
    own, bins = columns(n), np.random.default_rng(0).choice([0, 1, 3, OUTSIDE], n).astype(np.uint8)
    own[:, bins == OUTSIDE] = np.nan  # which nobody sums
    terms = [(0,), (2,), (0, 2)]
    want = [column_sums(own[:, bins == b], (3, 5, 6), what="bin", terms=terms) for b in range(4)]
    assert n < 2 or len({sums.units for sums in want}) == 4
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            assert binned_sums(own, bins, 4, (3, 5, 6), what="bin", terms=terms) == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_are_read_where_they_are(backend: str) -> None:
    own, n = columns(2 * CHUNK + 5), 2 * CHUNK + 5
    constant, spread = np.broadcast_to(np.float64(0.3), (n,)), columns(2 * n)[1, ::2]
    bins = np.arange(n, dtype=np.uint8) % 3
    apart, together = [own[0], constant, spread], np.stack([own[0], constant, spread])
    with kernels.using_backend(backend):
        for terms in (TERMS, [(2, 1)], [(1,)]):
            powers = [6] * len(terms)
            assert column_sums(apart, powers, what="term", terms=terms) == column_sums(
                together, powers, what="term", terms=terms
            )
            assert binned_sums(apart, bins, 3, powers, what="bin", terms=terms) == binned_sums(
                together, bins, 3, powers, what="bin", terms=terms
            )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_column_is_put_on_the_unit_scale_of_its_range_as_numpy_puts_it(backend: str) -> None:
    n = CHUNK + 5
    own, bins = columns(n), np.arange(n, dtype=np.uint8) % 3
    lazy = [own[0], UnitScaled(own[1], -7.0, 14.0), UnitScaled(own[2], 0.3, 0.7)]
    made = [own[0], (own[1] + 7.0) / 14.0, (own[2] - 0.3) / 0.7]
    with kernels.using_backend(backend):
        assert binned_sums(lazy, bins, 3, (3, 6, 8), what="bin", terms=TERMS[1:4]) == binned_sums(
            made, bins, 3, (3, 6, 8), what="bin", terms=TERMS[1:4]
        )
    assert lazy[2].part(slice(3, 9)).tobytes() == made[2][3:9].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 8.5])
def test_a_row_beyond_the_bound_of_a_bin_is_counted(backend: str, bad: float) -> None:
    own, bins = np.ones((2, 30)), (np.arange(30) // 10).astype(np.uint8)
    own[1, [3, 25, 26]] = bad
    with kernels.using_backend(backend), pytest.raises(ContributionError, match=r"^3 row.*one row's bin"):
        binned_sums(own, bins, 3, (3, 3), what="bin")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [0, 1, 7, 2 * CHUNK + 5])
def test_values_are_put_into_bins_and_counted(backend: str, n: int) -> None:
    edges = (-3.0, 0.0, 0.5, 4.0)
    values = columns(n)[0].round()
    values[: n // 9] = np.nan
    values[n // 9 : n // 3] = 4.0  # an edge belongs to the bin above it
    bins = np.array([sum(value >= edge for edge in edges) for value in values], dtype=np.uint8)
    with kernels.using_backend(backend):
        assert kernels.bins_between(edges, values).tolist() == bins.tolist()
        assert kernels.bins_between((), values).tolist() == [0] * n
        outside = np.where(values == 2.0, OUTSIDE, bins).astype(np.uint8)
        assert kernels.count_bins(outside, 6) == [int(np.sum(outside == b)) for b in range(6)]
        known = np.array([4.0, -1.0])
        want = [
            [
                int(np.sum(held & (outside == b)))
                for held in (values == 4, values == -1, ~np.isin(values, known))
            ]
            for b in range(6)
        ]
        assert kernels.count_values(values, known, outside, 6).tolist() == want
        assert kernels.count_values(values, known[:0], outside, 6)[:, 0].tolist() == [
            int(np.sum(outside == b)) for b in range(6)
        ]


@pytest.mark.parametrize("dim", range(1, 9))
def test_a_hessian_of_any_width(dim: int) -> None:
    rng = np.random.default_rng(dim)
    X, y, eps = rng.uniform(-1, 1, (dim, 1000)), rng.uniform(0, 1, 1000), rng.uniform(-1, 1, dim)
    parts = Part.GRADIENT | Part.HESSIAN
    shifts = query_shifts(RowBound(gradient=1, curvature=0), eps, parts)
    found = []
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            found.append(kernels.glm_sums(kernels.glm_rows(Family.LOGISTIC, X, y=y), eps, parts, shifts))
    assert found[0] == found[1]


def test_no_row_is_beyond_the_bound_where_only_the_largest_of_two_rows_would_be() -> None:
    w = np.array([1.0, 2.0**-40, 1.0])
    X = np.array([[2.0**-10, 2.0**10, 1.0]] * 4)  # at most 1 in each row, 2^20 between two of them
    shifts = query_shifts(RowBound(gradient=0, curvature=0), np.zeros(4), Part.HESSIAN)

    def hessian(X: Array) -> tuple[int, ...]:
        return kernels.glm_sums(kernels.glm_rows(Family.GAUSSIAN, X, w=w), np.zeros(4), Part.HESSIAN, shifts)

    assert hessian(X) == (2**30 + 2**30 + 2**50,) * 10
    X[2, 2] = np.nextafter(1.0, 2.0)
    with pytest.raises(ContributionError, match="Hessian"):
        hessian(X)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_magnitude(backend: str) -> None:
    with kernels.using_backend(backend):
        assert kernels.largest(np.array([1.0, -3.0, 2.0])) == 3.0
        assert kernels.largest(np.array([1.0, -np.inf])) == np.inf
        for at in (0, 1, 2):
            column = np.array([np.inf, -1.0, 5.0])
            column[at] = np.nan
            assert np.isnan(kernels.largest(column))
        assert kernels.largest(np.zeros(0)) == 0.0
        assert kernels.largest(np.broadcast_to(np.float64(-2.0), (5,))) == 2.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_is_chosen_for_each_row(backend: str) -> None:
    values = np.random.default_rng(0).normal(size=(3, 100))
    values[1, 3] = np.nan
    codes = np.arange(100, dtype=np.int16) % 3
    with kernels.using_backend(backend):
        assert kernels.chosen(values, codes).tobytes() == values[codes, np.arange(100)].tobytes()
        half = values[:, ::2]
        assert kernels.chosen(half, codes[:50]).tobytes() == half[codes[:50], np.arange(50)].tobytes()
        two = values[:2, :30]
        assert kernels.chosen(two, codes[:30] % 2).tobytes() == two[codes[:30] % 2, np.arange(30)].tobytes()
        assert kernels.chosen(values[1:2], codes * 0).tobytes() == values[1].tobytes()
        assert kernels.chosen(np.zeros((2, 0)), codes[:0]).shape == (0,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_multiple_is_added_as_numpy_adds_it(backend: str) -> None:
    total, values = columns(100)[:2]
    constant = np.broadcast_to(np.float64(0.3), (100,))
    want = total + 0.7 * values + 0.1 * constant + 0.2 * columns(200)[0, ::2]
    with kernels.using_backend(backend):
        kernels.add_multiple(total, 0.7, values)
        kernels.add_multiple(total, 0.1, constant)
        kernels.add_multiple(total, 0.2, columns(200)[0, ::2])
        with pytest.raises(InputError, match="values"):
            kernels.add_multiple(total, 1.0, values[:50])
    assert total.tobytes() == want.tobytes()


def test_arguments_that_do_not_fit_are_refused() -> None:
    ones = np.ones((2, 4))
    for terms in ([(2,)], [(0, 5)], [(-1,)], [(0, -2)]):
        with pytest.raises(InputError, match="terms"):
            column_sums(ones, (1,), what="term", terms=terms)
    with pytest.raises(InputError, match="terms"):
        column_sums(ones, (1, 1, 1), what="term")
    for bins, size in (([0, 1, 2], 3), ([0, 1, 2, 3], 3), ([0] * 4, 0), ([0] * 4, 256)):
        with pytest.raises(InputError, match="bins"):
            binned_sums(ones, np.array(bins, dtype=np.uint8), size, (1, 1), what="bin")
    with pytest.raises(InputError, match="bins"):
        binned_sums(ones, np.zeros(4, dtype=np.int64), 1, (1, 1), what="bin")
    with pytest.raises(InputError, match="columns"):
        column_sums([np.ones(4), np.ones(5)], (1, 1), what="term")
    with pytest.raises(InputError, match="edges"):
        kernels.bins_between([0.5] * 255, np.ones(3))
    with pytest.raises(InputError, match="codes"):
        kernels.chosen(ones, np.zeros(3, dtype=np.int16))


def test_after_an_error_nothing_goes_on_in_the_background() -> None:
    parallel.set_threads(2)
    begun, ended = [], []

    def work(k: int) -> None:
        begun.append(k)
        if k == 1:
            raise ValueError("the second item")
        time.sleep(0.01)
        ended.append(k)

    with pytest.raises(ValueError, match="second"):
        list(parallel.mapped(work, range(50)))
    count = len(begun)
    assert count < 50
    assert sorted(ended) == sorted(k for k in begun if k != 1)
    time.sleep(0.05)
    assert len(begun) == count


def test_a_forked_process_has_threads_of_its_own() -> None:
    parallel.set_threads(2)
    assert list(parallel.mapped(abs, range(5))) == list(range(5))  # the pool of this process is there
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_mapped_in_child).get(timeout=60) == list(range(5))


def _mapped_in_child() -> list[int]:
    return list(parallel.mapped(abs, range(5)))


def test_what_is_mapped_may_map() -> None:
    parallel.set_threads(2)

    def inner(k: int) -> list[int]:
        return list(parallel.mapped(lambda j: 10 * k + j, range(5)))

    assert list(parallel.mapped(inner, range(7))) == [[10 * k + j for j in range(5)] for k in range(7)]
