"""A silo's memory of earlier studies, as its owner meets it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.cli.base import Exit
from fedtmle.data import read_silo_file
from fedtmle.errors import InputError, JournalError, RefusedError
from fedtmle.privacy.audit import Attacker
from fedtmle.runtime import ledger
from fedtmle.studies.approval import review
from fedtmle.studies.preview import preview
from fedtmle.studies.risk import risk
from fedtmle.studies.validate import validate
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle.text.approval import render_preview
from tests.attacks.across import NEWCOMER, ROWS, Hospitals

BOTH = ["p", "q"]


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def approve(hospitals: Hospitals, study: StudyFile, name: str = "p") -> tuple[int, str]:
    silo = hospitals.folder / name / "silo.toml"
    ran = CliRunner().invoke(app, ["silo", "approve", str(study.path), "--silo", str(silo), "--yes"])
    return ran.exit_code, ran.output


def test_the_owner_sees_and_the_silo_refuses_by_one_rule(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, BOTH)
    first = hospitals.study(BOTH, seed=1)
    assert approve(hospitals, first)[0] == 0
    hospitals.run(first)
    hospitals.write("p", hospitals.rows("p")[1:])
    later = hospitals.study(BOTH, seed=2)
    code, output = approve(hospitals, later)
    assert code == int(Exit.REFUSED)
    words = " ".join(output.split())
    assert file_plan(first).digest.hex()[:16] in words
    assert "because of an earlier study (limit min_cell). Nothing would leave." in words
    again = " ".join(approve(hospitals, first, "q")[1].split())
    assert "This plan was answered here already: " in again
    assert "No other study was answered here." in again
    assert "Here it is 1 record, and your limit is 5 (min_cell); the earlier studies are" in words
    assert "wait until more have changed, or give the table that the earlier study had" in words
    assert "Your silo file names no column of the person (person in [data])" in words
    assert "Approved" not in words
    assert not hospitals.home("p").approvals.approves(file_plan(later).digest)
    view = preview(file_plan(later), read_silo_file(later.silos["p"]))
    assert view.refused_by == "memory: min_cell"
    with pytest.raises(RefusedError):
        hospitals.run(later)
    assert approve(hospitals, later, "q")[0] == 0  # whose rows did not change


def test_the_owner_approves_the_rows_of_the_earlier_snapshot(tmp_path: Path) -> None:
    """The approval is of those rows, and the run answers from them, whoever else comes meanwhile."""
    hospitals = Hospitals(tmp_path, BOTH)
    hospitals.run(hospitals.study(BOTH, seed=1))
    hospitals.add("p", NEWCOMER)
    later = hospitals.study(BOTH, seed=2)
    for name in BOTH:
        code, output = approve(hospitals, later, name)
        assert code == 0
        words = " ".join(output.split())
        assert ("1 of your rows are left out: fewer than 5 people came since earlier" in words) == (
            name == "p"
        )
    hospitals.add("p", NEWCOMER)
    answered = hospitals.run(later, approved=True)
    assert dict(answered.finished.sizes)["p"] == ROWS
    hospitals.add("p", *((1.0, float(k % 2), 30.0 + k) for k in range(3)))
    assert (
        "5 of your rows" not in approve(hospitals, hospitals.study(BOTH, seed=3))[1]
    )  # five came: they count


def test_the_home_adds_up_what_was_asked_about_the_same_people(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, BOTH)
    shown = ["silo", "home", "--silo", str(hospitals.folder / "p" / "silo.toml")]
    assert "No study was answered yet." in CliRunner().invoke(app, shown).output
    for seed in (1, 2):
        hospitals.run(hospitals.study(BOTH, seed=seed))
    accounts = ledger.studies(ledger.read(hospitals.home("p").ledger_path))
    words = " ".join(CliRunner().invoke(app, shown).output.split())
    numbers = f"{sum(each.numbers for each in accounts):,}"
    assert (
        "It remembers the people of 2 studies. About the same person, up to 2 of them were answered" in words
    )
    assert f"with {numbers} numbers in all" in words
    assert "whether the difference of two pooled results shows a person cannot be judged here" in words


def test_a_memory_that_lacks_an_answered_study_stops_the_silo(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, BOTH)
    hospitals.run(hospitals.study(BOTH, seed=1))
    home = hospitals.home("p")
    shutil.rmtree(home.file.home / "people")
    later = hospitals.study(BOTH, seed=2)
    with pytest.raises(JournalError, match="the memory lacks studies that were answered"):
        hospitals.run(later)
    code, output = approve(hospitals, later)
    assert code == 1
    assert "restore the home" in output


def test_the_policy_limits_what_all_studies_tell(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, BOTH, policy="max_bits = 1.5\n")
    first, second = (hospitals.study(BOTH, seed=seed) for seed in (1, 2))
    shown = review(first, hospitals.home("p"))
    assert shown.bits == {"y": 1.0, "a": 1.0}  # two values each: the audit finds some record of each
    assert shown.spent == {}
    for name in BOTH:
        assert approve(hospitals, first, name)[0] == 0
    hospitals.run(first, approved=True)
    assert review(second, hospitals.home("p")).spent == {"y": 1.0, "a": 1.0}
    code, output = approve(hospitals, second)
    assert code == int(Exit.REFUSED)
    assert "more than your 1.5" in " ".join(output.split())
    with pytest.raises(RefusedError):
        hospitals.run(second)
    assert [line["key"] for line in ledger.read(hospitals.home("p").ledger_path)][-1] == "memory: max_bits"


def test_a_first_study_that_discloses_too_much_is_refused_alike_by_all(tmp_path: Path) -> None:
    """Preview, approval and `validate` say the same, with the study itself as the reason."""
    hospitals = Hospitals(tmp_path, BOTH, policy="max_bits = 0.5\n")
    study = hospitals.study(BOTH, seed=1)
    file = read_silo_file(study.silos["p"])
    view = preview(file_plan(study), file)
    alone = "This study alone discloses up to 1.0 bits of one person's 'y': more than your 0.5"
    assert view.refused_by == "memory: max_bits"
    assert view.conflicts[0].text.startswith(alone)
    words = " ".join(render_preview(view).split())
    assert "would refuse this study here, by its key max_bits. Nothing would leave." in words
    assert alone in words
    found = [defect.text for defect in validate(study.path).defects]
    assert any(text.startswith("silo 'p': " + alone) for text in found), found
    code, output = approve(hospitals, study)
    words = " ".join(output.split())
    assert code == int(Exit.REFUSED)
    assert "Your silo will REFUSE this study: * This study alone discloses" in words
    assert "arlier studies disclosed" not in words
    assert render_preview(preview(file_plan(study), file)).endswith(render_preview(view)[-200:])


def test_the_budget_of_bits_in_the_guide_allows_three_studies(tmp_path: Path) -> None:
    """An outcome that is a number counts 20 bits in each."""
    guide = Path(__file__).parents[2] / "docs/first/owner.md"
    (stated,) = re.findall(r"without noise `(max_bits = \d+)`", guide.read_text(encoding="utf-8"))
    hospitals = Hospitals(tmp_path, BOTH, policy=f"{stated}\n")
    for name in BOTH:
        rows = hospitals.rows(name)
        rows[:, 0] += rows[:, 2] / 100
        hospitals.write(name, rows)
    number = '[variables]\ny = {kind = "number", range = [-3, 3]}'
    for seed in (1, 2, 3, 4):
        path = hospitals.study(BOTH, seed=seed).path
        path.write_text(path.read_text().replace('[variables]\ny = {kind = "binary"}', number))
        study = read_study(path)
        assert review(study, hospitals.home("p")).bits == {"y": 20.0, "a": 1.0}
        view = preview(file_plan(study), read_silo_file(study.silos["p"]))
        if seed < 4:
            assert not view.refused_by
            for name in BOTH:
                assert approve(hospitals, study, name)[0] == 0
            hospitals.run(study, approved=True)
    assert "Earlier studies disclosed up to 60.0 bits of one person's 'y'" in view.conflicts[0].text


def test_with_a_limit_a_study_that_was_not_audited_is_refused(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, BOTH, policy="max_bits = 1.5\n")
    with pytest.raises(RefusedError):
        hospitals.run(hospitals.study(BOTH, seed=1))  # approved without an audit
    assert [line["key"] for line in ledger.read(hospitals.home("p").ledger_path)][-1] == "memory: max_bits"


def test_the_ledger_names_what_a_study_was_told_of_and_no_record(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, BOTH)
    study = hospitals.study(BOTH, seed=1)
    hospitals.run(study)
    home = hospitals.home("p")
    lines = list(ledger.read(home.ledger_path))
    told = [(line["request"], line["told"]) for line in lines if line.get("told")]
    assert [request for request, _ in told] == ["begin"]
    ((_, record),) = told
    assert record is not None
    assert set(record.sources) == {"y", "a", "w"}
    assert record.roster == ("p", "q")
    (stored,) = (home.file.home / "people" / "sets").iterdir()
    assert stored.stat().st_size == 16 + 8 * ROWS
    stored.unlink()
    with pytest.raises(JournalError, match="a set of people is gone; restore"):
        home.read(file_plan(hospitals.study(BOTH, seed=2)))


def test_a_table_that_is_streamed_is_remembered_as_one_in_memory(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, BOTH)
    hospitals.run(hospitals.study(BOTH, seed=1))
    silo = hospitals.folder / "p" / "silo.toml"
    silo.write_text(silo.read_text().replace("[policy]", "stream = true\n\n[policy]"))
    hospitals.run(hospitals.study(BOTH, seed=2))
    assert len(list((hospitals.home("p").file.home / "people" / "sets").iterdir())) == 1
    hospitals.add("p", NEWCOMER)
    answered = hospitals.run(hospitals.study(BOTH, seed=3))
    assert dict(answered.finished.sizes)["p"] == ROWS
    hospitals.write("p", hospitals.rows("p")[1:])
    with pytest.raises(RefusedError):
        hospitals.run(hospitals.study(BOTH, seed=4))


def test_an_audit_of_a_masked_study_is_of_the_rows_that_were_told(tmp_path: Path) -> None:
    """With its own key a silo makes its masks again, and sees whether its rows gave what it sent."""
    three = ["p", "q", "r"]
    hospitals = Hospitals(tmp_path, three)
    study = hospitals.study(three, seed=1, masked=True)
    hospitals.run(study).finished.transcript.save(tmp_path / "transcript")
    found = risk(study, study.silos["p"], transcript=tmp_path / "transcript", attackers=[Attacker.OTHERS])
    assert not found.planned
    rows = hospitals.rows("p")
    rows[7, 2] += 0.5
    hospitals.write("p", rows)
    with pytest.raises(InputError, match="'p': its rows do not give the recorded answers"):
        risk(study, study.silos["p"], transcript=tmp_path / "transcript")
