"""A table read in passes: the first checks every row and gathers the levels, the others give blocks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fedtmle.data.cells import in_order
from fedtmle.data.problems import Findings
from fedtmle.model.table import Factor, StreamedTable, Table

Batches = Callable[[], Iterator[tuple[Table, Findings]]]  # one pass, each batch beside what is wrong with it


def streamed(batches: Batches, findings: Findings) -> StreamedTable:
    """The table behind ``batches``; what is wrong with it goes to ``findings``."""
    n_rows = 0
    counts: dict[str, Counter[str]] = {}  # of each factor's labels
    digests: dict[str, Any] = {}  # by column, so that batches leave no trace in them
    for batch, found in batches():
        findings.merge(found)
        n_rows += batch.n_rows
        for name, column in batch.numeric.items():
            digests.setdefault(f"numeric {name}", hashlib.blake2b()).update(column.data)
        for name, factor in batch.factors.items():
            counts.setdefault(name, Counter()).update(dict(zip(factor.levels, factor.counts, strict=True)))
            hashed = np.array([_hash(level) for level in factor.levels] + [0], dtype=np.uint64)
            digests.setdefault(f"factor {name}", hashlib.blake2b()).update(hashed[factor.codes].data)
    in_levels = {name: {level: rows[level] for level in in_order(rows)} for name, rows in counts.items()}
    levels = {name: tuple(rows) for name, rows in in_levels.items()}

    def read() -> Iterator[Table]:
        for batch, found in batches():
            found.settle()
            factors = {
                name: Factor(own.recode(levels[name]), levels[name]) for name, own in batch.factors.items()
            }
            yield Table(n_rows=batch.n_rows, numeric=batch.numeric, factors=factors)

    whole = hashlib.blake2b(digest_size=32)
    for name in sorted(digests):
        whole.update(name.encode() + digests[name].digest())
    return StreamedTable(n_rows=n_rows, factor_counts=in_levels, digest=whole.digest(), read=read)


def _hash(label: str) -> int:
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest())
