"""Federations: one verb, `exchange`, that carries bytes to silos and brings bytes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from fedtmle.errors import ProtocolError
from fedtmle.runtime.silo import Silo
from fedtmle.runtime.transcript import Exchange, Transcript


class Federation(Protocol):
    """Carries one synchronous round."""

    @property
    def silos(self) -> Sequence[str]: ...

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]: ...


class InProcess:
    """All silos in this process; ``threads`` > 1 lets them answer side by side."""

    def __init__(self, silos: Sequence[Silo], *, threads: int = 1) -> None:
        self._silos = {silo.name: silo for silo in silos}
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self._silos)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        run = map if self._pool is None else self._pool.map
        replies = run(lambda item: self._silos[item[0]].step(item[1]), requests.items())
        return dict(zip(requests, replies, strict=True))


class Replay:
    """Answers from a recorded transcript; any other request is an error."""

    def __init__(self, transcript: Transcript) -> None:
        self._exchanges = list(transcript.exchanges)
        self._silos = tuple(self._exchanges[0].requests) if self._exchanges else ()

    @property
    def silos(self) -> Sequence[str]:
        return self._silos

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        recorded = self._exchanges.pop(0) if self._exchanges else Exchange({}, {})
        if dict(requests) != recorded.requests:
            raise ProtocolError(
                "the run asks something that the transcript does not hold; was the plan changed?"
            )
        return recorded.replies
