"""The owner is told of a study by a command of their own, without a shell."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from fedtmle.engine.post import command_of, notice_of, set_command, tell, tell_later
from fedtmle.errors import InputError


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Writes its arguments and its input to a file beside it."""
    path = tmp_path / "tell owner"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.args"; cat > "$0.in"; env > "$0.env"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_command_reads_the_notice_and_nothing_of_the_study_is_an_argument(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTMLE_SECRET", "x")
    study = tmp_path / "studies; touch owned" / f"{'ab' * 32}.toml"
    assert tell([str(program), "--to", "$(touch owned)"], notice_of("north", study)) == ""
    assert Path(f"{program}.args").read_text().splitlines() == ["--to", "$(touch owned)"]
    notice = json.loads(Path(f"{program}.in").read_text())
    assert notice["plan"] == "ab" * 32
    assert notice["study"] == str(study)
    assert notice["event"] == "study waits"
    assert not list(tmp_path.rglob("owned"))
    assert "FEDTMLE_SECRET" not in Path(f"{program}.env").read_text()


def test_a_command_that_fails_is_tried_again_and_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = tmp_path / "counts"
    fails = tmp_path / "fails"
    fails.write_text(f'#!/bin/sh\necho >> "{counts}"; exit 7\n')
    fails.chmod(0o700)
    tell_later([str(fails)], [notice_of("north", tmp_path / "x.toml")], pause=0.0).join(timeout=30)
    assert len(counts.read_text().splitlines()) == 3
    assert "it ended with 7" in caplog.text
    assert "could not be started" in tell([str(tmp_path / "none")], {})


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.engine.post.LIMIT", 0.3)
    assert "longer than 0.3 s" in tell(["/bin/sleep", "30"], {})


def test_the_command_is_kept_in_the_kit(program: Path, tmp_path: Path) -> None:
    assert command_of(tmp_path) == []
    set_command(tmp_path, [str(program), "a b"])
    assert command_of(tmp_path) == [str(program), "a b"]
    set_command(tmp_path, [])
    assert command_of(tmp_path) == []
    (tmp_path / "notice.json").write_text("[]")
    assert command_of(tmp_path) == []
    for wrong in ("mail", "./mail", str(tmp_path / "none")):
        with pytest.raises(InputError, match="whole path of a program"):
            set_command(tmp_path, [wrong])
