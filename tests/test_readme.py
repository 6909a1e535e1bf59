"""The README stays true: every command and every example in it is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(command: list[str], folder: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(  # noqa: S603 - the README's own commands
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


FEDTMLE = ".venv/bin/fedtmle "
STUDY_COMMANDS = [command for command in COMMANDS if command.startswith(FEDTMLE)]
MAKE_COMMANDS = [command for command in COMMANDS if command not in STUDY_COMMANDS]


@pytest.mark.parametrize("command", MAKE_COMMANDS)
def test_every_command_runs(command: str) -> None:
    """`make test` only collects here: this test is part of what it would run."""
    printed = run(command.split(), PYTEST_ADDOPTS="--collect-only -q", COLUMNS="80", NO_COLOR="1")
    assert printed.strip()


def test_the_two_commands_are_there() -> None:
    assert MAKE_COMMANDS == ["make demo", "make test"]


def test_the_study_commands_run_in_their_order(tmp_path: Path) -> None:
    verbs = [command.split()[1] for command in STUDY_COMMANDS]
    assert verbs == ["init", "validate", "preflight", "run", "show"]
    for command in STUDY_COMMANDS:
        assert run([sys.executable, "-m", "fedtmle", *command.split()[1:]], tmp_path).strip()


@pytest.mark.parametrize("example", blocks("python"))
def test_every_example_runs(example: str) -> None:
    assert run([sys.executable, "-c", example]).strip()


def test_inline_commands_run() -> None:
    commands = re.findall(r"`(\.venv/bin/fedtmle [^`]*)`", README)
    assert commands
    for command in commands:
        assert run([sys.executable, "-m", "fedtmle", *command.split()[1:]]).strip()
