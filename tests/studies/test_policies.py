"""A silo's own file says what it releases and guards; a study and its statistician cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.errors import InputError, RefusedError
from fedtmle.studyfile.file import StudyFileErrors, read_study
from fedtmle.studyfile.template import write_template


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_template(tmp_path, force=False)
    return tmp_path / "study.toml"


def state(path: Path, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    text += "" if "[policy]" in text else "\n[policy]\n"
    path.write_text(text.replace("[policy]", f"[policy]\n{line}\n#"), encoding="utf-8")


def test_a_silo_releases_its_estimate_in_its_own_file(study: Path) -> None:
    file = read_study(study)
    assert ft.run(file.study, file.silos).document["silos"] == {}
    state(study.parent / "south.toml", "release = true")
    found = ft.run(file.study, file.silos).document
    assert set(found["silos"]) == {"south"}
    assert found["without"] == {}


def test_nobody_can_consent_for_a_silo(study: Path) -> None:
    file = read_study(study)
    with pytest.raises(InputError, match="release: the silo file of 'north' does not allow it"):
        ft.run(file.study, file.silos, release=["north"])
    study.write_text(study.read_text(encoding="utf-8") + '\n[release]\nsilos = ["north"]\n', encoding="utf-8")
    with pytest.raises(StudyFileErrors, match="release: unknown section"):
        read_study(study)


def test_a_silo_files_policy_guards_its_rows_in_one_process_too(study: Path) -> None:
    file = read_study(study)
    state(study.parent / "south.toml", "min_rows = 200")  # it has 160
    with pytest.raises(RefusedError, match="south"):
        ft.run(file.study, file.silos)


def test_a_floor_hides_more_in_the_results_diagnostics(study: Path) -> None:
    file = read_study(study)

    def hidden() -> int:
        return sum(
            sum(h["hidden_in"]) for h in ft.run(file.study, file.silos).document["diagnostics"]["overlap"]
        )

    before = hidden()
    state(study.parent / "south.toml", "min_cell = 40")
    assert hidden() > before


def test_weights_per_silo_are_for_the_silos_of_the_run(study: Path) -> None:
    file = read_study(study)
    weights = {"north": 0.5, "east": 0.5}
    with pytest.raises(InputError, match="weights: expected one weight for each silo"):
        ft.run(
            ft.Study(
                target=file.study.target,
                outcome_model=file.study.outcome_model,
                treatment_model=file.study.treatment_model,
                missingness_model=file.study.missingness_model,
                algorithm=ft.LocalAverage(weights=weights),
                variables=file.study.variables,
            ),
            file.silos,
        )
