"""`fedtmle deploy init`: start-up kits for a server and named silos, and the authority that certifies
them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypedDict

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from fedtmle.deploy.kits import ADMIN_ROLE, Deployment, Kit, Role, write_policy
from fedtmle.engine.office import COORDINATOR
from fedtmle.engine.runs import revoked, sites
from fedtmle.errors import InputError
from fedtmle_core.journal import Document, read_document, write_document

# The consortium's certificate authority: it signs certificates, and keeps no private key but its own.
#
# A silo or a statistician makes their own key and sends a request (`fedtmle deploy renew`); the coordinator
# signs it (`fedtmle deploy sign`). A certificate may be renewed at any time, and no other party has to
# do anything.

KEY_BITS = 2048
ROOT_DAYS = 3650  # the authority outlives the certificates that it signs
BACKDATED = timedelta(minutes=10)  # a certificate begins so long before it is made: clocks differ


@dataclass(frozen=True)
class Authority:
    """The authority in a deployment's folder."""

    path: Path  # authority/

    @property
    def _state(self) -> Path:
        (state,) = self.path.glob("*/state/cert.json")
        return state

    def create(self, name: str, days: int) -> None:
        """Make the authority's key and certificate, valid for ``days`` days, where FLARE looks for them.

        FLARE's own would begin at this second, so that a machine whose clock is behind could not use it.
        """
        from nvflare.lighter import utils

        key, public = utils.generate_keys()
        identity = utils.Identity(name)
        begin = datetime.now(UTC) - BACKDATED
        root = utils.generate_cert(
            identity, identity, key, public, valid_days=days, ca=True, not_valid_before=begin
        )
        state = self.path / name / "state" / "cert.json"
        state.parent.mkdir(parents=True, mode=0o700)
        document = {"root_cert": utils.serialize_cert(root), "root_pri_key": utils.serialize_pri_key(key)}
        write_document(state, {name: pem.decode() for name, pem in document.items()})
        state.chmod(0o600)

    @property
    def days(self) -> int:
        """For how many days the authority's certificate is valid in all."""
        root = self._root()
        return (root.not_valid_after_utc - root.not_valid_before_utc).days

    def _root(self) -> x509.Certificate:
        state = json.loads(self._state.read_text(encoding="utf-8"))
        return x509.load_pem_x509_certificate(state["root_cert"].encode())

    def forget_keys(self) -> None:
        """Delete every private key but the authority's own from FLARE's records."""
        kept = ("root_cert", "root_pri_key")
        state = json.loads(self._state.read_text(encoding="utf-8"))
        write_document(self._state, {key: state[key] for key in kept})
        self._state.chmod(0o600)

    def state_text(self) -> str:
        """Return FLARE's record of the authority, for kits of new silos."""
        return self._state.read_text(encoding="utf-8")

    def certificate_path(self, site: str) -> Path:
        """Return where the last certificate of a party is kept."""
        return self.path / "certificates" / f"{site}.pem"

    def reissue(self, site: str, certificate: x509.Certificate, public_key: object, days: int) -> bytes:
        """Return a new certificate, in PEM, with the subject and rights of ``certificate`` for a key."""
        state, root = json.loads(self._state.read_text(encoding="utf-8")), self._root()
        key = serialization.load_pem_private_key(state["root_pri_key"].encode(), password=None)
        if not isinstance(key, rsa.RSAPrivateKey) or not isinstance(public_key, rsa.RSAPublicKey):
            raise InputError("the key of a certificate must be an RSA key")
        now = datetime.now(UTC)
        end = min(now + timedelta(days=days), root.not_valid_after_utc)
        builder = x509.CertificateBuilder(
            issuer_name=root.subject,
            subject_name=certificate.subject,
            public_key=public_key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - BACKDATED,
            not_valid_after=end,
        )
        for extension in certificate.extensions:
            value = extension.value
            if isinstance(value, x509.SubjectKeyIdentifier):
                value = x509.SubjectKeyIdentifier.from_public_key(public_key)
            builder = builder.add_extension(value, extension.critical)
        pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        path = self.certificate_path(site)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pem)
        return pem


def authority_of(deployment: Deployment) -> Authority:
    """Return the authority of a deployment; raise if its folder is elsewhere."""
    authority = Authority(deployment.path / "authority")
    if not list(authority.path.glob("*/state/cert.json")):
        raise InputError(
            f"{authority.path}: the authority's folder is not here; bring it back to sign or add"
        )
    return authority


def request(kit: Kit) -> bytes:
    """Make a new private key in the kit, which stays there, and return a request to certify it, in PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = _new_key(kit)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(key.private_bytes(*private))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, kit.site)])
    asked = x509.CertificateSigningRequestBuilder(subject_name=name).sign(key, hashes.SHA256())
    return asked.public_bytes(serialization.Encoding.PEM)


def sign(deployment: Deployment, data: bytes, *, days: int) -> tuple[str, bytes]:
    """Return the silo or statistician that sent a request, and the new certificate in PEM."""
    try:
        asked = x509.load_pem_x509_csr(data)
        (name,) = asked.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        site = str(name.value)
        is_signed = asked.is_signature_valid
    except ValueError:
        raise InputError("this is not a request that `fedtmle deploy renew` made") from None
    if not is_signed:
        raise InputError("the request is not signed with the key that it asks a certificate for")
    silos = {network: silo for silo, network in deployment.sites.items()}
    silos |= {f"{name}@fedtmle.org": name for name in deployment.statisticians}
    if site not in silos:
        raise InputError(f"the deployment has no silo '{site}'; it has {', '.join(map(repr, silos))}")
    authority = authority_of(deployment)
    last = x509.load_pem_x509_certificate(authority.certificate_path(site).read_bytes())
    return silos[site], authority.reissue(site, last, asked.public_key(), days)


def install(kit: Kit, data: bytes) -> datetime:
    """Put a new certificate and its key in place of the kit's; return when the certificate ends."""
    path = _new_key(kit)
    try:
        certificate = x509.load_pem_x509_certificate(data)
        root = x509.load_pem_x509_certificate(kit.authority.read_bytes())
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError as error:
        raise InputError(f"{error.filename}: missing; make a request first, with --out") from None
    except ValueError:
        raise InputError("this is not a certificate in PEM, as `fedtmle deploy sign` writes it") from None
    try:
        certificate.verify_directly_issued_by(root)
    except (InvalidSignature, TypeError, ValueError):
        raise InputError("another authority signed this certificate; is it of another consortium?") from None
    if certificate.public_key() != key.public_key():
        raise InputError("the certificate is not for the last request of this kit; have that one signed")
    kit.certificate.write_bytes(data)
    path.replace(kit.key)
    return certificate.not_valid_after_utc


def _new_key(kit: Kit) -> Path:
    return kit.home / "renewal.key"


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
