"""What every command does at a terminal of 80 columns, and where there is none."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from fedtmle.cli import app, base
from fedtmle.studyfile.template import write_template

ESCAPE = "\x1b"


def leaves(group: Any, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *before, name)
        else:
            yield (*before, name), command


COMMANDS = {**dict(leaves(typer.main.get_command(app))), ("reproduce",): base.command("reproduce")}
ON_STUDIES = [name for name in COMMANDS if len(name) == 1]
SHOWS_PROGRESS = [("run",), ("demo",), ("reproduce",)]


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_help_fits_and_has_no_colour(name: tuple[str, ...]) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name, "--help"])
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 80
    assert ESCAPE not in shown.output


@pytest.mark.parametrize("name", dict(leaves(typer.main.get_command(app))), ids=" ".join)
def test_help_has_examples_that_parse(name: tuple[str, ...]) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name, "--help"]).output
    examples = [line.split() for line in shown.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()]
    assert examples
    for line in (shlex.split(" ".join(example)) for example in examples):
        assert tuple(line[: 1 + len(name)]) == ("fedtmle", *name)
        COMMANDS[name].make_context(name[-1], line[1 + len(name) :])  # a wrong option or argument raises


@pytest.mark.parametrize("group", [(), ("silo",), ("ledger",), ("deploy",), ("server",)], ids=" ".join)
def test_a_groups_help_cuts_no_sentence(group: tuple[str, ...]) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*group, "--help"]).output
    assert "..." not in shown.partition("Options:")[2]


def test_a_shell_completes_commands() -> None:
    asked = {"_FEDTMLE_COMPLETE": "complete_bash", "COMP_WORDS": "fedtmle silo pre", "COMP_CWORD": "2"}
    done = subprocess.run(  # noqa: S603 - our own
        [Path(sys.executable).with_name("fedtmle")],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["preview"]


def test_the_options_for_scripts_are_there() -> None:
    options = {name: {o for p in command.params for o in p.opts} for name, command in COMMANDS.items()}
    assert [name for name in ON_STUDIES if "--json" not in options[name]] == []
    assert [name for name in SHOWS_PROGRESS if "--quiet" not in options[name]] == []


def at_a_terminal(*arguments: str, folder: Path) -> str:
    """All that a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fedtmle", *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"COLUMNS": "80", "TERM": "xterm-256color"}
    with subprocess.Popen(  # noqa: S603 - our own
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as run:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # how a terminal says that nobody writes to it any more
            pass
        finally:
            os.close(ours)
        assert run.wait(300) == 0, said
    return said.decode()


def test_a_run_shows_its_progress_at_a_terminal_only(tmp_path: Path) -> None:
    write_template(tmp_path, force=False)
    said = at_a_terminal("run", "study.toml", folder=tmp_path)
    progress = "study: reading the silos"  # its first line; how many rounds are seen is a matter of speed
    assert progress in said
    assert ESCAPE in said
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "\n")
    assert max(map(len, plain.splitlines())) <= 80
    assert progress not in at_a_terminal("run", "study.toml", "--quiet", folder=tmp_path)
    command = [sys.executable, "-m", "fedtmle", "run", "study.toml"]
    piped = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)  # noqa: S603 - our own
    assert ESCAPE not in piped.stdout + piped.stderr
    assert progress not in piped.stderr
