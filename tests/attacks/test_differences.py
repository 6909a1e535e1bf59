"""Differences of sums are judged under masks too, and honest studies of the same form are answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.leverage import PersonRows
from fedtmle.programs.imputation import differing_sums
from fedtmle.programs.missing import MissingCounts
from fedtmle.protocol.fits import FitQuery
from fedtmle.protocol.subjects import FoldRows, Hazards, _side_by_side
from fedtmle.targets.effects.prepare import WithoutFold
from tests.attacks.combinations import VARIABLES
from tests.attacks.differences import AloneInAFold, LoneFit, ManyCompletions, TwoCauses, TwoGrids
from tests.attacks.invented import ROW
from tests.attacks.over_time import first_sums
from tests.attacks.settings import RefusedBySiloError, Server, Setting
from tests.attacks.small import Columns

KINDS = (AloneInAFold, TwoGrids, TwoCauses, ManyCompletions, LoneFit)
REFUSED = [
    *((kind, Setting.OPEN, "min_people") for kind in KINDS),
    (AloneInAFold, Setting.MASKED, "min_pooled"),
    (AloneInAFold, Setting.COLLUDING, "min_people"),
    (TwoGrids, Setting.MASKED, "min_pooled"),
    (TwoGrids, Setting.COLLUDING, "min_people"),
    (TwoCauses, Setting.MASKED, "min_pooled"),
    (TwoCauses, Setting.COLLUDING, "min_people"),
    (ManyCompletions, Setting.MASKED, "min_pooled"),
    (LoneFit, Setting.MASKED, "min_people"),
]


@pytest.mark.parametrize(("kind", "setting", "key"), REFUSED)
def test_it_is_refused_in_each_setting(kind: type, setting: Setting, key: str) -> None:
    attack = kind()
    attack.setting = setting
    if kind is not LoneFit or setting is Setting.OPEN:  # masks hide one fit, which is judged anyway
        assert attack.works(attack.run(attack.victim(attack.open_keeper())))
    victim = attack.victim(attack.keeper(attack.guarded()))
    with pytest.raises(RefusedBySiloError):
        attack.run(victim)
    assert victim.refused_by == key


class ManyInEachFold(AloneInAFold):
    """The same study, where a quarter of the people of every silo have the covariate."""

    def columns(self) -> Columns:
        return {**super().columns(), "hiv": (ROW % 4 == 1) * 1.0}

    def common(self) -> Columns:
        return self.columns()


@pytest.mark.parametrize("setting", Setting)
def test_a_covariate_that_many_have_in_each_fold_is_answered(setting: Setting) -> None:
    attack = ManyInEachFold()
    attack.setting = setting
    attack.run(attack.victim(attack.keeper(attack.guarded())))


@pytest.mark.parametrize("folds", [2, 3])
def test_folds_are_looked_at_if_there_are_three_or_more(folds: int) -> None:
    """The sum without one of two folds is that over the other, which is judged anyway."""
    attack = ManyInEachFold()
    attack.setting = Setting.MASKED
    attack.options = {**attack.options, "folds": folds}
    server, answer = attack.server(attack.victim(attack.keeper(attack.guarded())))
    first_sums(server, answer, WithoutFold)
    subjects = [gram.subject for look in server.looks for gram in look]
    in_folds = [subject for subject in subjects if isinstance(subject, FoldRows)]
    assert {subject.left_out.fold for subject in in_folds} == (set() if folds == 2 else {0, 1, 2})
    assert not any(subject.has_floor for subject in in_folds)


class CrossFittedHazards(TwoGrids):
    """Where many have events, of a covariate that many have in each fold."""

    def study(self) -> ft.Study:
        return replace(super().study(), folds=3)

    def common(self) -> Columns:
        columns = super().common()
        time, event = 0.25 + ROW % 16 / 4, ROW % 3 > 0
        return {**columns, "time": np.where(event, time, 4.0), "event": event * 1.0}

    def columns(self) -> Columns:
        return self.common()


def test_hazards_without_a_fold_are_looked_at_by_fold() -> None:
    """All responses without one fold together, and each response within one."""
    attack = CrossFittedHazards()
    attack.setting = Setting.MASKED
    server, answer = attack.server(attack.victim(attack.keeper(attack.guarded())))
    first_sums(server, answer, WithoutFold)
    subjects = [gram.subject for look in server.looks for gram in look]
    together = [subject for subject in subjects if isinstance(subject, Hazards)]
    assert {union.facts.left_out for subject in together for union in subject.unions} == {
        each.left_out for each in subjects if isinstance(each, FoldRows) and each.is_summed
    }
    assert all(len({union.facts.left_out for union in each.unions}) == 1 for each in together)


class RetiringFit(LoneFit):
    """The same, where silos count whose fit is zero before they send it."""

    options = {"algorithm": ft.Personalized(lattice=2.0**-20, min_active=3)}  # noqa: RUF012 - read only


@pytest.mark.parametrize("setting", [Setting.OPEN, Setting.MASKED])
def test_the_fit_is_judged_before_it_is_counted(setting: Setting) -> None:
    attack = RetiringFit()
    attack.setting = setting
    victim = attack.victim(attack.keeper(attack.guarded()))
    with pytest.raises(RefusedBySiloError):
        until_fits(*attack.server(victim))
    assert victim.refused_by == "min_people"


def until_fits(server: Server, answer: Any) -> None:
    """Go on honestly until fits are asked, without going further."""
    while not isinstance(server.query, FitQuery):
        answer = server.go_on(answer)


@pytest.mark.parametrize(
    ("formula", "columns"),
    [("w", 1), ("w + a:w + I(w**2)", 3), ("w + C(site):w", 2), ("w + l", 1), ("w:l", 0), ("smoker", 0)],
)
def test_sums_by_which_completions_differ_are_counted(formula: str, columns: int) -> None:
    """Columns that read another imputed variable differ in more people, and do not count."""
    missing = {name: {"kind": "number", "range": (-1, 1), "missing": "impute"} for name in "wl"}
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + " + formula),
        treatment_model=ft.GLM("1"),
        variables=ft.Variables({**VARIABLES, **missing}),
        imputations=7,
    )
    counts = MissingCounts(n=100, counts={"w": 10, "l": 20})
    assert differing_sums(study, "w", counts, study.levels) == 6 * columns


def test_people_are_put_side_by_side_whatever_the_pieces() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.normal(size=(dim, 100)) for dim in (2, 1, 3)]
    cuts = [(30, 60), (), (1, 2, 99)]
    pieces = [
        iter([PersonRows(each) for each in np.split(part, cut, axis=1)])
        for part, cut in zip(parts, cuts, strict=True)
    ]
    joined = np.concatenate([piece.rows for piece in _side_by_side(pieces)], axis=1)
    assert np.array_equal(joined, np.concatenate(parts))
