"""Attacks across studies succeed without what a silo remembers, and fail with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.errors import RefusedError
from fedtmle.protocol.messages import Reason
from fedtmle.runtime.ledger import read
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle_core.home import MOST_REFUSALS
from tests.attacks.across import NEWCOMER, Hospitals, newcomer
from tests.attacks.threats import PAGE

ONE = "p"


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def refused_by(hospitals: Hospitals, name: str) -> str:
    """The key of the policy in the last line of a hospital's ledger."""
    return list(read(hospitals.home(name).ledger_path))[-1]["key"]


@pytest.mark.parametrize("remembers", [False, True])
def test_the_same_study_before_and_after_one_person_came(tmp_path: Path, remembers: bool) -> None:
    """Attack 10 of the table: outcome, arm and covariate of the person who came, exactly."""
    hospitals = Hospitals(tmp_path, ["p", "q"])
    first = hospitals.run(hospitals.study(["p", "q"], seed=1), remembers=remembers)
    hospitals.add(ONE, NEWCOMER)
    second = hospitals.run(hospitals.study(["p", "q"], seed=2), remembers=remembers)
    if remembers:  # it is answered from the earlier snapshot: the sums are the same
        assert all(map(np.array_equal, first.sums(ONE), second.sums(ONE)))
        return
    assert newcomer(first, second, ONE) == pytest.approx(NEWCOMER, abs=1e-12)


@pytest.mark.parametrize("change", ["left", "corrected", "came, and another column is read"])
def test_a_person_who_left_or_was_corrected_is_no_less_told(tmp_path: Path, change: str) -> None:
    hospitals = Hospitals(tmp_path, ["p", "q"])
    hospitals.run(hospitals.study(["p", "q"], seed=1))
    rows = hospitals.rows(ONE)
    if change == "left":
        hospitals.write(ONE, rows[1:])
    elif change == "corrected":
        rows[7, 2] += 1.0
        hospitals.write(ONE, rows)
    else:  # a study that leaves out w still tells who came, by y and a
        hospitals.add(ONE, NEWCOMER)
    later = hospitals.study(["p", "q"], seed=2)
    if change.startswith("came"):
        text = later.path.read_text().replace('"C(a) + w"', '"C(a)"').replace('"w"', '"1"')
        later.path.write_text(text)
        answered = hospitals.run(read_study(later.path))
        assert dict(answered.finished.sizes)[ONE] == len(hospitals.rows(ONE)) - 1
        return
    with pytest.raises(RefusedError, match=Reason.POLICY.value):
        hospitals.run(later)
    assert refused_by(hospitals, ONE) == "memory: min_cell"


def test_a_refresh_of_many_people_and_no_refresh_are_answered(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, ["p", "q"])
    hospitals.run(hospitals.study(["p", "q"], seed=1))
    hospitals.write(ONE, hospitals.rows(ONE)[::-1])  # another order is no change
    hospitals.run(hospitals.study(["p", "q"], seed=2))
    random = np.random.default_rng(5)
    hospitals.add(ONE, *((1.0, float(k % 2), float(w)) for k, w in enumerate(random.uniform(20, 80, 40))))
    hospitals.run(hospitals.study(["p", "q"], seed=3))


# Four parts of a hospital, and one more person: A + B less A + C, and B + D less C + D, are both B less C.
PARTS = {"a": slice(0, 60), "b": slice(60, 100), "c": slice(100, 140), "d": slice(140, 199)}
REFRESHES = ("ab", "ac", "bd", "cd+")


def refreshed(hospitals: Hospitals, name: str, covariate: str, seed: int) -> StudyFile:
    """The hospital's table has these parts now, and the study reads y, a and one covariate."""
    rows = hospitals.everyone(ONE)
    chosen = [rows[PARTS[part]] for part in name.strip("+")] + ([rows[199:]] if "+" in name else [])
    hospitals.write(ONE, np.vstack(chosen))
    study = hospitals.study(["p", "q"], seed=seed)
    text = study.path.read_text()
    for old, new in (("w = {kind", f"{covariate} = {{kind"), ("C(a) + w", f"C(a) + {covariate}")):
        assert old in text
        text = text.replace(old, new)
    study.path.write_text(text.replace('formula = "w"', f'formula = "{covariate}"'))
    return read_study(study.path)


@pytest.mark.parametrize("person", [False, True])
@pytest.mark.parametrize("covariates", ["wwww", "wuvx"])
def test_refreshes_that_single_out_one_person_only_together(
    tmp_path: Path, covariates: str, person: bool
) -> None:
    """Any two of the four differ by many, each may read another covariate, and all tell of one person."""
    hospitals = Hospitals(tmp_path, ["p", "q"], person=person, covariates="wuvx")
    answered = []
    for seed, (name, covariate) in enumerate(zip(REFRESHES[:3], covariates, strict=False)):
        answered.append(hospitals.run(refreshed(hospitals, name, covariate, seed)))
    last = refreshed(hospitals, REFRESHES[3], covariates[3], 9)
    with pytest.raises(RefusedError):
        hospitals.run(last)
    assert refused_by(hospitals, ONE) == "memory: min_cell"
    answered.append(hospitals.run(last, remembers=False))  # what a silo that does not remember gives away
    # The first numbers of the treatment's gradient are about the constant: half of (1/2 - a), summed.
    constant = [study.sums(ONE)[1][0] for study in answered]
    y, a = hospitals.everyone(ONE)[199, :2]
    alone = constant[3] - constant[2] - constant[1] + constant[0]
    assert alone * 2 in (pytest.approx(0.5 - a), pytest.approx(0.5 - y))


@pytest.mark.parametrize("place", ["another silo file", "another folder", "another silo"])
def test_another_table_of_the_same_home_is_no_new_start(tmp_path: Path, place: str) -> None:
    """The home is the institution's. These files have one column more, and one person less."""
    hospitals = Hospitals(tmp_path, ["p", "q"], person=True)
    hospitals.run(hospitals.study(["p", "q"], seed=1))
    name = "r" if place == "another silo" else "p"
    folder = hospitals.folder / ("p" if place == "another silo file" else "elsewhere")
    folder.mkdir(exist_ok=True)
    table = (hospitals.folder / "p" / "table.csv").read_text().splitlines()
    del table[17]
    (folder / "other.csv").write_text(
        "\n".join(f"{line},{'more' * (k == 0) or k}" for k, line in enumerate(table))
    )
    silo = folder / "other.toml"
    home = hospitals.folder / "p" / "home"
    silo.write_text(f'[silo]\nname = "{name}"\nhome = "{home}"\n[data]\npath = "other.csv"\nperson = "id"\n')
    later = hospitals.study(["p", "q"], seed=2)
    text = later.path.read_text().replace('p = "p/silo.toml"', f'{name} = "{silo}"')
    later.path.write_text(text)
    study = read_study(later.path)
    found = Home.of(silo).conflicts(file_plan(study), None)
    assert [each.key for each in found] == ["min_cell"]
    assert "so few people of an earlier study left" in found[0].text.lower()
    assert "Here it is 1 person, and your limit is 5 (min_cell)" in found[0].text
    with pytest.raises(RefusedError):
        hospitals.run(study)


def test_a_corrected_record_is_seen_by_studies_that_read_its_column(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, ["p", "q"], person=True, covariates="wu")
    rows = hospitals.everyone(ONE)
    hospitals.run(refreshed(hospitals, "abcd+", "w", 1))
    before = rows[7, 2]
    rows[7, 2] += 1.0  # w
    hospitals.keep(ONE, rows)
    with pytest.raises(RefusedError):  # y and a are in both studies, but so is w in the first
        hospitals.run(refreshed(hospitals, "abcd+", "w", 2))
    assert refused_by(hospitals, ONE) == "memory: min_cell"
    rows[7, 2] = before
    rows[7, 3] += 1.0  # u, which no study has read
    hospitals.keep(ONE, rows)
    hospitals.run(refreshed(hospitals, "abcd+", "u", 3))


def test_refusals_are_charged_to_the_author_until_none_is_left(tmp_path: Path) -> None:
    """An author who cannot be told whether one person is there may ask five times a year."""
    hospitals = Hospitals(tmp_path, ["p", "q"])
    rows = hospitals.rows(ONE)
    hospitals.run(hospitals.study(["p", "q"], seed=1))
    for seed in range(2, 2 + MOST_REFUSALS):
        hospitals.write(ONE, np.delete(rows, seed, axis=0))
        with pytest.raises(RefusedError):
            hospitals.run(hospitals.study(["p", "q"], seed=seed))
        assert refused_by(hospitals, ONE) == "memory: min_cell"
    hospitals.write(ONE, rows)
    innocent = hospitals.study(["p", "q"], seed=99)
    with pytest.raises(RefusedError):
        hospitals.run(innocent)
    assert refused_by(hospitals, ONE) == "memory: refusals"
    silo = str(hospitals.folder / ONE / "silo.toml")
    said = CliRunner().invoke(app, ["silo", "home", "--silo", silo]).output
    assert "5 of 5 refusals a year are charged to servers without a key" in " ".join(said.split())
    pardoned = CliRunner().invoke(app, ["silo", "home", "--silo", silo, "--pardon", "unsigned"])
    assert pardoned.exit_code == 0, pardoned.output
    assert "refusals a year" not in " ".join(pardoned.output.split())
    hospitals.run(innocent)


@pytest.mark.parametrize("remembers", [False, True])
def test_masked_studies_whose_rosters_differ_by_one_silo(tmp_path: Path, remembers: bool) -> None:
    hospitals = Hospitals(tmp_path, ["p", "q", "r", "s"])
    first = hospitals.run(hospitals.study(["p", "q", "r"], seed=1, masked=True), remembers=remembers)
    later = hospitals.study(["p", "q", "r", "s"], seed=2, masked=True)
    if remembers:
        with pytest.raises(RefusedError, match=Reason.POLICY.value):
            hospitals.run(later)
        assert refused_by(hospitals, ONE) == "memory: colluders"
        return
    second = hospitals.run(later, remembers=False)
    treated, rows = hospitals.rows("s")[:, 1].sum(), len(hospitals.rows("s"))
    assert (second.totals() - first.totals())[:2].tolist() == [rows - treated, treated]  # of s alone


def test_rosters_that_differ_by_two_silos_tell_one_of_them_the_others_sums(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, ["p", "q", "r", "s", "t", "u"])
    hospitals.run(hospitals.study(["p", "r", "t"], seed=1, masked=True))
    with pytest.raises(RefusedError):
        hospitals.run(hospitals.study(["p", "q", "r", "s", "t"], seed=2, masked=True))
    assert refused_by(hospitals, ONE) == "memory: colluders"
    hospitals.run(hospitals.study(["p", "q", "r", "s", "t", "u"], seed=3, masked=True))
    hospitals.run(hospitals.study(["p", "r", "t"], seed=4, masked=True))  # the same roster again


def test_groups_of_looks_count_as_rosters(tmp_path: Path) -> None:
    """Six silos look in the groups p, r, t and q, s, u: with the totals of p, q, r, t has those of q."""
    hospitals = Hospitals(tmp_path, ["p", "q", "r", "s", "t", "u"])
    hospitals.run(hospitals.study(["p", "q", "r"], seed=1, masked=True))
    with pytest.raises(RefusedError):
        hospitals.run(hospitals.study(["p", "q", "r", "s", "t", "u"], seed=2, masked=True))
    assert refused_by(hospitals, ONE) == "memory: colluders"


def test_silos_that_the_owner_does_not_vouch_for_count_as_the_servers_own(tmp_path: Path) -> None:
    """Three that are in no other study hide one another, unless two may be the server's inventions."""
    hospitals = Hospitals(tmp_path, ["p", "q", "r", "s", "t", "u"])
    hospitals.run(hospitals.study(["p", "r", "t"], seed=1, masked=True))
    keys = [hospitals.home(name).key.public_keys.hex() for name in "qrt"]
    (hospitals.home(ONE).folder / "peers").write_text("\n".join(keys))
    with pytest.raises(RefusedError):
        hospitals.run(hospitals.study(["p", "q", "r", "s", "t", "u"], seed=2, masked=True))
    assert refused_by(hospitals, ONE) == "memory: colluders"


def test_two_studies_with_nearly_the_same_column_tell_a_person(tmp_path: Path) -> None:
    """Each is answered, the page says so, and one study with both columns is not."""
    hospitals = Hospitals(tmp_path, ["p", "q"])
    hospitals.add(ONE, NEWCOMER)
    spike = '"I(w + 1/(1 + (100000*(w - 61.25))**2))"'
    studies = [hospitals.study(["p", "q"], seed=seed) for seed in (1, 2)]
    text = studies[1].path.read_text()
    studies[1].path.write_text(text.replace('treatment]\nformula = "w"', f"treatment]\nformula = {spike}"))
    one, other = (hospitals.run(read_study(study.path)).sums(ONE)[0] for study in studies)
    alone = 128.0 * (other[1] - one[1])  # both columns are scaled by 1/128
    assert 0.5 - alone == pytest.approx(NEWCOMER[1], abs=1e-3)
    assert "the arm of one person follows, to 0.001" in " ".join(PAGE.read_text(encoding="utf-8").split())
    both = text.replace('treatment]\nformula = "w"', f'treatment]\nformula = {spike[:-1]} + w"')
    studies[0].path.write_text(both.replace("seed = 2", "seed = 3"))
    with pytest.raises(RefusedError, match=Reason.POLICY.value):
        hospitals.run(read_study(studies[0].path))
    assert refused_by(hospitals, ONE) == "min_people"
