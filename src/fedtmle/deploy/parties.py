"""A party on its own machine: start it, report its status and its studies, run it as a service."""

from __future__ import annotations

import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedtmle.data import read_silo_file
from fedtmle.data.silofile import CsvFile
from fedtmle.deploy.kits import Kit, Role, place_storage
from fedtmle.deploy.launch import STALE, presence
from fedtmle.deploy.processes import running, start
from fedtmle.engine.post import last_contact, located_by, silo_folder, studies_folder
from fedtmle.engine.runs import RunFolder, server_key
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.layout import wrapped
from fedtmle.location import VARIABLE
from fedtmle.runtime.signing import Decision
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import file_plan, read_study
from fedtmle_core.journal import read_document, write_document

# The studies that came to a silo: which plan each is, what its owner decided, and whether it has run.
#
# A study is known by the digest under which it came. An upgrade of fedtmle gives the same text another
# digest; the studies that came before keep theirs, and their decisions.

LARGEST_COMPARED = 20_000_000  # bytes of a file that is read to see whether it changed


@dataclass(frozen=True, kw_only=True)
class ReceivedStudy:
    """One study that came, and its owner's decision; ``begun``: whether the silo has answered any of it."""

    plan: str
    path: Path
    decision: Decision | None
    begun: bool


def came_to(home: Home) -> list[ReceivedStudy]:
    """Return the studies that came to a silo, the latest last."""
    decisions = home.approvals.current()
    paths = studies_folder(home.folder).glob("[0-9a-f]*.toml")
    return [
        ReceivedStudy(
            plan=path.stem,
            path=path,
            decision=decisions.get(path.stem),
            begun=(home.folder / f"{path.stem}.journal").exists(),
        )
        for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))
    ]


def words(study: ReceivedStudy, home: Home, open_plans: Sequence[str] | None) -> str:
    """Return where a study stands, its title, and what its owner can do, on several lines.

    ``open_plans`` are the plans that the server lists.
    """
    arguments = f"{shlex.quote(str(study.path))} --silo {shlex.quote(str(home.file.path))}"
    preview, approve = f"    fedtmle silo preview {arguments}", f"    fedtmle silo approve {arguments}"
    named = wrapped(described(study), first="    Study: ", indent=" " * 8)
    is_closed = open_plans is not None and study.plan not in open_plans
    if study.decision is not None:
        decided = f"{'approved' if study.decision.approved else 'rejected'} {study.decision.time}"
        if is_closed and study.decision.approved and not study.begun:
            return "\n".join([f"{decided}, then closed by the coordinator; nothing was asked", *named])
        if not _has_other_data(study, study.decision, home):
            return "\n".join([decided, *named])
        return "\n".join([f"{decided}, but the data changed since: approve it again", *named, approve])
    if is_closed:
        return "\n".join(["closed by the coordinator; nothing was decided", *named])
    return "\n".join(["waits for you:", *named, preview, approve])


def described(study: ReceivedStudy) -> str:
    """Return the title of a study that came, or its question."""
    try:
        content = read_study(study.path, samples=False).study
    except FedTMLEError:
        return "(a study of another version of fedtmle)"
    return content.title or content.target.question


def _has_other_data(study: ReceivedStudy, decision: Decision, home: Home) -> bool:
    """Return whether an approval without an answer yet is for other rows; large sources are not read."""
    data = home.file.data
    path = data.path if isinstance(data, CsvFile) else data
    if not decision.approved or not decision.data or not isinstance(path, Path):
        return False
    try:
        if path.stat().st_size > LARGEST_COMPARED or study.plan in home.earlier():
            return False
        plan = file_plan(read_study(study.path, samples=False))
        return plan.digest.hex() == study.plan and home.data_digest(plan).hex() != decision.data
    except (FedTMLEError, OSError):
        return False


@dataclass(frozen=True, kw_only=True)
class PartyStatus:
    """What `fedtmle server status` and `fedtmle silo status` print."""

    party: str
    running: bool
    connection: str = ""  # whether a server listens, or whether a silo hears its server
    records: dict[str, str] = field(default_factory=dict)  # runs at a server, studies at a silo
    key: str = ""  # public half of the key with which a server signs requests

    def __str__(self) -> str:
        lines = [f"{self.party}: {'running' if self.running else 'not running'}"]
        if self.running and self.connection:
            lines[0] += f", {self.connection}"
        if self.key:
            lines.append(f'  requests are signed for studies with server = "{self.key}" under [plan]')
        return "\n".join([*lines, *(f"  {name}: {status}" for name, status in self.records.items())])


def prepare_server(kit: Kit) -> None:
    """Let the server's jobs and snapshots stay in its own folder."""
    place_storage(kit)


def prepare_silo(kit: Kit, silo_file: Path | None) -> None:
    """Store the path of a silo's silo file in its kit, and nowhere else."""
    record = kit.home / "silo.json"
    if silo_file is None and not record.is_file():
        raise InputError("--silo-file: give the path of this silo's silo.toml; it is needed the first time")
    if silo_file is not None:
        named = read_silo_file(silo_file).name
        if named != kit.silo:
            raise InputError(f"{silo_file}: this is silo '{named}', but the kit is that of '{kit.silo}'")
        write_document(record, {"silo_file": str(silo_file.absolute())})


def start_server(kit: Kit) -> None:
    """Start the server in the background."""
    prepare_server(kit)
    start(kit)


def start_silo(kit: Kit, silo_file: Path | None) -> None:
    """Start a silo in the background."""
    prepare_silo(kit, silo_file)
    start(kit)


def status_of(kit: Kit) -> PartyStatus:
    """Return whether the party runs, and its runs (server) or studies (silo)."""
    alive = running(kit) is not None
    if kit.role is Role.SERVER:
        records = {str(run.path): _run_words(run) for run in RunFolder.every(kit.path / "runs")}
        return PartyStatus(
            party="server",
            running=alive,
            connection=_server(kit),
            records=records,
            key=server_key(kit.path).public.hex(),
        )
    return PartyStatus(
        party=f"silo '{kit.silo}'", running=alive, connection=_contact(kit), records=_studies(kit)
    )


def _server(kit: Kit) -> str:
    listening = listens("localhost" if kit.host != "127.0.0.1" else kit.host, kit.port)
    seen = presence(kit.path)
    sites = sorted(seen.sites) if seen is not None else []
    connected = f"connected: {', '.join(sites)}" if sites else "no silo is connected"
    return f"listening; {connected}" if listening else "not listening yet"


def _contact(kit: Kit) -> str:
    """Return since when a silo hears its server."""
    contact = last_contact(kit.home)
    if not contact:
        return "the server has not been heard yet"
    age = time.time() - float(contact["heard"])
    if age > 2 * STALE:
        return f"the server was last heard {_stamp(contact['heard'])}"
    return f"connected since {_stamp(contact['since'])}"


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def home_of(kit: Kit) -> Home:
    """Return the home of the silo whose kit this is."""
    try:
        return Home.of(read_document(kit.home / "silo.json")["silo_file"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{kit.path}: the silo file is not known yet, or cannot be read") from None


def _studies(kit: Kit) -> dict[str, str]:
    """Return the studies that came to a silo, and its owner's decision about each."""
    try:
        home = home_of(kit)
    except InputError:
        return {}
    open_plans = last_contact(kit.home).get("open")
    return {f"plan {study.plan[:16]}": words(study, home, open_plans) for study in came_to(home)}


def listens(host: str, port: int, *, timeout: float = 3.0) -> bool:
    """Return whether something accepts connections at this address."""
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False


def _run_words(run: RunFolder) -> str:
    try:
        status = run.look()
    except InputError as error:
        return f"damaged: {error}"
    progress = f"{status.state}, round {status.round}" if status.round else str(status.state)
    silos = [f"{silo}: {each}" for silo, each in status.silos.items() if each != "ready"]
    said = [part for part in (status.why, *(silos if not status.state.is_over else ())) if part]
    return f"{progress}: {'; '.join(said)}" if said else progress


# A systemd unit for a party: it starts at boot, is restarted, and can write its own folders only.

UNIT = """\
[Unit]
Description=fedtmle {role} {name}
Wants=network-online.target
After=network-online.target

[Service]
User={user}
ExecStart={python} -m fedtmle {role} run {kit}
Restart=always
RestartSec=5
KillMode=mixed
TimeoutStopSec=30
UMask=0077
Environment=NUMBA_CACHE_DIR={kit}/fedtmle/cache
{environment}ReadWritePaths={writable}
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=true
PrivateDevices=true
NoNewPrivileges=true
CapabilityBoundingSet=
AmbientCapabilities=
ProtectClock=true
ProtectControlGroups=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
RemoveIPC=true
LockPersonality=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged

[Install]
WantedBy=multi-user.target
"""


def unit(kit: Kit, *, user: str) -> str:
    """Return the unit of a party that the account ``user`` runs.

    A silo can write its kit and its home, a server its kit. Compiled code needs memory that
    is writable and executable, so that `MemoryDenyWriteExecute` is not set.
    """
    if kit.role is Role.ADMIN:
        raise InputError(f"{kit.path}: an administrator's kit runs nothing; give a server's or a silo's kit")
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", user) or user == "root":
        raise InputError(f"--user: expected the name of an account other than root, got '{user}'")
    writable, environment = [kit.path], ""
    if kit.role is Role.SILO:
        try:
            silo_folder(kit.home)  # raises if there is no home
            home = located_by(kit.home).home
            writable.append(home)
            environment = (
                f"Environment={VARIABLE}={_quoted(home)}\n"  # the service has no login's environment
            )
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{kit.path}: the silo file is not known yet; run `fedtmle silo start {kit.path} --silo-file "
                "silo.toml` once"
            ) from None
    (kit.home / "cache").mkdir(exist_ok=True)
    return UNIT.format(
        role=kit.role,
        name=kit.silo or kit.project,
        user=user,
        python=_quoted(Path(sys.executable)),
        kit=_quoted(kit.path),
        environment=environment,
        writable=" ".join(map(_quoted, writable)),
    )


def _quoted(path: Path) -> str:
    """Return a path as a unit file has it: percent signs doubled, blanks escaped."""
    text = str(path)
    if "\n" in text or '"' in text:
        raise InputError(f"{path}: a unit file cannot name this path; move the folder")
    return re.sub(r"[ \t\\\\]", lambda found: f"\\x{ord(found[0]):02x}", text.replace("%", "%%"))
