"""Batches that are drawn anew at each step, as Algorithm 2 with SGD has them, and what they tell together.

Sums over batches that overlap disclose single rows by subtraction. A server that makes eps stand still is
told, for each batch with counts c of the silo's rows, the sum of c_i t_i over gradients t_i, and so every
linear combination of these sums. With k batches person i stands behind the rows (c_1i t_i, ..., c_ki t_i),
and the rule of people (`model.leverage`) is that of these: their largest leverage may not exceed
1/min_people. All rows at once, which the EIF check asks about, count as one more batch. A silo of N rows
whose gradients have d coordinates so answers at most N/(d min_people) different batches, and fewer if these
are nearly dependent.
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
    """The batches that one session asked about, each as the counts of the silo's rows in it."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._counts: dict[bytes, IntArray] = {}
        self.add(np.arange(n_rows))

    def add(self, rows: IntArray) -> None:
        """Add a batch of row numbers, with repetitions; one that is known adds nothing."""
        counts = np.bincount(rows, minlength=self._n_rows).astype(np.int64)
        self._counts.setdefault(counts.tobytes(), counts)

    def largest_leverage(self, submodel: AbstractRowsSubmodel, eps: Array, enough: float) -> float:
        """Return the largest leverage in the sums over all batches as if told at ``eps``.

        ``submodel`` has all rows of the silo. A bound that is at most ``enough`` will do.
        """

        def pieces() -> Iterator[PersonRows]:
            start = 0
            for piece in submodel.told_rows(eps):
                stop = start + piece.rows.shape[1]
                told = [piece.rows * counts[start:stop] for counts in self._counts.values()]
                yield PersonRows(np.concatenate(told))
                start = stop

        return largest_leverage(pieces, enough=enough)
