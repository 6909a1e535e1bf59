"""Frames: the form of our messages on an engine that only carries byte strings.

Down: ``?`` asks whether the silo is ready, ``>`` carries a request. Up: ``<`` carries a
reply, ``.`` means ready, ``~`` not yet, ``!`` no. The run's transcript holds the content of the frames only.
If the plan has the server's key, each frame down comes sealed: ``+``, the signature of 64 bytes, the frame.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from fedtmle.errors import DecodeError
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.signing import request_statement
from fedtmle_core.signing import SigningKey, is_signed

HELLO = b"?"  # the frame that asks whether a silo is ready
CHANNEL, STEP = "fedtmle", "step"  # where an engine with channels carries frames
_SIGNATURE = 64  # bytes


class Waiting(enum.StrEnum):
    """Why a silo is not ready yet."""

    APPROVAL = "waiting for its owner's approval"
    DATA = "reading its data"
    ANSWER = "computing its answer"
    END = "its process for the run is ending"


class Declined(enum.StrEnum):
    """Why a silo does not take part; no reason carries a value of its data."""

    REJECTED = "its owner rejected the plan"
    UNSIGNED = "the server of the plan did not sign the request"
    NO_SERVER_KEY = "its policy wants signed requests, and the plan has no key of the server"
    ROSTER = "the plan's roster does not list it under this name"
    PLAN = "the study of the job is not that of the announced plan"
    STUDY = "its version of fedtmle cannot read the study"
    CONFIGURATION = "its silo file or approvals are missing or damaged; its own log has the details"
    DATA = "its data cannot be used for this study; its own log has the details"
    CHANGED = "its data changed since its owner approved the plan; the owner has to approve it again"
    JOURNAL = "its journal or ledger is lost, damaged or cannot be written; its own log says which"
    FAULT = "an unexpected fault occurred there; its own log has the details"


@dataclass(frozen=True)
class Ready:
    """The silo has read its data; ``release``: whether its own estimate may be shown."""

    release: bool = False


@dataclass(frozen=True)
class Reply:
    """The protocol's own bytes."""

    data: bytes


Answer: TypeAlias = Reply | Ready | Waiting | Declined


def byte_string(carried: object) -> bytes:
    """Return the bytes that an engine carried, b"" (which is no frame) if that is no byte string."""
    return bytes(carried) if isinstance(carried, bytes | bytearray | memoryview) else b""


def request(data: bytes) -> bytes:
    """Return the frame of a request."""
    return b">" + data


def sealed(frame: bytes, plan: Plan, key: SigningKey) -> bytes:
    """Return a frame as the server signs it, or as it is if the plan has no key of the server."""
    return b"+" + key.sign(request_statement(plan.digest, frame)) + frame if plan.server else frame


def unsealed(sealed: object, plan: Plan) -> object:
    """Return the frame inside ``sealed``; raise `DecodeError` unless the plan's server signed it.

    A plan without the key of a server takes any frame.
    """
    if not plan.server:
        return sealed
    if isinstance(sealed, bytes) and sealed[:1] == b"+":
        signature, frame = sealed[1 : 1 + _SIGNATURE], sealed[1 + _SIGNATURE :]
        if is_signed(request_statement(plan.digest, frame), signature, plan.server):
            return frame
    raise DecodeError("the server of the plan did not sign this frame")


def read_request(frame: object) -> bytes | None:
    """Return the request in a frame, None if the frame is `HELLO`; raise `DecodeError` if it is neither."""
    if isinstance(frame, bytes) and frame[:1] == b">":
        return frame[1:]
    if frame == HELLO:
        return None
    raise DecodeError("not a frame of this protocol")


def answer(value: Answer) -> bytes:
    """Return the frame of an answer."""
    if isinstance(value, Reply):
        return b"<" + value.data
    if isinstance(value, Ready):
        return b".+" if value.release else b"."
    return (b"~" if isinstance(value, Waiting) else b"!") + value.name.encode()


def read_answer(frame: object) -> Answer:
    """Return the answer in a frame, or raise `DecodeError`."""
    if isinstance(frame, bytes):
        kind, rest = frame[:1], frame[1:]
        if kind == b"<":
            return Reply(rest)
        if frame in (b".", b".+"):
            return Ready(release=frame == b".+")
        code = rest.decode("ascii", "replace")
        if kind == b"~" and code in Waiting.__members__:
            return Waiting[code]
        if kind == b"!" and code in Declined.__members__:
            return Declined[code]
    raise DecodeError("not a frame of this protocol")
