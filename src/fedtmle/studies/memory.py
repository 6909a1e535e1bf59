"""A silo's memory of its rows and rosters: a study is compared with earlier ones before it answers.

The ledger has the scope of each study (`runtime.ledger.StudyScope`), the approvals what `risk` found
beforehand. The owner sees the conflicts when approving a plan; the silo refuses by the same rule when the
study opens, and again before its first answer.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedtmle.data import Column, DataErrors, Kind, Schema, SiloFile, load
from fedtmle.data.source import hashed_levels
from fedtmle.errors import InputError, JournalError
from fedtmle.model.budget import OWNER_DELTA
from fedtmle.model.table import AnyTable, Table
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.ledger import ReadColumn, StudyScope, epsilon_taken
from fedtmle.runtime.signing import Decision
from fedtmle.studyfile.file import study_of
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.journal import sync_folder

# A silo's memory of its rows and rosters across studies, and what studies disclose together.
#
# A file for each version of the data holds a keyed digest of every record, sorted. The key is derived from
# the silo's secret and never leaves it, so that nobody else can test a guess against the file. The ledger's
# line of a study's first answer names the version, the columns and the silos that took part (`StudyScope`).
#
# **Refreshed data.** Two studies over the same columns, before and after a refresh, disclose the difference
# of their sums, which is over the records that came, went or were corrected. Write t_i for the studies that
# record i is in. A combination of the studies' sums is made, in effect, of 1 / max h_i people, where h_i =
# t_i^T (sum t t^T)^+ t_i is the leverage (`model.leverage`). A corrected record is one person in two
# versions, so that the records of two versions also count by the larger of those that came and went.
#
# **Rosters.** Under masks a study discloses totals over its silos. Take the matrix with a row for each study
# and a column for each silo, 1 where the silo took part. The totals of a set of silos follow from the studies
# if the row space holds a vector that is zero elsewhere, which is so if the columns elsewhere have a smaller
# rank.

NOISE_IN_BITS = "Studies with noise are not counted in bits: state max_epsilon_total in [policy] for them."
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
            cells.append(hashed_levels(table.factors[column.name]))
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


Earlier = Mapping[str, tuple[str, StudyScope]]  # by plan: the time of its first answer, and its scope


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Why a study may not follow the earlier ones: the key of the policy, and words for the owner.

    With ``is_alone`` it would be refused without the earlier ones too.
    """

    key: str
    text: str
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class OwnersBudget:
    """What a study with noise takes of the owner's budget, each number an epsilon at the owner's delta.

    ``before`` is what the earlier studies with noise took, ``total`` that of all together, which is less than
    the sum. ``exact`` is the number of earlier studies without noise, which no budget covers.
    """

    study: float
    before: float
    total: float
    limit: float
    exact: int

    @classmethod
    def of(cls, plan: Plan, earlier: Earlier, policy: Policy) -> OwnersBudget | None:
        """Return the budget of a plan after other studies; None if its sums have no noise."""
        privacy = plan.program.privacy
        if privacy is None:
            return None
        scopes = [each for digest, (_, each) in earlier.items() if digest != plan.digest.hex()]
        privacy_taken = str(privacy.taken)
        return cls(
            study=privacy.owners_epsilon,
            before=epsilon_taken([each.zcdp for each in scopes]),
            total=epsilon_taken([privacy_taken, *(each.zcdp for each in scopes)]),
            limit=policy.max_epsilon_total,
            exact=sum(not each.zcdp for each in scopes),
        )

    def __str__(self) -> str:
        """In words for the owner."""
        limit = "none" if self.limit >= Policy().max_epsilon_total else f"{self.limit:g}"
        words = (
            f"epsilon of this study {self.study:.3g}, of earlier ones with noise {self.before:.3g}, of all "
            f"together {self.total:.3g} (delta {OWNER_DELTA:g}); your limit (max_epsilon_total): {limit}"
        )
        if self.exact:
            words += f". {self.exact} earlier studies without noise are not counted: no budget covers them"
        return words


@dataclass(frozen=True, kw_only=True)
class SiloMemory:
    """What the silo of ``file`` remembers, and its rows as the study at hand reads them.

    ``earlier`` returns what the ledger holds; ``decisions`` the owner's, with what `risk` found; ``key`` is
    that of the digests of rows.
    """

    file: SiloFile
    table: AnyTable
    columns: tuple[ReadColumn, ...]  # columns of the table
    store: RowStore
    key: bytes
    peers: frozenset[bytes] | None
    earlier: Callable[[], Earlier]
    decisions: Callable[[], Mapping[str, Decision]]
    _read: dict[tuple[ReadColumn, ...], Digests | None] = field(
        default_factory=dict
    )  # digests of today's rows

    def refusal(self, plan: Plan) -> str:
        """Return the key of the policy by which this study may not follow the earlier ones, or nothing."""
        return next((each.key for each in self.conflicts(plan)), "")

    def record_scope(self, plan: Plan) -> StudyScope:
        """Store which rows the silo has now; return the scope of a study with this plan, for the ledger."""
        columns = read_columns(plan, self.file)
        digests = self._digests(columns)
        if digests is None:
            raise AssertionError("a silo has the columns of the study that it takes part in")
        return StudyScope(rows=self.store.keep(digests), **_about(plan, columns, self.file.name))

    def conflicts(self, plan: Plan, bits: Mapping[str, float] | None = None) -> tuple[Conflict, ...]:
        """Return every reason why a study by ``plan`` may not follow the earlier ones.

        ``bits`` is what `risk` found of each column, by default what the approval of the plan has.
        """
        this_plan = plan.digest.hex()
        earlier = {digest: scope for digest, scope in self.earlier().items() if digest != this_plan}
        columns = read_columns(plan, self.file)
        sources = frozenset(column.source for column in columns)
        alike = {digest: each for digest, each in earlier.items() if each[1].sources & sources}
        # The difference of two studies is covered by the noise of either.
        exact = {} if plan.program.privacy else {d: scope for d, scope in alike.items() if not scope[1].zcdp}
        return (
            *self._refreshed(exact),
            *self._rosters(plan, columns, alike),
            *self._spent(plan, earlier, bits),
            *self._budget(plan, earlier),
        )

    def _refreshed(self, alike: Earlier) -> Sequence[Conflict]:
        """Return a conflict if few people differ between the rows of earlier studies and those of today."""
        floor, conflicts = self.file.policy.min_people, []
        by_columns: dict[tuple[ReadColumn, ...], dict[str, str]] = {}
        for digest, (_, scope) in alike.items():
            by_columns.setdefault(scope.columns, {})[scope.rows] = digest
        for columns, versions in by_columns.items():
            today = self._digests(columns)
            if today is None:
                continue
            stored = [self.store.read(name) for name in versions]
            before, now = fewest_people(stored), fewest_people([*stored, today])
            if now is None or now > floor * (1 - 1e-9) or (before is not None and now >= before):
                continue
            plans = ", ".join(plan[:16] for plan in versions.values())
            conflicts.append(
                Conflict(
                    key="min_people",
                    text=f"Your records differ from those of an earlier study that read the same columns "
                    f"({plans}), and the difference of the two studies' sums would show {_shown_of(now)} "
                    f"(limit min_people). Wait until {_spelled(floor)} or more records have changed, or "
                    "answer it from the records of the earlier study.",
                )
            )
        return conflicts

    def _rosters(self, plan: Plan, columns: tuple[ReadColumn, ...], alike: Earlier) -> Sequence[Conflict]:
        """Return a conflict if totals of few silos follow from the rosters of this study and earlier ones."""
        if not plan.is_masked:  # the server reads each silo's own sums anyway
            return ()
        colluders = self.file.policy.colluders
        about = StudyScope(rows="", **_about(plan, columns, self.file.name))
        masked = [scope for _, scope in alike.values() if scope.is_masked]
        before, exact = [], []
        for scope in masked:
            totals = self._totals(scope, has_noise=bool(scope.zcdp or about.zcdp))
            before += totals
            exact += totals if about.zcdp or not scope.zcdp else []
        silos = isolated([*before, *self._totals(about, has_noise=bool(about.zcdp))], colluders)
        # Totals that follow from earlier studies are known already, but not exactly if these had noise.
        if silos is None or (exact and isolated(exact, colluders) == silos):
            return ()
        names = {_identity(member): member.name for member in plan.roster} | {about.own: self.file.name}
        words = " and ".join(f"'{names.get(silo, silo[:16])}'" for silo in silos)
        known = ", ".join(digest[:16] for digest, (_, scope) in alike.items() if scope.is_masked)
        return (
            Conflict(
                key="colluders",
                text=f"Together with earlier studies of other silos ({known}), the totals of this one give "
                f"the sums of {words} {'together' if len(silos) > 1 else 'alone'}, which masks should hide. "
                f"Rosters must differ by more than {colluders + 1} silos, or not at all.",
            ),
        )

    def _totals(self, scope: StudyScope, *, has_noise: bool) -> list[frozenset[str]]:
        """Return the silos behind each total of a study, less those whose sums the server knows by itself.

        Silos that the owner does not vouch for may be the server's own. This silo's rows are another unknown
        if they changed since, unless the noise of that study, or of the one at hand, covers the change.
        """
        vouched = {
            silo for silo in scope.roster if self.peers is None or silo in {key.hex() for key in self.peers}
        }
        today = self._digests(scope.columns) if scope.rows and not has_noise else None
        is_changed = today is not None and self.store.name(today) != scope.rows
        others = vouched - {scope.own}
        this_silo = scope.own + (f" {scope.rows}" if is_changed else "")
        totals = (
            frozenset(others.intersection(group)) | ({this_silo} if scope.own in group else set())
            for group in scope.groups or (scope.roster,)
        )
        return [total for total in totals if total]

    def _spent(self, plan: Plan, earlier: Earlier, bits: Mapping[str, float] | None) -> Sequence[Conflict]:
        """Return a conflict if all studies together would disclose more of a column than the owner allows."""
        decisions, this_plan = self.decisions(), plan.digest.hex()
        if bits is None:
            bits = decisions[this_plan].bits if this_plan in decisions else None
        return beyond_max_bits(plan, self.file.policy, bits, spent_bits(earlier, decisions))

    def _budget(self, plan: Plan, earlier: Earlier) -> Sequence[Conflict]:
        """Return a conflict if the studies with noise would together take more than the owner allows."""
        budget = OwnersBudget.of(plan, earlier, self.file.policy)
        if budget is None or budget.total <= budget.limit:
            return ()
        is_alone, text = budget.study > budget.limit, f"{budget}: more than you allow."
        return (Conflict(key="max_epsilon_total", text=text, is_alone=is_alone),)

    def _digests(self, columns: tuple[ReadColumn, ...]) -> Digests | None:
        """Return the digests of today's rows over ``columns``; None if the data have no such columns."""
        if columns not in self._read:
            self._read[columns] = self._digests_now(columns)
        return self._read[columns]

    def _digests_now(self, columns: tuple[ReadColumn, ...]) -> Digests | None:
        if columns == self.columns or _has(self.table, columns):
            return row_digests(self.table, columns, self.key)
        read = (Column(name=c.name, kind=Kind(c.kind), levels=c.levels, may_be_missing=True) for c in columns)
        try:
            table = load(self.file, Schema(tuple(read)), silo=self.file.name)
            return row_digests(table, columns, self.key)
        except (DataErrors, InputError):
            return None


def read_columns(plan: Plan, file: SiloFile) -> tuple[ReadColumn, ...]:
    """Return the columns that a study reads, with the hospital's own names of them."""
    named = {name: column.column for name, column in file.columns.items()}
    return tuple(
        ReadColumn(column.name, column.kind.value, column.levels, named.get(column.name, column.name))
        for column in schema_of(study_of(plan)).columns
    )


def beyond_max_bits(
    plan: Plan, policy: Policy, bits: Mapping[str, float] | None, spent: Mapping[str, float]
) -> tuple[Conflict, ...]:
    """Return a conflict for each column of which a study, with the earlier ones, discloses more than allowed.

    ``bits`` is what `risk` found of each column, None if it could not audit the study, and ``spent`` what
    the earlier studies disclosed.
    """
    if plan.program.privacy and policy.max_epsilon_total < Policy().max_epsilon_total:
        return ()  # noise is not audited in bits; it has a budget of its own
    if bits is None and policy.max_bits >= Policy().max_bits:
        return ()
    if bits is None:
        text = "Your policy limits what all studies disclose in bits (max_bits), and this one has no audit. "
        text += NOISE_IN_BITS if plan.program.privacy else "`fedtmle risk` says why."
        return (Conflict(key="max_bits", text=text, is_alone=True),)
    return tuple(
        _beyond(column, here, spent.get(column, 0.0), policy.max_bits)
        for column, here in bits.items()
        if spent.get(column, 0.0) + here > policy.max_bits
    )


def _beyond(column: str, here: float, before: float, limit: float) -> Conflict:
    """Return the conflict with the limit: earlier studies disclosed ``before`` bits, this one ``here``."""
    over = f"more than your {limit:g} for all studies (max_bits)."
    if before:
        words = f"Earlier studies disclosed up to {before:.1f} bits of one person's '{column}', and this one "
        text = f"{words}up to {here:.1f}: {over}"
    else:
        text = f"This study alone discloses up to {here:.1f} bits of one person's '{column}': {over}"
    return Conflict(key="max_bits", text=text, is_alone=here > limit)


def spent_bits(earlier: Earlier, decisions: Mapping[str, Decision]) -> dict[str, float]:
    """Return what the earlier studies disclosed of each column: the sum of the most exposed record's bits.

    It counts as if that record were the same person's in every study, and so is at least what any one person
    has disclosed. A study of which `risk` found nothing counts 0.
    """
    spent: dict[str, float] = {}
    for plan in earlier:
        for column, bits in ((decisions[plan].bits or {}) if plan in decisions else {}).items():
            spent[column] = spent.get(column, 0.0) + bits
    return spent


def _about(plan: Plan, columns: tuple[ReadColumn, ...], silo: str) -> dict[str, Any]:
    (own,) = (member for member in plan.roster if member.name == silo)
    identities = {member.name: _identity(member) for member in plan.roster}
    return {
        "columns": columns,
        "roster": tuple(identities.values()),
        "own": _identity(own),
        "is_masked": plan.is_masked,
        "groups": tuple(tuple(identities[name] for name in group) for group in plan.look_groups.groups),
        "zcdp": "" if plan.program.privacy is None else str(plan.program.privacy.taken),
    }


def _shown_of(people: float) -> str:
    """Return in words whose records a number discloses if so many people contribute to it in effect."""
    return "the record of a single person" if people < 1.5 else f"the records of some {people:.2g} people"


def _spelled(floor: float) -> str:
    """Return the smallest whole number of records above a limit of people in effect."""
    least = max(2, math.ceil(floor))
    return "two" if least == 2 else str(least)


def _identity(member: Member) -> str:
    return (member.key + member.mask_key).hex() or member.name


def _has(table: AnyTable, columns: tuple[ReadColumn, ...]) -> bool:
    """Return whether a table in memory has these columns, each as numbers or as a factor."""
    return isinstance(table, Table) and all(
        column.name in (table.factors if column.kind == "factor" else table.numeric) for column in columns
    )
