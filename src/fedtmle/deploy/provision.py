"""`fedtmle deploy init`: certificates and start-up kits for a server and named silos."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cryptography import x509

from fedtmle.deploy.authority import ROOT_DAYS, Authority, authority_of
from fedtmle.deploy.kits import Deployment, Kit, Role
from fedtmle.deploy.policy import ADMIN_ROLE, write_policy
from fedtmle.engine.dispatch import revoked
from fedtmle.engine.runs import sites
from fedtmle.errors import InputError
from fedtmle.runtime.documents import Document, read_document, write_document

ADMIN = "admin@fedtmle.org"  # FLARE wants the form of an address; it is nobody's
DISPATCHER = "dispatcher@fedtmle.org"


def provision(folder: Path, *, silos: Sequence[str], host: str, port: int, days: int = 360) -> Deployment:
    """Make ``folder`` with a private certificate authority and one kit per party, for mutual TLS.

    ``host`` and ``port`` are the server's as silos reach it; certificates are valid for ``days`` days.
    """
    if not silos:
        raise InputError("silos: name at least one")
    if len(set(silos)) < len(silos):
        raise InputError("silos: two have the same name; give each a name of its own")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise InputError(
            f"host: '{host}' is not a host name or address; give the one at which silos reach it"
        )
    if not 1 <= port <= 65535:
        raise InputError(f"port: expected 1 to 65535, not {port}")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: the folder is not empty; choose another")
    named = sites(silos)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    project = _project_name(folder)
    made = Deployment(path=folder, project=project, host=host, port=port, sites=named)
    authority = folder / "authority"
    kits = _provision(authority, _project(made, max(days, ROOT_DAYS)))
    (folder / "silos").mkdir()
    shutil.move(kits / "server", made.server)
    shutil.move(kits / ADMIN, made.admin)
    kit = partial(Kit, project=project, host=host, port=port)
    parties = [kit(path=made.server, role=Role.SERVER, site="server", silo="")]
    dispatcher = kits / DISPATCHER / "startup"
    (made.server / "fedtmle").mkdir()
    for suffix in ("crt", "key"):  # with which the server signs the jobs that it starts
        shutil.copy(dispatcher / f"client.{suffix}", made.server / "fedtmle" / f"dispatcher.{suffix}")
    for silo, site in named.items():
        shutil.move(kits / site, made.kit(silo))
        parties.append(kit(path=made.kit(silo), role=Role.SILO, site=site, silo=silo))
    _listen(made)
    for party in parties:
        party.write()
        write_policy(party)
    admin_kit = kit(path=made.admin, role=Role.ADMIN, site=ADMIN, silo="")
    admin_kit.write()
    signs = Authority(authority)
    for party in (*parties, admin_kit):
        _certify(signs, party.site, party.certificate, days)
    _certify(signs, DISPATCHER, made.server / "fedtmle" / "dispatcher.crt", days)
    signs.forget_keys()
    shutil.rmtree(kits)
    for private in (authority, made.admin, *(party.path for party in parties)):
        private.chmod(0o700)
    made.write()
    return made


def add_silo(deployment: Deployment, silo: str, *, days: int = 360) -> Deployment:
    """Make the kit of one more silo, under the same authority; nobody else has to do anything."""
    if silo in deployment.sites:
        raise InputError(f"--silo: the deployment has a silo '{silo}' already")
    named = sites([*deployment.sites, silo])
    if named[silo] in revoked(deployment.server):
        raise InputError(f"--silo: '{silo}' was removed from this deployment; choose another name")
    made = replace(deployment, sites=named)
    authority = authority_of(deployment)
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch) / deployment.project / "state"
        state.mkdir(parents=True)
        (state / "cert.json").write_text(authority.state_text(), encoding="utf-8")
        kits = _provision(Path(scratch), _project(made, ROOT_DAYS))
        shutil.move(kits / named[silo], made.kit(silo))
    kit = Kit(
        path=made.kit(silo),
        role=Role.SILO,
        site=named[silo],
        silo=silo,
        project=made.project,
        host=made.host,
        port=made.port,
    )
    kit.write()
    write_policy(kit)
    _certify(authority, kit.site, kit.certificate, days)
    kit.path.chmod(0o700)
    made.write()
    return made


def remove_silo(deployment: Deployment, silo: str) -> Deployment:
    """Take a silo out of the deployment: the server refuses it from the next second on."""
    if silo not in deployment.sites:
        raise InputError(f"--silo: the deployment has no silo '{silo}'")
    site = deployment.sites[silo]
    gone = sorted({*revoked(deployment.server), site})
    write_document(deployment.server / "fedtmle" / "revoked.json", {"sites": gone})
    made = replace(deployment, sites={s: n for s, n in deployment.sites.items() if s != silo})
    made.write()
    return made


def _certify(authority: Authority, site: str, path: Path, days: int) -> None:
    """Sign a party's certificate again, for as many days as asked: FLARE's own have 360."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    path.write_bytes(authority.reissue(site, certificate, certificate.public_key(), days))


def _project_name(folder: Path) -> str:
    """Return the project's name on the network, from the folder's."""
    return re.sub(r"[^a-z0-9_]+", "_", folder.name.lower()).strip("_") or "fedtmle"


def _project(made: Deployment, days: int) -> Document:
    """Return FLARE's project, as its `project.yml` would have it."""
    server = {
        "name": "server",
        "type": "server",
        "org": "coordinator",
        "fed_learn_port": made.port,
        "default_host": made.host,
        "host_names": [made.host],
    }
    silos = [
        {"name": site, "type": "client", "org": re.sub(r"\W", "_", site)} for site in made.sites.values()
    ]
    admins = [
        {"name": name, "type": "admin", "org": "coordinator", "role": ADMIN_ROLE}
        for name in (ADMIN, DISPATCHER)
    ]
    builder = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": made.project,
        "description": "fedtmle",
        "participants": [server, *silos, *admins],
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
    """Set the server's address: FLARE binds to loopback alone if that is it, else to every interface."""
    path = made.server / "startup" / "fed_server.json"
    document = read_document(path)
    for server in document["servers"]:
        server["service"]["target"] = f"{made.host}:{made.port}"
    write_document(path, document)


def _provision(workspace: Path, project: Document) -> Path:
    """Let FLARE make the kits; return their folder."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    provisioner = Provisioner(str(workspace), prepare_builders(project))
    context = provisioner.provision(prepare_project(project), logger=_Quiet())
    kits = context.get(CtxKey.CURRENT_PROD_DIR)
    if context.get(CtxKey.BUILD_ERROR) or not kits:
        raise InputError("FLARE could not make the kits; check the names of the host and the silos")
    return Path(kits)


class _Quiet:
    """A logger that ignores FLARE's reports of progress."""

    def debug(self, _: str) -> None: ...
    def info(self, _: str) -> None: ...
    def warning(self, _: str) -> None: ...
    def error(self, _: str) -> None: ...
