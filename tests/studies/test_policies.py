"""A silo's own file says what it releases and guards; a study and its statistician cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.errors import InputError, RefusedError
from fedtmle.protocol.bins import BinsQuery
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.studyfile.file import StudyFileErrors, file_plan, read_study
from fedtmle.studyfile.template import write_template
from fedtmle.targets.effects.statistics import PropensityBins


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


def test_a_floor_joins_more_bins_in_the_results_diagnostics(study: Path) -> None:
    file = read_study(study)

    def bins() -> tuple[int, int]:
        """Return the smallest count that the south tells of a bin with people, and of all bins together."""
        run = ft.run(file.study, file.silos).run
        assert run is not None
        told: list[int] = []
        for heard in heard_rounds(file_plan(file), run.transcript, run.sizes):
            answers: Any = heard.query.split(heard.answers["south"])
            for query, answer in zip(heard.query.members, answers, strict=True):
                if isinstance(query, BinsQuery) and isinstance(query.bins, PropensityBins):
                    told += [cell.count for group in answer for cell in group if cell and cell.count]
        return min(told), sum(told)

    before, everyone = bins()
    state(study.parent / "south.toml", "min_cell = 40")
    smallest, still = bins()
    assert before < 40 <= smallest
    assert still == everyone


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
