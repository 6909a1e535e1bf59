"""Every decoder of the package, with examples: what the fuzzing of the tests and of `fuzz/` runs over.

A decoder takes bytes and gives back what they re-encode to, or raises its one documented error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np

import fedtmle as ft
from fedtmle.errors import DecodeError, FedTMLEError, JournalError
from fedtmle.initial.glm import GLM
from fedtmle.initial.trees import GradientBoostedTrees
from fedtmle.model.families import Family
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, Bits, BitWriter
from fedtmle.protocol.learners import GLMCodec, TreesCodec
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Link
from fedtmle.runtime import ledger
from fedtmle.runtime.federation import InProcess
from fedtmle.runtime.journal import MAGIC, START, frame, scan
from fedtmle.runtime.ledger import Entry
from fedtmle.runtime.session import Session
from fedtmle.runtime.silo import Silo
from fedtmle.runtime.transcript import Exchange, Transcript
from fedtmle.studies.run import study_plan
from tests.initial.silos import LEVELS, pooled_table, split, trial
from tests.runtime.faults import CASES


@dataclass(frozen=True)
class Decoder:
    """``again`` decodes and encodes; ``error`` is all that it may raise."""

    name: str
    again: Callable[[bytes], bytes]
    error: type[FedTMLEError]
    examples: tuple[bytes, ...]


def bits_as_bytes(bits: Bits) -> bytes:
    """A bit string as fuzzers know it: how many bits of the last byte are padding, then the bytes."""
    return bytes([-bits.length % 8]) + bits.data


def bytes_as_bits(data: bytes) -> Bits:
    return Bits(8 * (len(data) - 1) - data[0], data[1:]) if data else Bits(0, b"")


def _bit_decoder(name: str, read: Any, write: Any, examples: Iterable[Bits]) -> Decoder:
    def again(data: bytes) -> bytes:
        if not data:
            raise DecodeError("nothing")
        reader = BitReader(bytes_as_bits(data))
        value = read(reader)
        reader.finish()
        out = BitWriter()
        write(value, out)
        return bits_as_bytes(out.finish())

    return Decoder(name, again, DecodeError, tuple(dict.fromkeys(map(bits_as_bytes, examples))))


@dataclass
class Recorder(Session):
    """A session that keeps its queries, with what was said in them."""

    seen: list[tuple[Any, list[tuple[Bits, Link]], Bits]] = field(default_factory=list)

    def __init__(self, plan: Plan, silos: list[Silo]) -> None:
        super().__init__(plan, InProcess(silos))
        self.seen = []
        self.answers: list[tuple[Bits, Link]] = []

    def _collect(self, query: Any, requests: Any) -> Any:
        before = {silo: Link(dict(link.previous)) for silo, link in self._links.items()}
        found = super()._collect(query, requests)
        replies = self._transcript.exchanges[-1].replies
        self.answers = [
            (messages.decode_reply(reply).payload.bits(), before[silo]) for silo, reply in replies.items()
        ]
        return found

    def _broadcast(self, query: Any, pooled: Any) -> Bits:
        bits = super()._broadcast(query, pooled)
        self.seen.append((query, self.answers, bits))
        return bits


TREES = GradientBoostedTrees("x", rounds=2, depth=1, min_leaf=10)


def _study(outcome_model: Any) -> tuple[Plan, Any]:
    study = trial(outcome_model, algorithm=ft.Coded(tolerance=0.1))
    tables = split(pooled_table(240, 4), 2)
    return study_plan(study, roster(list(tables))), tables


LEARNERS = (GLM("a + x + C(site)"), ft.Pilot(TREES, at="s1"), ft.PerSilo(TREES))
STUDIES: dict[str, Callable[[], tuple[Plan, Any]]] = {
    "learners": lambda: _study(ft.SuperLearner(LEARNERS, folds=2)),
    "pilot's trees": lambda: _study(ft.Pilot(TREES, at="s1")),
    "pilot's coefficients": lambda: _study(ft.Pilot(GLM("a + x + C(site)"), at="s1")),
}


@cache
def queries() -> dict[str, tuple[Any, list[tuple[Bits, Link]], Bits]]:
    """One of each kind of query, and of each width of it, as real runs ask them."""
    found = {}
    for name, case in {**CASES, **STUDIES}.items():
        plan, rows = case()
        session = Recorder(plan, [Silo(silo, plan, own) for silo, own in rows.items()])
        session.run()
        for number, seen in enumerate(session.seen):
            kind = type(seen[0]).__name__
            if sum(key.startswith(kind) for key in found) < 3:
                found[f"{kind} {number + 1} of '{name}'"] = seen
    return found


def _query_decoders() -> Iterable[Decoder]:
    for name, (query, answers, pooled) in queries().items():
        yield _bit_decoder(f"{name}: pooled", query.read_pooled, query.write_pooled, [pooled])
        memory = dict(answers[0][1].previous)  # the links have said the same number of things

        def read(bits: BitReader, query: Any = query, memory: Any = memory) -> Any:
            return query.read_answer(bits, Link(dict(memory)))

        def write(answer: Any, out: BitWriter, query: Any = query, memory: Any = memory) -> None:
            query.write_answer(answer, out, Link(dict(memory)))

        yield _bit_decoder(f"{name}: answer", read, write, [bits for bits, _ in answers])


def _journal_again(data: bytes) -> bytes:
    """The whole records; a torn tail is no part of a journal."""
    out, chain = MAGIC, START
    for payload, _, _ in scan(data, "journal"):
        more, chain = frame(payload, chain)
        out += more
    if MAGIC.startswith(data):
        return data
    tail = data[len(out) :]
    return out + tail if data.startswith(out) else out


def _journal_example() -> bytes:
    out, chain = MAGIC, START
    for payload in (b"identity", b"", b"record" * 9):
        more, chain = frame(payload, chain)
        out += more
    return out


def _ledger_example() -> bytes:
    opened = Entry(time="t", session="s", request="open", round=0)
    entry = Entry(time="t", session="s", request="é\u001f", round=1, decision="refused", reason="policy")
    out, head = b"", ledger.START
    for number, event in enumerate((opened, entry), start=1):
        line, head = ledger._chained(msgspec.json.encode(event), number, head)
        out += line + b"\n"
    return out


def _ledger_again(data: bytes) -> bytes:
    lines = [(line, end) for line, end in ledger._lines(data, "ledger")]
    whole = b"".join(msgspec.json.encode(line) + b"\n" for line, _ in lines)
    return whole + data[lines[-1][1] if lines else 0 :]


def _message_examples() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    from tests.protocol.test_messages import REPLIES, REQUESTS

    return tuple(map(messages.encode, REQUESTS)), tuple(map(messages.encode, REPLIES))


def _codecs() -> Iterable[Decoder]:
    table = pooled_table(80, 3)
    y, w = table.numeric["y"], table.numeric["w"]
    trees = TreesCodec(trees=TREES, levels=LEVELS, family=Family.GAUSSIAN)
    packed = trees.pack(TREES.fit(table, LEVELS, y, w, binary=False))
    yield Decoder("trees", lambda data: trees.pack(trees.unpack(data)), DecodeError, (packed,))
    glm = GLMCodec(formula=GLM("x + C(site)").parsed, levels=LEVELS, family=Family.GAUSSIAN)
    coefficients = np.array([0.0, -0.0, 1e-300, 5.0]).tobytes()
    yield Decoder("GLM", lambda data: glm.pack(glm.unpack(data)), DecodeError, (coefficients,))


@cache
def decoders() -> dict[str, Decoder]:
    requests, replies = _message_examples()
    three = BitWriter()
    three.gamma((0, -3, 1 << 70))
    transcript = Transcript(b"s", [Exchange({"b": b"1", "a": b"2"}, {"a": b"", "b": b"3"})]).encode()
    found = [
        Decoder("request", lambda d: messages.encode(messages.decode_request(d)), DecodeError, requests),
        Decoder("reply", lambda d: messages.encode(messages.decode_reply(d)), DecodeError, replies),
        Decoder("transcript", lambda d: Transcript.decode(d).encode(), DecodeError, (transcript,)),
        Decoder("journal", _journal_again, JournalError, (_journal_example(),)),
        Decoder("ledger", _ledger_again, JournalError, (_ledger_example(),)),
        _bit_decoder("gamma", lambda b: b.gamma(3), lambda v, out: out.gamma(v), [three.finish()]),
        *_codecs(),
        *_query_decoders(),
    ]
    return {decoder.name: decoder for decoder in found}
