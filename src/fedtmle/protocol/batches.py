"""Batches drawn anew at each step, as in Algorithm 2 with SGD, and what their sums disclose together.

Sums over batches that overlap disclose single rows by subtraction. If a server keeps eps fixed, each
batch with counts c of the silo's rows discloses the sum of c_i t_i over gradients t_i, and all batches
together disclose every linear combination of these sums. With k batches, person i contributes
(c_1i t_i, ..., c_ki t_i), and the largest leverage (`model.leverage`) of these vectors may not exceed
1/min_people. The sum over all rows, which the EIF check asks for, counts as one more batch. A silo of N rows
whose gradients have d coordinates therefore answers at most N/(d min_people) different batches, and fewer if
the batches are nearly dependent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.model.submodel import AbstractRowsSubmodel
from fedtmle.model.types import Array, IntArray


@final
class FreshBatches:
    """The batches of one session; each is stored as how often it contains each of the silo's rows."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._counts: dict[bytes, IntArray] = {}
        self.add(np.arange(n_rows))

    def add(self, rows: IntArray) -> None:
        """Add a batch of row numbers, which may repeat; a batch that was added before changes nothing."""
        counts = np.bincount(rows, minlength=self._n_rows).astype(np.int64)
        self._counts.setdefault(counts.tobytes(), counts)

    def largest_leverage(self, submodel: AbstractRowsSubmodel, eps: Array, enough: float) -> float:
        """Return the largest leverage in the sums over all batches, as if all were disclosed at ``eps``.

        ``submodel`` has all rows of the silo. An upper bound may be returned if it is at most ``enough``.
        """

        def pieces() -> Iterator[PersonRows]:
            start = 0
            for piece in submodel.disclosed_rows(eps):
                stop = start + piece.rows.shape[1]
                disclosed = [piece.rows * counts[start:stop] for counts in self._counts.values()]
                yield PersonRows(np.concatenate(disclosed))
                start = stop

        return largest_leverage(pieces, enough=enough)
