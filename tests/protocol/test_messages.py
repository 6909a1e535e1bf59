"""Envelopes: one form each; anything else is a `DecodeError`."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.protocol import messages
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Closing,
    Compare,
    Compared,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
)

PAYLOAD = Payload(5, b"\xa8")
REQUESTS = [
    Open(1, b"s", b"p"),
    Begin(b"s", 10, 0),
    Ask(b"s", 2, PAYLOAD),
    Close(b"s", 3, PAYLOAD),
    Compare(b"s", (Closing("a", b"d", b"s"),)),
]
REPLIES = [Opened(7), Answered(2, PAYLOAD), Closed(b"d", b"s"), Compared(False), Refused(Reason.OUT_OF_ORDER)]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda m: type(m).__name__)
def test_requests_round_trip(request_: messages.Request) -> None:
    assert messages.decode_request(messages.encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_round_trip(reply: messages.Reply) -> None:
    assert messages.decode_reply(messages.encode(reply)) == reply


@given(st.binary(max_size=200))
def test_any_bytes_decode_canonically_or_raise_decode_error(data: bytes) -> None:
    for decode in (messages.decode_request, messages.decode_reply):
        try:
            message = decode(data)
        except DecodeError:
            continue
        assert messages.encode(message) == data


@given(st.sampled_from(REQUESTS), st.integers(0, 60), st.integers(0, 255))
def test_a_flipped_byte_is_another_message_or_none(request_: messages.Request, at: int, byte: int) -> None:
    data = bytearray(messages.encode(request_))
    data[at % len(data)] = byte
    try:
        decoded = messages.decode_request(bytes(data))
    except DecodeError:
        return
    assert messages.encode(decoded) == bytes(data)


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
    """A request is a session, a round, what was pooled and what was signed: no place to go."""
    fields = {name for message in REQUESTS for name in message.__struct_fields__}
    assert fields == {"format", "session", "plan", "n", "first_row", "round", "pooled", "closings"}
