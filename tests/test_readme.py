"""README and documentation stay true: every command and every example in them is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fedtmle.cli import app, base

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
README = PAGES["README.md"]
FEDTMLE = ".venv/bin/fedtmle "
# With real processes, in tests/deploy/test_docs.py; with a real database server, in tests/databases; with the
# example database that the page names, in tests/trials/test_docs.py; with its package, in examples.
ELSEWHERE = ("docs/deploy.md", "docs/databases.md", "docs/emulate.md", "docs/late.md")
RUNNING_TESTS = ("make test", "make test-slow", "make check", "make browser", "make docs")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def commands(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]


def run(command: list[str], folder: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(  # noqa: S603 - the pages' own commands
        command,
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "MPLBACKEND": "Agg", **environment},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def folder() -> Path:
    """Where studies are run: one for all pages, so that a command that several have runs once."""
    return Path(tempfile.mkdtemp())


@cache
def run_study(command: str) -> str:
    arguments = shlex.split(command)[1:]
    if arguments[0] == "watch":
        return watch(arguments, folder())
    return run([sys.executable, "-m", "fedtmle", *arguments], folder())


@cache
def run_here(command: str) -> str:
    """A command on the repository itself, once for all pages that have it."""
    return run(shlex.split(command), BROWSER="cat %s")


def watch(arguments: list[str], folder: Path) -> str:
    """`watch` goes on until it is stopped; meanwhile its page is there."""
    command = [sys.executable, "-m", "fedtmle", *arguments, "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            url = next(word for word in line.split() if word.startswith("http://"))
            with urllib.request.urlopen(url, timeout=60) as reply:  # noqa: S310 - our own server
                assert reply.status == 200
        finally:
            server.terminate()
        assert server.wait(60) == 0
    return line


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page) and page not in ELSEWHERE])
def test_every_command_runs_in_its_order(page: str) -> None:
    """Those that themselves run tests are checked to exist; the others run, studies in a folder apart."""
    for command in commands(page):
        if command in RUNNING_TESTS:
            assert run(["make", "--dry-run", *command.split()[1:]]).strip()
        elif command.startswith(FEDTMLE):
            assert run_study(command).strip()
        else:
            assert run_here(command).strip()


def test_two_commands_lead_to_an_estimate_and_an_open_report() -> None:
    """With a browser that only prints what it is given."""
    first, second = commands("docs/index.md")[:2]
    assert [first, second] == commands("README.md")[:2] == ["make demo", "python3 -m webbrowser report.html"]
    printed = run_here(first)
    assert re.search(r"federated +985 .* 7\.20 to 11\.48", printed)
    assert (ROOT / "report.html").as_uri() in printed
    assert "<!DOCTYPE html>" in run_here(second)


def test_the_readme_shows_the_study_commands() -> None:
    verbs = [command.split()[1] for command in commands("README.md") if command.startswith(FEDTMLE)]
    assert verbs == ["init", "validate", "preflight", "run", "show", "report", "watch"]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in ELSEWHERE])
def test_every_example_runs(page: str, tmp_path: Path) -> None:
    """A page's examples belong together."""
    assert run([sys.executable, "-W", "error", "-c", "\n".join(blocks(page, "python"))], tmp_path).strip()


def test_inline_commands_run() -> None:
    found = re.findall(r"`(\.venv/bin/fedtmle [^`]*)`", README)
    assert found
    for command in found:
        assert run([sys.executable, "-m", "fedtmle", *command.split()[1:]]).strip()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_named_exists(page: str) -> None:
    """`fedtmle verb --option` in running text: the verb and the options are there; so are make's targets."""
    for words in re.findall(r"`(?:\.venv/bin/)?fedtmle ([a-z][^`]*)`", PAGES[page]):
        command: Any = typer.main.get_command(app)
        for word in words.split():
            if word in getattr(command, "commands", {}):
                command = base.command(word) or command.commands[word]
        assert command.name in words.split(), (page, words)
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= options | {"--help"}, (page, words)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)`", PAGES[page]):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), (page, target)


def test_the_class_in_the_targets_page_has_50_lines() -> None:
    (code,) = (block for block in blocks("docs/target.md", "python") if "class Share" in block)
    lines = [line for line in code[code.index("@dataclass") :].splitlines() if line.strip()]
    assert len(lines) <= 50
