"""Random draws by public rules: the same at every party, and for a record whatever silo it is in.

A stream is named by a text, such as a study's seed and what is drawn. The draw of record i is a function of
the stream and of i alone (a counter-based generator), so that neither the order in which records are visited
nor their partition into silos changes it. Draws that all parties make are computed without libm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from fedtmle.model import kernels
from fedtmle.model.types import Array

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream_key(name: str) -> int:
    """Return the 64-bit key of a stream, from SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(f"fedtmle draw:{name}".encode()).digest()[:8], "big")


def uniforms(key: int, numbers: Array) -> Array:
    """Return one draw in (0, 1) for each record number, shape (N,): two rounds of SplitMix64's mixer.

    The numbers are whole and below 2^53. A draw is an odd multiple of 2^-54.
    """
    words = numbers.astype(np.uint64)
    for round_key in (key, key ^ _GOLDEN):
        words = _mixed(words * np.uint64(_GOLDEN) + np.uint64(round_key))
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIXERS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


def uniform_stream(key: int) -> Iterator[float]:
    """Yield draws in (0, 1): those of records 0, 1, 2, ..."""
    for number in count():
        yield float(uniforms(key, np.array([float(number)]))[0])


# Wichura (1988), algorithm AS 241: numerator and denominator of each of three pieces, ascending powers.
_CENTRAL = (
    (3.3871328727963666080, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_MIDDLE = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
     1.27045825245236838258, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
_TAIL = (
    (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5,
     2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip


def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal law at p in (0, 1), without libm (AS 241)."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * _ratio(_CENTRAL, 0.180625 - q * q)
    r = math.sqrt(-kernels.log(p if q < 0 else 1.0 - p))
    value = _ratio(_MIDDLE, r - 1.6) if r <= 5.0 else _ratio(_TAIL, r - 5.0)
    return -value if q < 0 else value


def _ratio(pair: tuple[tuple[float, ...], tuple[float, ...]], x: float) -> float:
    above, below = (_polynomial(coefficients, x) for coefficients in pair)
    return above / below


def _polynomial(coefficients: tuple[float, ...], x: float) -> float:
    total = 0.0
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


def normals(draws: Iterator[float], size: int) -> list[float]:
    """Return independent standard normal draws."""
    return [normal_quantile(next(draws)) for _ in range(size)]


def chi_square(draws: Iterator[float], df: float) -> float:
    """Return a draw of chi^2 with df >= 1 degrees of freedom: twice a gamma draw (Marsaglia and Tsang)."""
    shape, boost = df / 2.0, 1.0
    if shape < 1.0:  # gamma(a) = gamma(a + 1) U^(1/a); a is 1/2
        boost, shape = next(draws) ** 2, shape + 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = normal_quantile(next(draws))
        v = 1.0 + c * x
        if v <= 0.0:
            continue
        v = v * v * v
        if kernels.log(next(draws)) < 0.5 * x * x + d - d * v + d * kernels.log(v):
            return 2.0 * d * v * boost
