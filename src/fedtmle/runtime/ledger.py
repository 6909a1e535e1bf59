"""What an owner can read afterwards: the ledger, the account of each study made from it, and the transcript.

Each event is one line of JSON that carries the hash of the line before it, so that nobody can change, drop
or insert a line unnoticed. The file stays at the silo: it names the key of the policy behind a refusal, which
the server does not learn.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TypedDict

import msgspec

from fedtmle.errors import DecodeError, InputError, JournalError
from fedtmle.model.budget import OWNER_DELTA, epsilon_of
from fedtmle.runtime.signing import check_head, read_head, write_head
from fedtmle_core.journal import Held
from fedtmle_core.signing import SigningKey

START = "0" * 64
_SHA256 = hashlib.sha256()  # copying it is faster than creating a new one


class StudyScope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scope of a study's answers: the columns that it reads, and the silos that take part.

    ``sources`` are the hospital's names of the columns. Whose rows they were is in the memory of the home.
    ``roster`` has the public keys of each silo in hexadecimal, or its name if it has none; ``own`` is this
    silo's entry. ``groups`` are groups of silos whose totals were disclosed too. ``zcdp`` is the budget of
    differential privacy that the study takes, as a fraction; it is empty if the sums had no noise.
    """

    sources: tuple[str, ...]
    roster: tuple[str, ...]
    own: str
    is_masked: bool
    groups: tuple[tuple[str, ...], ...] = ()
    zcdp: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event, before it is chained."""

    time: str
    session: str
    request: str  # open, begin, ask, close or compare; the decision if the bytes were not decoded
    round: int
    query: str = ""  # the query that the silo derived and answered
    phase: str = ""
    decision: str = "answered"  # answered, repeated or refused
    reason: str = ""  # why the silo refused, as sent to the server
    key: str = ""  # key of the policy that refused; not sent
    asked: bytes = b""  # the request, or its beginning if it was not answered; base64 in the file
    replied: bytes = b""
    queries: int = 0  # running totals of the session
    functionals: int = 0
    bits: int = 0
    recovered: bool = False  # a crash kept the line from the ledger; the silo added it at its restart
    plan: str = ""  # the study's plan, in hexadecimal
    data: str = ""  # a digest of plan and rows, which stays at the silo
    explanation: str = ""  # the query in words, as `preview` has it; of a refusal, columns and remedy
    told: StudyScope | None = None  # the study's scope, with its first answer


class LedgerLine(TypedDict):
    """One line as `read` returns it: the entry, bytes in base64, chained to the line before it."""

    line: int
    time: str
    session: str
    request: str
    round: int
    query: str
    phase: str
    decision: str
    reason: str
    key: str
    asked: str
    replied: str
    queries: int
    functionals: int
    bits: int
    recovered: bool
    plan: str
    data: str
    explanation: str
    told: StudyScope | None
    previous: str
    hash: str


class Ledger:
    """An append-only, hash-chained file, one for all studies of a silo; with a ``key`` its head is signed."""

    def __init__(self, path: str | Path, *, sync: bool = True, key: SigningKey | None = None) -> None:
        self.path = Path(path)
        self._sync, self._key = sync, key
        self.count, self._head, self._end = 0, START, 0
        with contextlib.ExitStack() as unless_ready:
            try:
                self._file = unless_ready.enter_context(open(self.path, "a+b", buffering=0))
                os.chmod(self.path, 0o600)
                with Held(self._file):
                    if key is not None:
                        verify(self.path, key.public)
                    self._catch_up()
            except OSError:
                raise JournalError(f"{self.path}: the ledger cannot be opened for writing") from None
            unless_ready.pop_all()  # keep the file open as long as the object

    def add(self, entry: Entry) -> None:
        """Append one line; it is durable when this returns."""
        try:
            with Held(self._file):
                self._catch_up()  # another study of this silo may have added lines
                data, head = _chained(msgspec.json.encode(entry), self.count + 1, self._head)
                self._write(data + b"\n")
                if self._key is not None:
                    write_head(self.path, self.count + 1, head, self._key)
        except OSError:
            raise JournalError(f"{self.path}: the line could not be written; is the disk full?") from None
        self.count, self._head = self.count + 1, head

    def _catch_up(self) -> None:
        """Read the lines added since the last call, and remove an incomplete last line."""
        size = self._file.seek(0, os.SEEK_END)
        if size == self._end:
            return
        if size < self._end:
            raise JournalError(f"{self.path}: the ledger was cut short after line {self.count} was written")
        self._file.seek(self._end)
        start, data = self._end, self._file.read()
        for line, end in _lines(data, self.path, self.count, self._head):
            self.count, self._head, self._end = line["line"], line["hash"], start + end
        if self._end < size:
            self._file.truncate(self._end)

    def _write(self, data: bytes) -> None:
        try:
            if self._file.write(data) != len(data):
                raise OSError
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise
        self._end += len(data)

    def decisions(self, session: str) -> dict[tuple[str, str], str]:
        """Return the decision for each (request, reply) of a session, repeats left out."""
        with Held(self._file):
            return {
                (line["asked"], line["replied"]): line["decision"]
                for line in read(self.path)
                if line["session"] == session and line["decision"] != "repeated"
            }

    def has_answered(self, plan: str) -> bool:
        """Return whether the silo has answered any request of a plan."""
        with Held(self._file):
            return any(line["plan"] == plan and line["decision"] == "answered" for line in read(self.path))

    def scopes(self) -> dict[str, tuple[str, StudyScope]]:
        """Return the time of each study's first answer and the study's scope, by its plan in hexadecimal."""
        with Held(self._file):
            return scopes(read(self.path))

    def close(self) -> None:
        self._file.close()


def scopes(lines: Iterable[LedgerLine]) -> dict[str, tuple[str, StudyScope]]:
    """Return the time of each study's first answer and the study's scope, by its plan in hexadecimal."""
    each = ((line["plan"], line["time"], line["told"]) for line in lines)
    return {plan: (time, record) for plan, time, record in each if record is not None}


def epsilon_taken(budgets: Iterable[str]) -> float:
    """Return the epsilon, at the owner's delta, of studies with these budgets (`StudyScope.zcdp`) together.

    Every study counts as if it were about the same people. Budgets are added as zCDP and converted once;
    those of studies without noise are empty and left out.
    """
    total = sum(map(Fraction, filter(None, budgets)), Fraction(0))
    return epsilon_of(float(total), OWNER_DELTA)


def verify(path: Path, public: bytes | None) -> tuple[int, str]:
    """Return the number of lines of a ledger and the hash of the last; raise if it was changed.

    ``public`` is the public half of the silo's key, which signs the head: with it, lines that were cut off at
    the end are noticed, and a chain that was computed anew. A line that a crash tore is no change.
    """
    head = None if public is None else read_head(path, public)
    data = path.read_bytes() if path.exists() else b""
    count, last, at_head = 0, START, START
    for line, _ in _lines(data, path):
        count, last = line["line"], line["hash"]
        if head is not None and count == head.count:
            at_head = last
    if head is not None:
        check_head(path, head, count, at_head)
    return count, last


def read(path: str | Path) -> Iterator[LedgerLine]:
    """Yield the lines of a ledger, each checked against its hash and the line before it."""
    data, read_to = Path(path).read_bytes(), 0
    for line, end in _lines(data, path):
        yield line
        read_to = end
    if read_to < len(data):
        raise JournalError(
            f"{path}: the last line is incomplete; the silo cuts it off when it next opens the ledger"
        )


def _lines(
    data: bytes, path: str | Path, count: int = 0, head: str = START
) -> Iterator[tuple[LedgerLine, int]]:
    """Yield the whole lines after line ``count``, each with its end in ``data``."""
    at, number = 0, count + 1
    while (stop := data.find(b"\n", at) + 1) > 0:
        line = _line(data[at : stop - 1], number, head)
        if line is None:
            raise JournalError(_changed(path, number))
        yield line, stop
        head, at, number = line["hash"], stop, number + 1
    if _line(data[at:-1], number, head) is not None:  # a whole line: its end was changed, not torn
        raise JournalError(_changed(path, number))


def _changed(path: str | Path, number: int) -> str:
    return f"{path}, line {number}: the ledger was changed here, or before it"


def _line(data: bytes, number: int, head: str) -> LedgerLine | None:
    """Return the line if these bytes are the canonical form of line ``number`` after ``head``, else None."""
    try:
        line = msgspec.json.decode(data, type=LedgerLine)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    bare = {key: value for key, value in line.items() if key not in ("line", "previous", "hash")}
    return line if _chained(msgspec.json.encode(bare), number, head)[0] == data else None


def text(data: bytes) -> str:
    """Return bytes as a ledger holds them."""
    return base64.b64encode(data).decode("ascii")


def _chained(bare: bytes, number: int, previous: str) -> tuple[bytes, str]:
    """Return a line of the file and its hash, from the entry's JSON ``bare``.

    The line's number precedes the entry; the hash of the ``previous`` line follows it. The line's own hash is
    that of the line without it, and comes last.
    """
    body = b'{"line":%d,%b,"previous":"%b"}' % (number, bare[1:-1], previous.encode())
    state = _SHA256.copy()
    state.update(body)
    digest = state.hexdigest()
    return b'%b,"hash":"%b"}' % (body[:-1], digest.encode()), digest


# The transcript: every message of a run, for replay and audit.

SELF = "self"  # the silo's name in a transcript that `of_ledger` made


class Exchange(msgspec.Struct, frozen=True):
    """One round: each silo's request and reply."""

    requests: dict[str, bytes]
    replies: dict[str, bytes]


@dataclass
class Transcript:
    """Every message of a run, in order. A run can be replayed from it.

    Parameters
    ----------
    session
        The session's name.
    exchanges
        Requests and replies, round by round.

    Examples
    --------
    >>> transcript = result.run.transcript
    >>> ft.Transcript.decode(transcript.encode()).digest() == transcript.digest()
    True
    """

    session: bytes
    exchanges: list[Exchange] = field(default_factory=list)

    def encode(self) -> bytes:
        """Return the one byte string of a transcript."""
        return msgspec.msgpack.encode((self.session, self.exchanges), order="deterministic")

    @classmethod
    def decode(cls, data: bytes) -> Transcript:
        """Return the transcript, or raise `DecodeError`."""
        try:
            session, exchanges = msgspec.msgpack.decode(data, type=tuple[bytes, list[Exchange]])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise DecodeError("not a transcript") from None
        transcript = cls(session, exchanges)
        if transcript.encode() != data:
            raise DecodeError("not a transcript in its canonical form")
        return transcript

    def save(self, path: str | Path) -> None:
        """Write the transcript to one msgpack file."""
        Path(path).write_bytes(self.encode())

    def digest(self) -> str:
        """Return the SHA-256 of the saved file, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> Transcript:
        """Read a saved transcript."""
        try:
            return cls.decode(Path(path).read_bytes())
        except DecodeError as error:
            raise DecodeError(f"{path}: {error}") from None


def of_ledger(lines: Sequence[LedgerLine], session: str = "") -> Transcript:
    """Return one silo's requests and replies in one session, from its ledger; the last session by default."""
    answered = [line for line in lines if line["decision"] == "answered"]
    wanted = session or (answered[-1]["session"] if answered else "")
    exchanges = [
        Exchange({SELF: base64.b64decode(line["asked"])}, {SELF: base64.b64decode(line["replied"])})
        for line in answered
        if line["session"] == wanted
    ]
    if not exchanges:
        raise InputError("session: the ledger has no answer in it")
    return Transcript(bytes.fromhex(wanted), exchanges)


# A silo's account of each study, from its ledger: what was asked, answered and refused, and what it spent.
#
# The ledger interleaves the lines of studies that run at the same time. Each line has the running totals of
# its session; the numbers and bits of one answer are the difference from the line before.


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer that left the silo, with its own numbers and bits."""

    line: LedgerLine
    words: str  # the query, as `preview` explains it
    numbers: int
    bits: int


@dataclass
class AnsweredKind:
    """All answers of one kind in a study."""

    words: str
    phase: str
    times: int = 0
    numbers: int = 0
    bits: int = 0


@dataclass(frozen=True)
class Refusal:
    """One request that was refused; the server learns neither the policy's ``key`` nor ``advice``."""

    time: str
    reason: str
    key: str
    advice: str = ""  # the columns behind the refusal, and what to do


@dataclass
class StudyAccount:
    """One study at a silo."""

    plan: str
    first: str
    last: str = ""
    kinds: dict[tuple[str, str], AnsweredKind] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    repeated: int = 0  # repeated requests, which got the recorded answer
    closed: bool = False

    @property
    def numbers(self) -> int:
        return sum(kind.numbers for kind in self.kinds.values())

    @property
    def bits(self) -> int:
        return sum(kind.bits for kind in self.kinds.values())

    @property
    def answers(self) -> int:
        return sum(kind.times for kind in self.kinds.values())


def studies(lines: Iterable[LedgerLine]) -> list[StudyAccount]:
    """Return the account of every study in a ledger, the first one first."""
    accounts: dict[str, StudyAccount] = {}
    for line, answer in walk(lines):
        account = accounts.setdefault(line["plan"], StudyAccount(line["plan"], line["time"]))
        account.last = line["time"]
        if answer is not None:
            key = (answer.words, line["phase"])
            kind = account.kinds.setdefault(key, AnsweredKind(*key))
            kind.times += 1
            kind.numbers += answer.numbers
            kind.bits += answer.bits
        elif line["decision"] == "refused":
            advice = line["explanation"]
            account.refusals.append(Refusal(line["time"], line["reason"], line["key"], advice))
        elif line["decision"] == "repeated":
            account.repeated += 1
        elif line["request"] == "compare":
            account.closed = True
    return list(accounts.values())


def walk(lines: Iterable[LedgerLine]) -> Iterator[tuple[LedgerLine, Answer | None]]:
    """Yield each line with its answer, None if it has none."""
    totals: dict[str, tuple[int, int]] = {}  # numbers and bits by session
    for line in lines:
        if line["decision"] != "answered" or not line["query"]:
            yield line, None
            continue
        numbers, bits = totals.get(line["session"], (0, 0))
        totals[line["session"]] = (line["functionals"], line["bits"])
        yield (
            line,
            Answer(
                line=line,
                words=line["explanation"],
                numbers=line["functionals"] - numbers,
                bits=line["bits"] - bits,
            ),
        )
