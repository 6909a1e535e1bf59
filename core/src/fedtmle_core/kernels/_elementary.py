"""exp, log and their kin from IEEE +, -, *, / and bit patterns alone: no libm, no FMA.

Each function is written once. Called with numpy arrays it is the numpy twin; `_jit` registers
the same source with numba, where it works on scalars inside loops that vectorise. Only the
`_primitives` differ. Without fast-math both do the same operations in the same order, hence the
same bits.

Polynomials are minimax on their reduced range (a linear programme on 2,000 points in 80-digit
arithmetic, leading Taylor coefficients held fixed).
"""

from __future__ import annotations

import numpy as np

from fedtmle_core.kernels._primitives import MAGIC, MAGIC_BITS, bits, from_bits, select
from fedtmle_core.types import Array, IntArray

INVERSE_LN2 = 1.4426950408889634
LN2_HIGH = 0.6931471803691238  # 32 bits, so that k * LN2_HIGH is exact for every exponent k
LN2_LOW = 1.9082149292705877e-10

EXP_LOWEST = -708.0  # below, e^x is flushed to 0: it would be (nearly) subnormal
EXP_HIGHEST = 709.782712893384  # above, e^x overflows

# (e^r - 1 - r)/r^2 on |r| <= ln(2)/2; error of e^r below 2^-57 e^r.
E0, E1, E2, E3, E4 = 0.5, 1 / 6, 0.041666666666612215, 0.008333333333392305, 0.0013888888923835707
E5, E6, E7 = 0.00019841269642584722, 2.4801512056334568e-05, 2.7557518452813234e-06
E8, E9 = 2.7623951577121797e-07, 2.5009030826825466e-08

# (2 atanh(s) - 2s)/s^3 in z = s^2, |s| <= 3 - 2 sqrt(2); relative error of 2 atanh below 2^-58.
A0, A1, A2, A3 = 2 / 3, 0.39999999999781655, 0.2857142867204234, 0.222222050055975
A4, A5, A6 = 0.18183260032284498, 0.15321242086904058, 0.1472876216528188

# e^r = (Q + r P)/(Q - r P) in z = r^2, |r| <= ln(2)/2; the coefficients of Cephes' exp, error below 2^-57.
P0, P1, P2 = 1.26177193074810590878e-4, 3.02994407707441961300e-2, 9.99999999999999999910e-1
Q0, Q1, Q2, Q3 = 3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0
EXPIT_LOWEST = -709.5  # there 2^k is infinite already, and so 1/(1 + e^-x) is 0

SMALLEST_NORMAL = 2.0**-1022
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
MANTISSA_MASK = 0xFFFFFFFFFFFFF


def _exp_tail(r: Array) -> Array:
    """e^r - 1 - r, in pairs (a shorter chain than Horner's), r^2/2 apart (a smaller error)."""
    r2 = r * r
    low = (E1 + E2 * r) + (E3 + E4 * r) * r2
    high = (E5 + E6 * r) + ((E7 + E8 * r) + E9 * r2) * r2
    return E0 * r2 + (r2 * r) * (low + high * (r2 * r2))


def _reduced(x: Array) -> tuple[Array, Array, Array]:
    """k + MAGIC, r and a correction c with x = k ln 2 + r + c, |r| <= ln(2)/2."""
    shifted = x * INVERSE_LN2 + MAGIC
    k = shifted - MAGIC
    high = x - k * LN2_HIGH
    low = k * LN2_LOW
    r = high - low
    return shifted, r, (high - r) - low


def _half_power(shifted: Array) -> Array:
    """2^(k-1) from k + MAGIC: k is in the low bits, and k - 1 keeps 2^1024 representable."""
    return from_bits((bits(shifted) + 1022) << 52)


def exp(x: Array) -> Array:
    """e^x; 0 below -708, infinity above 709.78, NaN for NaN."""
    shifted, r, correction = _reduced(x)
    one_and_r = 1.0 + r
    lost = (1.0 - one_and_r) + r
    small = lost + (correction + _exp_tail(r))
    value = (one_and_r + small) * 2.0 * _half_power(shifted)
    return select(x < EXP_LOWEST, 0.0, select(x > EXP_HIGHEST, np.inf, value))


def expm1_near(x: Array) -> Array:
    """e^x - 1 to relative accuracy, for |x| <= 64 only."""
    shifted, r, correction = _reduced(x)
    half = _half_power(shifted)
    fraction = r + (correction + _exp_tail(r))
    return ((half - 0.5) + half * fraction) * 2.0


def _split(x: Array) -> tuple[IntArray, Array]:
    """k and m with x = 2^k m, m in [sqrt(1/2), sqrt(2)), for normal positive x."""
    above = bits(x) - SQRT_HALF_BITS
    k = above >> 52
    m = from_bits((above & MANTISSA_MASK) + SQRT_HALF_BITS)
    return k, m


def _as_float(k: IntArray) -> Array:
    """k as a float, by bits: AVX2 has no conversion from int64."""
    return from_bits(k + MAGIC_BITS) - MAGIC


def _atanh_tail(s: Array) -> Array:
    """(2 atanh(s) - 2s)/s."""
    z = s * s
    z2 = z * z
    low = (A0 + A1 * z) + (A2 + A3 * z) * z2
    return z * (low + ((A4 + A5 * z) + A6 * z2) * (z2 * z2))


def log(x: Array) -> Array:
    """log x; -infinity at 0, NaN below, infinity at infinity; subnormal x are not flushed."""
    subnormal = x < SMALLEST_NORMAL
    k, m = _split(select(subnormal, x * 2.0**54, x))
    exponent = _as_float(k) - select(subnormal, 54.0, 0.0)
    f = m - 1.0
    s = f / (2.0 + f)
    half_square = 0.5 * f * f
    # 2 atanh(s) = 2s + s R with 2s = f - f^2/2 + s f^2/2: f, the largest term, enters exactly.
    rest = s * (half_square + _atanh_tail(s)) + exponent * LN2_LOW
    value = exponent * LN2_HIGH + (f - (half_square - rest))
    finite = select(x < np.inf, value, x)  # infinity and NaN stay what they are
    return select(x > 0.0, finite, select(x == 0.0, -np.inf, np.nan))


def log1p(u: Array) -> Array:
    """log(1 + u) to relative accuracy, for finite u >= 0."""
    v = 1.0 + u
    back = v - 1.0
    lost = (1.0 - (v - back)) + (u - back)  # v + lost = 1 + u exactly
    return log(v) + lost / v


def expit(x: Array) -> Array:
    """1/(1 + e^-x) = (Q - r P)/((Q - r P) + 2^k (Q + r P)), -x = k ln 2 + r: one division for both."""
    t = -select(x < EXPIT_LOWEST, EXPIT_LOWEST, select(x > -EXP_LOWEST, -EXP_LOWEST, x))
    shifted, r, _ = _reduced(t)  # the correction is below half a unit of r, and of r P
    z = r * r
    odd = r * ((P0 * z + P1) * z + P2)
    even = ((Q0 * z + Q1) * z + Q2) * z + Q3
    below = even - odd
    return below / (below + (even + odd) * from_bits((bits(shifted) + 1023) << 52))


def softplus(x: Array) -> Array:
    """log(1 + e^x), to relative accuracy also where it is about e^x."""
    return select(x > 0.0, x, 0.0) + log1p(exp(-abs(x)))


def _folded(p: Array) -> tuple[Array, Array]:
    """a = min(p, 1-p), and log(a/(1-a)).

    With b = 1 - a and 2^k near a/b: log(a/b) = k ln 2 + 2 atanh((a' - b)/(a' + b)), a' = 2^-k a, where
    a' - b is exact.
    """
    a = select(p > 0.5, 1.0 - p, p)
    b = 1.0 - a
    lost = (1.0 - b) - a
    k, _ = _split(a / b)
    scaled = a * from_bits((1023 - k) << 52)
    s = ((scaled - b) - lost) / (scaled + b)
    exponent = _as_float(k)
    return a, exponent * LN2_HIGH + (2.0 * s + (s * _atanh_tail(s) + exponent * LN2_LOW))


def logit_inside(p: Array) -> Array:
    """log(p/(1-p)), for 2^-60 <= p <= 1 - 2^-60 only: the same as `logit`."""
    _, value = _folded(p)
    return select(p > 0.5, -value, value)


def logit(p: Array) -> Array:
    """log(p/(1-p)), to relative accuracy near 0, 1/2 and 1; -+infinity at 0 and 1, NaN outside."""
    a, near = _folded(p)
    value = select(a < 2.0**-60, log(a), near)  # there 1 - a = 1; log also knows 0, subnormal and outside
    return select(p > 0.5, -value, value)


# One row's loss difference, mean and variance function; like `_elementary`, one source for both backends.
#
# The difference is rho(eta) - rho(offset) + y delta, with delta = eps . X; the term -y delta is
# added by the caller. NEAR formulas have an error of about 1e-15 |delta| however small delta is;
# they would overflow for a runaway delta, where the plain difference, FAR, loses nothing.


NEAR = 64.0


def logistic_near(lower: Array, delta: Array) -> Array:
    """softplus(eta) - softplus(offset) = +-log(1 + lower (e^|delta| - 1)), lower = expit(min(offset, eta)).

    From the lower end every term is positive, so nothing cancels.
    """
    gain = log1p(lower * expm1_near(abs(delta)))
    return select(delta < 0.0, -gain, gain)


def logistic_far(offset: Array, eta: Array) -> Array:
    """softplus(eta) - softplus(offset)."""
    return softplus(eta) - softplus(offset)


def poisson_near(offset: Array, delta: Array) -> Array:
    """e^eta - e^offset = e^offset (e^delta - 1)."""
    return exp(offset) * expm1_near(delta)


def poisson_far(offset: Array, eta: Array) -> Array:
    """e^eta - e^offset."""
    return exp(eta) - exp(offset)


def gaussian_change(offset: Array, y: Array, delta: Array) -> Array:
    """((eta - y)^2 - (offset - y)^2)/2 = delta (offset - y + delta/2)."""
    return delta * ((offset - y) + 0.5 * delta)


def logistic_variance(p: Array) -> Array:
    """rho'' = p (1 - p), p = expit(eta); its error is below 2^-53, of a ceiling of 1/4."""
    return p * (1.0 - p)
