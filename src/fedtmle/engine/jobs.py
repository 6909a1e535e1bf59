"""A run as a FLARE job, which is configuration only, no code."""

from __future__ import annotations

import base64
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from fedtmle.engine.runs import RunFolder
from fedtmle.runtime.documents import Document

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
