"""What a run is reduced to: every message of every silo, and the numbers of its result.

A run is watched where a silo meets the wire, `Silo.step`: bytes in, bytes out. So runs that end in a refusal
are recorded like all others, and the runs themselves need no more than the public API.

Digests must not depend on the plan's digest, which changes with the names of classes and the version. It is
blanked where it crosses the wire, and so are the session's name, the signatures and what silos count under
masks, which derive from it. The
digest that a silo sends at the close is one of the messages that it heard; it is checked against them, and
replaced by that of the messages with their session's name blanked.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.optimizers import AbstractOptimizer
from fedtmle.initial.glm import AbstractResponse
from fedtmle.model.problem import AbstractProblem
from fedtmle.model.submodel import AbstractNormaliser
from fedtmle.model.table import AbstractBins, AbstractBoundedColumns
from fedtmle.protocol.codes import AbstractCode
from fedtmle.protocol.query import AbstractQuery
from fedtmle.runtime.silo import Silo
from fedtmle.targets.effects.components import AbstractPopulation, AbstractRegime
from fedtmle.targets.effects.estimands import AbstractEffect
from tests.kinds import concrete

Message = tuple[str, bytes, bytes]  # the silo, the request, the reply
SESSION, PLAN, SIGNATURE, MASKED = b"session", b"plan", b"signature", b"masked"

# A class counts as used where this method of it was called.
USED_BY: dict[type[Any], str] = {
    AbstractQuery: "answer",
    AbstractAlgorithm: "flow",
    AbstractOptimizer: "minimise",
    AbstractProblem: "finish",
    AbstractEffect: "summarise",
    AbstractRegime: "probabilities",
    AbstractPopulation: "indicator",
    AbstractResponse: "of",
    AbstractBoundedColumns: "evaluate",
    AbstractBins: "groups",
    AbstractCode: "write",
    AbstractNormaliser: "gradient",
}
# Rules over time that other rules, or numbers, stand for in each period.
USED_BY_ANOTHER: dict[type[Any], str] = {ft.Planned: "at", ft.Shift: "moved"}


@dataclass
class Tap:
    """Every message, which refusals there were, and which classes were used."""

    messages: list[Message] = field(default_factory=list)
    refusals: list[tuple[str, str, str]] = field(default_factory=list)  # the silo, the reason, the key
    used: set[type] = field(default_factory=set)

    def in_order(self) -> list[Message]:
        """Return the messages exchange by exchange, those of an exchange by the silo's name.

        Every silo still in the run is asked once in an exchange, so that the k-th message of each belongs to
        the k-th exchange, in whatever order their threads answer.
        """
        seen: Counter[str] = Counter()
        numbered = []
        for message in self.messages:
            seen[message[0]] += 1
            numbered.append((seen[message[0]], message))
        return [message for _, message in sorted(numbered)]


@contextmanager
def tapped() -> Iterator[Tap]:
    """Watch every silo of this process for as long as the context lasts."""
    tap = Tap()
    step = Silo.step

    def watched(silo: Silo, request: bytes) -> bytes:
        reply = step(silo, request)
        tap.messages.append((silo.name, request, reply))
        decoded = _decoded(reply)
        if decoded is not None and decoded.get("type") == "refused":
            tap.refusals.append((silo.name, decoded["reason"], silo.refused_by))
        return reply

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            tap.used.add(type(self))
            return method(self, *arguments, **options)

        return noted

    patches = [
        patch.object(kind, method, noting(getattr(kind, method)))
        for base, name in USED_BY.items()
        for kind in concrete(base)
        for method in (USED_BY_ANOTHER.get(kind, name),)
    ]
    with ExitStack() as stack:
        stack.enter_context(patch.object(Silo, "step", watched))
        for each in patches:
            stack.enter_context(each)
        yield tap


def message_digest(messages: list[Message]) -> str:
    """SHA-256 over (silo, request, reply) of each message, each part behind its length."""
    sha = hashlib.sha256()
    heard: dict[str, _Heard] = {}
    for silo, request, reply in messages:
        listener = heard.setdefault(silo, _Heard())
        for part in (silo.encode(), *listener.normalised(request, reply)):
            sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()


class _Heard:
    """What one silo heard: the digest that it must state at the close, as sent and as normalised."""

    def __init__(self) -> None:
        self._sent, self._blanked = hashlib.sha256(), hashlib.sha256()
        self._last = b""

    def normalised(self, request: bytes, reply: bytes) -> tuple[bytes, bytes]:
        asked, said = _decoded(request), _decoded(reply)
        blanked = request if asked is None else _encoded(self._blank(asked))
        admitted = said is not None and said.get("type") != "refused" and request != self._last
        if asked is not None and asked.get("type") == "open" and admitted:
            self._sent, self._blanked = hashlib.sha256(), hashlib.sha256()
        if asked is not None and asked.get("type") == "begin" and admitted:
            self._sent.update(_encoded({**asked, "first_row": 0}))  # recorded above, and so not blanked again
        if asked is not None and asked.get("type") in ("ask", "close") and admitted:
            self._sent.update(request)
            self._blanked.update(blanked)
        self._last = request if admitted else self._last
        return blanked, reply if said is None else _encoded(self._blank(said))

    def _blank(self, message: dict[str, Any]) -> dict[str, Any]:
        changed = dict(message)
        if "session" in message:
            changed["session"] = SESSION
        if message.get("type") == "open":
            changed["plan"] = PLAN
        if message.get("type") == "counted" and "payload" in message:
            changed["payload"] = [message["payload"][0], MASKED]
            if "signature" in message:
                changed["signature"] = SIGNATURE
        if message.get("type") == "closed" and {"digest", "signature"} <= message.keys():
            changed["digest"], changed["signature"] = self._closing(message["digest"], message["signature"])
        if message.get("type") == "compare" and "closings" in message:
            changed["closings"] = [[name, *self._closing(*rest)] for name, *rest in message["closings"]]
        return changed

    def _closing(self, digest: bytes, signature: bytes) -> tuple[bytes, bytes]:
        same = digest == self._sent.digest()
        return self._blanked.digest() if same else digest, SIGNATURE if signature else b""


def _decoded(data: bytes) -> dict[str, Any] | None:
    """Return a message as plain data, or None for bytes that are none in the canonical form."""
    try:
        message = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return message if isinstance(message, dict) and _encoded(message) == data else None


def _encoded(message: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode(message)


def values_of(result: ft.Result) -> dict[str, Any]:
    """Return the numbers and sentences of a result that must not change."""
    return {
        "psi": result.psi,
        "covariance": result.covariance,
        "std_error": result.std_error,
        "residual": result.residual,
        "accepted": result.trajectory.accepted,
        "visited": [(point.eps, point.gradient_norm) for point in result.trajectory.points],
        "status": result.status.value,
        "sizes": dict(result.sizes),
        "steps": result.steps,
        "updates": result.updates,
        "account": result.account.to_dict(),
        "retired_at": dict(result.retired_at),
        "silos": {
            name: (own.retired_at, own.n_rows, own.gap_bound, own.estimate.psi, own.estimate.covariance)
            for name, own in result.silos.items()
        },
    }


def value_digest(values: Any) -> str:
    """SHA-256 of plain data, every float as its hexadecimal form."""
    return hashlib.sha256(json.dumps(plain(values), sort_keys=True).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Return ``value`` as JSON data that tells every bit of a float; a class has no place in it."""
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value.hex() if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return str(value) if isinstance(value, str) else value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def numbers(document: Any) -> Any:
    """Return a result's document without its sentences: names, numbers, and where they stand."""
    if isinstance(document, Mapping):
        return {key: numbers(item) for key, item in document.items() if not _is_prose(item)}
    if isinstance(document, list | tuple):
        return [numbers(item) for item in document if not _is_prose(item)]
    return document


def _is_prose(item: Any) -> bool:
    is_list = isinstance(item, list | tuple) and len(item) > 0
    return isinstance(item, str) or (is_list and all(_is_prose(part) for part in item))
