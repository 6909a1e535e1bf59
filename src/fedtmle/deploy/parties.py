"""Start a party on its own machine, and report its status."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from fedtmle.data import read_silo_file
from fedtmle.deploy.kits import Kit, Role
from fedtmle.deploy.policy import place_storage
from fedtmle.deploy.processes import running, start
from fedtmle.engine.runs import RunFolder
from fedtmle.engine.site import studies_folder
from fedtmle.errors import InputError
from fedtmle.runtime.documents import read_document, write_document
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import file_plan, read_study


@dataclass(frozen=True, kw_only=True)
class PartyStatus:
    """What `fedtmle server status` and `fedtmle silo status` print."""

    party: str
    running: bool
    listening: bool | None = None  # of a server
    records: dict[str, str] = field(default_factory=dict)  # runs at a server, studies at a silo

    def __str__(self) -> str:
        lines = [f"{self.party}: {'running' if self.running else 'not running'}"]
        if self.running and self.listening is not None:
            lines[0] += ", listening" if self.listening else ", not listening yet"
        return "\n".join([*lines, *(f"  {name}: {status}" for name, status in self.records.items())])


def start_server(kit: Kit) -> None:
    """Start the server; its jobs and snapshots stay in its own folder."""
    place_storage(kit)
    start(kit)


def start_silo(kit: Kit, silo_file: Path | None) -> None:
    """Start a silo; the path of its silo file is stored in its kit and nowhere else."""
    record = kit.home / "silo.json"
    if silo_file is None and not record.is_file():
        raise InputError("--silo-file: give the path of this silo's silo.toml; it is needed the first time")
    if silo_file is not None:
        named = read_silo_file(silo_file).name
        if named != kit.silo:
            raise InputError(f"{silo_file}: this is silo '{named}', but the kit is that of '{kit.silo}'")
        write_document(record, {"silo_file": str(silo_file.absolute())})
    start(kit)


def status_of(kit: Kit) -> PartyStatus:
    """Return whether the party runs, and its runs (server) or studies (silo)."""
    alive = running(kit) is not None
    if kit.role is Role.SERVER:
        runs = [RunFolder(path) for path in sorted((kit.path / "runs").glob("*/")) if path.is_dir()]
        records = {str(run.path): _words(run) for run in runs}
        listening = listens("localhost" if kit.host != "127.0.0.1" else kit.host, kit.port)
        return PartyStatus(party="server", running=alive, listening=listening, records=records)
    return PartyStatus(party=f"silo '{kit.silo}'", running=alive, records=_studies(kit))


def _studies(kit: Kit) -> dict[str, str]:
    """Return the studies that came to a silo, and its owner's decision about each."""
    try:
        home = Home.of(read_document(kit.home / "silo.json")["silo_file"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    decisions = home.approvals.current()
    studies = {}
    for path in sorted(studies_folder(home).glob("[0-9a-f]*.toml")):
        plan = file_plan(read_study(path, samples=False))
        decision = decisions.get(plan.digest.hex())
        if decision is None:
            status = f"waits for you: fedtmle silo preview|approve|reject {path} --silo {home.file.path}"
        else:
            status = f"{'approved' if decision.approved else 'rejected'} {decision.time}"
        studies[f"plan {plan.digest.hex()[:16]}"] = status
    return studies


def listens(host: str, port: int, *, timeout: float = 3.0) -> bool:
    """Return whether something accepts connections at this address."""
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False


def _words(run: RunFolder) -> str:
    status = run.status()
    progress = f"{status.state}, round {status.round}" if status.round else str(status.state)
    return f"{progress}: {status.why}" if status.why else progress
