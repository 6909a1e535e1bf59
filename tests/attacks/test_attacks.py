"""Every attack succeeds against an unguarded silo; a guarded one refuses it, and only by its guard."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path

import pytest

from fedtmle.runtime.ledger import read
from tests.attacks import (
    batches,
    combinations,
    decoded,
    differences,
    followup,
    invented,
    masked,
    over_time,
    protocol,
    small,
    steering,
    tabulated,
)
from tests.attacks.base import AbstractAttack
from tests.attacks.settings import RefusedBySiloError, Setting

ATTACKS: dict[str, AbstractAttack] = {
    type(attack).__name__: attack
    for module in (
        batches,
        steering,
        small,
        combinations,
        invented,
        over_time,
        differences,
        followup,
        protocol,
        masked,
        tabulated,
    )
    for attack in module.ATTACKS
}
WORKING: dict[str, AbstractAttack] = {
    type(attack).__name__: attack
    for module in (invented, over_time, decoded, followup, tabulated)
    for attack in module.WORKING
}
HIDDEN: dict[str, AbstractAttack] = {type(attack).__name__: attack for attack in over_time.HIDDEN}
SUPPRESSED: dict[str, AbstractAttack] = {type(attack).__name__: attack for attack in followup.SUPPRESSED}
BY_POLICY = {name: attack for name, attack in ATTACKS.items() if attack.keys}
BY_PROTOCOL = {name: attack for name, attack in ATTACKS.items() if not attack.keys}
EACH_KEY = [(name, key) for name, attack in BY_POLICY.items() for key in attack.keys]


@pytest.fixture(params=ATTACKS.values(), ids=list(ATTACKS))
def attack(request: pytest.FixtureRequest) -> AbstractAttack:
    found: AbstractAttack = request.param
    return found


def test_it_succeeds_against_an_unguarded_silo(
    attack: AbstractAttack, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack.disarm(monkeypatch)
    assert attack.works(attack.run(attack.victim(attack.open_keeper())))


def test_a_guarded_silo_refuses_it(attack: AbstractAttack, tmp_path: Path) -> None:
    with (
        closing(attack.keeper(attack.guarded(), tmp_path / "ledger")) as keeper,
        pytest.raises(RefusedBySiloError) as refused,
    ):
        attack.run(attack.victim(keeper))
    assert refused.value.reason is attack.reason
    last = list(read(tmp_path / "ledger"))[-1]
    assert last["decision"] == "refused"
    assert last["reason"] == attack.reason.name.lower()
    if attack.keys:
        assert last["key"] in attack.keys


@pytest.mark.parametrize("setting", [Setting.MASKED, Setting.COLLUDING])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_not_asked_for_is_not_learned(
    name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither guarded nor unguarded; if it were asked for, a guarded silo would answer."""
    attack = copy.copy(HIDDEN[name])
    attack.setting = setting
    for keeper in (attack.open_keeper(), attack.keeper(attack.guarded())):
        assert not attack.works(attack.run(attack.victim(keeper)))
    attack.disarm(monkeypatch)
    assert attack.works(attack.run(attack.victim(attack.keeper(attack.guarded()))))


@pytest.mark.parametrize("setting", Setting)
@pytest.mark.parametrize("name", SUPPRESSED)
def test_a_guarded_silo_hides_what_is_few(name: str, setting: Setting) -> None:
    """And goes on; with the key off, it is told."""
    attack = copy.copy(SUPPRESSED[name])
    attack.setting = setting
    assert not attack.works(attack.run(attack.victim(attack.keeper(attack.guarded()))))
    for keeper in (attack.open_keeper(), attack.keeper(attack.without(*attack.hidden_by))):
        assert attack.works(attack.run(attack.victim(keeper)))


@pytest.mark.parametrize("name", BY_POLICY)
def test_without_its_guard_it_succeeds_again(name: str) -> None:
    attack = BY_POLICY[name]
    keeper = attack.keeper(attack.without(*attack.keys))
    assert attack.works(attack.run(attack.victim(keeper)))


@pytest.mark.parametrize("name", BY_PROTOCOL)
def test_without_its_check_it_succeeds_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = BY_PROTOCOL[name]
    attack.disarm(monkeypatch)
    keeper = attack.disarmed_keeper()
    assert attack.works(attack.run(attack.victim(keeper)))


@pytest.mark.parametrize(("name", "key"), EACH_KEY)
def test_each_guard_stops_it_alone(name: str, key: str, tmp_path: Path) -> None:
    attack = BY_POLICY[name]
    others = [other for other in attack.keys if other != key]
    with (
        closing(attack.keeper(attack.without(*others), tmp_path / "ledger")) as keeper,
        pytest.raises(RefusedBySiloError) as refused,
    ):
        attack.run(attack.victim(keeper))
    last = list(read(tmp_path / "ledger"))[-1]
    assert (last["decision"], last["key"]) == ("refused", key)
    assert last["reason"] == refused.value.reason.name.lower()
