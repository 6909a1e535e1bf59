"""A trial emulated on a real deployment: each owner writes a table and approves; the bytes are the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.deploy.demo import local_deployment
from fedtmle.studyfile.file import StudyFile, read_study
from tests.command import invoke
from tests.databases.server import missing_programs
from tests.trials.test_eunomia import SILOS, TRIAL
from tests.trials.test_time import TIMED

pytest.importorskip("nvflare")


def owner(folder: Path, name: str, cdm: str, text: str) -> Path:
    """Do what the owner of a silo does with the trial file, and return the silo file of the study."""
    folder.mkdir()
    paths = "\n".join(f'{silo} = "{silo}.toml"' for silo in SILOS)
    (folder / "trial.toml").write_text(f"{text}\n[silos]\n{paths}\n", encoding="utf-8")
    (folder / f"{name}.toml").write_text(f'[silo]\nname = "{name}"\n\n[cdm]\n{cdm}\n', encoding="utf-8")
    shown = invoke("emulate", folder / "trial.toml", "--silo", name, "--sql")
    assert shown.exit_code == 0, shown.output
    done = invoke("emulate", folder / "trial.toml", "--silo", name, "--write", folder / "study")
    assert done.exit_code == 0, done.output
    return folder / "study" / f"{name}.toml"


@pytest.mark.slow
@pytest.mark.parametrize("text", [TRIAL, TIMED], ids=["risk", "time to the event"])
def test_a_deployed_emulation_has_the_bytes_of_the_embedded_one(
    text: str,
    eunomia: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two silos keep their CDM in DuckDB and two, if there is a server, in PostgreSQL."""
    place = dict.fromkeys(SILOS, f'database = "{eunomia}"')
    if missing_programs() is None:
        monkeypatch.setenv("CDM", request.getfixturevalue("urls").reader)
        place |= dict.fromkeys(SILOS[2:], 'database = {url_env = "CDM"}\nschema = "eunomia"')
    files = {
        name: owner(tmp_path / name, name, f"{place[name]}\npart = [{index}, 4]", text)
        for index, name in enumerate(SILOS)
    }
    study = read_study(tmp_path / "north" / "study" / "study.toml")
    assert os.environ.get("CDM") is None or "CDM" not in study.path.read_text()
    monkeypatch.delenv("CDM", raising=False)  # a deployed silo needs the table only
    consortium, trial = tmp_path / "consortium", tmp_path / "coordinator" / "trial.toml"
    trial.parent.mkdir()
    trial.write_text((tmp_path / "north" / "trial.toml").read_text(), encoding="utf-8")
    saved, page = tmp_path / "result.json", tmp_path / "report.html"
    counts = [word for n in SILOS for word in ("--counts", files[n].with_name(f"{n}.counts.json"))]
    with local_deployment(consortium, StudyFile(path=study.path, study=study.study, silos=files)):
        for name, file in files.items():
            for command in (["preview"], ["approve", "--yes"]):
                done = invoke("silo", *command, tmp_path / name / "study" / "study.toml", "--silo", file)
                assert done.exit_code == 0, done.output
        done = invoke(
            "emulate", trial, "--on", consortium, *counts, "--out", saved, "--report", page, "--quiet"
        )
        assert done.exit_code == 0, done.output
        again = invoke("emulate", trial, "--on", consortium)
        assert again.exit_code == 1
        assert "this plan was run already" in again.output
    embedded = ft.emulate(
        *_trial_and_silos(
            trial, text, {n: f'database = "{eunomia}"\npart = [{i}, 4]' for i, n in enumerate(SILOS)}
        )
    )
    here, there = json.loads(embedded.result.to_json()), json.loads(saved.read_text(encoding="utf-8"))
    assert there["transcript"] == here["transcript"]
    assert there["plan"] == here["plan"]
    del here["emulation"]["table1"]
    assert there == {**here, "emulation": {**here["emulation"], "not_shared": []}}
    assert there["emulation"]["silos"]["south"]["people"][0] == 670
    assert "Flow of people" in page.read_text(encoding="utf-8")


def _trial_and_silos(trial: Path, text: str, places: dict[str, str]) -> tuple[Any, Any]:
    from fedtmle.trials import read_trial

    sections = "\n".join(f"[silos.{name}]\n{place}" for name, place in places.items())
    path = trial.with_name("together.toml")
    path.write_text(f"{text}\n{sections}\n", encoding="utf-8")
    file = read_trial(path)
    return file.trial, file.silos
