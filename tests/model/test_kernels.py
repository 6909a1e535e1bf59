"""Fused sums, softmax and kernel density: longhand values, and the same bits however they are computed."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtmle.errors import ContributionError, InputError
from fedtmle_core import kernels, parallel
from fedtmle_core.exact import CHUNK, query_shifts
from fedtmle_core.types import Array, Family, Part, RowBound
from fedtmle_paper.density.kernel import log_mean_kernel

EVERYTHING = Part.LOSS | Part.GRADIENT | Part.HESSIAN
PARTS = [Part(value) for value in range(1, EVERYTHING.value + 1)]
PATTERNS = list(itertools.product([False, True], repeat=3))
BOUND = RowBound(gradient=6, curvature=6)
BACKENDS = ("numba", "numpy")


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    yield
    parallel.set_threads(None)


class Rows:
    """Random rows; ``given`` says which of offset, y and w are not None."""

    def __init__(self, n: int, given: tuple[bool, bool, bool] = (True, True, True), dim: int = 3) -> None:
        rng = np.random.default_rng(n)
        self.X = rng.uniform(-1, 1, (dim, n))
        columns = (rng.uniform(-2, 2, n), rng.uniform(0, 1, n), rng.uniform(0, 2, n))
        self.columns = tuple(column if keep else None for column, keep in zip(columns, given, strict=True))

    def sums(self, family: Family, eps: Array, parts: Part = EVERYTHING, rows: Any = None) -> tuple[int, ...]:
        rows = slice(None) if rows is None else rows
        offset, y, w = (None if column is None else column[rows] for column in self.columns)
        shifts = query_shifts(BOUND, eps, parts)
        return kernels.glm_sums(kernels.glm_rows(family, self.X[:, rows], offset, y, w), eps, parts, shifts)


EPS = np.array([0.3, -0.7, 0.11])


def rho(family: Family, eta: Decimal, y: Decimal) -> tuple[Decimal, Decimal, Decimal]:
    """rho, rho' and rho'', as `families` defines them."""
    if family is Family.LINEAR:
        return eta, Decimal(1), Decimal(0)
    if family is Family.GAUSSIAN:
        return (eta - y) ** 2 / 2, eta - y, Decimal(1)
    power = eta.exp()
    if family is Family.POISSON:
        return power - y * eta, power - y, power
    p = power / (1 + power)
    return (1 + power).ln() - y * eta, p - y, p * (1 - p)


def longhand(family: Family, rows: Rows, eps: Array) -> dict[Part, list[Decimal]]:
    """Sums over rows in 60 digits, from the definition."""
    dim, n = rows.X.shape
    X = [[Decimal(x) for x in row] for row in rows.X.tolist()]
    coefficients = [Decimal(e) for e in eps.tolist()]
    offset, y, w = (
        [Decimal(default)] * n if column is None else [Decimal(v) for v in column.tolist()]
        for column, default in zip(rows.columns, (0, 0, 1), strict=True)
    )
    pairs = [(j, k) for j in range(dim) for k in range(j, dim)]
    loss, gradient, hessian = Decimal(0), [Decimal(0)] * dim, [Decimal(0)] * len(pairs)
    for i in range(n):
        eta = offset[i] + sum(coefficients[j] * X[j][i] for j in range(dim))
        value, slope, curvature = rho(family, eta, y[i])
        loss += w[i] * (value - rho(family, offset[i], y[i])[0])
        gradient = [g + w[i] * slope * X[j][i] for j, g in enumerate(gradient)]
        hessian = [h + w[i] * curvature * X[j][i] * X[k][i] for (j, k), h in zip(pairs, hessian, strict=True)]
    return {Part.LOSS: [loss], Part.GRADIENT: gradient, Part.HESSIAN: hessian}


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("given", PATTERNS)
def test_sums_are_the_definition(family: Family, given: tuple[bool, bool, bool]) -> None:
    rows = Rows(23, given)
    with localcontext() as context:
        context.prec = 60
        want = longhand(family, rows, EPS)
        for parts, backend in itertools.product(PARTS, BACKENDS):
            with kernels.using_backend(backend):
                units = rows.sums(family, EPS, parts)
            values = [value for part in Part if part in parts for value in want[part]]
            shifts = query_shifts(BOUND, EPS, parts)
            for unit, value, shift in zip(units, values, shifts, strict=True):
                exact = value * Decimal(2) ** shift
                # Half a unit of rounding per row, and some ulps of a contribution below 2^50.
                assert abs(unit - exact) <= 23 * (Decimal("0.5") + 2), (parts, backend)


def test_a_sum_is_the_sum_of_its_rounded_rows() -> None:
    rows = Rows(50)
    whole = rows.sums(Family.LOGISTIC, EPS)
    single = [rows.sums(Family.LOGISTIC, EPS, rows=[i]) for i in range(50)]
    assert whole == tuple(map(sum, zip(*single, strict=True)))


@pytest.mark.parametrize("n", [CHUNK + 5, (1 << 17) + CHUNK + 77])  # each in a pass of its own; side by side
def test_two_losses_side_by_side_have_the_sums_that_each_has_alone(n: int) -> None:
    rows, columns = Rows(n), Rows(n, (False, True, False), dim=5)
    eps = np.array([0.2, -0.1, 0.4, 0.0, -0.3])
    asked = [(Family.LOGISTIC, rows, EPS, Part.GRADIENT), (Family.GAUSSIAN, columns, eps, EVERYTHING)]
    want = tuple(each.sums(family, at, parts) for family, each, at, parts in asked)
    queries = [
        kernels.glm_query(kernels.glm_rows(family, each.X, *each.columns), at, parts, grid)
        for family, each, at, parts in asked
        for grid in [query_shifts(BOUND, at, parts)]
    ]
    for backend, threads in itertools.product(BACKENDS, (1, 2, 3)):
        parallel.set_threads(threads)
        with kernels.using_backend(backend):
            assert kernels.glm_sums_of_two(*queries) == want
            assert kernels.glm_sums_of_two(*queries[::-1]) == want[::-1]


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_row_beyond_its_bound_in_either_of_two_losses_is_counted(spoiled: int) -> None:
    X = [np.full((1, (1 << 15) + 1), 0.5) for _ in range(2)]
    X[spoiled][0, -1] = np.nan
    first, second = (
        kernels.glm_query(kernels.glm_rows(Family.LINEAR, x), np.zeros(1), Part.GRADIENT, (50,)) for x in X
    )
    for backend in BACKENDS:
        with kernels.using_backend(backend), pytest.raises(ContributionError, match=r"^1 row"):
            kernels.glm_sums_of_two(first, second)


def test_two_losses_side_by_side_have_as_many_rows() -> None:
    first, second = (
        kernels.glm_query(kernels.glm_rows(Family.LINEAR, np.ones((1, n))), np.zeros(1), Part.GRADIENT, (50,))
        for n in (5, 6)
    )
    with pytest.raises(InputError, match="second: expected 5 rows, not 6"):
        kernels.glm_sums_of_two(first, second)


def test_contributions_are_rounded_half_to_even() -> None:
    X = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 0.49999999999999994, 2.0**50, -(2.0**50)]])
    one = [
        kernels.glm_sums(kernels.glm_rows(Family.LINEAR, X[:, [i]]), np.zeros(1), Part.GRADIENT, (0,))[0]
        for i in range(8)
    ]
    assert one == [0, 2, 2, 0, -2, 0, 2**50, -(2**50)]


@pytest.mark.parametrize("family", Family)
def test_threads_order_partition_and_backend_change_nothing(family: Family) -> None:
    n = (1 << 17) + CHUNK + 77  # enough rows for threads, and an incomplete last chunk
    rows = Rows(n)
    parallel.set_threads(1)
    want = rows.sums(family, EPS)
    for threads in (2, 3):
        parallel.set_threads(threads)
        assert rows.sums(family, EPS) == want
    rng = np.random.default_rng(5)
    assert rows.sums(family, EPS, rows=rng.permutation(n)) == want
    cuts = np.sort(rng.integers(0, n, 3))
    parts = [rows.sums(family, EPS, rows=part) for part in np.split(np.arange(n), cuts)]
    assert tuple(map(sum, zip(*parts, strict=True))) == want
    with kernels.using_backend("numpy"):
        assert rows.sums(family, EPS) == want
    asked_apart = [rows.sums(family, EPS, part) for part in Part]
    assert sum(asked_apart, ()) == want


@pytest.mark.parametrize("family", [Family.LOGISTIC, Family.POISSON])
@pytest.mark.parametrize("size", [1e-300, 1e-17, 1e-9, 1e-4, 1.0, 63.0])
def test_a_small_step_has_an_accurate_loss(family: Family, size: float) -> None:
    offsets = np.linspace(-20, 20, 41) if family is Family.LOGISTIC else np.linspace(-20, 1, 41)
    for offset, sign in itertools.product(offsets.tolist(), (1.0, -1.0)):
        step = sign * size
        shift = 40 - math.frexp(step)[1] - (90 if family is Family.POISSON and step > 1 else 0)
        (unit,) = kernels.glm_sums(
            kernels.glm_rows(family, np.ones((1, 1)), np.array([offset])),
            np.array([step]),
            Part.LOSS,
            (shift,),
        )
        with localcontext() as context:
            context.prec = 400 if size < 1e-100 else 60
            zero = Decimal(0)
            want = (
                rho(family, Decimal(offset) + Decimal(step), zero)[0] - rho(family, Decimal(offset), zero)[0]
            )
            scale = Decimal(2) ** shift
            error = abs(unit - want * scale)
            ceiling = abs(Decimal(step)) if family is Family.LOGISTIC else abs(want)
            assert error <= Decimal("0.5") + Decimal("3e-15") * ceiling * scale


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_runaway_step_has_a_loss_too(backend: str) -> None:
    X = np.array([[1.0, 1.0, -1.0, -1.0, 1e-3, 0.07]])
    offset = np.array([-795.0, 1.0, 795.0, -1.0, 0.3, -2.0])
    want = [softplus(o + 800 * x) - softplus(o) for o, x in zip(offset.tolist(), X[0].tolist(), strict=True)]
    with kernels.using_backend(backend):
        for i, value in enumerate(want):
            (unit,) = kernels.glm_sums(
                kernels.glm_rows(Family.LOGISTIC, X[:, [i]], offset[[i]]), np.array([800.0]), Part.LOSS, (30,)
            )
            assert unit * 2.0**-30 == pytest.approx(value, rel=1e-9)


def test_no_rows_give_zeros() -> None:
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            assert Rows(0).sums(Family.LOGISTIC, EPS) == (0,) * 10
            assert Rows(0, (False, False, False)).sums(Family.GAUSSIAN, EPS, Part.GRADIENT) == (0,) * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("part", "name"), [(Part.LOSS, "loss"), (Part.GRADIENT, "gradient"), (Part.HESSIAN, "Hessian")]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.2345e9])
def test_a_row_beyond_the_bound_raises(backend: str, part: Part, name: str, bad: float) -> None:
    rows = Rows(CHUNK + 100)
    rows.X[1, [7, 4100]] = bad
    rows.X[2, 7] = bad
    with kernels.using_backend(backend), pytest.raises(ContributionError) as error:
        rows.sums(Family.GAUSSIAN, EPS, part)
    assert str(error.value).startswith(
        f"2 row(s) exceed the declared bound on one row's contribution to the {name};"
    )
    assert "1.2345" not in str(error.value)
    assert "1234" not in str(error.value)


@pytest.mark.parametrize("column", ["offset", "y", "w"])
def test_nan_anywhere_is_caught(column: str) -> None:
    for backend, family in itertools.product(BACKENDS, [Family.GAUSSIAN, Family.LOGISTIC, Family.POISSON]):
        rows = Rows(1000)
        rows.columns[("offset", "y", "w").index(column)][999] = np.nan
        with kernels.using_backend(backend), pytest.raises(ContributionError, match=r"^1 row"):
            rows.sums(family, EPS, Part.LOSS | Part.GRADIENT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bound_itself_is_allowed_and_no_more(backend: str) -> None:
    def gradient(x: float) -> tuple[int, ...]:
        return kernels.glm_sums(
            kernels.glm_rows(Family.LINEAR, np.array([[x]])), np.zeros(1), Part.GRADIENT, (50,)
        )

    with kernels.using_backend(backend):
        assert gradient(1.0) == (2**50,)
        assert gradient(-1.0) == (-(2**50),)
        for x in (np.nextafter(1, 2), np.nextafter(-1, -2)):
            with pytest.raises(ContributionError):
                gradient(x)


def test_full_chunks_at_the_bound_do_not_overflow() -> None:
    X = np.full((1, 3 * CHUNK), -1.0)
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            units = kernels.glm_sums(kernels.glm_rows(Family.LINEAR, X), np.zeros(1), Part.GRADIENT, (50,))
        assert units == (-3 * CHUNK * 2**50,)


def test_a_tiny_eps_has_a_grid_finer_than_a_float_can_scale() -> None:
    eps = np.array([1e-310])
    shifts = query_shifts(BOUND, eps, Part.LOSS)
    assert shifts[0] > 1023
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            units = kernels.glm_sums(kernels.glm_rows(Family.LINEAR, np.ones((1, 1))), eps, Part.LOSS, shifts)
        assert units == (round(Fraction(1e-310) * 2 ** shifts[0]),)


def test_arguments_that_do_not_fit_are_refused() -> None:
    X, eps = np.zeros((2, 5)), np.zeros(2)

    def sums(**changed: Any) -> None:
        arguments: dict[str, Any] = {
            "X": X,
            "offset": None,
            "y": None,
            "w": None,
            "eps": eps,
            "shifts": (40, 40),
        } | changed
        of = {name: arguments.pop(name) for name in ("eps", "shifts")}
        kernels.glm_sums(kernels.glm_rows(Family.LINEAR, **arguments), parts=Part.GRADIENT, **of)

    sums()
    for name, wrong in {"eps": np.zeros(3), "y": np.zeros(4), "w": np.zeros((5, 1)), "shifts": (40,)}.items():
        with pytest.raises(InputError, match=name):
            sums(**{name: wrong})
    with pytest.raises(InputError, match="one grid"):
        sums(shifts=(40, 41))
    with pytest.raises(InputError, match="logits"):
        kernels.softmax(np.zeros(3))
    with pytest.raises(InputError, match="centres"):
        log_mean_kernel(np.zeros((2, 3)), np.zeros((2, 0)))


def both(function: Callable[..., Any], *arguments: Array) -> Array:
    """The value, after checking that threads and backends agree on every bit."""
    results = []
    for backend, threads in (("numba", 1), ("numba", 2), ("numba", 3), ("numpy", 1)):
        parallel.set_threads(threads)
        with kernels.using_backend(backend):
            results.append(function(*arguments))
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()
    return results[0]


def test_softmax() -> None:
    rng = np.random.default_rng(0)
    logits = rng.uniform(-30, 30, (4, 40_001))
    logits[1, 5] = -np.inf
    logits[:, 6] += 5000
    p = both(kernels.softmax, logits)
    powers = np.exp(logits.astype(np.longdouble) - logits.max(axis=0))
    np.testing.assert_allclose(p, (powers / powers.sum(axis=0)).astype(float), rtol=1e-14)
    assert p[1, 5] == 0
    assert both(kernels.softmax, rng.standard_normal((1, 9))).tolist() == [[1.0] * 9]
    assert both(kernels.softmax, np.zeros((3, 0))).shape == (3, 0)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_log_mean_kernel(dim: int) -> None:
    rng = np.random.default_rng(dim)
    points, centres = 3 * rng.standard_normal((dim, 1501)), rng.standard_normal((dim, 301))
    points[:, 3] = 200.0  # every kernel underflows there; their log does not
    got = both(log_mean_kernel, points, centres)
    half = ((points[:, :, None] - centres[:, None, :]).astype(np.longdouble) ** 2).sum(axis=0) / 2
    want = np.log(np.exp(half.min(axis=1)[:, None] - half).mean(axis=1)) - half.min(axis=1)
    np.testing.assert_allclose(got, want.astype(float), rtol=1e-14, atol=1e-14)
    assert both(log_mean_kernel, np.zeros((dim, 0)), centres).shape == (0,)


def test_backend_is_chosen_and_restored() -> None:
    before = kernels.backend()
    with kernels.using_backend("numpy"):
        assert kernels.backend() == "numpy"
    assert kernels.backend() == before
    with pytest.raises(InputError, match="backend"), kernels.using_backend("fortran"):
        pass


def test_threads_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTMLE_THREADS", "3")
    assert parallel.threads() == 3
    parallel.set_threads(2)
    assert parallel.threads() == 2
    parallel.set_threads(None)
    for wrong in ("0", "many"):
        monkeypatch.setenv("FEDTMLE_THREADS", wrong)
        with pytest.raises(InputError, match="FEDTMLE_THREADS"):
            parallel.threads()
    with pytest.raises(InputError, match="threads"):
        parallel.set_threads(0)


CODE = (
    "import sys; from fedtmle_core import kernels; assert 'numba' not in sys.modules; "
    "kernels.exp(1.0); print(kernels.backend(), 'numba' in sys.modules)"
)


def run(paths: list[str], **environment: str) -> list[str]:
    """What CODE prints in a fresh interpreter."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FEDTMLE")}
    done = subprocess.run(  # noqa: S603 - our own interpreter, a constant program
        [sys.executable, "-c", CODE],
        env={**inherited, "PYTHONPATH": os.pathsep.join([*paths, *sys.path]), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_numba_is_imported_by_the_first_call_only() -> None:
    assert run([]) == ["numba", "True"]
    assert run([], FEDTMLE_BACKEND="numpy") == ["numpy", "False"]


def test_a_numba_that_cannot_be_imported_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 1.0 or less')")
    assert run([str(tmp_path)]) == ["numpy", "False"]
    with pytest.raises(subprocess.CalledProcessError):
        run([str(tmp_path)], FEDTMLE_BACKEND="numba")


LOADED = """
import sys
from pathlib import Path
from fedtmle.deploy.demo import run_here, write_example
from fedtmle_core import kernels
from fedtmle.studyfile.file import read_study

def overloads():
    modules = [module for name, module in sys.modules.items() if name.startswith("fedtmle_core.kernels")]
    named = {k: v for module in modules for k, v in vars(module).items()}
    return {name: list(each.signatures) for name, each in named.items() if hasattr(each, "signatures")}

kernels.load()
before = overloads()
run_here(read_study(write_example(Path(sys.argv[1]), 3, keys=True)))
print(sum(map(len, before.values())), overloads() == before)
"""


def test_a_study_waits_for_no_kernel_once_all_are_loaded(tmp_path: Path) -> None:
    done = subprocess.run(  # noqa: S603 - our own interpreter, a constant program
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    count, same = done.stdout.split()
    assert int(count) > 15
    assert same == "True"


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_kernels_are_loaded_on_rows_that_they_accept(backend: str) -> None:
    with kernels.using_backend(backend):
        kernels.load()
