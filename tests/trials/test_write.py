"""The files of a trial's study: the same study, the same tables, the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.errors import InputError
from fedtmle.studyfile.file import read_study
from fedtmle.trials.cohort import read_cohort
from fedtmle.trials.emulate import emulate, write_study
from fedtmle.trials.file import TrialFile
from tests.trials.test_eunomia import SILOS, STRICTER, TRIAL, in_duckdb, write
from tests.trials.test_file import FULL, read

HARD = r'"a \"quoted\" \\ name, \U0001F600"'  # as TOML writes it
NAMED = TRIAL.replace('name = "celecoxib"', f"name = {HARD}").replace('name = "diclofenac"', 'name = "NA"')


def written(file: TrialFile, folder: Path) -> Path:
    cohorts = {name: read_cohort(file.trial, cdm) for name, cdm in file.silos.items()}
    write_study(file, cohorts, folder)
    return folder / "study.toml"


@pytest.mark.parametrize("text", [TRIAL, STRICTER, NAMED])
def test_the_written_study_gives_the_same_result(text: str, eunomia: Path, tmp_path: Path) -> None:
    file = write(tmp_path, text, in_duckdb(eunomia))
    study = written(file, tmp_path / "study")
    assert read_study(study).study == file.trial.study
    checked = CliRunner().invoke(app, ["validate", str(study)])
    assert checked.exit_code == 0, checked.output
    ran = CliRunner().invoke(app, ["run", str(study), "--json"])
    assert ran.exit_code == 0, ran.output
    document = dict(emulate(file.trial, file.silos).result.document)
    del document["emulation"]
    assert json.loads(ran.output) == json.loads(json.dumps(document))


def test_table_1_of_the_written_study(eunomia: Path, tmp_path: Path) -> None:
    study = written(write(tmp_path, TRIAL, in_duckdb(eunomia)), tmp_path / "study")
    shown = CliRunner().invoke(app, ["preflight", str(study)])
    assert shown.exit_code == 0, shown.output
    assert "peptic_ulcer" in shown.output


def test_models_algorithm_and_options_are_written_as_they_were(tmp_path: Path) -> None:
    file = read(tmp_path, FULL)
    write_study(file, {}, tmp_path / "study")
    assert read_study(tmp_path / "study" / "study.toml").study == file.trial.study
    with pytest.raises(InputError, match="exists already"):
        write_study(file, {}, tmp_path / "study")


def test_an_owner_writes_their_own_table_only(eunomia: Path, tmp_path: Path) -> None:
    write(tmp_path, TRIAL, in_duckdb(eunomia))
    command = ["emulate", str(tmp_path / "trial.toml"), "--silo", "east", "--write", str(tmp_path / "mine")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        "east.counts.json",
        "east.parquet",
        "east.toml",
        "study.toml",
    ]
    assert list(read_study(tmp_path / "mine" / "study.toml").silos) == list(SILOS)
    assert (tmp_path / "mine").stat().st_mode & 0o077 == 0
