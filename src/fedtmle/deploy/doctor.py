"""`fedtmle deploy doctor`: check everything that a party needs, and say how to fix what is wrong."""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from fedtmle.data import check_readable, read_silo_file
from fedtmle.deploy.kits import Kit, Role
from fedtmle.deploy.policy import AUTHORIZATION, CLASSES, COMMUNICATION, POSTS
from fedtmle.deploy.presence import presence
from fedtmle.deploy.processes import running, wait_until
from fedtmle.deploy.tunnel import ProxyError, connected, proxy_for
from fedtmle.engine.post import approvals_of, last_contact, silo_folder
from fedtmle.errors import FedTMLEError
from fedtmle.runtime.documents import read_document
from fedtmle.runtime.journal import scan
from fedtmle.runtime.ledger import verify

TESTED_ENGINE = (2, 9)
EXPIRY_NOTICE = 30  # days before the end of a certificate
MAX_SKEW = 60.0  # seconds between this clock and the server's
MIN_FREE = 100 << 20  # bytes
LONGEST_SILENCE = 30.0  # seconds
CONNECTING = 30.0  # seconds after its start in which a silo may still be connecting
SLOW_NAME = 3.0  # seconds to find the server's address
REPAIR = "restore the file from your backup"
NEW_KIT = "ask the coordinator for a new kit"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check: whether ``item`` is in order, and how to fix it if it is not."""

    item: str
    ok: bool
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{'ok ' if self.ok else 'NO '} {self.item}: {self.detail}"
        return f"{line}\n     {self.fix}" if self.fix else line


def examine(kit: Kit) -> list[Finding]:
    """Return all findings, in the order in which to fix them."""
    checks: list[Callable[[Kit], Iterable[Finding]]] = [_versions, _key, _certificates, _policy]
    if kit.role is Role.SILO:
        _await_contact(kit)
        checks += [_clock, _silo_data, _ledger]
    if kit.role is not Role.ADMIN:
        checks += [_engine]
    checks += [_disk, _server]
    return [finding for check in checks for finding in check(kit)]


def _await_contact(kit: Kit) -> None:
    """Give a silo that was started just now the time to hear its server."""
    supervisor = running(kit)
    if supervisor is not None:
        started = supervisor.create_time()
        wait_until(
            lambda: last_contact(kit.home).get("heard", 0.0) > started, CONNECTING - (time.time() - started)
        )


def _finding(item: str, detail: str, fix: str = "") -> Finding:
    """Return a finding that is in order if there is nothing to fix."""
    return Finding(item=item, ok=not fix, detail=detail, fix=fix)


def _versions(_: Kit) -> Iterator[Finding]:
    version = metadata.version("nvflare")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    fix = (
        ""
        if numbers == TESTED_ENGINE
        else "pip install 'fedtmle[flare]' installs the version that was tested"
    )
    yield _finding("versions", f"fedtmle {metadata.version('fedtmle')}, nvflare {version}", fix)


def _key(kit: Kit) -> Iterator[Finding]:
    if not kit.key.is_file():
        yield _finding("private key", "missing", NEW_KIT)
    elif kit.key.stat().st_mode & 0o077 and kit.path.stat().st_mode & 0o077:
        yield _finding("private key", "readable by others", f"chmod 700 {kit.path}")
    else:
        yield _finding("private key", "private")


def _certificates(kit: Kit) -> Iterator[Finding]:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        certificate = x509.load_pem_x509_certificate(kit.certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(kit.authority.read_bytes())
    except (OSError, ValueError):
        yield _finding("certificate", "missing or damaged", NEW_KIT)
        return
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, ValueError):
        yield _finding(
            "certificate", "not signed by the kit's authority", f"two kits are mixed up: {NEW_KIT}"
        )
        return
    now = datetime.now(UTC)
    for item, one in (("certificate", certificate), ("authority's certificate", authority)):
        end, days = one.not_valid_after_utc, (one.not_valid_after_utc - now).days
        renew = f"fedtmle deploy renew {kit.path} --out request.pem"
        if kit.role is Role.SERVER:
            renew = "fedtmle deploy renew, with the folder of the deployment, and restart the server"
        here = f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
        if one.not_valid_before_utc > now:
            begin = f"valid from {one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; {here}"
            yield _finding(item, begin, "set this machine's clock")
        elif days < 0:
            fix = f"set the clock if it is wrong; else {renew if one is certificate else NEW_KIT}"
            yield _finding(item, f"expired on {end:%Y-%m-%d}; {here}", fix)
        else:
            notice = f"{days} days left: {renew}" if days < EXPIRY_NOTICE else ""
            yield Finding(item=item, ok=True, detail=f"valid until {end:%Y-%m-%d}", fix=notice)


def _policy(kit: Kit) -> Iterator[Finding]:
    """Compare the engine's permissions with those that `fedtmle deploy init` wrote."""
    if kit.role is Role.ADMIN:
        return
    local = kit.path / "local"
    try:
        resources, rights = (read_document(local / f"{name}.json") for name in ("resources", "authorization"))
    except (OSError, ValueError):
        resources, rights = {}, {}
    wrong = []
    if resources.get("class_allow_list") != CLASSES[kit.role]:
        wrong.append("other classes may be built")
    if resources.get("class_list_enforcement_mode") != "enforce":
        wrong.append("the list of classes is not enforced")
    if kit.role is Role.SILO and resources.get("allow_log_streaming") is not False:
        wrong.append("logs may be streamed")
    if any("log" in str(part.get("id")) for part in resources.get("components", [])):
        wrong.append("a component sends logs")
    if not any(part.get("path") == POSTS[kit.role] for part in resources.get("components", [])):
        wrong.append("the post is missing")
    try:
        connections = read_document(local / "comm_config.json")
    except (OSError, ValueError):
        connections = {}
    if connections.get("internal") != COMMUNICATION["internal"]:
        wrong.append("connections to its own jobs may be open to others")
    if rights != AUTHORIZATION:
        wrong.append("rights were changed")
    detail = "; ".join(wrong) or "no code from outside, no logs, no shell"
    yield _finding(
        "engine's policy", detail, f"restore {local} from the kit as you received it" if wrong else ""
    )


def _silo_data(kit: Kit) -> Iterator[Finding]:
    try:
        path = Path(read_document(kit.home / "silo.json")["silo_file"])
    except (OSError, ValueError, KeyError, TypeError):
        yield _finding("silo file", "not given yet", f"fedtmle silo start {kit.path} --silo-file silo.toml")
        return
    try:
        silo = read_silo_file(path)
        if silo.name != kit.silo:
            fix = f"write name = \"{kit.silo}\" in [silo], or use the kit of '{silo.name}'"
            yield _finding("silo file", f"it is that of silo '{silo.name}'", fix)
            return
        yield _finding("silo file", str(path))
        check_readable(silo)
        yield _finding("data source", "can be read")
    except FedTMLEError as error:
        yield _finding("data source", str(error), f"correct {path}, or the data that it names")


def _disk(kit: Kit) -> Iterator[Finding]:
    """Look at every disk that the party writes to; a silo's journals may be on another one than its kit."""
    folders = {"disk": kit.path}
    if kit.role is Role.SILO:
        with suppress(OSError, ValueError, KeyError, TypeError):
            folders["disk of journals and ledger"] = silo_folder(kit.home)
    for item, folder in folders.items():
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if not os.access(folder, os.W_OK):
            yield _finding(item, "cannot be written", f"make {folder} writable for this user")
        else:
            fix = "" if free > MIN_FREE else "make room: a silo that cannot write its journal answers nothing"
            yield _finding(item, f"{free / 2**30:.1f} GiB free at {folder}", fix)


def _ledger(kit: Kit) -> Iterator[Finding]:
    """Check the chain of the ledger, the owner's decisions and the journals."""
    try:
        folder = silo_folder(kit.home)
    except (OSError, ValueError, KeyError, TypeError):
        return  # reported with the silo file
    path = folder / "ledger.jsonl"
    try:
        lines, _ = verify(path, approvals_of(kit.home).key.public)
        yield _finding("ledger", f"{lines} lines, unbroken, as its signed head says")
    except (FedTMLEError, OSError) as error:
        yield _finding("ledger", str(error), f"{REPAIR}, and look for who changed it")
    try:
        decided = len(approvals_of(kit.home).decisions())
        yield _finding("approvals", f"{decided} decisions, signed with the silo's key")
    except (FedTMLEError, OSError) as error:
        yield _finding("approvals", str(error), f"{REPAIR}; no plan is approved until then")
    for journal in sorted(folder.glob("*.journal")):
        try:
            for _ in scan(journal.read_bytes(), journal):
                pass
        except (FedTMLEError, OSError) as error:
            yield _finding("journal", str(error), f"{REPAIR}; else that plan cannot go on: reject it")


def _engine(kit: Kit) -> Iterator[Finding]:
    """Say whether the engine runs, and since when it is connected."""
    supervisor = running(kit)
    if supervisor is None:
        yield _finding("engine", "not running", f"fedtmle {kit.role} start {kit.path}")
        return
    up = f"running since {_stamp(supervisor.create_time())}"
    if kit.role is Role.SERVER:
        seen = presence(kit.path)
        if seen is None or not seen.alive:
            yield _finding("engine", f"{up}, without a sign of life", f"look into {kit.home / 'engine.log'}")
            return
        others = {str(site["version"]) for site in seen.sites.values()} - {metadata.version("fedtmle")}
        fix = f"install the same version everywhere; silos have {', '.join(sorted(others))}" if others else ""
        yield _finding("engine", f"{up}; connected: {', '.join(sorted(seen.sites)) or 'no silo'}", fix)
        return
    contact = last_contact(kit.home)
    if not contact or time.time() - float(contact["heard"]) > LONGEST_SILENCE:
        when = f"since {_stamp(contact['heard'])}" if contact else "yet"
        fix = f"look at the finding about the server below, then into {kit.home / 'engine.log'}"
        yield _finding("engine", f"{up}; the server has not been heard {when}", fix)
        return
    theirs, ours = str(contact["version"]), metadata.version("fedtmle")
    fix = "" if theirs == ours else f"install the same version: the server has {theirs}, this is {ours}"
    yield _finding("engine", f"{up}, connected since {_stamp(contact['since'])}", fix)


def _stamp(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _clock(kit: Kit) -> Iterator[Finding]:
    """Compare this clock with the server's, as the silo learned it when it last heard the server."""
    ahead = last_contact(kit.home).get("ahead")
    if ahead is None:
        yield _finding("clock", f"{_stamp(time.time())}; not compared with the server's yet")
        return
    direction = "ahead of" if ahead > 0 else "behind"
    fix = (
        ""
        if abs(ahead) < MAX_SKEW
        else "set this machine's clock (NTP), or ask the coordinator to set theirs"
    )
    yield _finding("clock", f"{abs(ahead):.0f} s {direction} the server's when it was last heard", fix)


def _server(kit: Kit) -> Iterator[Finding]:
    """Reach the server as the engine would: over the network, with certificates on both sides."""
    address = f"{kit.host}:{kit.port}"
    proxy = proxy_for(kit.host)
    if proxy is None:
        began = time.monotonic()
        try:
            socket.getaddrinfo(kit.host, kit.port)
        except OSError:
            fix = "check the name with the coordinator, and this machine's DNS"
            yield _finding("server", f"the host name {kit.host} is unknown", fix)
            return
        took = time.monotonic() - began
        fix = f"a DNS server does not answer; mend it, or write {kit.host} into /etc/hosts"
        yield _finding(
            "name resolution", f"{kit.host} found in {took:.1f} s", fix if took > SLOW_NAME else ""
        )
    try:
        plain = connected(kit.host, kit.port, timeout=5)
    except ProxyError as error:
        fix = f"check https_proxy; the proxy must allow CONNECT to TCP port {kit.port} of {kit.host}"
        yield _finding("server", str(error), fix)
        return
    except OSError:
        fix = (
            f"the server may be down; or a firewall blocks connections from here to TCP port {kit.port} there"
        )
        if kit.role is Role.SERVER:
            fix = f"fedtmle server start {kit.path}"
        yield _finding("server", f"{address} does not answer", fix)
        return
    if proxy is not None:
        address = f"{address}, through the proxy {proxy[0]}:{proxy[1]},"
    try:
        with plain:
            context = ssl.create_default_context(cafile=str(kit.authority))
            context.check_hostname = False  # FLARE identifies the server by its authority and name
            context.load_cert_chain(kit.certificate, kit.key)
            context.set_alpn_protocols(["h2"])
            context.wrap_socket(plain, server_hostname=kit.host).close()
        yield _finding("server", f"{address} answers with a valid certificate")
    except ssl.SSLCertVerificationError as error:
        expired = error.verify_code in (9, 10)  # not yet valid, expired
        fix = "another machine or a proxy answers, or a kit is of another consortium: ask the coordinator"
        detail = "its certificate is of another authority"
        if expired:
            detail = f"its certificate is not valid at {_stamp(time.time())}, by this machine's clock"
            fix = "set the clock if it is wrong; else ask the coordinator to renew the server's certificate"
        yield _finding("server", f"{address} answers, but {detail}", fix)
    except (OSError, ValueError) as error:
        expired = "expired" in str(error) or "not yet valid" in str(error)
        fix = "another machine or a proxy answers in its place: ask the coordinator"
        yield _finding(
            "server",
            f"{address} answers, but not with our server's certificate",
            "set this machine's clock" if expired else fix,
        )
