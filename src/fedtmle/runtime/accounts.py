"""A silo's account of each study, from its ledger: what was asked, answered and refused, and what it spent.

The ledger interleaves the lines of studies that run at the same time. Each line has the running totals of
its session; the numbers and bits of one answer are the difference from the line before.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fedtmle.errors import DecodeError
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Open
from fedtmle.runtime.ledger import LedgerLine


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer that left the silo, with its own numbers and bits."""

    line: LedgerLine
    plan: str
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
    for line, answer, plan in walk(lines):
        account = accounts.setdefault(plan, StudyAccount(plan, line["time"]))
        account.last = line["time"]
        if answer is not None:
            key = (answer.words, line["phase"])
            kind = account.kinds.setdefault(key, AnsweredKind(*key))
            kind.times += 1
            kind.numbers += answer.numbers
            kind.bits += answer.bits
        elif line["decision"] == "refused":
            advice = line.get("explanation", "")
            account.refusals.append(Refusal(line["time"], line["reason"], line["key"], advice))
        elif line["decision"] == "repeated":
            account.repeated += 1
        elif line["request"] == "compare":
            account.closed = True
    return list(accounts.values())


def walk(lines: Iterable[LedgerLine]) -> Iterator[tuple[LedgerLine, Answer | None, str]]:
    """Yield each line with its answer, None if it has none, and its plan."""
    totals: dict[str, tuple[int, int]] = {}  # numbers and bits by session
    plans: dict[str, str] = {}  # by session
    for line in lines:
        session = line["session"]
        plan = line.get("plan") or plans.get(session) or _opened_plan(line)
        plans.setdefault(session, plan)
        if line["decision"] != "answered" or not line["query"]:
            yield line, None, plan
            continue
        numbers, bits = totals.get(session, (0, 0))
        totals[session] = (line["functionals"], line["bits"])
        words = line.get("explanation") or line["query"]
        yield (
            line,
            Answer(
                line=line,
                plan=plan,
                words=words,
                numbers=line["functionals"] - numbers,
                bits=line["bits"] - bits,
            ),
            plan,
        )


def _opened_plan(line: LedgerLine) -> str:
    """Return the plan that the first request of a session names, for ledgers of earlier versions."""
    try:
        request = messages.decode_request(base64.b64decode(line["asked"]))
    except (DecodeError, ValueError):
        return ""
    return request.plan.hex() if isinstance(request, Open) else ""
