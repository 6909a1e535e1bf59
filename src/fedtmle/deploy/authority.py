"""The consortium's certificate authority: it signs certificates, and keeps no private key but its own.

A silo or a statistician makes their own key and sends a request (`fedtmle deploy renew`); the coordinator
signs it (`fedtmle deploy sign`). A certificate may be renewed at any time, and no other party has to
do anything.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from fedtmle.deploy.kits import Deployment, Kit
from fedtmle.errors import InputError
from fedtmle.runtime.documents import write_document

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
