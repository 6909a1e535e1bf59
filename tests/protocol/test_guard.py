"""The policy: floors rise and caps fall, the reverse takes a reason, and every key is read."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from fedtmle.errors import InputError
from fedtmle.lowered import LoweredLimit
from fedtmle.protocol.policy import UNGUARDED, Direction, Limit, Policy

LIMITS = Policy.limits()


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.name for limit in LIMITS])
def test_a_key_may_be_made_stricter_and_laxer_only_with_a_reason(limit: Limit) -> None:
    name, default, direction = limit.name, limit.default, limit.direction
    assert limit.meaning
    if direction is Direction.CONSENT:
        for choice in (not default,) if isinstance(default, bool) else (default - 1, default + 1):
            policy, mistakes = Policy.parse({name: choice})
            assert not mistakes
            assert getattr(policy, name) == choice
        return
    stricter, laxer = {
        Direction.FLOOR: (default + 1, default - 1),
        Direction.CAP: (default / 2, default * 2),
        Direction.PERMIT: (False, None),
    }[direction]
    policy, mistakes = Policy.parse({name: stricter})
    assert not mistakes
    assert getattr(policy, name) == stricter
    policy, mistakes = Policy.parse({name: laxer})
    assert list(mistakes) == [name]
    assert policy == Policy()
    policy, mistakes = Policy.parse({name: laxer, "reasons": {name: " decision\t12 "}})
    if laxer is None:
        assert list(mistakes) == [name]
        return
    assert not mistakes
    assert getattr(policy, name) == laxer
    assert policy.lowered == (LoweredLimit(name, float(laxer), "decision 12"),)
    assert policy.lower([]) == Policy()


@pytest.mark.parametrize("reason", ["", " ", 3, None, "a\x1b[2J", "a\u202eb", "x" * 301])
def test_a_reason_is_a_line_of_words(reason: Any) -> None:
    policy, mistakes = Policy.parse({"min_rows": 10, "reasons": {"min_rows": reason}})
    assert "expected a reason in words" in mistakes["min_rows"]
    assert policy == Policy()


@pytest.mark.parametrize("key", ["min_rows", "release", "allow_targets", "min_silo"])
def test_a_reason_for_what_is_not_lowered_is_named(key: str) -> None:
    stated = {"min_rows": 30, "release": True, "allow_targets": ["a"]}
    _, mistakes = Policy.parse({**stated, "reasons": {key: "why"}})
    assert list(mistakes) == ["reasons"]
    assert f"'{key}' is no limit" in mistakes["reasons"]
    assert list(Policy.parse({"reasons": "why"})[1]) == ["reasons"]


def test_lowered_limits_are_those_that_are_given() -> None:
    policy = Policy(min_people=3.0, min_rows=50).lower([LoweredLimit("min_people", 1.1, "a")])
    assert (policy.min_people, policy.min_rows) == (1.1, 50)
    other = policy.lower([LoweredLimit("max_queries", 6000.0, "b"), LoweredLimit("max_queries", 7000.0, "c")])
    assert (other.min_people, other.max_queries, other.reasons) == (1.2, 7000, {"max_queries": "c"})
    with pytest.raises(InputError, match="colluders: no limit of a policy has this name"):
        policy.lower([LoweredLimit("colluders", 0.0, "a")])


@pytest.mark.parametrize("value", ["5", None, -1, float("nan"), True, [1]])
def test_a_value_that_is_no_number_is_named(value: Any) -> None:
    policy, mistakes = Policy.parse({"min_rows": value, "min_silo": 3})
    assert set(mistakes) == {"min_rows", "min_silo"}
    assert "unknown key" in mistakes["min_silo"]
    assert policy == Policy()
    with pytest.raises(InputError, match="min_rows"):
        replace(Policy(), min_rows=value)


def test_unguarded_has_every_limit_off() -> None:
    off = UNGUARDED
    for key in (key for key in fields(Policy) if key.metadata):
        assert getattr(off, key.name) == key.metadata["off"]
    assert off.allow_targets is None
