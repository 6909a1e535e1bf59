"""The lattice in exact rationals: spacing, rounding, norms and the certificate, against brute force."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DecodeError, InputError, PrecisionError
from fedtmle.protocol.codes import BitReader, BitWriter
from fedtmle.protocol.lattice import (
    CHECK_BITS,
    LARGEST_MANTISSA,
    Lattice,
    build_lattice,
    divide,
    floating,
    identity,
    norm_squared_bound,
    significant,
    whitener,
    working_tolerance,
)
from fedtmle_core.exact import Sums
from tests.damage import damaged_bits
from tests.premise import Premise

positive = st.floats(1e-6, 1e6)


@st.composite
def curvatures(draw: st.DrawFn) -> np.ndarray:
    d = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    factor = rng.normal(size=(d, d)) * np.exp2(rng.uniform(-3, 3, size=d))
    return factor @ factor.T + 1e-2 * np.eye(d)


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    C = whitener(draw(curvatures())) if draw(st.booleans()) else identity(draw(st.integers(1, 5)))
    beta = significant(draw(positive), up=True)
    return build_lattice(delta=Fraction(draw(positive)), beta=beta, C=C)


is_tie = Premise("the quotient is half-way between two integers", at_least=0.3)
pairs = st.tuples(st.integers(-(10**30), 10**30), st.integers(1, 10**12))
ties = pairs.map(lambda pair: ((2 * pair[0] + 1) * pair[1], 2 * pair[1]))


@is_tie
@given(pairs | ties)
def test_divide_is_half_even(pair: tuple[int, int]) -> None:
    a, b = pair
    is_tie.holds(2 * a % b == 0 and a % b != 0)
    assert divide(a, b) == round(Fraction(a, b))


is_whitened = Premise("the lattice is whitened", at_least=0.2)
is_not_whitened = Premise("the lattice is not whitened", at_least=0.1)


@is_whitened
@is_not_whitened
@given(lattices())
def test_spacing_is_the_largest_of_eq_lattice_spacing(lattice: Lattice) -> None:
    is_raw = is_not_whitened.holds(identity(lattice.dim) == lattice.C)
    is_whitened.holds(not is_raw)
    next_one = 2 * lattice.h if is_raw else lattice.h * (1 + Fraction(1, 127))
    assert next_one**2 * 16 * lattice.dim * lattice.b_squared > lattice.delta**2
    assert lattice.h**2 * 16 * lattice.dim * lattice.b_squared <= lattice.delta**2
    dyadic = lattice.h / Fraction(2) ** math.floor(math.log2(lattice.h))
    assert dyadic == 1 if is_raw else dyadic.denominator <= 128


def test_raw_spacing_is_the_papers() -> None:
    delta = Fraction(1, 1000)
    lattice = build_lattice(delta=delta, beta=Fraction(1), C=identity(3))
    root = math.sqrt(3)
    assert delta / (8 * root) < float(lattice.h) <= delta / (4 * root)
    assert math.log2(lattice.h).is_integer()


@given(curvatures())
def test_whitener_and_its_exact_inverse(H: np.ndarray) -> None:
    C = whitener(H)
    lattice = build_lattice(delta=Fraction(1), beta=Fraction(1), C=C)
    d = lattice.dim
    product = [
        [sum((C[i][k] * lattice.B[k][j] for k in range(d)), Fraction(0)) for j in range(d)] for i in range(d)
    ]
    assert product == [[Fraction(int(i == j)) for j in range(d)] for i in range(d)]
    eigenvalues = np.linalg.eigvalsh(floating(C) @ H @ floating(C).T)
    condition = np.linalg.cond(H)
    slack = d * 2.0**-7 * math.sqrt(condition)  # each entry keeps 8 significant bits
    assert 1 - slack < eigenvalues.min() <= eigenvalues.max() < (1 + slack) ** 2


@given(curvatures())
def test_norm_bound_is_above_and_near(H: np.ndarray) -> None:
    matrix = tuple(tuple(Fraction(float(entry)) for entry in row) for row in np.linalg.cholesky(H))
    exact = np.linalg.norm(floating(matrix), 2) ** 2
    assert exact * (1 - 1e-12) <= norm_squared_bound(matrix) <= exact * 1.02


@given(lattices(), st.data())
@settings(max_examples=50)
def test_quantise_is_exact_rounding(lattice: Lattice, data: st.DataObject) -> None:
    d = lattice.dim
    units = tuple(data.draw(st.integers(-(2**60), 2**60)) for _ in range(d))
    shifts = (data.draw(st.integers(20, 58)),) * d
    public = np.array([data.draw(st.floats(-100, 100)) for _ in range(d)])
    n = data.draw(st.integers(1, 10**6))
    g = [
        Fraction(u, n * 2 ** shifts[0]) + round(Fraction(float(p)) * 2**60) / Fraction(2**60)
        for u, p in zip(units, public, strict=True)
    ]
    z = lattice.quantise(Sums(units, shifts), public, n)
    for i in range(d):
        image = sum((lattice.C[i][j] * g[j] for j in range(d)), Fraction(0)) / lattice.h
        assert z[i] == round(image)


goes_on = Premise("a coordinate is above its tolerance", at_least=0.2)
ends = Premise("every coordinate is within its tolerance", at_least=0.2)


@goes_on
@ends
@given(curvatures(), st.data())
@settings(max_examples=100)
def test_each_coordinate_is_held_to_a_tolerance_of_its_own(H: np.ndarray, data: st.DataObject) -> None:
    """A run that goes on has a gradient three times its rounding; one that ends is within delta_j."""
    d = len(H)
    scales = tuple(2 ** data.draw(st.integers(0, 6)) for _ in range(d))
    C, delta = whitener(H), Fraction(data.draw(positive))
    lattice = build_lattice(delta=delta, beta=Fraction(1), C=C, scales=scales)
    h, B = lattice.h, lattice.B
    rows = [sum(a * a for a in row) for row in B]
    widest = min((scale * delta) ** 2 / row for scale, row in zip(scales, rows, strict=True))
    assert h**2 * 16 * d <= widest < (h * (1 + Fraction(1, 127))) ** 2 * 16 * d
    j = data.draw(st.integers(0, d - 1))
    limits = [
        3 * scale * delta / (4 * h * abs(row[j])) for scale, row in zip(scales, B, strict=True) if row[j]
    ]
    for steps, within in ((math.floor(min(limits)), True), (math.floor(min(limits)) + 1, False)):
        assert lattice.is_small(tuple(steps * (i == j) for i in range(d))) is within
    least, most = data.draw(st.sampled_from([(0, 2), (50, 100)]))
    q = tuple(data.draw(st.sampled_from([-1, 1])) * data.draw(st.integers(least, most)) for _ in range(d))
    images = [abs(h * sum(a * b for a, b in zip(row, q, strict=True))) for row in B]
    is_small = all(4 * image <= 3 * scale * delta for image, scale in zip(images, scales, strict=True))
    assert lattice.is_small(q) == is_small
    ends.holds(is_small)
    if goes_on.holds(not is_small):
        assert sum(entry * entry for entry in q) >= 9 * d
        return
    stated = lattice.coordinate_certificates(q)
    assert all(
        bound <= float(scale * delta) * (1 + 1e-12) for bound, scale in zip(stated, scales, strict=True)
    )
    assert lattice.certificate(q) == pytest.approx(math.hypot(*stated), rel=1e-12)
    assert lattice.certificate(q) <= float(delta) * math.hypot(*scales) * (1 + 1e-12)


@given(lattices(), st.data())
@settings(max_examples=50)
def test_certificate_bounds_every_gradient_that_rounds_to_q(lattice: Lattice, data: st.DataObject) -> None:
    """||C^-1 (h q + e)|| over all |e_j| <= h stays below ||h B q|| + h sqrt(d) b."""
    q = tuple(data.draw(st.integers(-50, 50)) for _ in range(lattice.dim))
    B, h = floating(lattice.B), float(lattice.h)
    worst = max(
        float(np.linalg.norm(B @ (h * np.array(q) + h * np.array(corner))))
        for corner in itertools.product((-1, 1), repeat=lattice.dim)
    )
    assert worst <= lattice.certificate(q) * (1 + 1e-12)
    assert lattice.certificate(q) <= math.sqrt(lattice.raw_norm_squared(q)) + float(
        lattice.delta
    ) / 4 + 1e-9 * float(lattice.delta) + 1e-12 * lattice.certificate(q)


is_large = Premise("a step is taken", at_least=0.25)


@is_large
@given(lattices(), st.data())
def test_step_action_keeps_the_descent_constant(lattice: Lattice, data: st.DataObject) -> None:
    """Action 00 implies ||q|| > 3 sqrt(d): with rounding h sqrt(d), descent is at least 1/(6 beta)."""
    q = tuple(data.draw(st.integers(-12, 12)) for _ in range(lattice.dim))
    if is_large.holds(not lattice.is_small(q)):
        assert sum(a * a for a in q) > 9 * lattice.dim


@given(lattices(), st.booleans())
def test_wire_round_trip(lattice: Lattice, public: bool) -> None:
    out = BitWriter()
    lattice.write(out, public_C=public)
    reader = BitReader(out.finish())
    C = lattice.C if public else None
    assert Lattice.read(reader, dim=lattice.dim, delta=lattice.delta, C=C) == lattice
    reader.finish()


decodes = Premise("the bits are a lattice", at_least=0.08)


@decodes
@given(lattices(), st.data())
def test_garbage_is_no_lattice(lattice: Lattice, data: st.DataObject) -> None:
    out = BitWriter()
    lattice.write(out, public_C=False)
    bits = data.draw(damaged_bits(out.finish()))
    try:
        reader = BitReader(bits)
        found = Lattice.read(reader, dim=lattice.dim, delta=lattice.delta, C=None)
        reader.finish()
    except DecodeError:
        decodes.holds(False)
        return
    decodes.holds(True)
    again = BitWriter()
    found.write(again, public_C=False)
    assert again.finish() == bits


def written(exponent: int, mantissa: int) -> BitReader:
    """Return the stream of a lattice in one raw coordinate whose beta is mantissa times 2^exponent."""
    out = BitWriter()
    out.gamma((exponent,))
    out.fixed((mantissa,), (LARGEST_MANTISSA,))
    beta = mantissa * Fraction(2) ** exponent
    out.uint(build_lattice(delta=Fraction(1, 8), beta=beta, C=identity(1)).digest(), CHECK_BITS)
    return BitReader(out.finish())


@pytest.mark.parametrize(
    ("exponent", "mantissa", "is_read"),
    [(0, 3, True), (-1000, 1, True), (1000, 1, True), (1001, 1, False), (-1001, 1, False), (0, -3, False)],
)
def test_beta_is_positive_and_within_the_range_of_a_double(
    exponent: int, mantissa: int, is_read: bool
) -> None:
    with nullcontext() if is_read else pytest.raises(DecodeError):
        lattice = Lattice.read(written(exponent, mantissa), dim=1, delta=Fraction(1, 8), C=identity(1))
        assert lattice.beta == mantissa * Fraction(2) ** exponent


def test_parties_with_other_coordinates_do_not_go_on() -> None:
    lattice = build_lattice(
        delta=Fraction(1, 10), beta=Fraction(1), C=whitener(np.array([[2.0, 0.3], [0.3, 1.0]]))
    )
    out = BitWriter()
    lattice.write(out, public_C=True)
    other = whitener(np.array([[2.1, 0.3], [0.3, 1.0]]))
    with pytest.raises(DecodeError, match="coordinates"):
        Lattice.read(BitReader(out.finish()), dim=2, delta=lattice.delta, C=other)


def test_eps_is_a_multiple_of_h_over_beta_in_the_papers_coordinates() -> None:
    lattice = build_lattice(delta=Fraction(1, 100), beta=Fraction(5, 4), C=identity(2))
    assert lattice.eps((3, -7)).tolist() == [
        float(3 * lattice.h / lattice.beta),
        float(-7 * lattice.h / lattice.beta),
    ]


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_significant_bits(value: float) -> None:
    up = significant(value, up=True)
    near = significant(value)
    assert value <= up <= Fraction(value) * (1 + Fraction(1, 128))
    assert abs(near - Fraction(value)) <= Fraction(value) / 256


@pytest.mark.parametrize("entry", [0.3949, 0.227, 0.5, 1.0, 3e-3])
def test_coordinates_that_are_one_and_the_same_are_whitened_up_to_the_rounding(entry: float) -> None:
    """Whether the second pivot is 0 or a rounding error above it, C is as large as the rounding says."""
    H, rounding = np.full((2, 2), entry), 2.0**-12
    C = floating(whitener(H, rounding))
    assert np.linalg.norm(C, 2) ** 2 <= 1.02 / rounding
    assert np.linalg.eigvalsh(C @ H @ C.T)[-1] <= 1.02
    for unseen in (np.diag([entry, 0.0]), np.zeros((2, 2))):
        with pytest.raises(InputError, match="an arm or a coordinate may carry no information"):
            whitener(unseen, rounding)


def test_singular_curvature_and_too_fine_tolerance_are_named() -> None:
    with pytest.raises(InputError, match="coordinates"):
        whitener(np.zeros((2, 2)))
    with pytest.raises(PrecisionError, match="tolerance"):
        working_tolerance(1e-12, 1e-13)
