"""What a core writes down of a run: the journal, by which it goes on after a crash, and its owner's ledger.

The journal comes first: a reply leaves only when its request and it are there. A core that starts with a
journal hears the same requests again, in order (`recorded`); the recorder then compares, and writes nothing.
The ledger is written after. A line that a crash kept out of it is added at the restart.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import final

import msgspec

from fedtmle_core import messages
from fedtmle_core.around import Hospital
from fedtmle_core.errors import JournalError
from fedtmle_core.journal import Journal
from fedtmle_core.ledger import Line
from fedtmle_core.masks import Word
from fedtmle_core.messages import Code, Reply
from fedtmle_core.plan import Plan
from fedtmle_core.seal import digest
from fedtmle_core.version import __version__

MOST_STRAYS = 1000  # lines of a run's refusals that change nothing: a flood must not fill the disk


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step: a request, its reply, the digest of the question that it answers, and the word in it."""

    request: bytes
    reply: bytes
    question: bytes = b""
    word: Word | None = None


@final
class Recorder:
    """The journal and the ledger of one run at one hospital."""

    def __init__(self, hospital: Hospital, plan: Plan, records: bytes) -> None:
        self._hospital, self._plan = hospital, plan.digest.hex()
        self._run = ""
        self._step = self._strays = 0
        journal = hospital.journal
        owner = (hospital.name, hospital.consortium.digest, plan.digest, records)
        identity = digest("journal", __version__, *owner)
        if not journal.records:
            journal.append(identity)
        if journal.records[0] != identity:
            raise JournalError(
                f"hospital '{hospital.name}': the records, the plan, the consortium or the release changed "
                "since this run began; restore them, or begin a new run"
            )
        self._waiting = deque(_record(data) for data in journal.records[1:])

    @property
    def next(self) -> Record | None:
        """The step that a restarted core has to repeat next, None if it has caught up."""
        return self._waiting[0] if self._waiting else None

    def begin(self, run: bytes) -> None:
        """Name the run in the lines that follow."""
        self._run = run.hex()

    def keep(self, record: Record, *, asked: str, numbers: int, bits: int, note: str) -> None:
        """Write a step down, or raise `JournalError`; only then may its reply leave.

        A step that is in the journal or in the ledger already must be the same: no mask may cover two texts.
        """
        ledger, sent = self._hospital.ledger, hashlib.sha256(record.reply).hexdigest()
        self._step += 1
        known = None if ledger is None else ledger.sent(self._plan, self._run, self._step)
        if known not in (None, sent):
            raise JournalError("this step had another reply, which the ledger knows: restore the journal")
        if not self._waiting:
            self._hospital.journal.append(msgspec.msgpack.encode(record))
        elif self._waiting.popleft() != record:
            raise JournalError("the journal does not follow from the plan, the records and the requests")
        if ledger is None or known is not None:
            return
        heard, said = messages.decode_request(record.request), messages.decode_reply(record.reply)
        ledger.add(
            self._line(
                step=self._step,
                heard=_name(heard),
                said=said.code.name.lower() if isinstance(said, messages.Refused) else _name(said),
                asked=asked,
                numbers=numbers,
                bits=bits,
                sent=sent,
                note=note,
            )
        )

    def stray(self, code: Code) -> None:
        """Note a request that was refused and changed nothing."""
        self._strays += 1
        if self._hospital.ledger is not None and self._strays <= MOST_STRAYS:
            self._hospital.ledger.add(self._line(step=0, heard="", said=code.name.lower()))

    def _line(self, *, step: int, heard: str, said: str, **more: str | int) -> Line:
        time = self._hospital.clock().isoformat(timespec="seconds")
        line = Line(time=time, plan=self._plan, run=self._run, step=step, heard=heard, said=said)
        return msgspec.structs.replace(line, **more)


def recorded(journal: Journal) -> list[bytes]:
    """Return the requests that a core with this journal has to hear first, in order."""
    return [_record(data).request for data in journal.records[1:]]


def _record(data: bytes) -> Record:
    try:
        return msgspec.msgpack.decode(data, type=Record)
    except (msgspec.MsgspecError, RecursionError):
        raise JournalError("the journal has an entry that this release did not write") from None


def _name(message: messages.Request | Reply) -> str:
    return type(message).__name__.lower()
