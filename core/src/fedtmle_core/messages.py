"""The messages between the server and a core: all that crosses the wire, each in one form.

    server             core
    Open        ->     Opened       a nonce, signed
    Settle      ->     Settled      all openings; the first core replies with copies of the group key
    Keys        ->     Answered     a core's own copy; the answer to the first question
    Ask         ->     Answered     the sum of a round; the answer to the next question
    Ask         ->     Finished     or, if the program has its result, a commitment to it
    Close       ->     Closed       all commitments; a signature, and from one hospital the result

No message says what is asked: every hospital derives the next question from the totals that it has read.
A refusal is one of six codes, and its text depends on no record. A decoded message is encoded again and
compared, so that nothing has two forms.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec

from fedtmle_core.errors import DecodeError
from fedtmle_core.seal import Copy, Opening

FORMAT = 1
LONGEST = 1 << 24  # bytes: an answer of 10^6 numbers of 100 bits
RUN_BYTES = 16  # a run's name; the server draws it, and two runs of a plan have different ones


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open", forbid_unknown_fields=True):
    """The server names a run of a plan."""

    format: int
    run: bytes
    plan: bytes


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle", forbid_unknown_fields=True):
    """Who takes part: the openings of these hospitals, in the order of their names."""

    run: bytes
    openings: tuple[Opening, ...]


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="keys", forbid_unknown_fields=True):
    """A hospital's own copy of the group key; the first of the roster gets none."""

    run: bytes
    copy: Copy | None


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask", forbid_unknown_fields=True):
    """The sum of what all hospitals answered in a round."""

    run: bytes
    round: int
    summed: bytes


class Commitment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One hospital's commitment to its result, which only hospitals can compare."""

    name: str
    value: bytes


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close", forbid_unknown_fields=True):
    """The commitments of all hospitals that gave one, in the order of their names."""

    run: bytes
    commitments: tuple[Commitment, ...]


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened", forbid_unknown_fields=True):
    """The hospital takes part."""

    opening: Opening


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled", forbid_unknown_fields=True):
    """The roster is settled; ``copies`` are for the others in order, from its first hospital alone."""

    copies: tuple[Copy, ...]


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered", forbid_unknown_fields=True):
    """A sealed answer, or a sealed refusal, which looks the same."""

    round: int
    sealed: bytes


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished", forbid_unknown_fields=True):
    """The hospital's program has its result."""

    round: int
    commitment: bytes


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed", forbid_unknown_fields=True):
    """The hospital's signature of what is published, which one of them sends."""

    signature: bytes
    document: bytes


class Code(enum.StrEnum):
    """Why a core refused."""

    MALFORMED = "the request is not a message of this protocol in its one form"
    ORDER = "the request is not the next one of this run, nor a repetition of the last"
    PLAN = "the hospital does not admit this plan, this roster, or a question of the study's program"
    SEAL = (
        "the masks of a round do not cancel: hospitals were told or asked different things, or a sum or a "
        "result was changed on its way"
    )
    PEOPLE = "too few people stand behind what the study asks"
    FAILED = "a hospital could not compute its answer, or not record it; its own log says why"


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", forbid_unknown_fields=True):
    """A refusal is a reply."""

    code: Code


Request: TypeAlias = Open | Settle | Keys | Ask | Close
Reply: TypeAlias = Opened | Settled | Answered | Finished | Closed | Refused
T = TypeVar("T", bound="Request | Reply")

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Return the one byte string of a message."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Return the request that these bytes are, or raise `DecodeError`."""
    return _decode(data, _requests)


def decode_reply(data: bytes) -> Reply:
    """Return the reply that these bytes are, or raise `DecodeError`."""
    return _decode(data, _replies)


def result_statement(plan: bytes, run: bytes, names: Sequence[str], published: bytes) -> tuple[object, ...]:
    """Return what hospitals sign of a published result; anyone can check it with their public keys."""
    return ("result", plan, run, list(names), hashlib.sha256(published).digest())


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(data) > LONGEST:
        raise DecodeError(f"a message is longer than {LONGEST} bytes")
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise DecodeError("bytes are not a message of this protocol") from None
    if encode(message) != data:  # long forms of integers and the like
        raise DecodeError("a message is not in its one form")
    return message
