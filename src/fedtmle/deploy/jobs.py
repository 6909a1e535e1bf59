"""A run as a FLARE job: configuration only, no code."""

from __future__ import annotations

import base64
import io
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from fedtmle.deploy.kits import Deployment
from fedtmle.deploy.provision import ADMIN
from fedtmle.engine.runs import RunFolder, Terms
from fedtmle.errors import ProtocolError

LOGIN = 15.0  # seconds to reach the server
SET_UP = 120  # seconds for every silo to start its part of a job
THREADS = 8


def write_job(folder: Path, run: RunFolder) -> Path:
    """The job's folder, for `submit`; the study travels as text, with its plan's digest."""
    terms = run.terms()
    study = base64.b64encode((run.path / "study.toml").read_bytes()).decode()
    job = folder / run.name
    silo = {"study": study, "plan": terms.plan}
    _write(job / "meta.json", _meta(run.name, terms))
    _write(job / "coordinator" / "config" / "config_fed_server.json", server_config(run.name))
    _write(job / "silo" / "config" / "config_fed_client.json", silo_config(silo))
    return job


def _meta(name: str, terms: Terms) -> dict[str, Any]:
    sites = list(terms.sites.values())
    return {
        "name": name,
        "resource_spec": {},
        "min_clients": len(sites),  # with one silo less the sums are not the plan's: the engine stops the job
        "mandatory_clients": sites,
        "deploy_map": {"coordinator": ["server"], "silo": sites},
    }


def server_config(run: str) -> dict[str, Any]:
    arguments = {
        "server_obj_id": "_server",
        "sync_task_timeout": SET_UP,
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


def silo_config(arguments: dict[str, str]) -> dict[str, Any]:
    executor = {
        "path": "nvflare.collab.runtime.executor.CollabExecutor",
        "args": {
            "client_obj_id": "_client",
            "max_inbound_call_threads": THREADS,
            "max_outbound_call_threads": 1,
        },
    }
    return {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": "fedtmle.engine.flare_silo.SiloEnd", "args": arguments}],
    }


@contextmanager
def engine_session(deployment: Deployment, *, timeout: float = LOGIN) -> Iterator[Any]:
    """The administrator's session with the server; `ProtocolError` if it cannot be reached."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").addHandler(logging.NullHandler())  # what goes wrong is told below
    try:
        with redirect_stdout(io.StringIO()):  # it tells that it is connecting
            session = new_secure_session(ADMIN, str(deployment.admin), timeout=timeout)
    except Exception as error:
        where = f"{deployment.host}:{deployment.port}"
        raise ProtocolError(
            f"the server at {where} cannot be reached ({type(error).__name__}); "
            "`fedtmle server status` tells more"
        ) from None
    try:
        yield session
    finally:
        session.close()


def submit(session: Any, run: RunFolder) -> str:
    """Hands a run to the engine; returns the engine's name for the job."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            job: str = session.submit_job(str(write_job(Path(scratch), run)))
        except Exception as error:
            raise ProtocolError(f"the server did not take the job: {error}") from None
    return job


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
