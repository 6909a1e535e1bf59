"""A silo notices which columns it has alone: their totals are its own sums, whatever the masks."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.protocol.masked import Asked
from fedtmle.runtime import silo as silo_module
from fedtmle.runtime.ledger import read, studies
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.studies.preview import Preview
from fedtmle.studyfile.schema import schema_of
from fedtmle.text.approval import shared_levels
from tests.attacks.over_time import OwnLevel
from tests.attacks.settings import RefusedBySiloError, Setting
from tests.narrow import load

MASKED = replace(IHDP, aggregation="masked")
GROUPS = (("a", "c", "e"), ("b", "d", "f"))


def alone(own: list[int], people: Any, liars: int, groups: Any = GROUPS) -> list[str]:
    """The columns that silo a finds, of those that so many of its people have."""
    labels = tuple(f"x{j}" for j in range(len(own)))
    subject: Any = SimpleNamespace(labels=labels, people=lambda _: np.array(own))
    local: Any = SimpleNamespace(name="a")
    return list(Asked(subject, np.eye(len(own)), -10, people).lone_columns(local, groups, liars))


@pytest.mark.parametrize(
    ("liars", "found"),
    [
        (0, ["x0"]),  # x0: nobody else; x1: others of the group; x2: others of the other group; x3: of both
        (1, ["x0", "x1", "x2"]),  # one group may hold a liar
        (5, ["x0", "x1", "x2"]),  # there is no third group to ask
    ],
)
def test_a_column_is_shared_if_more_groups_say_so_than_may_lie(liars: int, found: list[str]) -> None:
    own, people = [9, 9, 9, 9, 0], ((9, 12, 9, 12, 3), (0, 0, 4, 4, 0))
    assert alone(own, people, liars) == found


def test_one_group_is_believed() -> None:
    assert alone([9, 9, 0], ((9, 12, 3),), 1, (("a", "b", "c"),)) == ["x0"]


def test_each_hospital_of_the_demo_notices_its_own_level(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    begin = silo_module.Silo.__init__

    def watched(self: Any, *arguments: Any, **named: Any) -> None:
        made.append(self)
        begin(self, *arguments, **named)

    monkeypatch.setattr(silo_module.Silo, "__init__", watched)
    ft.run(MASKED, ihdp_silos(), policy=ft.Policy())
    found = {silo.name: silo.alone for silo in made[-8:]}
    assert found == {
        "hospital 1": ("the reference level of C(site)[8]",),
        **{f"hospital {k}": (f"C(site)[{k}]",) for k in range(2, 9)},
    }


@pytest.mark.parametrize(("few", "found"), [("a", ("the reference level of C(site)[f]",)), ("b", ())])
def test_a_rehearsal_names_the_levels_that_everyone_has(few: str, found: tuple[str, ...]) -> None:
    """It cannot know of the other silos; levels that some of its people have are not named."""
    attack = copy.copy(OwnLevel())
    attack.setting = Setting.MASKED
    plan, site = attack.plan(), np.where(np.arange(60) < 20, few, "a")
    rows = load({**attack.columns(), "site": site}, schema_of(attack.study()), silo="a")
    alone_plan = plan.alone("a")
    silo = silo_module.Silo(
        "a", alone_plan, rows, keeper=Keeper(policy=ft.Policy(min_silos=0), rehearses=plan)
    )
    Session(alone_plan, InProcess([silo])).run()
    assert silo.alone == found
    words = shared_levels(cast(Preview, SimpleNamespace(shared_levels=found)))
    assert len(words) == len(found)
    assert all(f"All your people are in {found[0]}. If no other silo" in each for each in words)


def test_an_owner_may_mind() -> None:
    with pytest.raises(ft.RefusedError, match="policy does not allow"):
        ft.run(MASKED, ihdp_silos(), policy=ft.Policy(allow_own_columns=False))


@pytest.mark.parametrize("setting", [Setting.MASKED, Setting.COLLUDING])
def test_a_level_of_each_silo_is_refused_if_the_owner_minds(setting: Setting, tmp_path: Path) -> None:
    """Though an accomplice says that its people have the column too."""
    attack = copy.copy(OwnLevel())
    attack.setting = setting
    policy = replace(attack.guarded(), allow_own_columns=False)
    with (
        closing(attack.keeper(policy, tmp_path / "ledger")) as keeper,
        pytest.raises(RefusedBySiloError),
    ):
        attack.run(attack.victim(keeper))
    last = list(read(tmp_path / "ledger"))[-1]
    assert (last["decision"], last["key"]) == ("refused", "allow_own_columns")
    assert "yours alone has people in" in last["explanation"]


def test_the_account_says_so(tmp_path: Path) -> None:
    attack = copy.copy(OwnLevel())
    attack.setting = Setting.MASKED
    with closing(attack.keeper(attack.guarded(), tmp_path / "ledger")) as keeper:
        assert attack.works(attack.run(attack.victim(keeper)))
    (account,) = studies(read(tmp_path / "ledger"))
    said = [kind.words for kind in account.kinds.values() if "yours alone has people in" in kind.words]
    assert len(said) == 1
    assert "the reference level of C(site)" in said[0]
