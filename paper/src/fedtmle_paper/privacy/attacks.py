"""Attacks from a transcript alone: what the server has, and a prior.

`LinearAttack` knows the design (every column but one) and decodes that column; `fit_records` knows all but s
records and fits those by nonlinear least squares, as gradient-inversion attacks do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.privacy.answers import Submodels, explain
from fedtmle.protocol.query import AnsweredQuery, ClosingTerms, Local
from fedtmle_core.types import Array
from fedtmle_paper.privacy.disclosure import AffineDecoder, affine_decoder

DAMPING = 1e-3
TRIALS = 60


def sent(asked: AnsweredQuery, local: Local) -> Array:
    """Return the numbers of an answer as means over the silo's rows, less their public part."""
    means = asked.query.row_means(asked.answer, local)
    if means is None or means.sent is None:
        raise InputError(f"an attack on a {type(asked.query).__name__} is not written")
    return means.sent


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


def linear_attack(answered: Sequence[AnsweredQuery], guess: Local, rows: object, name: str) -> LinearAttack:
    """The attack on column ``name``; ``rows`` are the known design with a guess in that column.

    ``guess`` are the same rows as a query sees them. Only answers that are linear in the column are used.
    """
    submodels = Submodels()
    blocks, gaps = [], []
    for asked in answered:
        means = asked.query.row_means(asked.answer, guess)
        explained = explain(asked, guess, rows, submodels)
        if means is None or explained is None or any(isinstance(t, ClosingTerms) for t in means.terms):
            continue  # the closing sums have squares of the column
        blocks.append(explained.tangents(rows, name) / guess.n_rows)
        gaps.append(sent(asked, guess) - explained.terms(rows).mean(axis=1))
    return LinearAttack(A=np.concatenate(blocks), gap=np.concatenate(gaps))


@final
@dataclass(frozen=True, kw_only=True)
class RecordFit:
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
) -> RecordFit:
    """min ||F(u) - Y|| over |u_j| <= radius by Levenberg-Marquardt from several starts; the best is kept."""
    best: RecordFit | None = None
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
        fit = RecordFit(u=u, misfit=float(np.linalg.norm(rest)))
        if best is None or fit.misfit < best.misfit:
            best = fit
    if best is None:
        raise InputError("starts: expected at least one")
    return best
