"""A federation that only repeats what a transcript holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedtmle.errors import ProtocolError
from fedtmle.runtime.ledger import Exchange, Transcript


class Replay:
    """Return the replies of a recorded transcript; any other request is an error."""

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
                "the run sends a request that is not in the transcript; was the plan changed?"
            )
        return recorded.replies
