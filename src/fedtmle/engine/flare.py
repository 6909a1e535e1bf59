"""NVIDIA FLARE, the server's side: a `Federation` over the Collab API, and the run that uses it.

FLARE starts `Coordinator` in the server's process for the job. It imports no data code.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from fedtmle.engine import frames
from fedtmle.engine.coordinate import Coordination
from fedtmle.engine.frames import Answer, Declined, Reply
from fedtmle.errors import DeadlineError, DecodeError, ProtocolError, RefusedError

RETRY_PAUSE = 0.5  # seconds between attempts to reach a silo again


class FlareFederation:
    """Carries one synchronous round to the job's sites; ``deadline`` bounds each, in seconds."""

    def __init__(self, sites: Mapping[str, str], *, deadline: float) -> None:
        self._sites = dict(sites)
        self._deadline = deadline

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self._sites)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        """One reply per silo. A lost call is repeated: the same request has the same answer."""
        replies: dict[str, bytes] = {}
        until = time.monotonic() + self._deadline
        missing = dict(requests)
        while missing:
            asked = {silo: frames.request(data) for silo, data in missing.items()}
            for silo, answer in self.ask(asked, timeout=max(until - time.monotonic(), 0.1)).items():
                if isinstance(answer, Declined):
                    raise RefusedError(silo, answer.value)
                if isinstance(answer, Reply):
                    replies[silo] = answer.data
                    del missing[silo]
            if missing:
                if time.monotonic() + RETRY_PAUSE > until:
                    raise DeadlineError(tuple(sorted(missing)), self._deadline)
                time.sleep(RETRY_PAUSE)
        return {silo: replies[silo] for silo in requests}

    def ask(self, asked: Mapping[str, bytes], *, timeout: float) -> dict[str, Answer]:
        """The answers that came in time; silos that are asked the same share one group call."""
        groups: dict[bytes, list[str]] = {}
        for silo, frame in asked.items():
            groups.setdefault(frame, []).append(silo)
        names = {site: silo for silo, site in self._sites.items()}
        one = len(groups) == 1
        calls: list[Any] = []
        for frame, silos in groups.items():
            clients = collab.get_clients([self._sites[silo] for silo in silos])
            calls.append(clients(blocking=one, timeout=timeout, optional=True).step(frame))
        answers: dict[str, Answer] = {}
        for site, frame in (result for call in calls for result in call):
            try:
                answers[names[site]] = frames.read_answer(frame)
            except DecodeError:
                raise ProtocolError(f"silo '{names[site]}' sent something that is no frame") from None
        return answers


class Coordinator:
    """The job's server object: ``run`` names its folder under the server's own ``runs``."""

    def __init__(self, run: str) -> None:
        self.run = run  # FLARE reads arguments back from attributes of the same name

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """The whole run; how it ended is in its folder."""
        runs = Path(collab.workspace.get_root_dir()) / "runs"
        Coordination(runs, self.run).carry_out(
            lambda sites, deadline: FlareFederation(sites, deadline=deadline)
        )
