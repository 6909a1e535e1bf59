"""Commands and demonstrations of other distributions, found by entry points."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedtmle.cli import app, base

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


def greet(name: str = typer.Option("nobody", help="Whom to greet.")) -> None:
    """Greet somebody."""
    typer.echo(f"Hello, {name}")


def declare(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    """Let ``points`` be the only entry points of this environment."""

    def entry_points(**wanted: Any) -> EntryPoints:
        return EntryPoints(points).select(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


@pytest.mark.parametrize(
    "arguments",
    [["reproduce"], ["reproduce", "--figure", "2", "--quick"], ["demo", "--study", "transport", "--json"]],
)
def test_without_the_paper_one_sentence_tells_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    declare(monkeypatch)
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    called = "reproduce" if arguments[0] == "reproduce" else "demo --study transport"
    assert result.stderr == (
        f"`fedtmle {called}` needs the package fedtmle-paper: run `pip install ./paper` in a checkout of the "
        "fedtmle repository.\n"
    )


def test_the_paper_is_installed_here() -> None:
    """`make` installs both distributions; the placeholder gives way to the command with its options."""
    command = base.command("reproduce")
    assert command is not None
    assert "--figure" in {option for parameter in command.params for option in parameter.opts}
    shown = runner.invoke(app, ["reproduce", "--help"])
    assert "--figure" in shown.stdout
    assert "Usage: root reproduce" in shown.stdout or "Usage: fedtmle reproduce" in shown.stdout
    assert base.load(base.DEMOS, "transport") is not None


def test_another_distribution_can_add_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, EntryPoint("greet", f"{__name__}:greet", base.COMMANDS))
    assert runner.invoke(app, ["greet", "--name", "Ada"]).stdout == "Hello, Ada\n"
    assert runner.invoke(app, ["greet", "--nonsense"]).exit_code == 2
    assert runner.invoke(app, ["gret"]).exit_code == 2


def test_an_entry_point_cannot_replace_a_command_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, EntryPoint("validate", f"{__name__}:greet", base.COMMANDS))
    assert "Hello" not in runner.invoke(app, ["validate"]).output


def test_help_lists_reproduce_and_reads_no_entry_points() -> None:
    code = (
        "import sys; from fedtmle.cli import main\n"
        "sys.argv = ['fedtmle', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('importlib.metadata' in sys.modules, 'fedtmle_paper' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert "  reproduce  " in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"
