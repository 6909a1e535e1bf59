"""A deployment of three hospitals under test: faults on order, runs that are watched, and what they did."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

import fedtmle as ft
from fedtmle.deploy import processes
from fedtmle.deploy.demo import approve_everywhere, await_silos, local_deployment, silo_kit, write_example
from fedtmle.deploy.kits import Deployment, Kit, read_kit
from fedtmle.deploy.launch import RunsHere, follow, show
from fedtmle.deploy.parties import start_silo
from fedtmle.engine.office import resume
from fedtmle.engine.process import Process
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.runtime import ledger
from fedtmle.studyfile.file import StudyFile, read_study
from tests.deploy import faults
from tests.deploy.proxy import Proxy
from tests.engine.lines import ALGORITHMS
from tests.homes import home_at

DEADLINE = 20.0
NOTES = "FEDTMLE_FAULT_NOTES"  # the file, if any, to which each fault's message and times are appended
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rig:
    made: Deployment
    study: StudyFile
    faults: Path
    proxy: Proxy
    shown: dict[str, io.StringIO] = field(default_factory=dict)

    def plan(self, seed: int, algorithm: str = "Coded", *, approved: bool = True) -> StudyFile:
        """The same study with another seed: another plan."""
        text = self.study.path.read_text()
        text = re.sub(r"\[algorithm\]\n[^\[]*", f"[algorithm]\n{ALGORITHMS[algorithm]}\n\n", text)
        path = self.study.path.with_name(f"study-{seed}.toml")
        path.write_text(f"[options]\nseed = {seed}\n\n{text}")
        made = read_study(path)
        if approved:
            approve_everywhere(made)
        return made

    def start(self, study: StudyFile, deadline: float = DEADLINE, *, patience: float = 600.0) -> RunFolder:
        """Start a run, and keep the lines that `fedtmle run` would print."""
        run = RunsHere(self.made).new(study, deadline=deadline, patience=patience)
        self.watch(run)
        return run

    def watch(self, run: RunFolder) -> None:
        lines = self.shown.setdefault(run.name, io.StringIO())
        statuses = follow(RunsHere(self.made), run)
        threading.Thread(
            target=show, args=(statuses,), kwargs={"quiet": False, "to": lines}, daemon=True
        ).start()

    def lines(self, run: RunFolder) -> list[str]:
        return self.shown[run.name].getvalue().splitlines()

    def at_round(self, run: RunFolder, party: str, *, at: int = 6, seconds: float = 1.0) -> None:
        """Wait until a party is asked its ``at``-th request from now; it takes ``seconds`` longer over it."""
        faults.order(self.faults, party, at=at, what="slow", seconds=seconds)
        order = self.faults / f"{party}.json"
        assert processes.wait_until(lambda: not order.exists(), 120), run.status()

    def finish(self, run: RunFolder, *, within: float) -> float:
        """Wait for a run's end without a command; return the seconds that it took."""
        began = time.monotonic()
        assert processes.wait_until(lambda: run.status().state.is_over, within), run.status()
        assert run.status().state is RunState.DONE, run.status().why
        return time.monotonic() - began

    def attempt(self, run: RunFolder) -> RunStatus:
        """One command: `fedtmle run` or `fedtmle resume`."""
        resume(run)
        until, last = time.monotonic() + 180, None
        for last in follow(RunsHere(self.made), run):
            assert time.monotonic() < until, last
        assert last is not None
        return last

    def kits(self) -> list[Kit]:
        return [read_kit(self.made.server), *(silo_kit(self.made, silo) for silo in self.study.silos)]

    def restart(self, silo: str) -> None:
        kit = silo_kit(self.made, silo)
        processes.stop(kit)
        start_silo(kit, None)
        await_silos(self.made, list(self.study.silos))

    def note(self, fault: str, run: RunFolder, seconds: float | None) -> None:
        """Note what was seen of a fault, for the table in docs/deploy.md."""
        seen = {"fault": fault, "seconds": seconds, "lines": self.lines(run)}
        _log.info("%s", seen)
        path = os.environ.get(NOTES)
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(seen) + "\n")


@contextlib.contextmanager
def deployed(
    folder: Path, *, spare: tuple[str, ...] = (), host: str = "localhost", at: str = "127.0.0.1"
) -> Iterator[Rig]:
    """Deploy three hospitals, the third behind a proxy ``at`` an address; nothing is left at the end."""
    study = read_study(write_example(folder / "hospitals", 3))
    ft.run(study.study, study.silos)  # compiles the kernels, for the silos too
    orders = folder / "orders"
    orders.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTMLE_FAULTS", str(orders))
        patch.setenv("PYTHONPATH", str(faults.write_hook(folder / "hook")), prepend=os.pathsep)
        with local_deployment(folder / "consortium", study, host=host, spare=spare, within=180.0) as made:
            proxy = Proxy(made.port, host=at)
            _behind(made, "hospital 3", proxy.port)
            yield Rig(made, study, orders, proxy)
            proxy.close()
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]
    assert left == []


def _behind(made: Deployment, silo: str, port: int) -> None:
    """Puts a silo behind the proxy and starts it again."""
    kit = silo_kit(made, silo)
    config = kit.path / "startup" / "fed_client.json"
    config.write_text(config.read_text().replace(f"{made.host}:{made.port}", f"{made.host}:{port}"))
    processes.stop(kit)
    start_silo(kit, None)
    await_silos(made, list(made.sites)[:3])


def same(study: StudyFile, run: RunFolder, scratch: Path) -> None:
    """The run's result and messages are those of one process; no silo told two things to one request."""
    here = ft.run(study.study, study.silos)
    assert here.run is not None
    here.run.transcript.save(scratch / "transcript")
    assert run.result.read_text() == here.to_json() + "\n"
    assert run.transcript.read_bytes() == (scratch / "transcript").read_bytes()
    for path in study.silos.values():
        told: dict[str, str] = {}
        for entry in ledger.read(home_at(path).ledger_path):
            if entry["decision"] != "refused":
                assert told.setdefault(entry["asked"], entry["replied"]) == entry["replied"]


def kill_all(kit: Kit) -> None:
    """Kill every process of a party, as a power cut does, and wait until all have ended."""
    supervisor = processes.running(kit)
    assert supervisor is not None
    killed = []
    for process in [supervisor, *processes.descendants(supervisor)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            killed.append(Process.of(process.pid))
            process.kill()
    assert processes.wait_until(lambda: not any(process.find() for process in killed), 30)


def process_of(kit: Kit, which: str) -> psutil.Process:
    """The supervisor of a party, its engine, or the engine's process for the run."""
    supervisor = processes.running(kit)
    assert supervisor is not None
    if which == "supervisor":
        return supervisor
    (engine,) = (child for child in supervisor.children() if "_train" in " ".join(child.cmdline()))
    if which == "engine":
        return engine
    (job,) = (child for child in processes.descendants(engine) if "_process" in " ".join(child.cmdline()))
    return job
