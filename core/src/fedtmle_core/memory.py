"""The memory of a home: which people each answered study was about, in files that survive a crash.

`studies.journal` has a record for each study; `sets/` has each distinct set of people once, in a file that is
named by its digest. A set is written before the record that names it, so that a crash leaves at most a set
that nothing names. `studies.head` authenticates the records and their number under the home's key: records
that were cut off are noticed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fedtmle_core.errors import JournalError
from fedtmle_core.journal import FileJournal, sync_folder
from fedtmle_core.people import (
    PERSON,
    Asked,
    Basis,
    Census,
    Conflict,
    Digests,
    Refusal,
    Snapshot,
    atoms,
    judge,
)

MAGIC = b"fedtmle people 1"  # 16 bytes, so that the digests after it are aligned


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A study that was admitted: of which people, in which hospital of the home, for whom and when.

    ``views`` has the name of a set for each basis. ``reads`` are the columns that it reads. ``zcdp`` is the
    budget of differential privacy that it takes, a fraction, or empty if its sums have no noise.
    """

    plan: str
    hospital: str
    author: str
    time: str
    zcdp: str = ""
    reads: tuple[str, ...] = ()
    views: tuple[tuple[Basis, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What was asked about the person of whom most was asked: the studies, and the numbers they were sent."""

    studies: int
    numbers: int


class Memory:
    """The memory in a folder, open: its caller holds the home's lock.

    ``key`` authenticates the head. Records that the ledger knows and the memory lacks are the caller's to
    find: `plans` are those that it has.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        self._folder, self._key = folder, key
        self._journal = FileJournal(folder / "studies.journal")
        try:
            self._check_head()
            self.studies = [_decoded(record, self._journal.path) for record in self._journal.records]
        except JournalError:
            self._journal.close()
            raise

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    @property
    def plans(self) -> frozenset[tuple[str, str]]:
        """The plans that are remembered, each with its hospital."""
        return frozenset((study.plan, study.hospital) for study in self.studies)

    def find(self, plan: str, hospital: str) -> Study | None:
        """Return what is remembered of a plan at a hospital, None if it is new."""
        return next((each for each in self.studies if (each.plan, each.hospital) == (plan, hospital)), None)

    def bases(self, reads: frozenset[str]) -> list[Basis]:
        """Return the bases of earlier studies with which a study that reads these columns is compared."""
        every = dict.fromkeys(basis for study in self.studies for basis, _ in study.views)
        return [basis for basis in every if basis == PERSON or not reads.isdisjoint(basis)]

    def judge(
        self, plan: str, hospital: str, census: Census, *, least: int, is_noisy: bool = False
    ) -> Snapshot | Refusal:
        """Return the rows that a study may be answered from, or why it may not be answered.

        A study that was admitted before goes on from the people that it was admitted with. Noise covers the
        difference of two studies if either has it: a noisy study is compared with none, and none with it.
        """
        known = self.find(plan, hospital)
        if known is not None:
            return self._resumed(known, census)
        return judge(census, [] if is_noisy else self._asked(census, plan), least=least)

    def differs(self, plan: str, hospital: str, census: Census) -> bool:
        """Return whether a study was admitted with other rows, as far as is known."""
        known = self.find(plan, hospital)
        views = () if known is None else known.views
        return any(
            _name(_contents(census.people(basis))) != name for basis, name in views if basis in census.views
        )

    def remember(self, study: Study, census: Census) -> None:
        """Record a study with the people of its census; this is durable when the call returns.

        The census is of the kept rows only, and gives the study's columns and views. A study that is
        remembered already is not recorded again.
        """
        if self.find(study.plan, study.hospital) is not None:
            return
        views = tuple((basis, self._keep(census.people(basis))) for basis in census.own)
        whole = msgspec.structs.replace(study, views=views, reads=tuple(sorted(census.reads)))
        self._journal.append(msgspec.msgpack.encode(whole, order="deterministic"))
        self.studies.append(whole)
        self._write_head()

    def totals(self, numbers: Mapping[str, int]) -> Totals:
        """Return the most that was asked about one person; ``numbers`` are those that each plan was sent.

        Sets over different bases cannot be matched, and count as if they were of other people.
        """
        most = Totals(studies=0, numbers=0)
        bases = dict.fromkeys(study.views[0][0] for study in self.studies)
        for basis in bases:
            plans: dict[str, list[str]] = {}
            for study in self.studies:
                if study.views[0][0] == basis:
                    plans.setdefault(study.views[0][1], []).append(study.plan)
            histories, _ = atoms([self.read(name) for name in plans])
            sent = np.array([sum(numbers.get(plan, 0) for plan in each) for each in plans.values()])
            at = int(np.argmax(sent @ histories))
            studies = np.array([len(each) for each in plans.values()])
            found = Totals(studies=int((studies @ histories)[at]), numbers=int((sent @ histories)[at]))
            most = max(most, found, key=lambda each: (each.numbers, each.studies))
        return most

    def read(self, name: str) -> Digests:
        """Return a stored set; raise `JournalError` if it is lost or was changed."""
        path = self._folder / "sets" / name
        try:
            data = path.read_bytes()
        except OSError:
            raise JournalError(f"{path}: a set of people is gone; restore the home from a backup") from None
        if _name(data) != name:
            raise JournalError(f"{path}: a set of people was changed; restore the home from a backup")
        return np.frombuffer(data, dtype="<u8", offset=len(MAGIC)).astype(np.uint64, copy=False)

    def _asked(self, census: Census, plan: str) -> list[Asked]:
        """Return the sets that a study is compared with, each once; sets of the same plan are left out.

        Two hospitals of one home may take part in one study: its totals are over both.
        """
        named: dict[tuple[Basis, str], list[str]] = {}
        for study in self.studies:
            for basis, name in study.views:
                if study.plan != plan and not study.zcdp and census.concerns(basis):
                    named.setdefault((basis, name), []).append(study.plan)
        return [
            Asked(plans=tuple(plans), basis=basis, people=self.read(name))
            for (basis, name), plans in named.items()
        ]

    def _resumed(self, known: Study, census: Census) -> Snapshot | Refusal:
        """Return the rows of the people with whom a study was admitted; refuse if any is not there."""
        asked = [
            Asked(plans=(known.plan,), basis=basis, people=self.read(name)) for basis, name in known.views
        ]
        lost = next((each for each in asked if each.basis not in census.views), None)
        if lost is not None:
            return Refusal(
                conflict=Conflict.LEFT, plans=lost.plans, basis=lost.basis, people=len(lost.people)
            )
        # Fewer than this many differ in any case: whoever came is left out, and nobody may have left.
        everyone = census.n_rows + max(len(each.people) for each in asked) + 1
        return judge(census, asked, least=everyone)

    def _keep(self, people: Digests) -> str:
        """Store a set, unless it is there; return its name."""
        data = _contents(people)
        name, folder = _name(data), self._folder / "sets"
        if not (folder / name).exists():
            folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(folder / name, data)
        return name

    def _check_head(self) -> None:
        """Raise unless the journal has all records that the head counts, unchanged.

        The head is written after the record, so that a crash leaves it one behind; it is caught up here.
        """
        path, records = self._folder / "studies.head", self._journal.records
        try:
            count, mac = msgspec.msgpack.decode(path.read_bytes(), type=tuple[int, bytes])
        except FileNotFoundError:
            count, mac = 0, self._mac(0)
            if len(records) > 1:
                raise JournalError(f"{path}: the head of the memory is gone; restore it") from None
        except (OSError, msgspec.MsgspecError):
            raise JournalError(f"{path}: this is not the head of a memory; restore it") from None
        if not 0 <= count <= len(records) <= count + 1:
            raise JournalError(f"{path}: the memory has {len(records)} records, and its head says {count}")
        if not hmac.compare_digest(mac, self._mac(count)):
            raise JournalError(f"{path}: the memory differs from its head: it was written anew")
        if count < len(records):  # now, so that a second crash leaves it no further behind
            self._write_head()

    def _write_head(self) -> None:
        count = len(self._journal.records)
        replace_file(self._folder / "studies.head", msgspec.msgpack.encode((count, self._mac(count))))

    def _mac(self, count: int) -> bytes:
        digests = b"".join(hashlib.sha256(record).digest() for record in self._journal.records[:count])
        return hmac.digest(self._key, b"head" + digests, "sha256")


def _decoded(record: bytes, path: Path) -> Study:
    try:
        study = msgspec.msgpack.decode(record, type=Study)
    except (msgspec.MsgspecError, RecursionError):
        raise JournalError(f"{path}: a record of the memory cannot be read") from None
    if msgspec.msgpack.encode(study, order="deterministic") != record:
        raise JournalError(f"{path}: a record of the memory is not in its one form")
    return study


def _contents(people: Digests) -> bytes:
    return MAGIC + people.astype("<u8").tobytes()


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def replace_file(path: Path, data: bytes) -> None:
    """Write a file for its owner alone, in one step: a crash leaves the old file, or the new one, whole."""
    scratch = path.with_name(f"{path.name}.new")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)
