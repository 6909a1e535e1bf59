"""NVIDIA FLARE's long-lived processes: the post of a silo, and the post and dispatcher of the server.

Both are components of a party's own configuration (`resources.json`), built once when its engine starts. They
write to each other over FLARE's cells, whose messages carry the sender's certified name.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import DEFAULT_STUDY, JobMetaKey, RunStatus
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message
from nvflare.lighter.tool_consts import NVFLARE_SUBMITTER_CRT_FILE
from nvflare.lighter.utils import load_private_key_file, sign_folders
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

from fedtmle.engine.dispatch import Dispatcher, revoked
from fedtmle.engine.jobs import packed_job
from fedtmle.engine.logs import write_log
from fedtmle.engine.notice import command_of, notice_of, tell_later
from fedtmle.engine.office import Office, write_message
from fedtmle.engine.post import POST_EVERY, Desk, read_notice, read_report, write_letter
from fedtmle.engine.runs import RunFolder
from fedtmle.errors import DecodeError, ProtocolError

Engine: TypeAlias = Any  # of FLARE, server or client, for which it has no common type
CHANNEL, TOPIC, OFFICE = "fedtmle", "post", "office"
TURN_EVERY = 1.0  # seconds
FIRST_AFTER = 0.5  # seconds after the engine's start
REPLY_WITHIN = 10.0  # seconds
DISPATCHER = "dispatcher@fedtmle.org"  # in whose name the server submits its jobs
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
        home = root / "fedtmle"
        write_log(home / "server.log")
        dispatcher = Dispatcher(root / "runs", FlareJobs(engine, home), version=version("fedtmle"))

        office = Office(root, version=version("fedtmle"))

        def answering(reply: Callable[[str, object], bytes]) -> Callable[[Message], Message]:
            def answer(request: Message) -> Message:
                sender = str(request.get_header(CellMessageHeaderKeys.CLIENT_NAME))  # checked by the engine
                if sender in dispatcher.revoked:
                    return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.UNAUTHENTICATED}, None)
                try:
                    data = reply(sender, request.payload)
                    return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, data)
                except Exception:
                    _log.exception("a message of '%s' cannot be answered", sender)
                    return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.PROCESS_EXCEPTION}, None)

            return answer

        def notice(site: str, data: object) -> bytes:
            return write_letter(dispatcher.hear(site, read_report(data)))

        def attend(sender: str, data: object) -> bytes:
            return write_message(office.answer(sender, data))

        for topic, reply in ((TOPIC, notice), (OFFICE, attend)):
            engine.get_cell().register_request_cb(channel=CHANNEL, topic=topic, cb=answering(reply))

        def turn() -> None:
            gone = revoked(root)
            if gone - dispatcher.revoked:
                engine.disable_clients(sorted(gone - dispatcher.revoked))  # which refuses them from now on
            dispatcher.revoked = gone
            dispatcher.write_presence(home / "server.json")
            dispatcher.turn()

        self._repeat(turn, TURN_EVERY)


class FlareJobs:
    """The jobs of FLARE's server, from inside its process; ``home`` has the key that signs them."""

    def __init__(self, engine: Engine, home: Path) -> None:
        self._engine = engine
        self._home = home

    def submit(self, run: RunFolder) -> str:
        """Store the job of a run, as FLARE does with one that an administrator submits."""
        content = packed_job(run, self._sign)
        is_valid, error, meta = JobMetaValidator().validate(run.name, content)
        if not is_valid:
            raise ProtocolError(f"the engine refused the job of run '{run.name}': {error}")
        meta |= {
            JobMetaKey.STUDY.value: DEFAULT_STUDY,
            JobMetaKey.SUBMITTER_NAME.value: DISPATCHER,
            JobMetaKey.SUBMITTER_ORG.value: "coordinator",
            JobMetaKey.SUBMITTER_ROLE.value: "lead",
            JobMetaKey.JOB_FOLDER_NAME.value: run.name,
        }
        with self._engine.new_context() as fl_ctx:
            made = self._engine.job_def_manager.create(meta, content, fl_ctx)
        return str(made[JobMetaKey.JOB_ID.value])

    def _sign(self, job: Path) -> None:
        key = load_private_key_file(str(self._home / "dispatcher.key"))
        sign_folders(str(job), key, str(self._home / "dispatcher.crt"))

    def ended(self, job: str) -> str:
        """Return how a job ended, in FLARE's words; an empty string if it has not."""
        with self._engine.new_context() as fl_ctx:
            found = self._engine.job_def_manager.get_job(job, fl_ctx)
        if found is None:
            return "the engine does not know the job"
        status = str(found.meta.get(JobMetaKey.STATUS.value, ""))
        return status.removeprefix("FINISHED:").lower() if status.startswith("FINISHED") else ""

    def stop(self, job: str) -> None:
        """End a job: at the server and all silos if it runs, in the queue if it does not."""
        with suppress(Exception), self._engine.new_context() as fl_ctx:  # it may be over or unknown
            if self._engine.job_runner.stop_run(job, fl_ctx) and not self.ended(job):
                self._engine.job_def_manager.set_status(job, RunStatus.FINISHED_ABORTED, fl_ctx)


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
        _log.error("%s: removed; a job's configuration is JSON only", path)
    return others
