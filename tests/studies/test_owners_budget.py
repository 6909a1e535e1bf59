"""What all studies with noise may take of a silo's people: the owner's budget, kept by the ledger."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.cli.base import Exit
from fedtmle.data import read_silo_file
from fedtmle.errors import JournalError, RefusedError
from fedtmle.model.budget import OWNER_DELTA, epsilon_of, rho_of
from fedtmle.protocol.guard import RefusalError
from fedtmle.runtime import ledger
from fedtmle.runtime import silo as silo_module
from fedtmle.runtime.records import Records
from fedtmle.studies.approval import review
from fedtmle.studies.preview import preview
from fedtmle.studyfile.file import StudyFile, file_plan
from tests.attacks.across import NEWCOMER, Hospitals

NAMES = ["p", "q", "r"]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(silo_module, "discrete_gaussian", lambda _variance, _below: 3)


def private(hospitals: Hospitals, seed: int, epsilon: float = 1.0, **more: object) -> StudyFile:
    keys = {"epsilon": epsilon, **more}
    text = "\n[privacy]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
    return hospitals.study(NAMES, seed=seed, masked=True, more=text)


def last_key(hospitals: Hospitals, name: str = "p") -> str:
    return [line["key"] for line in ledger.read(hospitals.home(name).ledger_path)][-1]


def test_studies_add_up_and_the_one_beyond_the_budget_is_refused(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, NAMES, policy="max_epsilon_total = 1.5\n")
    both = epsilon_of(2 * float(rho_of(1.0, 1e-6)), OWNER_DELTA)
    assert 1.4 < both < 1.5  # less than 2: zCDP is added, and converted once
    for seed in (1, 2):
        hospitals.run(private(hospitals, seed))
    third = private(hospitals, 3)
    budget = review(third, hospitals.home("p")).budget
    assert budget is not None
    assert budget.before == pytest.approx(both, rel=1e-9)
    assert budget.study == pytest.approx(1.0, rel=1e-9)
    with pytest.raises(RefusedError):
        hospitals.run(third)
    assert last_key(hospitals) == "memory: max_epsilon_total"
    view = preview(file_plan(third), read_silo_file(third.silos["p"]))
    assert view.refused_by == "memory: max_epsilon_total"
    small = private(hospitals, 4, 0.1)  # what is left is enough for it
    hospitals.run(small)


def test_the_owner_sees_the_budget_before_approving_and_in_the_assessment(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, NAMES, policy="max_epsilon_total = 1.2\n")
    hospitals.run(private(hospitals, 1))
    second = private(hospitals, 2)
    silo = str(hospitals.folder / "p" / "silo.toml")
    ran = CliRunner().invoke(app, ["silo", "approve", str(second.path), "--silo", silo, "--yes"])
    words = " ".join(ran.output.split())
    assert ran.exit_code == int(Exit.REFUSED)
    assert "epsilon of this study 1, of earlier ones with noise 1, of all together 1.45" in words
    assert "more than you allow" in words
    ran = CliRunner().invoke(app, ["silo", "assess", str(second.path), "--silo", silo])
    assert ran.exit_code == 0
    assert "| budget across studies | epsilon of this study 1," in ran.output
    assert "your limit (max_epsilon_total): 1.2" in ran.output


@pytest.mark.parametrize("key", ["max_epsilon", "max_epsilon_total"])
def test_one_study_may_be_too_much_and_sums_without_noise_always_are(tmp_path: Path, key: str) -> None:
    hospitals = Hospitals(tmp_path, NAMES, policy=f"{key} = 0.5\n")
    for study in (private(hospitals, 1), hospitals.study(NAMES, seed=2, masked=True)):
        with pytest.raises(RefusedError):
            hospitals.run(study)
        assert last_key(hospitals).removeprefix("memory: ") == key
        view = preview(file_plan(study), read_silo_file(study.silos["p"]))
        assert view.refused_by.removeprefix("memory: ") == key
    hospitals.run(private(hospitals, 3, 0.5))


def test_the_study_s_delta_does_not_hide_its_cost(tmp_path: Path) -> None:
    """The owner's epsilon is at delta = 1e-6, whatever the study declares."""
    hospitals = Hospitals(tmp_path, NAMES, policy="max_epsilon = 1.0\n")
    with pytest.raises(RefusedError):
        hospitals.run(private(hospitals, 1, 1.0, delta=1e-4))
    assert last_key(hospitals) == "max_epsilon"
    hospitals.run(private(hospitals, 2, 1.0, delta=1e-8))


def test_noise_that_suffices_against_fewer_colluders_is_refused(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, NAMES)
    with pytest.raises(RefusedError):
        hospitals.run(private(hospitals, 1, colluders=0))
    assert last_key(hospitals) == "colluders"


def test_a_study_counts_in_full_from_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops after its first round has taken the whole budget; its resumption takes no more."""
    hospitals = Hospitals(tmp_path, NAMES, policy="max_epsilon_total = 1.2\n")
    plain, answers = Records.keep, 0

    def keep(self: Records, *given: object) -> None:
        nonlocal answers
        answers += 1
        if answers > 7:  # three openings, three first answers, and one more
            raise JournalError("the disk is full")
        plain(self, *given)  # type: ignore[arg-type]  # as they came

    study = private(hospitals, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Records, "keep", keep)
        with pytest.raises(RefusedError):
            hospitals.run(study)
    with pytest.raises(RefusedError):
        hospitals.run(private(hospitals, 2))
    assert last_key(hospitals) == "memory: max_epsilon_total"
    with pytest.raises(RefusedError):  # the journal of the first is held by the plan: it goes on, or nothing
        hospitals.run(private(hospitals, 3, 0.9))
    told = hospitals.home("p").earlier()
    assert list(told) == [file_plan(study).digest.hex()]
    ((_, record),) = told.values()
    assert Fraction(record.zcdp) == ft.Privacy(epsilon=1.0).taken


def test_two_studies_that_begin_at_once_cannot_both_take_the_rest(tmp_path: Path) -> None:
    """The home looks again under its lock, where no other silo and no other process can remember a study."""
    hospitals = Hospitals(tmp_path, NAMES, policy="max_epsilon_total = 1.2\n")
    home, plans = hospitals.home("p"), [file_plan(private(hospitals, seed)) for seed in (1, 2)]
    begun = [home.read(plan)[1] for plan in plans]
    for memory, plan in zip(begun, plans, strict=True):
        assert memory is not None
        assert not memory.refusal(plan)  # each could be answered alone
    first, second = begun
    assert first is not None
    first.record_scope(plans[0])
    first.record_scope(plans[0])  # again, after a restart
    assert second is not None
    with pytest.raises(RefusalError) as refused:
        second.record_scope(plans[1])
    assert refused.value.key == "memory: max_epsilon_total"


def test_the_budget_is_that_of_all_silos_of_the_institution(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, NAMES, policy="max_epsilon_total = 1.2\n")
    other = tmp_path / "q" / "silo.toml"
    other.write_text(other.read_text().replace('home = "home"', f'home = "{tmp_path / "p" / "home"}"'))
    hospitals.run(private(hospitals, 1))
    budget = review(private(hospitals, 3), hospitals.home("q")).budget
    assert budget is not None
    assert budget.before == pytest.approx(1.0, rel=1e-9)
    with pytest.raises(RefusedError):
        hospitals.run(private(hospitals, 3))
    assert [last_key(hospitals, name) for name in "pq"] == ["memory: max_epsilon_total"] * 2


def test_refreshed_rows_are_covered_by_the_noise(tmp_path: Path) -> None:
    """A newcomer between two exact studies is refused; with noise in either, the difference is covered."""
    hospitals = Hospitals(tmp_path, NAMES)
    hospitals.run(private(hospitals, 1))
    hospitals.add("p", NEWCOMER)
    hospitals.run(private(hospitals, 2))
    hospitals.run(hospitals.study(NAMES, seed=3, masked=True))
    hospitals.add("p", NEWCOMER)
    hospitals.run(private(hospitals, 4))
    exact = file_plan(hospitals.study(NAMES, seed=5, masked=True))
    home = hospitals.home("p")
    assert home.conflicts(exact, {}) == ()
    assert home.read(exact)[0].n_rows == len(hospitals.rows("p")) - 1  # the second newcomer is left out
    hospitals.write("p", hospitals.rows("p")[1:])
    assert {each.key for each in home.conflicts(exact, {})} == {"min_cell", "colluders"}


def test_a_lowered_limit_of_bits_needs_a_budget_for_noise(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, NAMES, policy="max_bits = 1.5\n")
    with pytest.raises(RefusedError):
        hospitals.run(private(hospitals, 1))
    assert last_key(hospitals) == "memory: max_bits"
    study = private(hospitals, 2)
    view = preview(file_plan(study), read_silo_file(study.silos["p"]))
    assert view.refused_by == "memory: max_bits"
    assert "state max_epsilon_total in [policy] for them" in view.conflicts[0].text
    budgeted = Hospitals(tmp_path / "2", NAMES, policy="max_bits = 1.5\nmax_epsilon_total = 2.0\n")
    budgeted.run(private(budgeted, 1))


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("shares", [(0.15, 0.1, 0.75), (0.3, 0.3, 0.4), (1 / 3, 1 / 3, 1 / 3)])
def test_what_is_taken_is_all_that_the_rounds_spend(epsilon: float, shares: tuple[float, ...]) -> None:
    gram, gradients, closing = shares
    privacy = ft.Privacy(epsilon=epsilon, gram=gram, gradients=gradients, closing=closing)
    rounds = (privacy.part(gram), *[privacy.part(gradients / 2)] * 2, privacy.part(closing))
    assert sum(rounds) < privacy.taken < sum(rounds) + Fraction(1, 1 << 199)
    assert privacy.taken <= privacy.rho * (1 + Fraction(1, 10**9))
