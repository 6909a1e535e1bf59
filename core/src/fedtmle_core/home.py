"""One home a hospital: a folder with its secret, its memory of people, and the records of its studies.

The home belongs to the institution. Tables lie elsewhere, and another table, another folder or another
extract has the same home: what was answered about the same people is known there.

    home            what this folder is, and a check value of the secret
    key             32 random bytes in hexadecimal; keys of hospitals and of digests are derived from it
    people/         the memory: whom each study was about (`memory`)
    charges.journal the refusals charged to each author
    hospitals/NAME  the records of each hospital that the institution takes part as: ledger, journals
    lock            held while one process reads and writes people/ and charges

A home is made by `create` and by nothing else. Anything that finds it incomplete says what to restore: a
new key beside old records would make them unreadable for good.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from fedtmle_core.errors import InputError, JournalError
from fedtmle_core.journal import FileJournal, Held, sync_folder
from fedtmle_core.memory import Memory, replace_file
from fedtmle_core.people import Digester
from fedtmle_core.seal import Identity
from fedtmle_core.signing import SigningKey

TITLE = "fedtmle home 1"
SECRET = 32  # bytes

# A refusal depends on the rows: at worst it tells its author whether one chosen person is in them. Few honest
# studies are refused (3 %), so that five a year are those of 160 studies, and tell at most five such things.
MOST_REFUSALS = 5
YEAR = timedelta(days=365)


class Standing(enum.Enum):
    """Whether a study may be judged; the value is a sentence for the owner."""

    OPEN = "it may be judged"
    # To judge it again when the rows have changed would tell its author something each time.
    REFUSED = "this plan was refused here before, for good; a new study needs another seed"
    EXHAUSTED = (
        f"{MOST_REFUSALS} studies of its author were refused here within a year; you may pardon them, and "
        "else the first of them expires after a year"
    )


class Charge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A refusal that was charged to an author; with no plan, the owner's pardon of all earlier ones."""

    author: str
    plan: str
    time: datetime


class Charges:
    """The refusals of studies, by the author who asked; its caller holds the home's lock.

    An author is the fingerprint of a key, or a name. Studies of unknown authors share one account.
    """

    def __init__(self, path: Path) -> None:
        self._journal = FileJournal(path)
        try:
            self._charges = [msgspec.msgpack.decode(record, type=Charge) for record in self._journal.records]
        except (msgspec.MsgspecError, RecursionError):
            self._journal.close()
            raise JournalError(f"{path}: a record cannot be read; restore the home") from None

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def of(self, author: str, now: datetime) -> list[Charge]:
        """Return the refusals that are charged to an author: those of a year, since the last pardon."""
        mine = [each for each in self._charges if each.author == author and each.time > now - YEAR]
        pardons = [number for number, each in enumerate(mine) if not each.plan]
        return mine[pardons[-1] + 1 :] if pardons else mine

    def counts(self, now: datetime) -> dict[str, int]:
        """Return how many refusals are charged to each author that has any."""
        authors = dict.fromkeys(each.author for each in self._charges)
        return {author: count for author in authors if (count := len(self.of(author, now)))}

    def standing(self, author: str, plan: str, now: datetime) -> Standing:
        """Return whether a plan of this author may be judged."""
        charged = self.of(author, now)
        if any(each.plan == plan for each in charged):
            return Standing.REFUSED
        return Standing.OPEN if len(charged) < MOST_REFUSALS else Standing.EXHAUSTED

    def add(self, author: str, plan: str, now: datetime) -> None:
        """Charge the refusal of a plan to its author; this is durable when the call returns."""
        self._append(Charge(author=author, plan=plan, time=now))

    def pardon(self, author: str, now: datetime) -> None:
        """Strike out the refusals that are charged to an author; only the owner does this."""
        self._append(Charge(author=author, plan="", time=now))

    def _append(self, charge: Charge) -> None:
        self._journal.append(msgspec.msgpack.encode(charge))
        self._charges.append(charge)


@dataclass(frozen=True, kw_only=True)
class OpenHome:
    """What may be read and written while the home's lock is held."""

    memory: Memory
    charges: Charges


class Home:
    """A home whose secret was read; `create` makes one, `open` opens one that is there."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        self.folder, self._secret = folder, secret

    @classmethod
    def create(cls, folder: str | Path) -> Home:
        """Make a home in a new or empty folder; raise `InputError` if anything is there.

        If a crash interrupted it, it is done again with the key that is there.
        """
        folder = Path(folder).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir()} - {"key.new", "home.new"}
        if there - {"key"}:
            raise InputError(f"{folder}: the folder is not empty; give a new one, or open the home in it")
        folder.chmod(0o700)
        if not there:
            replace_file(folder / "key", os.urandom(SECRET).hex().encode() + b"\n")
        secret = _read_secret(folder)
        # Last: a folder without it is no home yet, and has no records.
        replace_file(folder / "home", f"{TITLE}\n{_check_value(secret)}\n".encode())
        sync_folder(folder.parent)
        return cls(folder, secret)

    @classmethod
    def open(cls, folder: str | Path) -> Home:
        """Open a home. It never makes one, nor a key: what is missing has to be restored."""
        folder = Path(folder).absolute()
        if not is_home(folder):
            raise InputError(f"{folder}: there is no home here; restore it from a backup, or make it once")
        try:
            title, value = (folder / "home").read_text(encoding="ascii").split("\n")[:2]
        except (OSError, ValueError):
            title, value = "", ""
        if title != TITLE:
            raise JournalError(f"{folder}: this is no home, or its file 'home' is lost; restore it")
        secret = _read_secret(folder)
        if not hmac.compare_digest(value, _check_value(secret)):
            raise JournalError(f"{folder / 'key'}: this is the key of another home; restore the right one")
        return cls(folder, secret)

    def key(self, hospital: str) -> SigningKey:
        """Return the key of the hospital that the institution takes part as."""
        return SigningKey(self._derived(b"hospital " + hospital.encode()))

    def identity(self, hospital: str) -> Identity:
        """Return the secrets with which the hospital takes part in sealed studies."""
        return Identity(self._derived(b"identity " + hospital.encode()))

    @property
    def digester(self) -> Digester:
        """What makes digests of people and records; the same for all tables of the home."""
        return Digester(self._derived(b"people"))

    def records(self, hospital: str) -> Path:
        """Return the folder of a hospital's records, which is made if it is not there."""
        folder = records_folder(self.folder, hospital)
        if not (folder / "name").exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(folder / "name", hospital.encode())
        return folder

    @property
    def hospitals(self) -> tuple[str, ...]:
        """The names of the hospitals that have records here."""
        named = sorted((self.folder / "hospitals").glob("*/name"))
        return tuple(path.read_text(encoding="utf-8") for path in named)

    @contextmanager
    def held(self) -> Iterator[OpenHome]:
        """Hold the home for this process, and open its memory and its charges.

        Judging a study and remembering it are one step: of two studies that arrive at once, the second is
        judged after the first is remembered.
        """
        people = self.folder / "people"
        people.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            lock = stack.enter_context(open(self.folder / "lock", "ab"))
            stack.enter_context(Held(lock))
            memory = Memory(people, self._derived(b"memory"))
            stack.callback(memory.close)
            charges = Charges(self.folder / "charges.journal")
            stack.callback(charges.close)
            yield OpenHome(memory=memory, charges=charges)

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, b"fedtmle home " + purpose, "sha256")


def is_home(folder: Path) -> bool:
    """Return whether a home was made in this folder; it may be damaged."""
    return any((folder / name).exists() for name in ("home", "key", "people", "hospitals"))


def records_folder(home: Path, hospital: str) -> Path:
    """Return where a hospital's records are: by its name, or by a digest if the name is no plain word."""
    plain = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_ -]{0,62}[A-Za-z0-9_-])?", hospital)
    name = hospital if plain else f"={hashlib.sha256(hospital.encode()).hexdigest()[:32]}"
    return home / "hospitals" / name


def key_beside(record: Path) -> SigningKey | None:
    """Return the key of the hospital in whose folder of a home a file is; None if it is elsewhere."""
    folder, home = record.absolute().parent, record.absolute().parents[2]
    if not (folder / "name").is_file() or not is_home(home):
        return None
    return Home.open(home).key((folder / "name").read_text(encoding="utf-8"))


def _read_secret(folder: Path) -> bytes:
    path = folder / "key"
    try:
        with open(path, "rb") as file:
            if sys.platform != "win32" and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise InputError(f"{path}: others can read this key; chmod 600 it, and see who could")
            secret = bytes.fromhex(file.read().decode("ascii").strip())
    except FileNotFoundError:
        raise JournalError(f"{path}: the home's key is gone; restore it from a backup") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        secret = b""
    if len(secret) != SECRET:
        raise JournalError(f"{path}: this is not a home's key; restore it from a backup")
    return secret


def _check_value(secret: bytes) -> str:
    """Return what shows that a key belongs to a home, and tells nothing of the key."""
    return hmac.digest(secret, b"fedtmle home check", "sha256").hex()
