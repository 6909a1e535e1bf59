"""NVIDIA FLARE's server process, beside its jobs: it answers silos and statisticians, and starts the runs."""

from __future__ import annotations

import base64
import io
import json
import logging
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from nvflare.apis.job_def import DEFAULT_STUDY, JobMetaKey, RunStatus
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.lighter.utils import load_private_key_file, sign_folders
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

from fedtmle.engine.office import Office, write_message
from fedtmle.engine.post import read_report, write_letter
from fedtmle.engine.process import write_log
from fedtmle.engine.runs import Dispatcher, RunFolder, revoked
from fedtmle.errors import ProtocolError
from fedtmle_core.journal import Document

# A run as a FLARE job, which is configuration only, no code.

SET_UP_TIMEOUT = 120  # seconds for every silo to start its part of a job
SILO_THREADS = 8


def packed_job(run: RunFolder, sign: Callable[[Path], None] = lambda _: None) -> bytes:
    """Return the job of a run as a zip file; the study travels as text, with its plan's digest.

    ``sign`` is called with the job's folder before it is packed: silos take signed jobs only.
    """
    terms = run.terms()
    study = base64.b64encode((run.path / "study.toml").read_bytes()).decode()
    files = {
        "meta.json": _meta(run.name, list(run.status().taking_part(terms.sites).values())),
        "coordinator/config/config_fed_server.json": server_config(run.name),
        "silo/config/config_fed_client.json": silo_config({"study": study, "plan": terms.plan}),
    }
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / run.name
        for name, document in files.items():
            (job / name).parent.mkdir(parents=True, exist_ok=True)
            (job / name).write_text(json.dumps(document), encoding="utf-8")
        sign(job)
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(job.rglob("*")):
                archive.write(path, path.relative_to(scratch))  # folders too: FLARE looks for their entries
    return packed.getvalue()


def _meta(name: str, sites: list[str]) -> Document:
    return {
        "name": name,
        "resource_spec": {},
        "min_clients": len(sites),  # every silo that takes part, or FLARE stops the job
        "mandatory_clients": sites,
        "deploy_map": {"coordinator": ["server"], "silo": sites},
    }


def server_config(run: str) -> Document:
    """Return the server's part of the job for the run of this name."""
    arguments = {
        "server_obj_id": "_server",
        "sync_task_timeout": SET_UP_TIMEOUT,
        "max_inbound_call_threads": 1,
        "max_outbound_call_threads": 100,
    }
    return {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": "nvflare.collab.runtime.controller.CollabController",
                "args": arguments,
            }
        ],
        "components": [{"id": "_server", "path": "fedtmle.engine.flare.Coordinator", "args": {"run": run}}],
    }


def silo_config(arguments: Mapping[str, str]) -> Document:
    """Return a silo's part of the job; ``arguments`` are those of `SiloEnd`."""
    executor = {
        "path": "nvflare.collab.runtime.executor.CollabExecutor",
        "args": {
            "client_obj_id": "_client",
            "max_inbound_call_threads": SILO_THREADS,
            "max_outbound_call_threads": 1,
        },
    }
    return {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": "fedtmle.engine.flare_silo.SiloEnd", "args": arguments}],
    }


Engine: TypeAlias = Any  # the engine of FLARE's server
DISPATCHER = "dispatcher@fedtmle.org"  # the submitter of the server's jobs
NO_SIGNATURE = "NA"  # FLARE's own text
_log = logging.getLogger("fedtmle.post")


class ServerDesk:
    """The server's end of the post; ``root`` is its kit. It listens once it is made."""

    def __init__(self, engine: Engine, root: Path, *, channel: str, post: str, office: str) -> None:
        self._engine, self._root, self._home = engine, root, root / "fedtmle"
        write_log(self._home / "server.log")
        own = version("fedtmle")
        self._dispatcher = Dispatcher(root / "runs", FlareJobs(engine, self._home), version=own)
        self._office = Office(root, version=own)
        for topic, reply in ((post, self._notice), (office, self._attend)):
            engine.get_cell().register_request_cb(channel=channel, topic=topic, cb=self._answering(reply))

    def turn(self) -> None:
        """Refuse the parties that were removed, give a sign of life, and carry the runs forward."""
        self._sign_anew()
        gone = revoked(self._root)
        if gone - self._dispatcher.revoked:
            self._engine.disable_clients(sorted(gone - self._dispatcher.revoked))  # refused from now on
        self._dispatcher.revoked = gone
        self._dispatcher.write_presence(self._home / "server.json")
        self._dispatcher.turn()

    def _sign_anew(self) -> None:
        """Let FLARE sign its messages if it could not when the first of them was sent.

        A silo that asks while the server is starting is answered before the server's key is loaded. FLARE
        then keeps the missing signature for good, and no administrator or statistician can log in.
        """
        server = self._engine.server
        if getattr(server, "my_own_token_signature", None) == NO_SIGNATURE:
            server.my_own_token_signature = None

    def _answering(self, reply: Callable[[str, object], bytes]) -> Callable[[Message], Message]:
        def answer(request: Message) -> Message:
            sender = str(request.get_header(CellMessageHeaderKeys.CLIENT_NAME))  # checked by the engine
            if sender in self._dispatcher.revoked:
                return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.UNAUTHENTICATED}, None)
            try:
                data = reply(sender, request.payload)
                return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, data)
            except Exception:
                _log.exception("a message of '%s' cannot be answered", sender)
                return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.PROCESS_EXCEPTION}, None)

        return answer

    def _notice(self, site: str, data: object) -> bytes:
        return write_letter(self._dispatcher.hear(site, read_report(data)))

    def _attend(self, sender: str, data: object) -> bytes:
        return write_message(self._office.answer(sender, data))


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
            record = self._engine.job_def_manager.get_job(job, fl_ctx)
        if record is None:
            return "the engine does not know the job"
        status = str(record.meta.get(JobMetaKey.STATUS.value, ""))
        return status.removeprefix("FINISHED:").lower() if status.startswith("FINISHED") else ""

    def stop(self, job: str) -> None:
        """End a job: at the server and all silos if it runs, in the queue if it does not."""
        with suppress(Exception), self._engine.new_context() as fl_ctx:  # it may be over or unknown
            if self._engine.job_runner.stop_run(job, fl_ctx) and not self.ended(job):
                self._engine.job_def_manager.set_status(job, RunStatus.FINISHED_ABORTED, fl_ctx)
