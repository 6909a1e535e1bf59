"""docs/threats.md says what the attacks do, and its figures are those that come out."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.initial.superlearner import SMALLEST_LEAF
from fedtmle.protocol.plan import roster
from fedtmle.protocol.policy import Policy
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.attacks import limits
from tests.attacks.decoded import OneRetires, SumOfFits
from tests.attacks.honest import run_honest
from tests.attacks.settings import Setting
from tests.attacks.test_attacks import ATTACKS, WORKING
from tests.attacks.threats import PAGE, rewritten, words
from tests.narrow import load_all

TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())


def test_the_table_is_that_of_the_attacks() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "python -m tests.attacks.threats"


@pytest.mark.parametrize("key", [key for key, *_ in Policy.limits() if key not in ("min_cell", "release")])
def test_every_key_is_on_the_page(key: str) -> None:
    assert f"`{key}" in TEXT


def test_the_last_record_follows_from_the_others() -> None:
    assert limits.all_others_known() < 1e-12
    assert "error below 1e-12" in TEXT


def test_two_false_gradients_count_the_treated() -> None:
    assert limits.steering_within_the_rules() == pytest.approx(limits.treated(), abs=1e-9)
    assert f"{limits.treated()} of 60, exactly" in TEXT


def test_a_steep_model_within_the_cap_counts_nearly() -> None:
    counted, true = limits.blurred_range_query()
    assert f"{counted:.1f} where {true} of 60" in TEXT


def test_rounded_answers_are_narrowed_down() -> None:
    error, width = limits.dithering_within_the_rules()
    assert f"{width:.3f} of the grid's spacing, with an error of {error:.3f} of it" in TEXT


def test_a_cell_of_one_is_told() -> None:
    assert limits.two_way_cell() == 1.0


def test_a_false_size_moves_the_average() -> None:
    honest, false = limits.false_size()
    assert f"average to {honest:.0f}; if the second says that it has 450 rows, to {false:.0f}" in TEXT


def test_four_hospitals_of_the_demo_would_refuse_it() -> None:
    tables = load_all(ihdp_silos(), schema_of(IHDP))
    few = []
    for table in tables.values():
        scored = ~np.isnan(table.numeric["iqsb_36"])
        count = int(np.count_nonzero((table.numeric["momhisp"] != 0) & scored))
        few += [count] if 0 < count < Policy().min_support else []
    few.sort()
    assert f"have {', '.join(map(str, few[:-1]))} and {few[-1]} of them" in TEXT
    plan = study_plan(IHDP, roster(list(tables)))
    assert run_honest(plan, tables) == ("refused", "min_support")


def test_combinations_that_are_not_judged() -> None:
    assert f"is to {100 * limits.combination_of_a_curvature():.0f} % one person" in TEXT
    once, difference = limits.difference_of_two_rounds()
    assert f"more than {100 * once:.0f} % of a combination" in TEXT
    assert f"person has {100 * difference:.0f} %" in TEXT


def test_one_event_among_twenty() -> None:
    y = np.zeros(20)
    y[0] = 1.0
    problem = ft.Mean()
    contributions = problem.submodel(problem.start(float(y.mean())), y)
    alone = contributions.look(np.zeros(1)).largest
    assert f"has {alone:.0%} of the sum of squares" in TEXT


@pytest.mark.parametrize("name", WORKING)
def test_what_still_works_does(name: str) -> None:
    """What the page says about it is what comes out under the default policy."""
    attack = copy.copy(WORKING[name])
    attack.setting = Setting.MASKED if attack.only_masked else Setting.OPEN
    learned = attack.run(attack.victim(attack.keeper(attack.guarded())))
    assert attack.works(learned)
    assert f'("{words(name)}")' in TEXT
    if name == "LookProducts":
        assert f"covariate as {learned:.3f} where it is 0.9" in TEXT
    if name == "OutlierInATable":
        assert f"is disclosed as {learned[1]:.0f} with the arm" in TEXT


def test_a_fine_lattice_of_fits_tells_the_counts_behind_them() -> None:
    sums = SumOfFits()
    assert sums.choices(2.0**-40) == 1
    assert round(sums.choices(2.0**-10), -3) == 25_000
    assert "only one choice of counts" in TEXT
    assert "some 25,000 choices are as near" in TEXT


def test_one_that_retires_leaves_its_own_mean() -> None:
    """Wherever the rule lets it leave, the two totals tell where it was."""
    retires = OneRetires()
    within = 0.5 * np.std(retires.rows(), ddof=1) / np.sqrt(len(retires.rows()))
    assert f"within {within:.2f} of its own mean, and two totals give that mean to 0.001" in TEXT


@pytest.mark.parametrize("name", ["TwoCompletions", "ManyCompletions"])
def test_a_lie_about_missing_values_is_believed_under_masks(name: str) -> None:
    attack = copy.copy(ATTACKS[name])
    attack.setting = Setting.COLLUDING
    assert attack.works(attack.run(attack.victim(attack.keeper(attack.guarded()))))
    assert '("two completions" and "many completions", last column)' in TEXT
    assert "fewer than `min_support` records of all silos" in TEXT


@pytest.mark.slow
def test_few_imputed_values_are_refused_in_open_studies() -> None:
    assert [limits.imputed_refusals(share) for share in (0.02, 0.05, 0.1)] == [8, 6, 0]
    assert "all with 2 % missing refuse, 6 of 8 with 5 % and none with 10 %" in TEXT


def test_a_released_estimate_tells_the_last_outcome() -> None:
    found = limits.released_estimate(12)
    assert f"{found} of 12 outcomes are found" in TEXT


def test_the_defaults_on_the_page() -> None:
    assert f"cap of {Policy().max_coefficient:.0f}" in TEXT
    assert f"made of {Policy().min_people} people in effect" in TEXT
    assert f"at least {SMALLEST_LEAF} rows" in TEXT
