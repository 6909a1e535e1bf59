"""The history code of thm:statistical: K + 1, then the K d integers beta eps^k/h, and back to the law.

The decoder needs what every party has: the problem, the initial law and the lattice (h, beta, C). It
applies the same moves in the same order, so the law is the same bit for bit.

What H_init codes (`MATH`): if the initial law was fitted on rows that are not those of the targeting
sample, nothing of it; else its coefficients. beta, h and C are coded wherever a calibration round took
them from the data, and so are delta and the shares N_m. The empirical covariate marginal is not coded:
it enters D only through a constant, which P_n - P_0 removes. A learner that cannot be written down as
coefficients is not covered by the theorem.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fedtmle.errors import NumericalError
from fedtmle.model.problem import AbstractProblem, Law, Rows
from fedtmle.protocol.codes import BitReader, Bits, BitWriter
from fedtmle.protocol.lattice import Lattice

History = tuple[tuple[int, ...], ...]


def history_integers(lattice: Lattice, accepted: Sequence[Sequence[float]]) -> History:
    """beta u^k/h with eps^k = C^T u^k: the integers behind the accepted fluctuations, verified."""
    history = tuple(_integers(lattice, eps) for eps in accepted)
    for integers, eps in zip(history, accepted, strict=True):
        if tuple(lattice.eps(integers)) != tuple(eps):
            raise NumericalError("an accepted fluctuation is not on the run's lattice")
    return history


def _integers(lattice: Lattice, eps: Sequence[float]) -> tuple[int, ...]:
    unit = lattice.h / lattice.beta
    exact = [Fraction(value) for value in eps]
    return tuple(
        round(sum((lattice.B[j][i] * exact[j] for j in range(lattice.dim)), Fraction(0)) / unit)
        for i in range(lattice.dim)
    )


def encode_history(history: Sequence[Sequence[int]]) -> Bits:
    """The code itself; its length is `statistical.history_bits`."""
    out = BitWriter()
    _write_count(len(history) + 1, out)
    for vector in history:
        out.gamma(vector)
    return out.finish()


def decode_history(bits: Bits, dim: int) -> History:
    """The inverse of `encode_history`; garbage is a `DecodeError`."""
    reader = BitReader(bits)
    K = _read_count(reader) - 1
    history = tuple(reader.gamma(dim) for _ in range(K))
    reader.finish()
    return history


def decode_law(bits: Bits, problem: AbstractProblem[Law, Rows], law: Law, lattice: Lattice) -> Law:
    """p^K from its code, the initial law and the lattice."""
    for integers in decode_history(bits, problem.dim):
        law = problem.move(law, lattice.eps(integers))
    return law


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """The sample-dependent part of the initial shared state; None where it is not of this sample."""

    coefficients: tuple[float, ...] | None = None  # of nuisances fitted on the targeting sample
    lattice: Lattice | None = None  # where a calibration round fixed beta, h or C
    codes_coordinates: bool = False  # C too, where the law does not know it
    sizes: tuple[int, ...] = ()  # the shares N_m, unless they are fixed by design


def encode_initial(state: InitialState) -> Bits:
    """A prefix-free code of `InitialState`, of length H_init; empty if nothing is of this sample."""
    out = BitWriter()
    if state.coefficients is not None:
        _write_count(len(state.coefficients) + 1, out)
        for value in state.coefficients:
            out.uint(int.from_bytes(struct.pack(">d", value), "big"), 64)
    if state.lattice is not None:
        out.uint(int.from_bytes(struct.pack(">d", float(state.lattice.delta)), "big"), 64)
        state.lattice.write(out, public_C=not state.codes_coordinates)
    for size in state.sizes:
        _write_count(size, out)
    return out.finish()


def _write_count(value: int, out: BitWriter) -> None:
    """The gamma code of a positive integer: floor(log2 v) zeros, then v."""
    out.uint(value, 2 * value.bit_length() - 1)


def _read_count(reader: BitReader) -> int:
    zeros = 0
    while reader.uint(1) == 0:
        zeros += 1
    return (1 << zeros) + reader.uint(zeros)
