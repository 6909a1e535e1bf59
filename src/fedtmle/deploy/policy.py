"""What a party's engine permits: FLARE's configuration of each site, fail closed.

A silo builds two classes and no other, runs no code that a job brings, streams no log, and opens no
shell to an administrator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtmle.deploy.kits import Kit, Role

ADMIN_ROLE = "lead"
CLASSES = {
    Role.SILO: [
        "nvflare.collab.runtime.executor.CollabExecutor",
        "fedtmle.engine.flare_silo.SiloEnd",
    ],
    Role.SERVER: [
        "nvflare.collab.runtime.controller.CollabController",
        "fedtmle.engine.flare.Coordinator",
    ],
}
UNWANTED = ("site_log_streamer", "log_receiver")

# "n:submitter" is the submitter himself. Whatever right is not named is denied.
RIGHTS = {
    "submit_job": "any",
    "manage_job": "n:submitter",
    "view": "any",
    "clone_job": "none",
    "download_job": "none",
    "operate": "none",
    "shell_commands": "none",
    "byoc": "none",
    "server-predeployed-flwr": "none",
}
AUTHORIZATION = {"format_version": "1.0", "permissions": {ADMIN_ROLE: RIGHTS}}


def write_policy(kit: Kit) -> None:
    """Puts our configuration before FLARE's defaults in the kit's ``local`` folder."""
    local = kit.path / "local"
    _write(local / "authorization.json", AUTHORIZATION)
    _write(local / "log_config.json", logging_of(_read(local / "log_config.json.default")))
    _write(local / "resources.json", resources(_read(local / "resources.json.default"), kit.role))


def resources(default: dict[str, Any], role: Role) -> dict[str, Any]:
    """FLARE's resources with our class list, and without its log streams."""
    document = {
        **default,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": CLASSES[role],
        "components": [part for part in default["components"] if part["id"] not in UNWANTED],
    }
    if role is Role.SILO:
        document["allow_log_streaming"] = False
    return document


def place_storage(kit: Kit) -> None:
    """The server keeps jobs and snapshots in its own folder; FLARE's default is a shared one."""
    path = kit.path / "local" / "resources.json"
    document = _read(path)
    storage = document["snapshot_persistor"]["args"]["storage"]["args"]
    storage["root_dir"] = str(kit.path / "storage" / "snapshots")
    for part in document["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(kit.path / "storage" / "jobs")
    _write(path, document)


def logging_of(default: dict[str, Any]) -> dict[str, Any]:
    """Warnings and errors to files of the party's own; a line for each message costs a tenth of a round."""
    handlers = {name: default["handlers"][name] for name in ("logFileHandler", "errorFileHandler")}
    root = {"level": "WARNING", "handlers": list(handlers)}
    return {**default, "handlers": handlers, "loggers": {"root": root}}


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
