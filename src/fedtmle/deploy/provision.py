"""`fedtmle deploy init`: certificates and start-up kits for a server and named silos."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from cryptography import x509

from fedtmle.deploy.authority import ROOT_DAYS, Authority, authority_of
from fedtmle.deploy.kits import Deployment, Kit, Role
from fedtmle.deploy.policy import ADMIN_ROLE, write_policy
from fedtmle.engine.dispatch import revoked
from fedtmle.engine.office import COORDINATOR
from fedtmle.engine.runs import sites
from fedtmle.errors import InputError
from fedtmle.runtime.documents import Document, read_document, write_document

DISPATCHER = "dispatcher@fedtmle.org"
NO_RIGHTS = "member"  # the engine's role of statisticians: only our office answers them
_RESERVED = ("admin", "dispatcher")


def provision(
    folder: Path,
    *,
    silos: Sequence[str],
    host: str,
    port: int,
    days: int = 360,
    statisticians: Sequence[str] = (),
) -> Deployment:
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
    for name in statisticians:
        _check_name(name)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    project = _project_name(folder)
    made = Deployment(path=folder, project=project, host=host, port=port, sites=named)
    authority = folder / "authority"
    signs = Authority(authority)
    signs.create(project, max(days, ROOT_DAYS))
    kits = _provision(authority, _project(made, signs.days))
    (folder / "silos").mkdir()
    shutil.move(kits / "server", made.server)
    shutil.move(kits / COORDINATOR, made.admin)
    kit = partial(Kit, project=project, host=host, port=port)
    parties = [kit(path=made.server, role=Role.SERVER, site="server", silo="")]
    dispatcher = kits / DISPATCHER / "startup"
    (made.server / "fedtmle").mkdir()
    for suffix in ("crt", "key"):  # the server signs the jobs that it starts with these
        shutil.copy(dispatcher / f"client.{suffix}", made.server / "fedtmle" / f"dispatcher.{suffix}")
    for silo, site in named.items():
        shutil.move(kits / site, made.kit(silo))
        parties.append(kit(path=made.kit(silo), role=Role.SILO, site=site, silo=silo))
    _listen(made)
    for party in parties:
        party.write()
        write_policy(party)
    admin_kit = kit(path=made.admin, role=Role.ADMIN, site=COORDINATOR, silo="")
    admin_kit.write()
    for party in (*parties, admin_kit):
        _certify(signs, party.site, party.certificate, days)
    _certify(signs, DISPATCHER, made.server / "fedtmle" / "dispatcher.crt", days)
    signs.forget_keys()
    shutil.rmtree(kits)
    for private in (authority, made.admin, *(party.path for party in parties)):
        private.chmod(0o700)
    made.write()
    for name in statisticians:
        made = add_statistician(made, name, days=days)
    return made


def add_silo(deployment: Deployment, silo: str, *, days: int = 360) -> Deployment:
    """Make the kit of one more silo, under the same authority; nobody else has to do anything."""
    if silo in deployment.sites:
        raise InputError(f"--silo: the deployment has a silo '{silo}' already")
    named = sites([*deployment.sites, silo])
    if named[silo] in revoked(deployment.server):
        raise InputError(f"--silo: '{silo}' was removed from this deployment; choose another name")
    made = replace(deployment, sites=named)
    path = made.kit(silo)
    _add_kit(made, Kit(path=path, role=Role.SILO, site=named[silo], silo=silo, **_server_of(made)), days)
    return made


def add_statistician(deployment: Deployment, name: str, *, days: int = 360) -> Deployment:
    """Make the kit of a statistician, who posts studies from another machine; no silo has to do anything."""
    _check_name(name)
    if name in deployment.statisticians:
        raise InputError(f"--statistician: the deployment has a statistician '{name}' already")
    site = statistician_site(name)
    if site in revoked(deployment.server):
        raise InputError(f"--statistician: '{name}' was removed from this deployment; choose another name")
    made = replace(deployment, statisticians=[*deployment.statisticians, name])
    path = made.statistician(name)
    _add_kit(made, Kit(path=path, role=Role.ADMIN, site=site, silo="", **_server_of(made)), days)
    return made


def statistician_site(name: str) -> str:
    """Return a statistician's name on the network; the engine wants the form of an address."""
    return f"{name}@fedtmle.org"


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name) or name in _RESERVED:
        raise InputError(
            f"--statistician: expected up to 31 lower case letters, digits and -, other than "
            f"{' and '.join(_RESERVED)}; got '{name}'"
        )


class _Address(TypedDict):
    project: str
    host: str
    port: int


def _server_of(made: Deployment) -> _Address:
    """Return the fields of a kit that say where its server is."""
    return {"project": made.project, "host": made.host, "port": made.port}


def _add_kit(made: Deployment, kit: Kit, days: int) -> None:
    """Make one more kit under the deployment's authority."""
    authority = authority_of(made)
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch) / made.project / "state"
        state.mkdir(parents=True)
        (state / "cert.json").write_text(authority.state_text(), encoding="utf-8")
        kits = _provision(Path(scratch), _project(made, authority.days))
        kit.path.parent.mkdir(exist_ok=True)
        shutil.move(kits / kit.site, kit.path)
    kit.write()
    if kit.role is Role.SILO:
        write_policy(kit)
    _certify(authority, kit.site, kit.certificate, days)
    kit.path.chmod(0o700)
    made.write()


def remove_silo(deployment: Deployment, silo: str) -> Deployment:
    """Take a silo out of the deployment: the server refuses it from the next second on."""
    if silo not in deployment.sites:
        raise InputError(f"--silo: the deployment has no silo '{silo}'")
    _revoke(deployment, deployment.sites[silo])
    made = replace(deployment, sites={s: n for s, n in deployment.sites.items() if s != silo})
    made.write()
    return made


def remove_statistician(deployment: Deployment, name: str) -> Deployment:
    """Take a statistician out of the deployment: the server refuses their kit from the next second on."""
    if name not in deployment.statisticians:
        raise InputError(f"--statistician: the deployment has no statistician '{name}'")
    _revoke(deployment, statistician_site(name))
    made = replace(deployment, statisticians=[other for other in deployment.statisticians if other != name])
    made.write()
    return made


def _revoke(deployment: Deployment, site: str) -> None:
    gone = sorted({*revoked(deployment.server), site})
    write_document(deployment.server / "fedtmle" / "revoked.json", {"sites": gone})


def renew_server(deployment: Deployment, *, days: int) -> None:
    """Sign the certificates of the server and the coordinator again, for the keys that they have."""
    authority = authority_of(deployment)
    _certify(authority, "server", deployment.server / "startup" / "server.crt", days)
    _certify(authority, COORDINATOR, deployment.admin / "startup" / "client.crt", days)
    _certify(authority, DISPATCHER, deployment.server / "fedtmle" / "dispatcher.crt", days)


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
    roles = dict.fromkeys((COORDINATOR, DISPATCHER), ADMIN_ROLE)
    roles |= {statistician_site(name): NO_RIGHTS for name in made.statisticians}
    admins = [
        {"name": name, "type": "admin", "org": "coordinator", "role": role} for name, role in roles.items()
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
