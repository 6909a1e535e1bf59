"""The files of a trial's study: the same study, the same tables, the same result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.data import read_silo_file
from fedtmle.data.source import read_cells
from fedtmle.errors import InputError
from fedtmle.model.table import Factor
from fedtmle.studyfile.file import file_plan, read_study
from fedtmle.trials.cohort import read_cohort
from fedtmle.trials.emulate import emulate, write_study
from fedtmle.trials.file import TrialFile
from tests.homes import home_at
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


@pytest.mark.parametrize("first", ["all", "all but few"])
def test_trials_whose_cohorts_differ_by_few_people_are_no_new_start(
    first: str, eunomia: Path, tmp_path: Path
) -> None:
    """Attack: a person's arm and age are the difference of two emulated trials, written to two folders."""
    sections = list(in_duckdb(eunomia))
    everyone = write(tmp_path, TRIAL, iter(sections))
    ages = read_cohort(everyone.trial, everyone.silos["east"]).columns["age"]
    oldest = next(age for age in np.unique(ages)[::-1] if 0 < np.count_nonzero(ages > age) < 5)
    few = int(np.count_nonzero(ages > oldest))
    homes = {}
    for name, limit in (("all", 100), ("all but few", oldest)):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        trial = write(folder, TRIAL.replace("age = [18, 100]", f"age = [18, {limit:.0f}]"), iter(sections))
        study = read_study(written(trial, folder / "study"))
        homes[name] = home_at(study.silos["east"]), file_plan(study)
    (second,) = homes.keys() - {first}
    assert homes[first][0].file.path.parent != homes[second][0].file.path.parent
    home, plan = homes[first]
    _, memory = home.read(plan)
    assert memory is not None
    memory.record_scope(plan)  # it was answered
    later, later_plan = homes[second]
    table, remembered = later.read(later_plan)
    assert remembered is not None
    if first == "all":
        assert [each.key for each in remembered.conflicts(later_plan)] == ["min_cell"]
        return
    assert table.n_rows == len(ages) - few  # the few are left out: it is answered about the same people
    assert remembered.conflicts(later_plan) == ()


def test_no_variable_of_a_trial_has_the_name_of_the_identifier(eunomia: Path, tmp_path: Path) -> None:
    text = TRIAL.replace("peptic_ulcer = {kind", "person_id = {kind")
    with pytest.raises(InputError, match="two columns of the table are called 'person_id'; rename one"):
        write(tmp_path, text, in_duckdb(eunomia))


def test_the_written_silo_file_has_the_home_and_the_identifiers_of_the_hospital(
    eunomia: Path, tmp_path: Path
) -> None:
    (tmp_path / "east.toml").write_text(
        f'[silo]\nname = "east"\nhome = "institution"\n[cdm]\ndatabase = "{eunomia}"\npart = [1, 4]\n'
    )
    sections = ['[silos]\neast = "east.toml"\nnorth = "north.toml"']
    (tmp_path / "north.toml").write_text(
        f'[silo]\nname = "north"\n[cdm]\ndatabase = "{eunomia}"\npart = [0, 4]\n'
    )
    study = written(write(tmp_path, TRIAL, iter(sections)), tmp_path / "study")
    files = {name: read_silo_file(path) for name, path in read_study(study).silos.items()}
    assert files["east"].home == tmp_path / "institution"
    assert files["north"].home != files["east"].home
    assert files["east"].person == "person_id"
    _, cells = read_cells(files["east"].data)
    identifiers = cells["person_id"]
    assert isinstance(identifiers, Factor)
    assert len(identifiers.levels) == len(identifiers.codes)
    assert all(int(each) % 4 == 1 for each in identifiers.levels)
