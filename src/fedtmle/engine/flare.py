"""NVIDIA FLARE at the server: a `Federation` over the cells of a job, and the run that uses it.

FLARE starts `Coordinator` in the server's process for the job. It imports no data code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from nvflare.apis.fl_context import FLContext
from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted
from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message

from fedtmle.engine import frames
from fedtmle.engine.coordinate import Awaited, Coordination, Seal, words
from fedtmle.engine.frames import Answer, Declined, Reply
from fedtmle.engine.process import keep_loaded
from fedtmle.errors import DeadlineError, DecodeError, ProtocolError, RefusedError
from fedtmle_core import kernels

RETRY_PAUSE = 0.5  # seconds between attempts to reach a silo again
ABORT_POLL = 0.2  # seconds between two looks at whether the engine has ended the job
ASK_AGAIN = 15.0  # seconds after which a request without an answer is sent again


class ServerCell:
    """Rounds over the cells of a job: a message to each site, and its answer in another.

    FLARE joins and checks the cells. A call of its Collab API is streamed, which takes several messages each
    way and half of a round's time. Our frames are short, so that one message carries each, as with the
    letters of the post. ``is_aborted`` returns whether the engine has ended the job.
    """

    def __init__(self, fl_ctx: FLContext, is_aborted: Callable[[], bool]) -> None:
        engine, job = fl_ctx.get_engine(), fl_ctx.get_job_id()
        self._cell = engine.get_cell().core_cell
        self._names = {client.name: FQCN.join([client.get_fqcn(), job]) for client in engine.get_clients()}
        self._is_aborted = is_aborted

    def call(self, asked: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """Return what the sites sent back within ``timeout`` seconds; raise if the engine ends the job.

        The engine's call cannot be interrupted, so a thread makes it, which may outlive this one.
        """
        sites = {self._names[site]: site for site in asked}
        messages = {
            name: TargetMessage(name, frames.CHANNEL, frames.STEP, Message(payload=asked[site]))
            for name, site in sites.items()
        }
        found: SimpleQueue[dict[str, Message] | Exception] = SimpleQueue()

        def send() -> None:
            try:
                found.put(self._cell.broadcast_multi_requests(messages, timeout, optional=True))
            except Exception as error:
                found.put(error)

        threading.Thread(target=send, name="fedtmle-send", daemon=True).start()
        while True:
            try:
                replies = found.get(timeout=ABORT_POLL)
                break
            except Empty:
                if self._is_aborted():
                    raise RunAborted("the engine ended the job") from None
        if isinstance(replies, Exception):
            raise replies
        return {
            sites[name]: frames.byte_string(reply.payload)
            for name, reply in replies.items()
            if reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK
        }


class FlareFederation:
    """Carry one synchronous round to the job's sites, within ``deadline`` seconds.

    ``awaited`` is called with the silos that did not answer a call, and why, and once more when they did.
    ``seal`` returns a frame as the server signs it.
    """

    def __init__(
        self,
        sites: Mapping[str, str],
        cell: ServerCell,
        *,
        deadline: float,
        awaited: Awaited = lambda _: None,
        seal: Seal = lambda frame: frame,
    ) -> None:
        self._sites, self._cell = dict(sites), cell
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
        """Return the answers that came in time."""
        sealed = {frame: self._seal(frame) for frame in set(asked.values())}  # most are asked the same
        names = {self._sites[silo]: silo for silo in asked}
        replies = self._cell.call({site: sealed[asked[silo]] for site, silo in names.items()}, timeout)
        answers: dict[str, Answer] = {}
        for site, reply in replies.items():
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
        cell = ServerCell(collab.fl_ctx, lambda: bool(collab.is_aborted))

        def connect(
            sites: Mapping[str, str], deadline: float, awaited: Awaited, seal: Seal
        ) -> FlareFederation:
            threading.Thread(target=_load, name="fedtmle-load", daemon=True).start()
            return FlareFederation(sites, cell, deadline=deadline, awaited=awaited, seal=seal)

        Coordination(runs, self.run).carry_out(connect)
