"""Envelopes: one form each; anything else is a `DecodeError`."""

from __future__ import annotations

import contextlib
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.protocol import messages
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Compare,
    Compared,
    Counted,
    Event,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
    SignedAnswer,
    SignedDigest,
    State,
)
from tests.damage import damaged
from tests.premise import Premise

PAYLOAD = Payload(5, b"\xa8")
REQUESTS: list[messages.Request] = [
    Open(1, b"s", b"p"),
    Begin(b"s", 10, 0),
    Begin(b"s", 10, 0, (SignedAnswer(PAYLOAD, b"s"),)),
    Ask(b"s", 2, PAYLOAD),
    Ask(b"s", 2, PAYLOAD, (SignedAnswer(PAYLOAD, b"s"),)),
    Close(b"s", 3, PAYLOAD),
    Compare(b"s", (SignedDigest("a", b"d", b"s"),)),
]
REPLIES: list[messages.Reply] = [
    Opened(7),
    Counted(PAYLOAD, b"s"),
    Answered(2, PAYLOAD),
    Answered(2, PAYLOAD, b"s"),
    Closed(b"d", b"s"),
    Compared(False),
    Refused(Reason.OUT_OF_ORDER),
]


def test_every_kind_of_message_has_an_example() -> None:
    assert {type(message) for message in REQUESTS} == set(typing.get_args(messages.Request))
    assert {type(message) for message in REPLIES} == set(typing.get_args(messages.Reply))


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_round_trips(reason: Reason) -> None:
    assert messages.decode_reply(messages.encode(Refused(reason))) == Refused(reason)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda m: type(m).__name__)
def test_requests_round_trip(request_: messages.Request) -> None:
    assert messages.decode_request(messages.encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_round_trip(reply: messages.Reply) -> None:
    assert messages.decode_reply(messages.encode(reply)) == reply


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that a field of a message has, or any message."""
    if typing.get_origin(kind) is tuple:
        return st.lists(drawn(typing.get_args(kind)[0]), max_size=2).map(tuple)
    if kind is int:
        return st.integers(-(2**63), 2**64 - 1)
    if issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{name: drawn(of) for name, of in typing.get_type_hints(kind).items()})
    return st.from_type(kind)


KINDS = (*typing.get_args(messages.Request), *typing.get_args(messages.Reply))
decodes = Premise("the bytes are a message", at_least=0.15)


@decodes
@given(st.sampled_from(KINDS).flatmap(drawn), st.data())
@settings(max_examples=300)
def test_any_bytes_decode_canonically_or_raise_decode_error(
    message: messages.Request | messages.Reply, data: st.DataObject
) -> None:
    bytes_ = data.draw(damaged(messages.encode(message)))
    read = []
    for decode in (messages.decode_request, messages.decode_reply):
        with contextlib.suppress(DecodeError):
            read.append(decode(bytes_))
    assert [messages.encode(found) for found in read] == [bytes_] * len(read)
    decodes.holds(read)


def test_other_forms_of_the_same_message_are_refused() -> None:
    plain = messages.encode(Begin(b"s", 10, 0))
    fields = msgspec.msgpack.decode(plain)
    reordered = msgspec.msgpack.encode(dict(reversed(fields.items())))
    long_integer = plain.replace(b"\xa1n\x0a", b"\xa1n\xcd\x00\x0a")
    for other in (reordered, long_integer, plain + b"\x00", plain[:-1]):
        assert other != plain
        with pytest.raises(DecodeError):
            messages.decode_request(other)


def test_deep_nesting_and_oversize_are_refused() -> None:
    with pytest.raises(DecodeError):
        messages.decode_request(b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(DecodeError, match="longer"):
        messages.decode_request(b"\x00" * (messages.MAX_BYTES + 1))


def test_no_request_has_room_for_a_law_an_eps_or_a_row() -> None:
    """A request is a session, a round, what was pooled or sent, what was signed and which silos take part."""
    fields = {name for message in REQUESTS for name in message.__struct_fields__}
    # "absent" has room for names of the roster only: tests/studies/test_on_refusal.py.
    passed_on = {"pooled", "relayed", "closings"}
    assert fields == {"format", "session", "plan", "n", "first_row", "round", "absent"} | passed_on


# The states of docs/wire.md, once more: where each request leads, by what came of it.
LEADS_TO = {
    (State.NEW, Open): {Event.REPLIED: State.OPENED, Event.REFUSED: State.NEW},
    (State.OPENED, Begin): {Event.REPLIED: State.ANSWERING, Event.REFUSED: State.REFUSED},
    (State.ANSWERING, Ask): {Event.REPLIED: State.ANSWERING, Event.REFUSED: State.REFUSED},
    (State.ANSWERING, Close): {Event.REPLIED: State.CLOSED, Event.REFUSED: State.REFUSED},
    (State.CLOSED, messages.Compare): {Event.REPLIED: State.COMPARED, Event.REFUSED: State.REFUSED},
}


def test_every_request_leads_to_its_state() -> None:
    for state in State:
        for request in REQUESTS:
            line = messages.transition(state, request)
            assert (line.leads_to if line else None) == LEADS_TO.get((state, type(request)))
    assert messages.EXHAUSTED is State.REFUSED
