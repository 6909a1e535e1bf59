"""A run as a FLARE job, which is configuration only, no code; and the administrator's session with FLARE."""

from __future__ import annotations

import base64
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Protocol

from fedtmle.deploy.kits import Deployment
from fedtmle.deploy.provision import ADMIN
from fedtmle.engine.runs import RunFolder, Terms
from fedtmle.errors import ProtocolError
from fedtmle.runtime.documents import Document, write_document

LOGIN_TIMEOUT = 15.0  # seconds to reach the server
SET_UP_TIMEOUT = 120  # seconds for every silo to start its part of a job
SILO_THREADS = 8


class Client(Protocol):
    """A connected silo, as FLARE lists it."""

    @property
    def name(self) -> str: ...


class EngineSession(Protocol):
    """The part of FLARE's administrator session that we use."""

    def submit_job(self, job_definition_path: str) -> str: ...

    def abort_job(self, job_id: str) -> object: ...

    def get_job_meta(self, job_id: str) -> Mapping[str, object]: ...

    def get_connected_client_list(self) -> Sequence[Client]: ...

    def close(self) -> None: ...


def write_job(folder: Path, run: RunFolder) -> Path:
    """Write the job's folder, for `submit`; the study travels as text, with its plan's digest."""
    terms = run.terms()
    study = base64.b64encode((run.path / "study.toml").read_bytes()).decode()
    job = folder / run.name
    server, silo = job / "coordinator" / "config", job / "silo" / "config"
    for config in (server, silo):
        config.mkdir(parents=True)
    write_document(job / "meta.json", _meta(run.name, terms))
    write_document(server / "config_fed_server.json", server_config(run.name))
    write_document(silo / "config_fed_client.json", silo_config({"study": study, "plan": terms.plan}))
    return job


def _meta(name: str, terms: Terms) -> Document:
    sites = list(terms.sites.values())
    return {
        "name": name,
        "resource_spec": {},
        "min_clients": len(sites),  # every silo of the plan, or FLARE stops the job
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


@contextmanager
def engine_session(deployment: Deployment, *, timeout: float = LOGIN_TIMEOUT) -> Iterator[EngineSession]:
    """Open the administrator's session with the server; `ProtocolError` if it cannot be reached."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").addHandler(logging.NullHandler())  # errors are reported below
    try:
        with redirect_stdout(io.StringIO()):  # FLARE prints that it is connecting
            session: EngineSession = new_secure_session(ADMIN, str(deployment.admin), timeout=timeout)
    except Exception as error:
        where = f"{deployment.host}:{deployment.port}"
        raise ProtocolError(
            f"the server at {where} cannot be reached ({type(error).__name__}); check it with "
            "`fedtmle server status`"
        ) from None
    try:
        yield session
    finally:
        session.close()


def submit(session: EngineSession, run: RunFolder) -> str:
    """Submit a run to the engine; return the engine's name for the job."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return session.submit_job(str(write_job(Path(scratch), run)))
        except Exception as error:
            raise ProtocolError(f"the server did not accept the job: {error}") from None
