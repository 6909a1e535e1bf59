"""A statistician on another machine: a mount namespace in which the server's and silos' folders are empty."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.deploy import processes
from fedtmle.deploy.demo import approve_everywhere, local_deployment, write_example
from fedtmle.deploy.kits import Deployment, Role, read_kit
from fedtmle.deploy.parties import start_server
from fedtmle.deploy.provision import add_statistician, remove_statistician
from fedtmle.engine.runs import Move, RunFolder, RunState
from fedtmle.studyfile.file import StudyFile, read_study

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide folders from a process"),
]
HIDE = 'mount -t tmpfs none "$0" && exec "$@"'


@dataclass(frozen=True)
class Elsewhere:
    """The statistician's machine: a folder with their kit and study, and nothing of the others."""

    made: Deployment
    study: StudyFile
    folder: Path

    def call(self, *words: str, code: int = 0) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, out + err
        return out + err

    def start(self, *words: str) -> subprocess.Popen[str]:
        return self.hidden(sys.executable, "-m", "fedtmle", *words)

    def hidden(self, *command: str) -> subprocess.Popen[str]:
        """A process for which the folder of the deployment and of the hospitals is empty."""
        return subprocess.Popen(  # noqa: S603 - our own command
            ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", HIDE, str(self.made.path.parent), *command],
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    folder = tmp_path_factory.mktemp("remote")
    study = read_study(write_example(folder / "hospitals", 2))
    ft.run(study.study, study.silos)  # compiles the kernels
    own = tmp_path_factory.mktemp("elsewhere")
    with local_deployment(folder / "consortium", study) as begun:
        made = add_statistician(begun, "alice")
        shutil.move(made.statistician("alice"), own / "alice")
        shutil.copy(study.path, own / "study.toml")
        yield Elsewhere(made, study, own)


def seeded(at: Elsewhere, seed: int) -> StudyFile:
    """The study with another seed at both places."""
    text = f"[options]\nseed = {seed}\n\n{at.study.path.read_text()}"
    path = at.study.path.with_name(f"study-{seed}.toml")
    path.write_text(text)
    (at.folder / path.name).write_text(text)
    return read_study(path)


def only_run(at: Elsewhere) -> RunFolder:
    runs = [run for run in RunFolder.every(at.made.runs) if not run.status().state.is_over]
    return runs[0] if runs else None


def test_a_study_from_another_account_gives_the_bytes_of_one_process(elsewhere: Elsewhere) -> None:
    listed, _ = elsewhere.hidden("/bin/ls", str(elsewhere.made.path.parent)).communicate(timeout=10)
    assert listed == ""  # the process really cannot look
    study = elsewhere.study
    approve_everywhere(study)
    said = elsewhere.call("run", "study.toml", "--on", "alice", "--out", "result.json", "--events", "e.jsonl")
    assert "done in" in said
    here = ft.run(study.study, study.silos)
    assert (elsewhere.folder / "result.json").read_text() == here.to_json() + "\n"
    (copy,) = (elsewhere.folder / "alice" / "runs").iterdir()
    there = RunFolder(elsewhere.made.runs / copy.name)
    assert (copy / "result.json").read_bytes() == there.result.read_bytes()
    assert (copy / "events.jsonl").read_bytes() == there.events.read_bytes()
    assert (elsewhere.folder / "e.jsonl").stat().st_size
    assert not (copy / "transcript").exists()
    assert '"status": "finished"' in elsewhere.call("watch", f"alice/runs/{copy.name}", "--json")
    assert "this run is done" in elsewhere.call("resume", f"alice/runs/{copy.name}", code=1)
    again = elsewhere.call("run", "study.toml", "--on", "alice", code=1)
    assert "this plan was run already" in again
    refused = elsewhere.call("run", "study.toml", "--on", "alice", "--transcript", "t", code=2)
    assert "stay at the server" in refused


def test_a_run_is_followed_over_a_restart_of_the_server_and_cancelled(elsewhere: Elsewhere) -> None:
    seeded(elsewhere, 5)
    process = elsewhere.start("run", "study-5.toml", "--on", "alice")
    try:
        assert processes.wait_until(lambda: only_run(elsewhere) is not None, 60)
        run = only_run(elsewhere)
        server = read_kit(elsewhere.made.server, Role.SERVER)
        processes.stop(server)
        start_server(server)
        assert processes.wait_until(
            lambda: set(run.status().silos.values()) == {"waiting for its owner's approval"}, 90
        )
        said = elsewhere.call("cancel", f"alice/runs/{run.name}")
        assert "Cancelled" in said
        _, told = process.communicate(timeout=60)
        assert process.returncode == 3
        assert "the run was cancelled" in told
        assert run.status().state is RunState.CANCELLED
    finally:
        process.kill()
        process.communicate()


def test_a_statistician_who_was_removed_is_refused_at_once(elsewhere: Elsewhere) -> None:
    seeded(elsewhere, 6)
    made = add_statistician(elsewhere.made, "bob")
    shutil.move(made.statistician("bob"), elsewhere.folder / "bob")
    process = elsewhere.start("run", "study-6.toml", "--on", "bob")
    try:
        assert processes.wait_until(lambda: only_run(elsewhere) is not None, 60)
        run = only_run(elsewhere)
        assert run.terms().owner == "bob@fedtmle.org"
        elsewhere.call("cancel", f"alice/runs/{run.name}", code=1)  # it is not hers
        assert run.status().state is RunState.WAITING
        remove_statistician(made, "bob")
        _, told = process.communicate(timeout=60)
        assert "has removed this kit" in told
    finally:
        process.kill()
        process.communicate()
    late = elsewhere.call("cancel", f"bob/runs/{run.name}", code=3)
    assert "cannot be reached" in late
    assert run.status().state is RunState.WAITING
    run.move(Move.CANCEL)
