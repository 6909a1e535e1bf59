"""Attacks across studies succeed without what a silo remembers, and fail with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtmle.errors import RefusedError
from fedtmle.protocol.messages import Reason
from fedtmle.runtime.ledger import read
from fedtmle.studyfile.file import read_study
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
    later = hospitals.study(["p", "q"], seed=2)
    if remembers:
        with pytest.raises(RefusedError, match=Reason.POLICY.value):
            hospitals.run(later)
        assert refused_by(hospitals, ONE) == "memory: min_people"
        return
    second = hospitals.run(later, remembers=False)
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
        later = read_study(later.path)
    with pytest.raises(RefusedError):
        hospitals.run(later)
    assert refused_by(hospitals, ONE) == "memory: min_people"


def test_a_refresh_of_many_people_and_no_refresh_are_answered(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, ["p", "q"])
    hospitals.run(hospitals.study(["p", "q"], seed=1))
    hospitals.write(ONE, hospitals.rows(ONE)[::-1])  # another order is no change
    hospitals.run(hospitals.study(["p", "q"], seed=2))
    random = np.random.default_rng(5)
    hospitals.add(ONE, *((1.0, float(k % 2), float(w)) for k, w in enumerate(random.uniform(20, 80, 40))))
    hospitals.run(hospitals.study(["p", "q"], seed=3))


def test_refreshes_that_single_out_one_person_only_together(tmp_path: Path) -> None:
    """A, A + B, A + C, then A + B + C without one of A: any two differ by many, and all four by that one."""
    hospitals = Hospitals(tmp_path, ["p", "q"])
    rows = hospitals.rows(ONE)
    for seed, chosen in enumerate((rows[:120], rows[:160], np.vstack([rows[:120], rows[160:]]))):
        hospitals.write(ONE, chosen)
        hospitals.run(hospitals.study(["p", "q"], seed=seed))
    hospitals.write(ONE, rows[1:])
    with pytest.raises(RefusedError):
        hospitals.run(hospitals.study(["p", "q"], seed=9))
    assert refused_by(hospitals, ONE) == "memory: min_people"


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
