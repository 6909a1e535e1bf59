"""A silo's memory of its rows and rosters across studies, and what studies disclose together.

A file for each version of the data holds a keyed digest of every record, sorted. The key is derived from the
silo's secret and never leaves it, so that nobody else can test a guess against the file. The ledger's line of
a study's first answer names the version, the columns and the silos that took part (`StudyScope`).

**Refreshed data.** Two studies over the same columns, before and after a refresh, disclose the difference of
their sums, which is over the records that came, went or were corrected. Write t_i for the studies that record
i is in. A combination of the studies' sums is made, in effect, of 1 / max h_i people, where h_i = t_i^T (sum
t t^T)^+ t_i is the leverage (`model.leverage`). A corrected record is one person in two versions, so that the
records of two versions also count by the larger of those that came and went.

**Rosters.** Under masks a study discloses totals over its silos. Take the matrix with a row for each study
and a column for each silo, 1 where the silo took part. The totals of a set of silos follow from the studies
if the row space holds a vector that is zero elsewhere, which is so if the columns elsewhere have a smaller
rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedtmle.errors import JournalError
from fedtmle.model.table import AnyTable, Table
from fedtmle.runtime.journal import sync_folder
from fedtmle.runtime.ledger import ReadColumn

DIGEST = 16  # bytes for a record: two of 2^40 records share one with probability 2^-49
_MAGIC = b"fedtmle rows 1\n"
_PRIME = (1 << 61) - 1  # no minor of 27 or fewer rows of zeros and ones is a multiple of it

Digests = npt.NDArray[np.bytes_]  # sorted, one for each record


def row_digests(table: AnyTable, columns: Collection[ReadColumn], key: bytes) -> Digests:
    """Return the keyed digest of every record over ``columns``, sorted."""
    parts = [_digests_of(block, columns, key) for block in table.blocks()]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=f"S{DIGEST}")


def _digests_of(table: Table, columns: Collection[ReadColumn], key: bytes) -> Digests:
    cells = []
    for column in sorted(columns, key=lambda column: (column.name, column.kind)):
        if column.kind == "factor":
            factor = table.factors[column.name]
            labels = np.array([_label(level) for level in factor.levels] + [0], dtype=np.uint64)
            cells.append(labels[factor.codes])
        else:
            values = table.numeric[column.name] + 0.0  # no negative zero
            cells.append(np.where(np.isnan(values), np.nan, values).view(np.uint64))
    data = memoryview(np.stack(cells, axis=1).tobytes())
    keyed, width = hashlib.blake2b(key=key, digest_size=DIGEST), 8 * len(cells)
    digests = []
    for at in range(0, len(data), width):
        digest = keyed.copy()  # faster than a new one
        digest.update(data[at : at + width])
        digests.append(digest.digest())
    joined = b"".join(digests)
    return np.frombuffer(joined, dtype=f"S{DIGEST}")


def _label(level: str) -> int:
    return int.from_bytes(hashlib.blake2b(level.encode(), digest_size=8).digest())


@dataclass(frozen=True)
class RowStore:
    """The files of digests, each named by the digest of its content."""

    folder: Path

    @staticmethod
    def name(digests: Digests) -> str:
        """Return the name of a version of the rows."""
        return hashlib.sha256(_MAGIC + digests.tobytes()).hexdigest()

    def keep(self, digests: Digests) -> str:
        """Store a version of the rows, if it is not there yet; return its name."""
        data, name = _MAGIC + digests.tobytes(), self.name(digests)
        path = self._path(name)
        if not path.exists():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}.new")
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
            sync_folder(self.folder)
        return name

    def read(self, name: str) -> Digests:
        """Return a stored version; raise `JournalError` if it is lost or was changed."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except OSError:
            raise JournalError(
                f"{path}: the digests of the rows of an earlier study are gone; restore them from a backup"
            ) from None
        if hashlib.sha256(data).hexdigest() != name:
            raise JournalError(f"{path}: the digests of the rows of an earlier study were changed")
        return np.frombuffer(data[len(_MAGIC) :], dtype=f"S{DIGEST}")

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.digests"


def fewest_people(versions: Sequence[Digests]) -> float | None:
    """Return the fewest people, in effect, on whom a combination of studies over these versions can rest.

    None if all versions have the same records. Combinations in which every record has the same part, as in
    each study alone, are left to the guard of that study.
    """
    records, where = np.unique(np.concatenate(versions), return_inverse=True)
    ends = np.cumsum([0, *map(len, versions)])
    counts = np.stack(
        [np.bincount(where[start:stop], minlength=len(records)) for start, stop in pairwise(ends)]
    )
    layers = range(1, int(counts.max(initial=0)) + 1)  # identical records are different people
    patterns, people = np.unique(
        np.concatenate([counts >= layer for layer in layers], axis=1), axis=1, return_counts=True
    )
    is_there = patterns.any(axis=0)
    patterns, people = patterns[:, is_there], people[is_there]
    if patterns.all():
        return None
    T = patterns.astype(np.float64)
    leverage = np.einsum("ik,ij,jk->k", T, np.linalg.pinv((T * people) @ T.T, rcond=1e-12, hermitian=True), T)
    fewest = [1.0 / float(leverage.max())]
    for first, second in combinations(counts, 2):
        change = second - first
        fewest += [float(max(change.clip(0).sum(), (-change).clip(0).sum()))] if change.any() else []
    return min(fewest)


def isolated(rosters: Collection[frozenset[str]], colluders: int) -> tuple[str, ...] | None:
    """Return silos whose totals follow from the totals over these rosters, None if there are too many.

    It seeks one silo, or one with up to ``colluders`` others: these know their own part of the total.
    """
    distinct = list(dict.fromkeys(rosters))
    silos = sorted(frozenset().union(*distinct))
    matrix = [[int(silo in roster) for silo in silos] for roster in distinct]
    rank = _rank(matrix)
    for size in range(1, colluders + 2):
        for chosen in combinations(range(len(silos)), size):
            if _rank([[x for at, x in enumerate(row) if at not in chosen] for row in matrix]) < rank:
                return tuple(silos[at] for at in chosen)
    return None


def _rank(matrix: Sequence[Sequence[int]]) -> int:
    """Return the rank of a matrix of zeros and ones, by elimination modulo a prime."""
    rows, rank = [list(row) for row in matrix], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((row for row in rows[rank:] if row[column]), None)
        if pivot is None:
            continue
        rows.remove(pivot)
        rows.insert(rank, pivot)
        inverse = pow(pivot[column], -1, _PRIME)
        for row in rows[rank + 1 :]:
            if row[column]:
                share = row[column] * inverse % _PRIME
                row[:] = [(x - share * y) % _PRIME for x, y in zip(row, pivot, strict=True)]
        rank += 1
    return rank
