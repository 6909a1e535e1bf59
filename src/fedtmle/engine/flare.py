"""NVIDIA FLARE at the server: a `Federation` over the Collab API, and the run that uses it.

FLARE starts `Coordinator` in the server's process for the job. It imports no data code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nvflare.collab import collab

from fedtmle.engine import frames
from fedtmle.engine.coordinate import Awaited, Coordination, Seal, words
from fedtmle.engine.frames import Answer, Declined, Reply
from fedtmle.engine.process import keep_loaded
from fedtmle.errors import DeadlineError, DecodeError, ProtocolError, RefusedError
from fedtmle.model import kernels

RETRY_PAUSE = 0.5  # seconds between attempts to reach a silo again
ASK_AGAIN = 15.0  # seconds after which a request without an answer is sent again


class FlareFederation:
    """Carry one synchronous round to the job's sites, within ``deadline`` seconds.

    ``awaited`` is called with the silos that did not answer a call, and why, and once more when they did.
    ``seal`` returns a frame as the server signs it.
    """

    def __init__(
        self,
        sites: Mapping[str, str],
        *,
        deadline: float,
        awaited: Awaited = lambda _: None,
        seal: Seal = lambda frame: frame,
    ) -> None:
        self._sites = dict(sites)
        self._deadline = deadline
        self._awaited, self._seal = awaited, seal

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self._sites)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        """Return one reply per silo, within the deadline.

        A call that is lost with a connection never returns. Each call therefore has `ASK_AGAIN` seconds, and
        is repeated to the silos that did not answer: the same request has the same reply.
        """
        replies: dict[str, bytes] = {}
        until = time.monotonic() + self._deadline
        missing = dict(requests)
        has_waited = False
        while missing:
            asked = {silo: frames.request(data) for silo, data in missing.items()}
            answers = self.ask(asked, timeout=_share(until))
            for silo, answer in answers.items():
                if isinstance(answer, Declined):
                    raise RefusedError(silo, answer.value)
                if isinstance(answer, Reply):
                    replies[silo] = answer.data
                    del missing[silo]
            if missing:
                self._awaited({silo: words(answers.get(silo)) for silo in missing})
                has_waited = True
                if time.monotonic() + RETRY_PAUSE > until:
                    raise DeadlineError(tuple(sorted(missing)), self._deadline)
                time.sleep(RETRY_PAUSE)
        if has_waited:
            self._awaited({})
        return {silo: replies[silo] for silo in requests}

    def ask(self, asked: Mapping[str, bytes], *, timeout: float) -> dict[str, Answer]:
        """Return the answers that came in time; silos that are asked the same share one group call."""
        groups: dict[bytes, list[str]] = {}
        for silo, frame in asked.items():
            groups.setdefault(frame, []).append(silo)
        names = {site: silo for silo, site in self._sites.items()}
        is_one_group = len(groups) == 1
        calls: list[Iterable[tuple[str, object]]] = []  # one (site, frame) for each client that answered
        for frame, silos in groups.items():
            clients = collab.get_clients([self._sites[silo] for silo in silos])
            calls.append(
                clients(blocking=is_one_group, timeout=timeout, optional=True).step(self._seal(frame))
            )
        answers: dict[str, Answer] = {}
        for site, reply in (result for call in calls for result in call):
            try:
                answers[names[site]] = frames.read_answer(reply)
            except DecodeError:
                raise ProtocolError(
                    f"silo '{names[site]}' sent bytes that are not a frame of this protocol"
                ) from None
        return answers


def _share(until: float) -> float:
    """Return the seconds for one call of an exchange that ends at ``until``."""
    return min(ASK_AGAIN, max(until - time.monotonic(), 0.1))


def _load() -> None:
    """Load the kernels that a server calls while the silos read their data, not in a round."""
    kernels.exp(kernels.log(1.0))
    keep_loaded()


class Coordinator:
    """The job's server object: ``run`` names its folder under the server's own ``runs``."""

    def __init__(self, run: str) -> None:
        self.run = run  # FLARE reads arguments back from attributes of the same name

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """Carry out the run; its folder holds how it ended."""
        runs = Path(collab.workspace.get_root_dir()) / "runs"

        def connect(
            sites: Mapping[str, str], deadline: float, awaited: Awaited, seal: Seal
        ) -> FlareFederation:
            threading.Thread(target=_load, name="fedtmle-load", daemon=True).start()
            return FlareFederation(sites, deadline=deadline, awaited=awaited, seal=seal)

        Coordination(runs, self.run).carry_out(connect)
