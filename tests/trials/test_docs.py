"""The page `docs/emulate.md`: its trial file and commands run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "emulate.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_python_of_the_page_runs(
    eunomia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(eunomia, "eunomia.duckdb")
    (code,) = blocks("python")
    exec(code, {})  # noqa: S102 - our own page
    printed = capsys.readouterr().out
    assert printed.startswith("WITH ")
    assert "ATE" in printed
    assert "people=(672," in printed


def test_the_page_runs(eunomia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(eunomia, "eunomia.duckdb")
    trial, silo = blocks("toml")
    Path("trial.toml").write_text(trial, encoding="utf-8")
    commands, attrition, _, owner, on, later = blocks("text")
    assert [line.split()[:2] for line in (*on.splitlines(), *later.splitlines())] == [
        ["fedtmle", "emulate"]
    ] * 2
    assert len(owner.splitlines()) == 5  # tests/trials/test_deployed.py runs them
    printed = {}
    for command in commands.splitlines():
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
        printed[command] = done.output
    sql, owner, others, _, effect = printed.values()
    assert sql.count("-- silo ") == 4
    assert "people in the database                    672" in owner
    assert attrition in others
    assert attrition in effect
    assert "ATE" in effect
    assert Path("result.json").exists()
    assert Path("report.html").exists()
    # The silo's own file is read too, and its database is then not to be reached.
    Path("north.toml").write_text(silo, encoding="utf-8")
    Path("trial.toml").write_text(trial.partition("[silos.north]")[0] + '[silos]\nnorth = "north.toml"\n')
    monkeypatch.delenv("NORTH_CDM", raising=False)
    done = CliRunner().invoke(app, ["emulate", "trial.toml"])
    assert done.exit_code == 1
    assert "the environment variable NORTH_CDM, which should hold the database's URL," in done.output
