"""Starting a party on its own machine, and saying how it is."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedtmle.data import read_silo_file
from fedtmle.deploy.kits import Kit, Role
from fedtmle.deploy.policy import place_storage
from fedtmle.deploy.processes import running, start
from fedtmle.engine.runs import RunFolder
from fedtmle.engine.site import studies_folder
from fedtmle.errors import InputError
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import file_plan, read_study


@dataclass(frozen=True, kw_only=True)
class PartyStatus:
    """What `status` tells."""

    party: str
    running: bool
    listening: bool | None = None  # of a server
    records: dict[str, str] = field(default_factory=dict)  # runs at a server, studies at a silo

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.party}: {'running' if self.running else 'not running'}"]
        if self.running and self.listening is not None:
            lines[0] += ", listening" if self.listening else ", not listening yet"
        return "\n".join([*lines, *(f"  {name}: {what}" for name, what in self.records.items())])


def start_server(kit: Kit) -> None:
    """Starts the server; its jobs and snapshots stay in its own folder."""
    place_storage(kit)
    start(kit)


def start_silo(kit: Kit, silo_file: Path | None) -> None:
    """Starts a silo; the path of its silo file is written down here and nowhere else."""
    record = kit.home / "silo.json"
    if silo_file is None and not record.is_file():
        raise InputError("--silo-file: give this silo's silo.toml the first time")
    if silo_file is not None:
        named = read_silo_file(silo_file).name
        if named != kit.silo:
            raise InputError(f"{silo_file}: this is silo '{named}', but the kit is that of '{kit.silo}'")
        record.write_text(json.dumps({"silo_file": str(silo_file.absolute())}) + "\n", encoding="utf-8")
    start(kit)


def status_of(kit: Kit) -> PartyStatus:
    """Running or not, and what there is to know."""
    alive = running(kit) is not None
    if kit.role is Role.SERVER:
        runs = [RunFolder(path) for path in sorted((kit.path / "runs").glob("*/")) if path.is_dir()]
        records = {str(run.path): _words(run) for run in runs}
        listening = listens("localhost" if kit.host != "127.0.0.1" else kit.host, kit.port)
        return PartyStatus(party="server", running=alive, listening=listening, records=records)
    return PartyStatus(party=f"silo '{kit.silo}'", running=alive, records=_studies(kit))


def _studies(kit: Kit) -> dict[str, str]:
    """The studies that came to a silo, and what its owner said to each."""
    try:
        home = Home.of(json.loads((kit.home / "silo.json").read_text(encoding="utf-8"))["silo_file"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    decisions = home.approvals.current()
    found = {}
    for path in sorted(studies_folder(home).glob("[0-9a-f]*.toml")):
        plan = file_plan(read_study(path, samples=False))
        decision = decisions.get(plan.digest.hex())
        said = "approved" if decision is not None and decision.approved else "rejected"
        ask = f"waits for you: fedtmle silo preview|approve|reject {path} --silo {home.file.path}"
        found[f"plan {plan.digest.hex()[:16]}"] = ask if decision is None else f"{said} {decision.time}"
    return found


def listens(host: str, port: int, *, timeout: float = 3.0) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False


def _words(run: RunFolder) -> str:
    status = run.status()
    told = f"{status.state}, round {status.round}" if status.round else str(status.state)
    return f"{told}: {status.why}" if status.why else told
