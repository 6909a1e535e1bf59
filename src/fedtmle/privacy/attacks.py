"""Attacks from a transcript alone: what the server has, and a prior.

`LinearAttack` knows the design (every column but one) and decodes that column; `fit_records` knows all but s
records and fits those by nonlinear least squares, as gradient-inversion attacks do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array
from fedtmle.privacy.answers import Answered, Submodels, explain
from fedtmle.privacy.disclosure import AffineDecoder, affine_decoder
from fedtmle.protocol.coded import RoundedGradientQuery
from fedtmle.protocol.lattice import floating
from fedtmle.protocol.query import Local
from fedtmle.protocol.sums import MomentsQuery, SumsQuery

DAMPING = 1e-3
TRIALS = 60


def sent(asked: Answered, local: Local) -> Array:
    """The numbers of an answer as means over the silo's rows, the public part taken off."""
    query, answer = asked.query, asked.answer
    if isinstance(query, SumsQuery | MomentsQuery):
        return np.asarray(answer.values(local.n_rows))
    if isinstance(query, RoundedGradientQuery):
        public = query.problem.normaliser(query.law).gradient(query.eps)
        lattice = query.lattice
        return np.asarray(
            float(lattice.h) * np.array(answer, dtype=np.float64) - floating(lattice.C) @ public
        )
    raise InputError(f"an attack on a {type(query).__name__} is not written")


@final
@dataclass(frozen=True, kw_only=True)
class LinearAttack:
    """Y - F(x_o) = A u + e, with A and F(x_o) from the known design and a guess x_o of the column."""

    A: Array  # (m, N)
    gap: Array  # Y - F(x_o), (m,)

    @property
    def rank(self) -> int:
        """How many functionals of the column the answers hold."""
        return (
            int(np.linalg.matrix_rank(self.A, tol=1e-10 * float(np.linalg.norm(self.A, 2))))
            if self.A.any()
            else 0
        )

    def column(self) -> Array:
        """The column less the guess, of least norm: exact in the directions that the answers see."""
        scale = np.maximum(np.linalg.norm(self.A, axis=1), 1e-300)  # units of the numbers differ
        return np.asarray(np.linalg.lstsq(self.A / scale[:, None], self.gap / scale, rcond=1e-11)[0])

    def decoder(self, c: Array, *, radius: float, noise: float) -> AffineDecoder:
        """The best affine decoder of c . u; apply it to ``gap``."""
        return affine_decoder(self.A, c, radius=radius, noise=noise)


def linear_attack(answered: Sequence[Answered], guess: Local, rows: Any, name: str) -> LinearAttack:
    """The attack on column ``name``; ``rows`` are the known design with a guess in that column.

    ``guess`` are the same rows as a query sees them. Only answers that are linear in the column are used.
    """
    submodels = Submodels()
    blocks, gaps = [], []
    for asked in answered:
        if isinstance(asked.query, MomentsQuery):
            continue  # squares of the column
        explained = explain(Answered(query=asked.query, answer=asked.answer), guess, rows, submodels)
        if explained is None:
            continue
        blocks.append(explained.tangents(rows, name) / guess.n_rows)
        gaps.append(sent(asked, guess) - explained.terms(rows).mean(axis=1))
    return LinearAttack(A=np.concatenate(blocks), gap=np.concatenate(gaps))


@final
@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Parameters that explain the transcript, and how well."""

    u: Array
    misfit: float


def fit_records(
    response: Callable[[Array], Array],
    jacobian: Callable[[Array], Array],
    answers: Array,
    starts: Sequence[Array],
    *,
    radius: float,
) -> Fitted:
    """min ||F(u) - Y|| over |u_j| <= radius by Levenberg-Marquardt from several starts; the best is kept."""
    best: Fitted | None = None
    for start in starts:
        u, damping = np.clip(start, -radius, radius), DAMPING
        rest = response(u) - answers
        for _ in range(TRIALS):
            J = jacobian(u)
            gram = J.T @ J
            step = np.linalg.lstsq(
                gram + damping * np.diag(np.maximum(np.diag(gram), 1e-300)), -J.T @ rest, rcond=None
            )[0]
            ahead = np.clip(u + step, -radius, radius)
            there = response(ahead) - answers
            if float(there @ there) < float(rest @ rest):
                u, rest, damping = ahead, there, damping * 0.3
            else:
                damping *= 4.0
            if damping > 1e12:
                break
        found = Fitted(u=u, misfit=float(np.linalg.norm(rest)))
        if best is None or found.misfit < best.misfit:
            best = found
    if best is None:
        raise InputError("starts: expected at least one")
    return best
