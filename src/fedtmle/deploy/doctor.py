"""`fedtmle deploy doctor`: everything a party needs, what is wrong, and how to mend it."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from fedtmle.data import check_readable, read_silo_file
from fedtmle.deploy.kits import Kit, Role
from fedtmle.deploy.parties import listens
from fedtmle.deploy.policy import AUTHORIZATION, CLASSES
from fedtmle.errors import FedTMLEError

ENGINE = (2, 9)
SOON = 30  # days before a certificate's end at which to mention it
SKEW = 60.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    fine: bool
    found: str
    mend: str = ""

    def __str__(self) -> str:
        line = f"{'ok ' if self.fine else 'NO '} {self.what}: {self.found}"
        return line if not self.mend else f"{line}\n     {self.mend}"


def examine(kit: Kit) -> list[Finding]:
    """All findings, in the order in which to mend them."""
    checks: list[Callable[[Kit], Iterator[Finding]]] = [_versions, _keys, _certificates, _policy]
    checks += [_clock, _silo_data, _disk, _server] if kit.role is Role.SILO else [_disk, _server]
    return [finding for check in checks for finding in check(kit)]


def _versions(_: Kit) -> Iterator[Finding]:
    version = metadata.version("nvflare")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    yield Finding(
        what="versions",
        fine=numbers == ENGINE,
        found=f"fedtmle {metadata.version('fedtmle')}, nvflare {version}",
        mend="" if numbers == ENGINE else "pip install 'fedtmle[flare]' brings the version that was tested",
    )


def _keys(kit: Kit) -> Iterator[Finding]:
    if not kit.key.is_file():
        yield Finding(
            what="private key", fine=False, found="missing", mend="ask the coordinator for a new kit"
        )
        return
    open_to = kit.key.stat().st_mode & 0o077 and kit.path.stat().st_mode & 0o077
    yield Finding(
        what="private key",
        fine=not open_to,
        found="readable by others" if open_to else "private",
        mend=f"chmod 700 {kit.path}" if open_to else "",
    )


def _certificates(kit: Kit) -> Iterator[Finding]:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        own = x509.load_pem_x509_certificate(kit.certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(kit.authority.read_bytes())
    except (OSError, ValueError):
        yield Finding(
            what="certificate",
            fine=False,
            found="missing or damaged",
            mend="ask the coordinator for a new kit",
        )
        return
    try:
        own.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, ValueError):
        yield Finding(
            what="certificate",
            fine=False,
            found="not signed by the kit's authority",
            mend="the kit is mixed up: ask the coordinator for a new one",
        )
        return
    now = datetime.now(UTC)
    for what, one in (("certificate", own), ("authority's certificate", authority)):
        days = (one.not_valid_after_utc - now).days
        early, late = one.not_valid_before_utc > now, days < 0
        found = f"valid until {one.not_valid_after_utc:%Y-%m-%d}"
        mend = ""
        if early:
            found, mend = (
                f"valid from {one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC",
                "set this machine's clock",
            )
        elif late:
            found, mend = (
                f"expired on {one.not_valid_after_utc:%Y-%m-%d}",
                "ask the coordinator for a new kit",
            )
        elif days < SOON:
            mend = f"{days} days left: ask the coordinator for a new kit soon"
        yield Finding(what=what, fine=not (early or late), found=found, mend=mend)


def _policy(kit: Kit) -> Iterator[Finding]:
    """The engine's own permissions, as `fedtmle deploy init` wrote them."""
    if kit.role is Role.ADMIN:
        return
    try:
        resources = json.loads((kit.path / "local" / "resources.json").read_text(encoding="utf-8"))
        rights = json.loads((kit.path / "local" / "authorization.json").read_text(encoding="utf-8"))
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
    if rights != AUTHORIZATION:
        wrong.append("rights were changed")
    yield Finding(
        what="engine's policy",
        fine=not wrong,
        found="; ".join(wrong) or "no code from outside, no logs, no shell",
        mend=f"put the kit's own {kit.path / 'local'} back" if wrong else "",
    )


def _silo_data(kit: Kit) -> Iterator[Finding]:
    try:
        path = Path(json.loads((kit.home / "silo.json").read_text(encoding="utf-8"))["silo_file"])
    except (OSError, ValueError, KeyError, TypeError):
        mend = f"fedtmle silo start {kit.path} --silo-file silo.toml"
        yield Finding(what="silo file", fine=False, found="not told yet", mend=mend)
        return
    try:
        silo = read_silo_file(path)
        if silo.name != kit.silo:
            mend = f'write name = "{kit.silo}" in [silo], or use that silo\'s kit'
            yield Finding(what="silo file", fine=False, found=f"it is of silo '{silo.name}'", mend=mend)
            return
        yield Finding(what="silo file", fine=True, found=str(path))
        check_readable(silo)
        yield Finding(what="data source", fine=True, found="can be read")
    except FedTMLEError as error:
        yield Finding(what="data source", fine=False, found=str(error), mend="mend what it says")


def _disk(kit: Kit) -> Iterator[Finding]:
    free = os.statvfs(kit.path).f_bavail * os.statvfs(kit.path).f_frsize
    enough = free > 100 << 20
    yield Finding(
        what="disk",
        fine=enough and os.access(kit.path, os.W_OK),
        found=f"{free / 2**30:.1f} GiB free" if os.access(kit.path, os.W_OK) else "cannot be written",
        mend="" if enough else "a silo that cannot write its journal answers nothing: make room",
    )


def _clock(kit: Kit) -> Iterator[Finding]:
    """Against the server's, as it was told when a run last began."""
    try:
        ahead = float(json.loads((kit.home / "clock.json").read_text(encoding="utf-8"))["ahead"])
    except (OSError, ValueError, KeyError, TypeError):
        yield Finding(
            what="clock",
            fine=True,
            found=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC; no run to compare with",
        )
        return
    way = "ahead of" if ahead > 0 else "behind"
    yield Finding(
        what="clock",
        fine=abs(ahead) < SKEW,
        found=f"{abs(ahead):.0f} s {way} the server's when a run last began",
        mend="" if abs(ahead) < SKEW else "set this machine's clock (NTP), or ask the coordinator to",
    )


def _server(kit: Kit) -> Iterator[Finding]:
    """Reaches the server as the engine would: over the network, with certificates on both sides."""
    where = f"{kit.host}:{kit.port}"
    try:
        socket.getaddrinfo(kit.host, kit.port)
    except OSError:
        mend = "check the name with the coordinator, or this machine's DNS"
        yield Finding(what="server", fine=False, found=f"the name {kit.host} is not known", mend=mend)
        return
    if not listens(kit.host, kit.port):
        mend = f"the server may be down; or let this machine open connections to TCP port {kit.port} there"
        if kit.role is Role.SERVER:
            mend = f"fedtmle server start {kit.path}"
        yield Finding(what="server", fine=False, found=f"{where} does not answer", mend=mend)
        return
    try:
        context = ssl.create_default_context(cafile=str(kit.authority))
        context.check_hostname = False  # FLARE identifies the server by its certificate's authority and name
        context.load_cert_chain(kit.certificate, kit.key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((kit.host, kit.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=kit.host),
        ):
            pass
        yield Finding(what="server", fine=True, found=f"{where} answers, and proves who it is")
    except (OSError, ValueError) as error:
        expired = "expired" in str(error) or "not yet valid" in str(error)
        mend = "set this machine's clock" if expired else "something stands between: ask the coordinator"
        yield Finding(what="server", fine=False, found=f"{where} answers, but not as our server", mend=mend)
