"""NVIDIA FLARE's long-lived processes: the post of a silo, and the post and dispatcher of the server.

Both are components of a party's own configuration (`resources.json`), built once when its engine starts. They
write to each other over FLARE's cells, whose messages carry the sender's certified name.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message
from nvflare.lighter.tool_consts import NVFLARE_SUBMITTER_CRT_FILE

from fedtmle.engine.post import POST_EVERY, Desk, command_of, notice_of, read_notice, tell_later, write_letter
from fedtmle.engine.process import write_log
from fedtmle.errors import DecodeError

Engine: TypeAlias = Any  # FLARE's server or client engine, which have no common type
CHANNEL, TOPIC, OFFICE = "fedtmle", "post", "office"
TURN_EVERY = 1.0  # seconds
FIRST_AFTER = 0.5  # seconds after the engine's start
REPLY_WITHIN = 10.0  # seconds
FLARE_NOTE = "fl_app.txt"  # FLARE writes the name of the application into every job
_log = logging.getLogger("fedtmle.post")


class _Posted(FLComponent, ABC):  # type: ignore[misc]
    """A component with one thread, from the start of the engine to its end."""

    def __init__(self) -> None:
        super().__init__()
        self._stopping = threading.Event()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start with the engine and end with it; the processes of jobs do not see its start."""
        if event_type == EventType.SYSTEM_START:
            self._begin(fl_ctx.get_engine(), _root(fl_ctx))
        elif event_type == EventType.SYSTEM_END:
            self._stopping.set()

    @abstractmethod
    def _begin(self, engine: Engine, root: Path) -> None:
        """Start the thread."""

    def _repeat(self, step: Callable[[], None], every: float) -> None:
        def loop() -> None:
            pause = FIRST_AFTER
            while not self._stopping.wait(pause):
                pause = every
                try:
                    step()
                except Exception:
                    _log.exception("unexpected fault; trying again")

        threading.Thread(target=loop, name="fedtmle-post", daemon=True).start()


class SiloPost(_Posted):
    """Write to the server every few seconds; keep out jobs whose configuration is not plain JSON."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start and end with the engine, and look at every job before it is launched."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.BEFORE_JOB_LAUNCH:
            meta = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
            job = meta.get(JobMetaKey.JOB_ID.value, "")
            if job:
                keep_json(_root(fl_ctx) / job)

    def _begin(self, engine: Engine, root: Path) -> None:
        home = root / "fedtmle"
        write_log(home / "post.log")
        desk = Desk(home, version=version("fedtmle"))

        def post() -> None:
            cell = engine.get_cell()
            if cell is None:  # not registered at the server yet
                return
            letter = Message(payload=write_letter(desk.report()))
            reply = cell.send_request(
                channel=CHANNEL,
                topic=TOPIC,
                target=FQCN.ROOT_SERVER,
                request=letter,
                timeout=REPLY_WITHIN,
                optional=True,
            )
            if reply is None or reply.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK:
                return
            try:
                came = desk.take(read_notice(reply.payload))
            except DecodeError as error:
                _log.error("%s", error)
                return
            for path in came:
                _log.warning("a study waits for the owner's approval: %s", path)
            command = command_of(home)
            if came and command:
                tell_later(command, [notice_of(root.name, path) for path in came])

        self._repeat(post, POST_EVERY)


class ServerPost(_Posted):
    """Answer the silos' letters, and carry the server's runs forward."""

    def _begin(self, engine: Engine, root: Path) -> None:
        from fedtmle.engine.flare_server import ServerDesk  # a silo's engine does without its modules

        desk = ServerDesk(engine, root, channel=CHANNEL, post=TOPIC, office=OFFICE)
        self._repeat(desk.turn, TURN_EVERY)


def _root(fl_ctx: FLContext) -> Path:
    """Return the party's kit."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    return Path(workspace.get_root_dir() if workspace else fl_ctx.get_prop(FLContextKey.WORKSPACE_ROOT))


def keep_json(job: Path) -> list[Path]:
    """Delete all files of a job that are neither JSON nor the certificate of its signer; return them.

    FLARE also reads HOCON, which can include what a URL names: an administrator could make a silo fetch it.
    """
    others = [
        path
        for path in sorted(job.rglob("*"))
        if path.is_file() and path.suffix != ".json" and path.name != NVFLARE_SUBMITTER_CRT_FILE
    ]
    for path in others:
        path.unlink()
        if path.name != FLARE_NOTE:
            _log.error("%s: removed; a job's configuration is JSON only", path)
    return others
