"""Start a party on its own machine, and report its status."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from fedtmle.data import read_silo_file
from fedtmle.deploy.kits import Kit, Role
from fedtmle.deploy.policy import place_storage
from fedtmle.deploy.presence import STALE, presence
from fedtmle.deploy.processes import running, start
from fedtmle.deploy.studies import came_to, words
from fedtmle.engine.post import last_contact
from fedtmle.engine.runs import RunFolder, server_key
from fedtmle.errors import InputError
from fedtmle.runtime.documents import read_document, write_document
from fedtmle.studies.home import Home


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
