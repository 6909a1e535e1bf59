"""What a party signs with its key: answers, heads of files, and the owner's decisions.

A silo signs answers under masks, closings, approvals and heads of files; a server signs its requests.

At the close of a run a silo signs the digest of the broadcasts that it heard.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fedtmle.errors import JournalError
from fedtmle.lowered import LoweredLimit
from fedtmle_core.signing import SigningKey, is_signed

if TYPE_CHECKING:
    from fedtmle.protocol.codes import Bits
    from fedtmle.protocol.plan import Plan


def request_statement(plan: bytes, frame: bytes) -> bytes:
    """Return what the server signs of a frame, in a run of the plan with the digest ``plan``."""
    return msgspec.msgpack.encode(("fedtmle request", plan, frame))


def answer_statement(plan: Plan, session: bytes, silo: str, round: int, heard: bytes, data: Bits) -> bytes:
    """Return what a silo signs of a masked answer: what it sent in a round, after hearing ``heard``."""
    named = ("fedtmle answer", plan.digest, session, silo, round, heard, data.length, data.data)
    return msgspec.msgpack.encode(named)


def closing_statement(plan: Plan, session: bytes, silo: str, digest: bytes) -> bytes:
    """Return what a silo signs at the close: that it heard ``digest`` in this session of this plan."""
    return msgspec.msgpack.encode(("fedtmle close", plan.digest, session, silo, digest))


# The signed head of a file that only grows: how many lines it had, and the digest of the last state.
#
# Without it nobody could tell that lines were cut off at a file's end, or that the whole chain was computed
# anew. The head is written after the line: after a crash the file may be ahead of its head, never behind it.


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of a file: after ``count`` lines its digest was ``digest``."""

    count: int
    digest: str
    signature: str = ""


def head_path(path: Path) -> Path:
    """Return the file beside ``path`` that holds its head."""
    return path.with_suffix(".head")


def write_head(path: Path, count: int, digest: str, key: SigningKey) -> None:
    """Sign the head of the file at ``path`` and replace it, in one step."""
    signature = key.sign(_statement(path, count, digest)).hex()
    head = str(head_path(path))
    scratch = f"{head}.new"
    with open(scratch, "wb") as file:
        file.write(msgspec.json.encode(Head(count=count, digest=digest, signature=signature)))
    os.chmod(scratch, 0o600)
    os.replace(scratch, head)


def read_head(path: Path, public: bytes) -> Head | None:
    """Return the head of the file at ``path``, None if it has none; raise if another key signed it."""
    try:
        head = msgspec.json.decode(head_path(path).read_bytes(), type=Head)
        signature = bytes.fromhex(head.signature)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError):
        raise JournalError(f"{head_path(path)}: this is not the head of {path.name}") from None
    if not is_signed(_statement(path, head.count, head.digest), signature, public):
        raise JournalError(f"{head_path(path)}: the silo's key did not sign this")
    return head


def check_head(path: Path, head: Head, count: int, digest_at_head: str) -> None:
    """Raise unless a file of ``count`` lines goes on from its head, after whose lines it has this digest."""
    if count < head.count:
        raise JournalError(
            f"{path}: it has {count} lines, and its signed head says {head.count}: lines were cut off"
        )
    if digest_at_head != head.digest:
        raise JournalError(f"{path}: it differs from its signed head: it was written anew")


def _statement(path: Path, count: int, digest: str) -> bytes:
    return msgspec.msgpack.encode(("fedtmle head", path.name, count, digest))


# The owner's decisions about plans: a file of signed JSON lines. The last line about a plan is in force.
#
# A changed plan has another digest, which nobody has approved yet; so has the same study under another
# version of the package. The file's head is signed, so that a revocation cannot be cut off.


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line: the owner's decision about a plan, and when it was made."""

    plan: str
    approved: bool
    time: str
    note: str = ""
    data: str = ""  # the digest of plan and rows for which it holds; empty: for any rows
    bits: dict[str, float] | None = None  # by column, as `risk` found it; None: not audited
    title: str = ""  # the study's title
    lowered: tuple[LoweredLimit, ...] = ()  # limits that the owner made laxer for this plan
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """The bytes that the key signs."""
        signed = ("fedtmle approval", self.plan, self.approved, self.time, self.note)
        named = (*signed, self.data) if self.data else signed
        audited = named if self.bits is None else (*named, sorted(self.bits.items()))
        titled = (*audited, {"title": self.title}) if self.title else audited
        return msgspec.msgpack.encode((*titled, {"lowered": self.lowered}) if self.lowered else titled)


@dataclass(frozen=True)
class Approvals:
    """The decisions in one file, checked against the silo's key."""

    path: Path
    key: SigningKey

    def decisions(self) -> list[Decision]:
        """Return every decision, oldest first; raise if the silo's key did not sign one of them."""
        head = read_head(self.path, self.key.public)  # read the head first: a decision may be added meanwhile
        if not self.path.exists():
            if head is not None:
                raise JournalError(f"{self.path}: the file is gone, but its signed head exists")
            return []
        decisions, data = [], self.path.read_bytes()
        if head is not None:
            lines = data.splitlines(keepends=True)
            check_head(self.path, head, len(lines), _digest(b"".join(lines[: head.count])))
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                decision = msgspec.json.decode(line, type=Decision)
                signature = bytes.fromhex(decision.signature)
            except (msgspec.MsgspecError, ValueError):
                raise JournalError(f"{self.path}, line {number}: this is not a decision") from None
            if not is_signed(decision.signed, signature, self.key.public):
                raise JournalError(f"{self.path}, line {number}: the silo's key did not sign this")
            decisions.append(decision)
        return decisions

    def current(self) -> dict[str, Decision]:
        """Return the decision in force for each plan, by the plan's digest in hexadecimal."""
        return {decision.plan: decision for decision in self.decisions()}

    def approves(self, plan: bytes) -> bool:
        """Return whether an approval of the plan is in force; in a tampered file none is."""
        try:
            decision = self.current().get(plan.hex())
        except JournalError:
            return False
        return decision is not None and decision.approved

    def decide(
        self,
        plan: bytes,
        *,
        approved: bool,
        note: str = "",
        data: bytes = b"",
        bits: Mapping[str, float] | None = None,
        title: str = "",
        lowered: Sequence[LoweredLimit] = (),
    ) -> Decision:
        """Sign and append a decision, and return it.

        ``data`` is the digest of the rows that it is about; ``bits`` is what `risk` found of each column;
        ``title`` is the study's; ``lowered`` are the limits that are laxer for it.
        """
        self.decisions()  # never add to a file that was tampered with
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        bare = Decision(
            plan=plan.hex(),
            approved=approved,
            time=time,
            note=note,
            data=data.hex(),
            bits=None if bits is None else dict(bits),
            title=title,
            lowered=tuple(lowered),
        )
        decision = msgspec.structs.replace(bare, signature=self.key.sign(bare.signed).hex())
        with open(self.path, "ab", buffering=0) as file:
            file.write(msgspec.json.encode(decision) + b"\n")
            os.fsync(file.fileno())
        os.chmod(self.path, 0o600)
        data = self.path.read_bytes()
        write_head(self.path, len(data.splitlines()), _digest(data), self.key)
        return decision


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
