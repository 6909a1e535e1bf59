"""Whether a party is well: the checks of `fedtmle deploy doctor`, and its health as numbers.

The doctor checks everything that a party needs, and says how to fix what is wrong. The numbers are for a
monitoring system.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import psutil

from fedtmle.data import check_readable, read_silo_file
from fedtmle.deploy.kits import AUTHORIZATION, CLASSES, COMMUNICATION, POSTS, Kit, Role
from fedtmle.deploy.launch import presence
from fedtmle.deploy.processes import descendants, running, wait_until
from fedtmle.engine.post import approvals_of, last_contact, located_by, silo_folder, studies_folder
from fedtmle.engine.runs import RunFolder, RunState
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.runtime.ledger import read, verify, walk
from fedtmle_core.home import Home
from fedtmle_core.journal import read_document, scan, write_document

# The way from a party's machine to the server: direct, or through the institution's outbound proxy.
#
# The engine's gRPC reads the address of a proxy from the environment, and asks it for a tunnel (HTTP
# CONNECT). The connection inside the tunnel is the same, with certificates of the consortium on both sides.

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # as gRPC reads them; the first that is set counts
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
LONGEST_REPLY = 8192  # bytes before the end of a proxy's reply


class ProxyError(OSError):
    """The proxy cannot be used; the message says why."""


def proxy_for(host: str) -> tuple[str, int] | None:
    """Return the host and port of the proxy through which the engine reaches ``host``; None if directly."""
    named = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    exceptions = next((os.environ[name] for name in EXCEPTIONS if os.environ.get(name)), "")
    if not named or proxy_bypass(host, {"no": exceptions}):
        return None
    try:
        address = urlsplit(named)
        return (address.hostname, address.port or 80) if address.hostname else None
    except ValueError:
        return None


def connected(host: str, port: int, *, timeout: float) -> socket.socket:
    """Return a connection to the server, through the proxy if there is one; raise `OSError` if none."""
    proxy = proxy_for(host)
    if proxy is None:
        return socket.create_connection((host, port), timeout=timeout)
    where = f"the proxy {proxy[0]}:{proxy[1]}"
    try:
        link = socket.create_connection(proxy, timeout=timeout)
    except OSError:
        raise ProxyError(f"{where} does not answer") from None
    try:
        link.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode("ascii"))
        reply = b""
        while b"\r\n\r\n" not in reply and len(reply) < LONGEST_REPLY:
            more = link.recv(1)  # not a byte of what follows the reply
            if not more:
                break
            reply += more
    except OSError:
        link.close()
        raise ProxyError(f"{where} does not answer") from None
    words = reply.split(None, 2)
    if len(words) < 2 or words[1] != b"200":
        link.close()
        code = words[1].decode("ascii", "replace") if len(words) > 1 else "nothing"
        raise ProxyError(f"{where} opens no tunnel to {host}:{port} (it says {code})")
    return link


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
        checks += [_clock, _silo_data, _home, _ledger]
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


def _home(kit: Kit) -> Iterator[Finding]:
    """Open the institution's home. It is never made here: a new key would not fit the old records."""
    try:
        located = located_by(kit.home)
    except (OSError, ValueError, KeyError, TypeError):
        return  # reported with the silo file
    try:
        home = Home.open(located.home)
        with home.held() as opened:
            studies = len(opened.memory.studies)
        yield _finding("home", f"{located.home}, which remembers the people of {studies} studies")
    except (FedTMLEError, OSError) as error:
        path = read_document(kit.home / "silo.json")["silo_file"]
        once = f"fedtmle silo home --silo {path} --create"
        fix = f"restore it from your backup; only if your institution never had one: {once}"
        yield _finding("home", str(error), fix)


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


# A party's health as numbers, for a monitoring system: from its own files and processes, nothing of records.
#
# `samples` reads them. A supervisor serves them on a loopback port as Prometheus reads them (`/metrics`), and
# whether the party is well (`/health`: 200 or 503). Studies and plans are not named.

ENGINE = "nvflare.private.fed.app."  # the module that `processes.engine_command` starts
HELP = {
    "up": "Whether the party's engine runs.",
    "build_info": "The installed version.",
    "start_time_seconds": "When the party was started, seconds since 1970.",
    "certificate_expiry_seconds": "When a certificate ends, seconds since 1970.",
    "disk_free_bytes": "Free space where the party writes its records.",
    "connected": "Whether the silo has heard the server within 30 s.",
    "connected_silos": "How many silos the server hears.",
    "runs": "Runs at the server, by state.",
    "rounds_total": "Rounds of all runs at the server.",
    "bits_total": "Bits of all runs at the server.",
    "studies": "Studies that came to the silo, by its owner's decision.",
    "requests_total": "Requests in the silo's ledger, by decision.",
    "answered_bits_total": "Bits of all answers that left the silo.",
    "record_bytes": "Size of the party's records, by kind.",
    "ledger_intact": "Whether the ledger is unbroken.",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One number of a party."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in self.labels.items())
        value = f"{self.value:.0f}" if self.value == int(self.value) else repr(self.value)
        return f"fedtmle_{self.name}{{{labels}}} {value}" if labels else f"fedtmle_{self.name} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def samples(kit: Kit) -> list[Sample]:
    """Return the numbers of a server or a silo."""
    reading = _server_samples(kit) if kit.role is Role.SERVER else _silo(kit)
    return [*_common(kit), *reading]


def is_well(read: Iterable[Sample]) -> bool:
    """Return whether a party's engine runs; a silo is well even if its server does not answer."""
    return any(sample.name == "up" and sample.value == 1 for sample in read)


def exposition(read: Iterable[Sample]) -> str:
    """Return samples as text that Prometheus reads."""
    lines: list[str] = []
    by_name: dict[str, list[Sample]] = {}
    for sample in read:
        by_name.setdefault(sample.name, []).append(sample)
    for name, group in by_name.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP fedtmle_{name} {HELP[name]}", f"# TYPE fedtmle_{name} {kind}", *map(str, group)]
    return "\n".join(lines) + "\n"


def _common(kit: Kit) -> Iterator[Sample]:
    supervisor = running(kit)
    alive = supervisor is not None and any(map(_is_engine, descendants(supervisor)))
    if kit.role is Role.SERVER:
        seen = presence(kit.path)
        alive = alive and seen is not None and seen.alive
    yield Sample(name="up", value=float(alive), labels={"role": str(kit.role), "party": kit.site})
    yield Sample(name="build_info", value=1.0, labels={"version": version("fedtmle")})
    if supervisor is not None:
        yield Sample(name="start_time_seconds", value=round(supervisor.create_time()))
    for whose, path in (("party", kit.certificate), ("authority", kit.authority)):
        with suppress(OSError, ValueError):
            stat = path.stat()
            end = _expiry(path, stat.st_mtime_ns)
            yield Sample(name="certificate_expiry_seconds", value=end, labels={"of": whose})


def _is_engine(process: psutil.Process) -> bool:
    try:
        return any(ENGINE in word for word in process.cmdline())
    except psutil.Error:
        return False


@lru_cache(maxsize=16)
def _expiry(path: Path, _written: int) -> float:
    from cryptography import x509

    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()


def _server_samples(kit: Kit) -> Iterator[Sample]:
    seen = presence(kit.path)
    yield Sample(name="connected_silos", value=0 if seen is None else len(seen.sites))
    states, rounds, bits, journals = Counter[RunState](), 0, 0, 0
    for run in RunFolder.every(kit.path / "runs"):
        with suppress(InputError, OSError):
            status = run.look()
            states[status.state] += 1
            rounds, bits = rounds + status.round, bits + status.bits
        journals += _size(run.journal)
    for state in RunState:
        yield Sample(name="runs", value=states[state], labels={"state": str(state)})
    yield Sample(name="rounds_total", value=rounds)
    yield Sample(name="bits_total", value=bits)
    yield Sample(name="record_bytes", value=journals, labels={"kind": "journals"})
    yield _free(kit.path)


def _silo(kit: Kit) -> Iterator[Sample]:
    contact = last_contact(kit.home)
    is_heard = bool(contact) and time.time() - float(contact["heard"]) < LONGEST_SILENCE
    yield Sample(name="connected", value=float(is_heard))
    try:
        folder = silo_folder(kit.home)
    except (OSError, ValueError, KeyError, TypeError):
        return
    with suppress(FedTMLEError, OSError):
        decisions = approvals_of(kit.home).current()
        words = {None: "waiting", True: "approved", False: "rejected"}
        plans = [path.stem for path in studies_folder(folder).glob("[0-9a-f]*.toml")]
        decided = [words[None if plan not in decisions else decisions[plan].approved] for plan in plans]
        for word in words.values():
            yield Sample(name="studies", value=decided.count(word), labels={"decision": word})
    path = folder / "ledger.jsonl"
    counts, bits, intact = _ledger_counts(path, _size(path))
    for decision in ("answered", "refused", "repeated"):
        yield Sample(name="requests_total", value=counts[decision], labels={"decision": decision})
    yield Sample(name="answered_bits_total", value=bits)
    yield Sample(name="ledger_intact", value=float(intact))
    sizes = {"ledger": _size(path), "journals": sum(map(_size, folder.glob("*.journal")))}
    for kind, size in sizes.items():
        yield Sample(name="record_bytes", value=size, labels={"kind": kind})
    yield _free(folder)


@lru_cache(maxsize=2)
def _ledger_counts(path: Path, _bytes: int) -> tuple[Counter[str], int, bool]:
    """Return the decisions, the bits that left, and whether the ledger is unbroken; read again if it grew."""
    counts, bits = Counter[str](), 0
    try:
        for line, answer in walk(read(path) if path.exists() else ()):
            counts[line["decision"]] += 1
            bits += 0 if answer is None else answer.bits
    except (FedTMLEError, OSError):
        return counts, bits, False
    return counts, bits, True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _free(folder: Path) -> Sample:
    disk = os.statvfs(folder)
    return Sample(name="disk_free_bytes", value=disk.f_bavail * disk.f_frsize)


def set_port(kit: Kit, port: int) -> None:
    """Write into the kit on which port its supervisor serves the numbers; 0 turns that off."""
    write_document(kit.home / "health.json", {"port": port})


def serve(kit: Kit) -> ThreadingHTTPServer | None:
    """Serve a kit's numbers on the loopback port that the kit names, in a thread; None if it names none.

    Raise `OSError` if the port is taken.
    """
    try:
        port = int(read_document(kit.home / "health.json")["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if port == 0:
        return None
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(kit))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="fedtmle-health", daemon=True).start()
    return server


def _handler(kit: Kit) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            read = samples(kit)
            if self.path == "/metrics":
                self._send(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", exposition(read))
            elif self.path == "/health":
                well = is_well(read)
                status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
                self._send(status, "application/json", json.dumps({"well": well}))
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "there are /metrics and /health\n")

        def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write nothing for a request: the log belongs to the engine."""

    return Handler
