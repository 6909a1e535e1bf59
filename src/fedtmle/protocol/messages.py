"""The messages, which are all that crosses the wire, and the table of states in which a silo admits them.

A request carries no law, eps, path, expression or row number: only a round number and what was
pooled in the round before. Decoding re-encodes and compares, so that each message has one form.

One table (`TABLE`) is the silo's state machine. A request that the table does not list for the silo's state
is refused and changes nothing; repeating the last admitted request returns the recorded bytes. An admitted
request leads to the state that the table gives for its `Event`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from fedtmle.errors import DecodeError
from fedtmle.lowered import LoweredLimit
from fedtmle.protocol.codes import Bits

# A limit that a silo's owner made laxer: the value that approvals sign, silos send and results state.


WIRE_FORMAT = 1
MAX_BYTES = 1 << 24
LARGEST_NOTED = 1 << 12  # bytes of a request that a ledger keeps


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """A bit string."""

    length: int
    data: bytes

    def bits(self) -> Bits:
        return Bits(self.length, self.data)


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """The server names the session and the plan; the silo compares the plan with its own."""

    format: int
    session: bytes
    plan: bytes


class SignedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What one silo sent under masks, and its signature."""

    payload: Payload
    signature: bytes


class Begin(msgspec.Struct, frozen=True, tag="begin", forbid_unknown_fields=True, omit_defaults=True):
    """Round 1: the pooled row count, and where this silo's rows start in the pooled order.

    Under masks nobody knows the latter, and it is 0. ``relayed`` are then the masked row counts of all silos,
    in the order of the roster, from which each silo adds up n itself.
    ``absent`` names the silos of the roster that the run goes on without, if the plan allows that.
    """

    session: bytes
    n: int
    first_row: int
    relayed: tuple[SignedAnswer, ...] = ()
    absent: tuple[str, ...] = ()


class Ask(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True, omit_defaults=True):
    """Round r >= 2: what was pooled in round r - 1. Every party derives the next query from it.

    ``relayed`` are the masked answers of all silos in round r - 1, which each silo adds up itself.
    """

    session: bytes
    round: int
    pooled: Payload
    relayed: tuple[SignedAnswer, ...] = ()


class Close(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True, omit_defaults=True):
    """The last broadcast; nothing is asked."""

    session: bytes
    round: int
    pooled: Payload
    relayed: tuple[SignedAnswer, ...] = ()


class SignedDigest(msgspec.Struct, frozen=True, array_like=True):
    """What one silo signed at the close: the digest of the broadcasts it received."""

    silo: str
    digest: bytes
    signature: bytes


class Compare(msgspec.Struct, frozen=True, tag="compare", forbid_unknown_fields=True):
    """The closing messages of all silos: each silo checks that all received the same broadcasts."""

    session: bytes
    closings: tuple[SignedDigest, ...]


class Opened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True, omit_defaults=True):
    """The silo takes part; N_m is its number of rows.

    ``lowered`` are the limits that its owner made laxer for this study.
    """

    n_rows: int
    lowered: tuple[LoweredLimit, ...] = ()


class Counted(msgspec.Struct, frozen=True, tag="counted", forbid_unknown_fields=True, omit_defaults=True):
    """The silo takes part under masks, and its number of rows is masked too."""

    payload: Payload
    signature: bytes = b""
    lowered: tuple[LoweredLimit, ...] = ()


class Answered(msgspec.Struct, frozen=True, tag="answered", forbid_unknown_fields=True, omit_defaults=True):
    """The answer to the query that the silo derived; signed if it is relayed to the other silos."""

    round: int
    payload: Payload
    signature: bytes = b""


class Closed(msgspec.Struct, frozen=True, tag="closed", forbid_unknown_fields=True):
    """The digest of all broadcasts received, signed by the silo's key where it has one."""

    digest: bytes
    signature: bytes


class Compared(msgspec.Struct, frozen=True, tag="compared", forbid_unknown_fields=True):
    """Whether every silo of the roster signed the digest that this one has."""

    agree: bool


class Reason(enum.StrEnum):
    """Why a silo refused; no reason carries a data-dependent value."""

    MALFORMED = "the request is not a canonical message"
    OUT_OF_ORDER = "the request is not the next one of its session, nor a repeat of the last"
    OTHER_PLAN = "the plan is not the one this silo approved"
    OTHER_FORMAT = "the wire format is not the one this silo speaks"
    NOT_APPROVED = "the silo's owner has not approved the plan, or has revoked it"
    EXPIRED = "the plan has expired, or has run longer than the silo's policy allows"
    TOO_FEW_SILOS = "the plan has fewer silos than the silo's policy asks for"
    OTHER_TARGET = "the silo's policy does not allow the distribution that brings the plan's target"
    FAILED_TARGET = "the plan's target failed the silo's checks of it on synthetic rows"
    NOT_DERIVABLE = "the broadcast does not follow from the protocol"
    TOO_MANY_QUERIES = "the silo's policy allows no more queries"
    TOO_MANY_FUNCTIONALS = "the silo's policy allows no more numbers to be told"
    TOO_FAR = "the broadcast leads further than the silo's policy allows"
    BATCHES = "the batches are not a fixed partition into parts as large as the silo's policy asks for"
    DISCLOSURE = "the answer would tell more of an attribute than the silo's policy allows"
    UNMASKED = "the silo's owner does not let this answer leave without a mask"
    RELAY = "the relayed answers are not those of the silos, or do not add up to the broadcast"
    POLICY = "the silo's policy does not allow this answer"  # depends on data: one coarse code for all
    CANNOT_ANSWER = "the silo could not compute its answer; its own log says why"
    CANNOT_RECORD = "the silo could not record its answer, and so gave none"


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """A refusal is an answer; it ends the run."""

    reason: Reason


Request: TypeAlias = Open | Begin | Ask | Close | Compare
Reply: TypeAlias = Opened | Counted | Answered | Closed | Compared | Refused
T = TypeVar("T", bound="Request | Reply")

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Return the one byte string of a message."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Return the request that ``data`` encodes, or raise `DecodeError`."""
    return _decode(data, _requests)


def decode_reply(data: bytes) -> Reply:
    """Return the reply that ``data`` encodes, or raise `DecodeError`."""
    return _decode(data, _replies)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(data) > MAX_BYTES:
        raise DecodeError(f"a message is longer than {MAX_BYTES} bytes")
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError):
        raise DecodeError("bytes are not a message of this protocol") from None
    if encode(message) != data:  # duplicate keys, long integer forms and the like
        raise DecodeError("a message is not in its canonical form")
    return message


class State(enum.StrEnum):
    """Where a silo stands in its one session."""

    NEW = "new"
    OPENED = "opened"
    ANSWERING = "answering"
    CLOSED = "closed"
    COMPARED = "compared"
    REFUSED = "refused"


class Event(enum.StrEnum):
    """How an admitted request ended."""

    REPLIED = "replied"
    REFUSED = "refused"  # by policy, or because the reply could not be computed


@dataclass(frozen=True)
class Transition:
    """In ``state`` the silo admits ``request`` and replies with ``reply``, or refuses."""

    state: State
    request: type[Request]
    reply: str
    leads_to: Mapping[Event, State]


_ANSWERED = {Event.REPLIED: State.ANSWERING, Event.REFUSED: State.REFUSED}

TABLE = (
    Transition(
        State.NEW,
        Open,
        "its number of rows",
        # Nothing was disclosed yet, and the owner may still approve: a refusal leaves the silo as it was.
        {Event.REPLIED: State.OPENED, Event.REFUSED: State.NEW},
    ),
    Transition(State.OPENED, Begin, "the answer of round 1", _ANSWERED),
    Transition(State.ANSWERING, Ask, "the answer of the next round", _ANSWERED),
    Transition(
        State.ANSWERING,
        Close,
        "the digest of what it heard",
        {Event.REPLIED: State.CLOSED, Event.REFUSED: State.REFUSED},
    ),
    Transition(
        State.CLOSED,
        Compare,
        "whether all heard the same",
        {Event.REPLIED: State.COMPARED, Event.REFUSED: State.REFUSED},
    ),
)

EXHAUSTED = State.REFUSED  # the state after too many requests out of order, from any state

_ADMITTED = {(t.state, t.request): t for t in TABLE}


def transition(state: State, request: Request) -> Transition | None:
    """Return the table's line for a request in a state, or None if the request is out of order."""
    return _ADMITTED.get((state, type(request)))
