"""The integer lattice of Algorithm 4, in raw or whitened coordinates.

The protocol runs, verbatim, for the target C Psi with C public, invertible and fixed for the
run; C = I is the paper's own. With B = C^-1 and b >= ||B||_op, all in exact arithmetic:

    delta/(8 sqrt(d) b) < h <= delta/(4 sqrt(d) b), h dyadic              eq. (lattice-spacing)
    z = round(C g_m / h),   q = round(sum_m N_m z_m / n)                  half to even
    u = -(h/beta) sum of q over the steps,   eps = C^T u
    ||C^-1 h q|| + h sqrt(d) b  bounds the raw residual.

If the coordinates of Psi have tolerances of their own, delta_j, a run ends when |(C^-1 h q)_j| <= 3 delta_j/4
for all j, and delta/b above is the smallest delta_j/||B_j||, B_j row j of B. If the rule fails for some j,
||h q|| >= |(B h q)_j|/||B_j|| > 3 delta_j/(4 ||B_j||) >= 3 h sqrt(d), and the step descends as in the paper.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from fedtmle.errors import DecodeError, InputError, NumericalError, PrecisionError
from fedtmle.model.linear import cholesky, invert_lower, symmetric_norm
from fedtmle.protocol.codes import BitReader, BitWriter
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array

Matrix = tuple[tuple[Fraction, ...], ...]
IntMatrix = tuple[tuple[int, ...], ...]

SIGNIFICANT_BITS = 8  # bits of each entry of C and of beta; the values sent are used
LARGEST_MANTISSA = 1 << SIGNIFICANT_BITS
LARGEST_EXPONENT = 1000
CHECK_BITS = 16
SMALLEST_NORM = 2.0**-LARGEST_EXPONENT
SMALLEST_PIVOT = 2.0**-40  # a smaller share of the diagonal entry is rounding error
PUBLIC_BITS = 60  # the public gradient of the normaliser is rounded to 2^-60


def divide(numerator: int, denominator: int) -> int:
    """Return the nearest integer to a quotient, half to even, without floats."""
    quotient, remainder = divmod(numerator, denominator)
    twice = 2 * remainder - denominator
    return quotient + (twice > 0 or (twice == 0 and quotient % 2 == 1))


def significant(value: float, *, up: bool = False) -> Fraction:
    """Return ``value`` rounded to 8 significant bits, to nearest or upwards."""
    if value == 0.0:
        return Fraction(0)
    _, exponent = math.frexp(value)
    unit = Fraction(2) ** (exponent - SIGNIFICANT_BITS)
    scaled = Fraction(value) / unit
    return (math.ceil(scaled) if up else round(scaled)) * unit


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Public numbers of one run: delta, h, beta and C (lower triangular), exact.

    Coordinate j of the residual may be ``scales[j]`` times delta; without scales its norm may be delta.
    """

    delta: Fraction
    h: Fraction
    beta: Fraction
    C: Matrix
    scales: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        return len(self.C)

    @cached_property
    def B(self) -> Matrix:
        """C^-1 by forward substitution."""
        columns = []
        for j in range(self.dim):
            column: list[Fraction] = []
            for i in range(self.dim):
                known = sum((self.C[i][k] * column[k] for k in range(i)), Fraction(0))
                column.append((Fraction(int(i == j)) - known) / self.C[i][i])
            columns.append(column)
        return tuple(zip(*columns, strict=True))

    @cached_property
    def b_squared(self) -> Fraction:
        """An exact upper bound of ||B||_op^2."""
        return norm_squared_bound(self.B)

    @cached_property
    def scaled_delta_squared(self) -> Fraction:
        """(delta/b)^2: the tolerance in the run's coordinates."""
        if not self.scales:
            return self.delta**2 / self.b_squared
        rows = zip(self.scales, self.B, strict=True)
        return min((self.delta * scale) ** 2 / sum(a * a for a in row) for scale, row in rows)

    @cached_property
    def _integer_C(self) -> tuple[IntMatrix, int]:
        return _integers(self.C)

    @cached_property
    def _integer_B(self) -> tuple[IntMatrix, int]:
        return _integers(self.B)

    def quantise(self, sums: Sums, public: Array, n_rows: int) -> tuple[int, ...]:
        """Return z = round(C g / h) with g = sums/n_rows + public."""
        entries, denominator = self._integer_C
        grid = max(*sums.shifts, PUBLIC_BITS)
        g = [
            (unit << (grid - shift)) + n_rows * round(Fraction(float(a)) * 2**grid)
            for unit, shift, a in zip(sums.units, sums.shifts, public, strict=True)
        ]
        scale = self.h * n_rows * 2**grid * denominator
        return tuple(divide(image * scale.denominator, scale.numerator) for image in _images(entries, g))

    def eps(self, steps: Sequence[int]) -> Array:
        """Return C^T u for u = (h/beta) times integers, each coordinate correctly rounded."""
        entries, denominator = self._integer_C
        unit = self.h / (self.beta * denominator)
        columns = tuple(zip(*entries, strict=True))
        return np.array(  # a quotient of integers is correctly rounded
            [unit.numerator * image / unit.denominator for image in _images(columns, steps)]
        )

    def raw_norm_squared(self, q: Sequence[int]) -> Fraction:
        """Return ||h B q||^2, exactly."""
        entries, denominator = self._integer_B
        return (self.h / denominator) ** 2 * sum(image**2 for image in _images(entries, q))

    def is_small(self, q: Sequence[int]) -> bool:
        """Return whether ||h B q|| <= 3 delta/4: eq. (protocol-action); with scales, each coordinate."""
        if self.scales:
            entries, denominator = self._integer_B
            images = zip(_images(entries, q), self.scales, strict=True)
            return all(
                4 * self.h * abs(image) <= 3 * self.delta * scale * denominator for image, scale in images
            )
        return 16 * self.raw_norm_squared(q) <= 9 * self.delta**2

    def certificate(self, q: Sequence[int]) -> float:
        """Return ||h B q|| + h sqrt(d) b, rounded up; with scales, the norm of the coordinates' bounds."""
        if self.scales:
            return root_up(
                sum((Fraction(each) ** 2 for each in self.coordinate_certificates(q)), Fraction(0))
            )
        rounding = self.h**2 * self.dim * self.b_squared
        return math.nextafter(root_up(self.raw_norm_squared(q)) + root_up(rounding), math.inf)

    def coordinate_certificates(self, q: Sequence[int]) -> tuple[float, ...]:
        """Return |(h B q)_j| + h sqrt(d) ||B_j||, rounded up: a bound on each coordinate of the residual."""
        entries, denominator = self._integer_B
        unit = self.h / denominator
        return tuple(
            math.nextafter(
                root_up((unit * image) ** 2) + root_up(unit**2 * self.dim * sum(a * a for a in row)), math.inf
            )
            for row, image in zip(entries, _images(entries, q), strict=True)
        )

    @property
    def smoothness_bits(self) -> int:
        """The number of bits that beta takes if it is set during the steps of a run."""
        out = BitWriter()
        _write_significant(self.beta, out)
        return out.finish().length

    def write(self, out: BitWriter, *, public_C: bool) -> None:
        """Append beta, C's lower triangle unless it is public, and a check; h follows from C and delta."""
        _write_significant(self.beta, out)
        if not public_C:
            for i, row in enumerate(self.C):
                for entry in row[: i + 1]:
                    _write_significant(entry, out)
        out.uint(self.digest(), CHECK_BITS)

    @classmethod
    def read(cls, bits: BitReader, *, dim: int, delta: Fraction, C: Matrix | None) -> Lattice:
        """Read what `write` appended; ``C`` is the public matrix, or None if it was sent."""
        beta = _read_significant(bits)
        if C is None:
            lower = [[_read_significant(bits) for _ in range(i + 1)] for i in range(dim)]
            C = tuple((*row, *(Fraction(0),) * (dim - len(row))) for row in lower)
        if beta <= 0 or any(C[i][i] <= 0 for i in range(dim)):
            raise DecodeError("a lattice's beta and C's diagonal must be positive")
        try:
            lattice = build_lattice(delta=delta, beta=beta, C=C)
        except NumericalError as error:
            raise DecodeError(str(error)) from None
        if bits.uint(CHECK_BITS) != lattice.digest():
            raise DecodeError("the parties do not hold the same coordinates C and spacing h")
        return lattice

    def digest(self) -> int:
        """Return 16 bits of SHA-256 over C and h.

        Every party computes both in fixed-order arithmetic, so they agree; the check is a defence against
        another version or a defect, not the means of agreement.
        """
        text = ";".join(str(entry) for row in (*self.C, (self.h,)) for entry in row)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[: CHECK_BITS // 8], "big")


def build_lattice(*, delta: Fraction, beta: Fraction, C: Matrix, scales: tuple[int, ...] = ()) -> Lattice:
    """Return the lattice whose h is the largest that eq. (lattice-spacing) allows.

    In raw coordinates h is a power of two, as in the paper. In others a power of two could be only half as
    large as allowed, so h keeps 8 significant bits there, and integers are up to a bit shorter.
    """
    lattice = Lattice(delta=delta, h=Fraction(1), beta=beta, C=C, scales=scales)
    widest = lattice.scaled_delta_squared / (16 * lattice.dim)
    power = math.floor((math.log2(widest.numerator) - math.log2(widest.denominator)) / 2)
    while Fraction(4) ** (power + 1) <= widest:
        power += 1
    while Fraction(4) ** power > widest:
        power -= 1
    h = Fraction(2) ** power
    is_raw = identity(lattice.dim) == C
    if not is_raw:
        unit = h / 2 ** (SIGNIFICANT_BITS - 1)
        h = math.isqrt(math.floor(widest / unit**2)) * unit
    return Lattice(delta=delta, h=h, beta=beta, C=C, scales=scales)


def _integers(matrix: Matrix) -> tuple[IntMatrix, int]:
    """Return the matrix times the least integer that makes its entries integers, and that integer."""
    denominator = math.lcm(*(entry.denominator for row in matrix for entry in row))
    return tuple(tuple(int(entry * denominator) for entry in row) for row in matrix), denominator


def _images(matrix: IntMatrix, vector: Sequence[int]) -> list[int]:
    return [sum(map(operator.mul, row, vector)) for row in matrix]


def identity(dim: int) -> Matrix:
    """Return C = I, the paper's own coordinates."""
    return tuple(tuple(Fraction(int(i == j)) for j in range(dim)) for i in range(dim))


def floating(matrix: Matrix) -> Array:
    """Return the matrix with each entry rounded to the nearest float."""
    return np.array([[float(entry) for entry in row] for row in matrix])


def whitener(curvature: Array, rounding: float = 0.0) -> Matrix:
    """Return C, the inverse Cholesky factor of the curvature, rounded to 8 significant bits.

    ``rounding`` bounds the operator norm of the rounding error. Two coordinates may be identical, such as
    risks at two horizons without an event between them. The factor is then that of curvature + rounding I,
    which is at least the curvature before it was rounded. A coordinate of no curvature is refused.
    """
    diagonal: list[float] = np.diag(curvature).tolist()
    factor = cholesky(curvature)
    if factor is None or any(
        pivot * pivot <= SMALLEST_PIVOT * entry
        for pivot, entry in zip(np.diag(factor).tolist(), diagonal, strict=True)
    ):
        is_seen = all(entry > 0 for entry in diagonal) and rounding > 0
        factor = cholesky(curvature, shift=rounding) if is_seen else factor
    if factor is None:
        raise InputError(
            "coordinates: the curvature of the loss is singular, so it cannot be whitened; "
            "an arm or a coordinate may carry no information. Use coordinates='raw', or drop it"
        )
    inverse, dim = invert_lower(factor), len(curvature)
    return tuple(
        tuple(significant(float(inverse[i, j])) if j <= i else Fraction(0) for j in range(dim))
        for i in range(dim)
    )


def finest_tolerance(error: float) -> float:
    """Return the smallest tolerance that is certified if exact sums and quadrature err by ``error``."""
    return 64 * error


def working_tolerance(tolerance: float, error: float, rule: str | None = None) -> Fraction:
    """Return delta less the error of exact sums and quadrature; refuse a tolerance too fine for it.

    ``error`` is known at the first law; later laws may have rows bounded less tightly, so four
    times it is set aside. ``rule`` names the rule that set the tolerance, if it was not given as a number.
    """
    finest = finest_tolerance(error)
    if not tolerance >= finest:
        asked = f"{tolerance:g}" if rule is None else f"the rule '{rule}' asks for {tolerance:g} here, which"
        coarser = "'negligible', or to " if rule == "practical" else ""
        raise PrecisionError(
            f"tolerance: {asked} is too fine; exact sums and quadrature certify no less than {finest:.2g} "
            f"here. Set tolerance to {coarser}a number of at least {finest:.2g}, or declare tighter bounds"
        )
    return Fraction(tolerance) - 4 * Fraction(error)


def norm_squared_bound(matrix: Matrix) -> Fraction:
    """Return a rational upper bound of ||matrix||_op^2, proved by an exact positive-definiteness test."""
    dim = len(matrix)
    gram = [
        [sum((matrix[k][i] * matrix[k][j] for k in range(dim)), Fraction(0)) for j in range(dim)]
        for i in range(dim)
    ]
    try:
        largest = symmetric_norm(floating(tuple(map(tuple, gram))))  # plain floats: h follows from it
    except OverflowError:
        largest = math.inf
    if not SMALLEST_NORM < largest < 1 / SMALLEST_NORM:  # too near the ends of a double to be rounded up
        raise NumericalError("a matrix of the lattice is out of the range of a double")
    bound = significant(largest, up=True)
    while not _is_positive_definite(
        [[bound * (i == j) - gram[i][j] for j in range(dim)] for i in range(dim)]
    ):
        bound = significant(float(bound) * (1 + 2.0**-SIGNIFICANT_BITS), up=True)
    return bound


def _is_positive_definite(matrix: list[list[Fraction]]) -> bool:
    """Return whether every pivot of Gaussian elimination in exact rationals is positive."""
    rows = [list(row) for row in matrix]
    for i, pivot_row in enumerate(rows):
        if pivot_row[i] <= 0:
            return False
        for row in rows[i + 1 :]:
            factor = row[i] / pivot_row[i]
            for j in range(i, len(row)):
                row[j] -= factor * pivot_row[j]
    return True


def root_up(value: Fraction) -> float:
    """Return a float of at least sqrt(value)."""
    root = math.sqrt(value)
    while Fraction(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    return root


def exponent_of(value: Fraction) -> int:
    """Return e with value = m 2^e and m odd, for a dyadic value other than zero."""
    return (value.numerator & -value.numerator).bit_length() - value.denominator.bit_length()


def _write_significant(value: Fraction, out: BitWriter) -> None:
    """Append a dyadic number of at most 8 significant bits: its exponent, then its signed mantissa."""
    exponent = exponent_of(value) if value else 0
    mantissa = int(value / Fraction(2) ** exponent)
    out.gamma((exponent,))
    out.fixed((mantissa,), (LARGEST_MANTISSA,))


def _read_significant(bits: BitReader) -> Fraction:
    (exponent,) = bits.gamma(1)
    if abs(exponent) > LARGEST_EXPONENT:
        raise DecodeError("an exponent is beyond the range of a double")
    (mantissa,) = bits.fixed((LARGEST_MANTISSA,))
    if mantissa % 2 == 0 and not (mantissa == 0 and exponent == 0):
        raise DecodeError("a number is not in its shortest form")
    return mantissa * Fraction(2) ** exponent
