"""Every decoder of the package, with examples: what the fuzzing of the tests and of `fuzz/` runs over.

A decoder takes bytes and gives back what they re-encode to, or raises its one documented error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from fedtmle.errors import DecodeError, FedTMLEError, JournalError
from fedtmle.initial.glm import GLM
from fedtmle.protocol import messages
from fedtmle.protocol.codes import AbstractCode, Bits, Differences, decode, encode
from fedtmle.protocol.learners import GLMFormat, TreesFormat
from fedtmle.runtime import ledger
from fedtmle.runtime.ledger import Entry, Exchange, Transcript
from fedtmle_core.journal import MAGIC, START, frame, scan
from fedtmle_core.types import Family
from tests.initial.silos import LEVELS, pooled_table
from tests.queries import TREES, examples


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


def _bit_decoder(name: str, code: AbstractCode[Any], values: Iterable[Any]) -> Decoder:
    def again(data: bytes) -> bytes:
        if not data:
            raise DecodeError("nothing")
        return bits_as_bytes(encode(code, decode(code, bytes_as_bits(data))))

    examples = (bits_as_bytes(encode(code, value)) for value in values)
    return Decoder(name, again, DecodeError, tuple(dict.fromkeys(examples)))


def _query_decoders() -> Iterable[Decoder]:
    for example in examples():
        yield _bit_decoder(f"{example.name}: pooled", example.pooled_code, [example.pooled])
        yield _bit_decoder(f"{example.name}: answer", example.answer_code, example.answers)


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

    return tuple(messages.encode(one) for one in REQUESTS), tuple(messages.encode(one) for one in REPLIES)


def _codecs() -> Iterable[Decoder]:
    table = pooled_table(80, 3)
    y, w = table.numeric["y"], table.numeric["w"]
    trees = TreesFormat(trees=TREES, levels=LEVELS, family=Family.GAUSSIAN)
    packed = trees.pack(TREES.fit(table, LEVELS, y, w, binary=False))
    yield Decoder("trees", lambda data: trees.pack(trees.unpack(data)), DecodeError, (packed,))
    glm = GLMFormat(formula=GLM("x + C(site)").parsed, levels=LEVELS, family=Family.GAUSSIAN)
    coefficients = np.array([0.0, -0.0, 1e-300, 5.0]).tobytes()
    yield Decoder("GLM", lambda data: glm.pack(glm.unpack(data)), DecodeError, (coefficients,))


@cache
def decoders() -> dict[str, Decoder]:
    requests, replies = _message_examples()
    transcript = Transcript(b"s", [Exchange({"b": b"1", "a": b"2"}, {"a": b"", "b": b"3"})]).encode()
    found = [
        Decoder("request", lambda d: messages.encode(messages.decode_request(d)), DecodeError, requests),
        Decoder("reply", lambda d: messages.encode(messages.decode_reply(d)), DecodeError, replies),
        Decoder("transcript", lambda d: Transcript.decode(d).encode(), DecodeError, (transcript,)),
        Decoder("journal", _journal_again, JournalError, (_journal_example(),)),
        Decoder("ledger", _ledger_again, JournalError, (_ledger_example(),)),
        _bit_decoder("gamma", Differences(dim=3, width=None), [(0, -3, 1 << 70)]),
        *_codecs(),
        *_query_decoders(),
    ]
    return {decoder.name: decoder for decoder in found}
