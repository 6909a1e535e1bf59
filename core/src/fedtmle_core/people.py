"""Who a study is about: keyed digests of people, and whether two studies differ by too few of them.

Two sums that are harmless each may differ by one person, and then their difference is that person's row. So
a hospital remembers whom each study was about, and compares the people of a new one with all earlier ones:

* **Pairs.** The people who came since an earlier study, and those who left, are nobody or at least ``least``.
* **Combinations.** A group of people who were in the same studies (an atom of the sets) and are fewer than
  ``least`` may be at most one half of any linear combination of the studies' sums.

What this cannot see: people under two identifiers, or who share one; without identifiers, a table whose
columns are not the same as before; what other hospitals' rows did between two studies. The last is why
differences of *pooled* results cannot be judged here: a hospital sees the changes of its own rows alone.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedtmle_core.types import Bools

# Two of 10^7 people share one of 2^64 digests with probability (10^7)^2 / 2^65 = 3e-6. A collision hides at
# most that one person's coming or going; it discloses nothing by itself.
DIGEST = 8  # bytes

# A judgement of the core asks for the same half: nobody is more than one half of any combination.
MOST = 0.5

Digests: TypeAlias = NDArray[np.uint64]

# The columns that a digest is of. A person's own digest is of the identifier alone and so has no column; the
# digest of a person's record also has the values of these columns, and changes when one is corrected.
Basis: TypeAlias = tuple[str, ...]
PERSON: Basis = ()

_COPY = np.uint64(0x9E3779B97F4A7C15)  # odd, so that 2^64 copies of one digest have distinct numbers


class Digester:
    """Compute HMAC-SHA256 under one key, shortened to `DIGEST` bytes.

    Only who has the hospital's secret can test whether a person is in a stored set.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise AssertionError(
                "a key of 32 bytes is shorter than a block, so that it is padded, not hashed"
            )
        # The states after the padded key are copied for each record: four times as fast as `hmac.digest`.
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key.ljust(64, b"\0")))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in key.ljust(64, b"\0")))

    def of(self, parts: Iterable[bytes], label: bytes = b"") -> Digests:
        """Return the digest of ``label`` and each part, in the order of the parts."""
        inner, outer = self._inner.copy(), self._outer
        inner.update(len(label).to_bytes(4, "big") + label)
        shortened = []
        for part in parts:
            first, second = inner.copy(), outer.copy()
            first.update(part)
            second.update(first.digest())
            shortened.append(second.digest()[:DIGEST])
        return np.frombuffer(b"".join(shortened), dtype="<u8").astype(np.uint64)

    def of_people(self, identifiers: Iterable[bytes]) -> Digests:
        """Return the digest of each row's person."""
        return self.of(identifiers, b"person")

    def of_records(self, basis: Basis, cells: NDArray[np.uint64]) -> Digests:
        """Return the digest of each row's record; ``cells`` has a row of integers for each record.

        Equal integers must mean equal values, in every table in which the columns have these names.
        """
        content = np.ascontiguousarray(cells, dtype="<u8").tobytes()
        width = DIGEST * cells.shape[1]
        rows = (content[at : at + width] for at in range(0, len(content), width))
        names = b"".join(len(name.encode()).to_bytes(4, "big") + name.encode() for name in basis)
        return self.of(rows, b"record" + names)


@dataclass(frozen=True, kw_only=True)
class Census:
    """The people behind a table's rows: for each basis one digest a row.

    ``own`` are the bases that are stored with the study, that of the people first: `PERSON`, or all columns
    of a table without identifiers. ``views`` also has the bases of earlier studies that the table still has.
    ``reads`` are the columns that the study reads, by the hospital's own names.
    """

    views: Mapping[Basis, Digests]
    own: tuple[Basis, ...]
    reads: frozenset[str]

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return len(self.views[self.own[0]])

    def rows(self, basis: Basis) -> Digests:
        """Return one digest for each row. Equal records are different people, so that copies are numbered.

        A person may have several rows, which share the digest.
        """
        digests = self.views[basis]
        return digests if basis == PERSON else _numbered(digests)

    def people(self, basis: Basis) -> Digests:
        """Return the set of people, sorted, as it is stored."""
        return _distinct(self.rows(basis))

    def keep(self, kept: Bools) -> Census:
        """Return the census of some of the rows."""
        views = {basis: digests[kept] for basis, digests in self.views.items()}
        return Census(views=views, own=self.own, reads=self.reads)

    def concerns(self, basis: Basis) -> bool:
        """Return whether a set of an earlier study over ``basis`` is compared with this study.

        People always are. Records are if the study reads one of the columns: a correction shows in no other.
        """
        return basis in self.views and (basis == self.own[0] or not self.reads.isdisjoint(basis))


def _distinct(digests: Digests) -> Digests:
    """Return the distinct digests, sorted. (`numpy.unique` hashes them, which takes ten times as long.)"""
    ordered = np.sort(digests, kind="stable")  # it merges sorted runs
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def _union(one: Digests, other: Digests) -> Digests:
    return _distinct(np.concatenate([one, other]))


def _numbered(digests: Digests) -> Digests:
    """Return the digests, each plus a multiple of `_COPY` that counts the equal ones before it."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(ordered) else order
    lengths = np.diff(np.append(starts, len(ordered)))
    copies = np.arange(len(ordered)) - np.repeat(starts, lengths)
    numbered = np.empty_like(digests)
    numbered[order] = ordered + copies.astype(np.uint64) * _COPY
    return numbered


class Conflict(enum.Enum):
    """Why a study may not follow the earlier ones; the value tells the owner what happened and what to do."""

    LEFT = (
        "so few people of an earlier study left, or were corrected, that the difference of the two studies "
        "would show them. That cannot be undone here: wait until more have changed, or give the table that "
        "the earlier study had"
    )
    COMBINED = (
        "a combination of this study and earlier ones would show too few people. Give the same people as in "
        "an earlier study, or wait until more have changed"
    )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A study that is not answered: why, beside which earlier studies, and over which columns.

    ``people`` says by how few the studies differ: for the owner's eyes, as it depends on the rows.
    """

    conflict: Conflict
    plans: tuple[str, ...]
    basis: Basis
    people: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The rows that a study is answered from: all of them, or those of people whom earlier studies had.

    ``plans`` are the earlier studies to whose people the rows were cut back.
    """

    kept: Bools
    plans: tuple[str, ...] = ()

    @property
    def left_out(self) -> int:
        """The number of rows that are left out."""
        return int(np.count_nonzero(~self.kept))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The people whom earlier studies were about, as one set over one basis, and the plans of the studies."""

    plans: tuple[str, ...]
    basis: Basis
    people: Digests


def judge(census: Census, earlier: Sequence[Asked], *, least: int) -> Snapshot | Refusal:
    """Return the rows that a study may be answered from after the ``earlier`` ones, or why it may not.

    Where fewer than ``least`` people came since an earlier study, their rows are left out: the study is
    answered from the earlier snapshot. This may make others differ by few, so that it repeats; after a cut
    the rows are within the earlier set for good, and so there is at most one cut for each set.
    """
    compared = [each for each in earlier if census.concerns(each.basis)]
    kept, cut_back = np.ones(census.n_rows, dtype=np.bool_), list[str]()
    while True:
        now = census.keep(kept)
        sets = {basis: now.people(basis) for basis in {each.basis for each in compared}}
        left = [_missing(sets[each.basis], each.people) for each in compared]
        came = [_missing(each.people, sets[each.basis]) for each in compared]
        for each, count in zip(compared, left, strict=True):
            if 0 < count < least:
                return Refusal(conflict=Conflict.LEFT, plans=each.plans, basis=each.basis, people=count)
        fresh = next((each for each, n in zip(compared, came, strict=True) if 0 < n < least), None)
        if fresh is None:
            return _combined(sets, compared, least) or Snapshot(kept=kept, plans=tuple(cut_back))
        kept[np.flatnonzero(kept)[_outside(now.rows(fresh.basis), fresh.people)]] = False
        cut_back += (plan for plan in fresh.plans if plan not in cut_back)


def _missing(people: Digests, others: Digests) -> int:
    """Return how many of the ``others`` are not in a set."""
    return int(np.count_nonzero(_outside(others, people)))


def _outside(digests: Digests, people: Digests) -> Bools:
    """Return which digests are not in a sorted set."""
    if not len(people):
        return np.ones(len(digests), dtype=np.bool_)
    places = np.searchsorted(people, digests)
    places[places == len(people)] = 0
    return np.asarray(people[places] != digests)


def _combined(today: Mapping[Basis, Digests], earlier: Sequence[Asked], least: int) -> Refusal | None:
    """Return a refusal if a combination of this study and earlier ones rests on too few people."""
    for basis, people in today.items():
        sets = [each for each in earlier if each.basis == basis]
        if any(np.array_equal(each.people, people) for each in sets):
            continue  # the same people: no combination is new
        now = _largest_share([*(each.people for each in sets), people], least)
        if now.share <= MOST * (1 + 1e-9):
            continue
        # Sets from before this rule may single somebody out already: this study is not to blame for that.
        before = _largest_share([each.people for each in sets], least)
        if now.share > before.share * (1 + 1e-9):
            plans = tuple(dict.fromkeys(plan for each in sets for plan in each.plans))
            return Refusal(conflict=Conflict.COMBINED, plans=plans, basis=basis, people=now.people)
    return None


@dataclass(frozen=True)
class _Largest:
    share: float
    people: int


def _largest_share(sets: Sequence[Digests], least: int) -> _Largest:
    """Return the largest share that a group of fewer than ``least`` people can have in a combination.

    A combination of the studies' sums with coefficients c gives each person the weight c . t, where t has a 1
    for each study that the person is in. A group of m people with the same t has the share
    m (c . t)^2 / sum over all people of (c . t)^2 of the squared weights. Its largest value over c is
    m t' G^+ t with G = sum of t t' over all people: the group's leverage. It is 1 if some combination is of
    this group alone, and at most one half for groups that others always outweigh.
    """
    histories, counts = atoms(sets)
    few = np.flatnonzero(counts < least)
    if not len(few):
        return _Largest(0.0, 0)
    studies = histories.astype(np.float64)
    gram = (studies * counts) @ studies.T
    inverse = np.linalg.pinv(gram, rcond=1e-12, hermitian=True)
    shares = counts[few] * np.einsum("sa,st,ta->a", studies[:, few], inverse, studies[:, few])
    at = int(np.argmax(shares))
    return _Largest(float(shares[at]), int(counts[few][at]))


def atoms(sets: Sequence[Digests]) -> tuple[Bools, NDArray[np.int64]]:
    """Return the distinct histories of people, and how many people have each.

    A history is a column that says for each set whether the people are in it. Memory is a few integers for
    each person in any set, however many sets there are.
    """
    everyone = reduce(_union, sets, np.empty(0, dtype=np.uint64))
    atom = np.zeros(len(everyone), dtype=np.int64)
    histories = np.zeros((0, 1), dtype=np.bool_)
    for people in sets:
        split = 2 * atom
        split[np.searchsorted(everyone, people)] += 1
        kinds, atom = np.unique(split, return_inverse=True)
        histories = np.vstack([histories[:, kinds // 2], kinds % 2 == 1])
    return histories, np.bincount(atom, minlength=histories.shape[1])
