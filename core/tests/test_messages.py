"""Every message has one form, and the table says which comes when."""

from __future__ import annotations

import itertools
import random
from typing import get_args

import msgspec
import pytest
from runs import Server, sites

from fedtmle_core import messages
from fedtmle_core.errors import DecodeError
from fedtmle_core.messages import Code, Open, Refused, Reply, Request, decode_reply, decode_request, encode
from fedtmle_core.state import TABLE, State, after

SERVER = Server(sites())
SERVER.go()
REQUESTS = [data[1] for data, _ in SERVER.seen]
REPLIES = [replies[1] for _, replies in SERVER.seen] + [SERVER.seen[1][1][0], encode(Refused(Code.SEAL))]


def test_messages_of_a_run_are_in_their_one_form() -> None:
    kinds = set()
    for data in REQUESTS:
        assert encode(decode_request(data)) == data
        kinds.add(type(decode_request(data)))
    assert kinds == set(get_args(Request))
    kinds = {type(decode_reply(data)) for data in REPLIES}
    assert kinds == set(get_args(Reply))
    assert all(encode(decode_reply(data)) == data for data in REPLIES)


@pytest.mark.parametrize("decode", [decode_request, decode_reply])
def test_anything_else_is_refused(decode) -> None:
    """Whatever is decoded from damaged bytes is encoded to the same bytes, or refused."""
    draws, refused, passed = random.Random(3), 0, 0  # noqa: S311
    for data in REQUESTS + REPLIES:
        for _ in range(300):
            damaged = bytearray(data)
            match draws.randrange(3):
                case 0:
                    damaged[draws.randrange(len(damaged))] ^= 1 << draws.randrange(8)
                case 1:
                    del damaged[draws.randrange(len(damaged)) :]
                case 2:
                    damaged[draws.randrange(len(damaged)) :] = draws.randbytes(draws.randrange(9))
            try:
                message = decode(bytes(damaged))
            except DecodeError:
                refused += 1
            else:
                assert encode(message) == damaged
                passed += 1
    assert refused > 1000
    assert passed > 100
    for data in (b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff", b"\xc1", b"", bytes(messages.LONGEST + 1)):
        with pytest.raises(DecodeError):
            decode(data)


def test_a_message_has_a_limit() -> None:
    most = messages.LONGEST - len(encode(messages.Ask(b"r" * 16, 1, b"")))
    assert decode_request(encode(messages.Ask(b"r" * 16, 1, bytes(most - 4))))
    with pytest.raises(DecodeError, match="longer"):
        decode_request(encode(messages.Ask(b"r" * 16, 1, bytes(most + 4))))


def test_integers_have_one_form() -> None:
    data = encode(Open(1, b"r" * 16, bytes(32)))
    at = data.index(b"\x01", 5)
    with pytest.raises(DecodeError, match="one form"):
        decode_request(data[:at] + b"\xcc\x01" + data[at + 1 :])


def test_the_table() -> None:
    """What is not listed here is refused: there are 132 pairs, and 12 lead anywhere."""
    kinds = (*get_args(Request), *get_args(Reply))
    assert {kind for _, kind in TABLE} <= set(kinds)
    pairs = list(itertools.product(State, kinds))
    assert len(pairs) == 121
    assert len(TABLE) == 12
    assert not any(state in (State.CLOSED, State.ENDED) for state, _ in TABLE)
    reached = {State.NEW}
    for _ in State:
        reached |= {to for (state, _), to in TABLE.items() if state in reached}
    assert reached == set(State)
    refusal = Refused(Code.ORDER)
    assert after(State.NEW, refusal) is None
    assert after(State.ASKED, refusal) is State.ENDED


def test_codes_say_nothing_of_records() -> None:
    assert len(Code) == 6
    assert all(msgspec.msgpack.decode(encode(Refused(code))) == ["refused", code.value] for code in Code)
