"""`fedtmle deploy init`: certificates and start-up kits for a server and named silos."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtmle.deploy.kits import Deployment, Kit, Role
from fedtmle.deploy.policy import ADMIN_ROLE, write_policy
from fedtmle.engine.runs import sites
from fedtmle.errors import InputError

ADMIN = "admin@fedtmle.org"  # FLARE wants the form of an address; it is nobody's


def provision(folder: Path, *, silos: Sequence[str], host: str, port: int, days: int = 360) -> Deployment:
    """Makes ``folder`` with a private certificate authority and one kit per party, mutual TLS throughout."""
    if not silos:
        raise InputError("silos: name at least one")
    if len(set(silos)) < len(silos):
        raise InputError("silos: each needs a name of its own")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise InputError(f"host: '{host}' is not a host name or address; silos must be able to reach it")
    if not 1 <= port <= 65535:
        raise InputError(f"port: expected 1 to 65535, not {port}")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: not empty; choose another folder")
    named = sites(silos)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    project = site_of_folder(folder)
    made = Deployment(path=folder, project=project, host=host, port=port, sites=named)
    authority = folder / "authority"
    kits = _provision(authority, _project(made, days))
    (folder / "silos").mkdir()
    shutil.move(kits / "server", made.server)
    shutil.move(kits / ADMIN, made.admin)
    common: dict[str, Any] = {"project": project, "host": host, "port": port}
    parties = [Kit(path=made.server, role=Role.SERVER, site="server", silo="", **common)]
    for silo, site in named.items():
        shutil.move(kits / site, made.kit(silo))
        parties.append(Kit(path=made.kit(silo), role=Role.SILO, site=site, silo=silo, **common))
    _listen(made)
    for kit in parties:
        kit.write()
        write_policy(kit)
    Kit(path=made.admin, role=Role.ADMIN, site=ADMIN, silo="", **common).write()
    for private in (authority, made.admin, *(kit.path for kit in parties)):
        private.chmod(0o700)
    made.write()
    return made


def site_of_folder(folder: Path) -> str:
    """The project's name on the network, from the folder's."""
    return re.sub(r"[^a-z0-9_]+", "_", folder.name.lower()).strip("_") or "fedtmle"


def _project(made: Deployment, days: int) -> dict[str, Any]:
    """FLARE's project, as its `project.yml` would say it."""
    server = {"name": "server", "type": "server", "org": "coordinator", "fed_learn_port": made.port}
    server |= {"default_host": made.host, "host_names": [made.host]}
    silos = [
        {"name": site, "type": "client", "org": re.sub(r"\W", "_", site)} for site in made.sites.values()
    ]
    admin = {"name": ADMIN, "type": "admin", "org": "coordinator", "role": ADMIN_ROLE}
    builder = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": made.project,
        "description": "fedtmle",
        "participants": [server, *silos, admin],
        "builders": [
            {
                "path": f"{builder}.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {
                "path": f"{builder}.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": "grpc"},
            },
            {"path": f"{builder}.cert.CertBuilder", "args": {"root_valid_days": days}},
            {"path": f"{builder}.signature.SignatureBuilder", "args": {}},
        ],
    }


def _listen(made: Deployment) -> None:
    """FLARE binds to loopback alone if that is the server's own target, and to every interface otherwise."""
    path = made.server / "startup" / "fed_server.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    for server in document["servers"]:
        server["service"]["target"] = f"{made.host}:{made.port}"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _provision(workspace: Path, project: dict[str, Any]) -> Path:
    """The folder with the kits that FLARE made."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    provisioner = Provisioner(str(workspace), prepare_builders(project))
    context = provisioner.provision(prepare_project(project), logger=_Quiet())
    kits = context.get(CtxKey.CURRENT_PROD_DIR)
    if context.get(CtxKey.BUILD_ERROR) or not kits:
        raise InputError("FLARE could not make the kits; check the names of host and silos")
    return Path(kits)


class _Quiet:
    """FLARE reports progress through these four."""

    def debug(self, _: str) -> None: ...
    def info(self, _: str) -> None: ...
    def warning(self, _: str) -> None: ...
    def error(self, _: str) -> None: ...
