"""docs/deploy.md stays true: its commands, in its order, from the command line, with real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedtmle.deploy.demo import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DOCS = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", DOCS, flags=re.DOTALL)
    for line in block.splitlines()
    if line
]
LOWER = "fedtmle silo approve study.toml --silo silo.toml --lower"
VERBS = [
    "fedtmle deploy demo",
    "pip install",
    "fedtmle deploy init",
    "fedtmle server start",
    "fedtmle server status",
    "fedtmle silo home",
    "fedtmle silo start",
    "fedtmle deploy doctor",
    "fedtmle deploy service",
    "fedtmle deploy renew",
    "fedtmle deploy sign",
    "fedtmle deploy renew",
    "fedtmle deploy add",
    "fedtmle deploy remove",
    "fedtmle deploy add consortium --statistician",
    "fedtmle run",
    "fedtmle silo status",
    "fedtmle silo preview",
    "fedtmle silo approve",
    "fedtmle silo assess",
    "fedtmle silo page",
    "fedtmle silo notify",
    LOWER,
    "fedtmle resume",
    "fedtmle cancel",
    "fedtmle deploy backup",
    "fedtmle deploy restore",
    "fedtmle silo stop",
]


def words(command: str, **places: str) -> list[str]:
    """A command of the documentation with its example names replaced by real ones."""
    for name, real in places.items():
        command = re.sub(rf"(?<![\w./-]){re.escape(name.replace('_', '.'))}(?![\w.-])", real, command)
    return [sys.executable, "-m", *shlex.split(command)]


def run(command: list[str], folder: Path, *, code: int = 0) -> str:
    done = subprocess.run(  # noqa: S603 - the documentation's own commands
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_documentation_names_these_commands() -> None:
    assert len(COMMANDS) == len(VERBS)
    assert all(command.startswith(verb) for command, verb in zip(COMMANDS, VERBS, strict=True))


def test_a_consortium_from_the_first_command_to_the_last(tmp_path: Path) -> None:
    command = dict(zip(VERBS, COMMANDS, strict=True))
    requests = [line for line in COMMANDS if line.startswith("fedtmle deploy renew")]
    run([sys.executable, "-m", "fedtmle", "init", "."], tmp_path)  # two hospitals with toy records
    init = words(command["fedtmle deploy init"], fedtmle_example_org="localhost")
    init = ["localhost" if word == "fedtmle.example.org" else word for word in init]
    run([*init, "--port", str(free_port())], tmp_path)
    kits = {name: f"consortium/silos/{name}" for name in ("north", "south")}
    waiting: subprocess.Popen[str] | None = None
    try:
        run(words(command["fedtmle server start"]), tmp_path)
        for name, kit in kits.items():
            place = {"north": kit, "silo_toml": f"{name}.toml"}
            run(words(command["fedtmle silo home"], **place), tmp_path)
            run(words(command["fedtmle silo start"], **place), tmp_path)
        for line in (requests[0], command["fedtmle deploy sign"], requests[1]):
            run(words(line, north=kits["north"]), tmp_path)
        run([sys.executable, "-m", "fedtmle", "silo", "stop", kits["north"]], tmp_path)
        run([sys.executable, "-m", "fedtmle", "silo", "start", kits["north"]], tmp_path)
        run(words(command["fedtmle deploy add"]), tmp_path)
        run(words(command["fedtmle deploy remove"]), tmp_path)
        run(words(command["fedtmle deploy add consortium --statistician"]), tmp_path)
        shutil.move(tmp_path / "consortium" / "statisticians" / "alice", tmp_path / "alice")
        notify = words(command["fedtmle silo notify"], north=kits["north"])
        run([*notify[:-1], "/bin/true"], tmp_path)
        run(words(command["fedtmle deploy service"], north=kits["north"]), tmp_path)
        _until(lambda: "connected: north, south" in run(words(command["fedtmle server status"]), tmp_path))
        _until(lambda: "listening" in run(words(command["fedtmle server status"]), tmp_path))
        for kit in kits.values():
            assert "NO " not in run(words(command["fedtmle deploy doctor"], north=kit), tmp_path)
        waiting = subprocess.Popen(  # noqa: S603 - as above
            [*words(command["fedtmle run"]), "--out", "result.json"],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name, kit in kits.items():
            status = words(command["fedtmle silo status"], north=kit)
            _until(lambda status=status: "waits for you" in run(status, tmp_path))
            place = {"silo_toml": f"{name}.toml"}
            run(words(command["fedtmle silo preview"], **place), tmp_path)
            run(words(command["fedtmle silo assess"], **place), tmp_path)
            approve = "fedtmle silo approve" if name == "south" else LOWER
            run([*words(command[approve], **place), "--yes"], tmp_path)
        printed, told = waiting.communicate(timeout=120)
        assert waiting.returncode == 0, printed + told
        assert "waiting for its owner's approval" in told
        lowered = "min_arm_rows is 5 instead of 10: rare disease; decision 12/2026"
        decisions = [sys.executable, "-m", "fedtmle", "silo", "decisions", "--silo", "north.toml"]
        assert f"Lowered: {lowered}" in " ".join(run(decisions, tmp_path).split())
        assert f"silo 'north' lowered a limit of its policy: {lowered}" in " ".join(printed.split())
        _lower_in_the_silo_file(tmp_path / "north.toml")
        run([sys.executable, "-m", "fedtmle", "run", "study.toml", "--out", "here.json"], tmp_path)
        assert (tmp_path / "result.json").read_bytes() == (tmp_path / "here.json").read_bytes()
        (record,) = (tmp_path / "consortium" / "server" / "runs").iterdir()
        resume = command["fedtmle resume"].replace("<run>", record.name).split()
        assert "this run is done" in run([sys.executable, "-m", *resume], tmp_path, code=1)
        again = [sys.executable, "-m", "fedtmle", "run", "study.toml", "--on", "alice"]
        assert "somebody else has posted this plan" in run(again, tmp_path, code=1)
        run(words(command["fedtmle deploy backup"], north=kits["north"]), tmp_path)
        run(words(command["fedtmle silo stop"], north=kits["north"]), tmp_path)
        restored = run(words(command["fedtmle deploy restore"], north=kits["north"]), tmp_path)
        assert "Put back: 0 files" in restored
    finally:
        if waiting is not None and waiting.poll() is None:
            waiting.kill()
            waiting.communicate()
        for kit in kits.values():
            run(words(command["fedtmle silo stop"], north=kit), tmp_path)
        run([sys.executable, "-m", "fedtmle", "server", "stop", "consortium/server"], tmp_path)


def test_the_demo_compares_and_stops_what_it_started(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", *COMMANDS[0].split(), "--silos", "2", "--json"], tmp_path)
    told = json.loads(done)
    assert told["same_result"]
    assert told["same_transcript"]


def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path) -> None:
    demo = subprocess.Popen(  # noqa: S603 - as above
        [sys.executable, "-m", *COMMANDS[0].split(), "--silos", "2"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _until(lambda: len(_inside(tmp_path)) > 4)  # the server, two hospitals, and their supervisors
    demo.terminate()
    demo.wait(timeout=60)
    assert _inside(tmp_path) == []


def _lower_in_the_silo_file(path: Path) -> None:
    """Write the documentation's example of a lowered limit into a silo file that has a policy."""
    ((keys, reasons),) = re.findall(
        r"```toml\n\[policy\]\n(.*?)(\n\[policy.reasons\]\n.*?)```", DOCS, flags=re.DOTALL
    )
    text = path.read_text(encoding="utf-8")
    reasons = reasons.replace("decision 12/2026 of the data protection officer", "decision 12/2026")
    path.write_text(text.replace("[policy]", f"[policy]\n{keys}", 1) + reasons, encoding="utf-8")


def _inside(folder: Path) -> list[int]:
    import psutil

    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


def _until(condition: object, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.5)
