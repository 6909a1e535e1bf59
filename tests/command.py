"""The command line, called in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from fedtmle.cli import app


def invoke(*words: object) -> Result:
    """Run `fedtmle` with these words and return what it printed and its exit code."""
    return CliRunner().invoke(app, list(map(str, words)))


def called(*words: object, code: int = 0) -> str:
    """Return what `fedtmle` prints, with single spaces; it must end with this exit code."""
    done = invoke(*words)
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())
