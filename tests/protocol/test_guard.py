"""The policy: floors only rise, caps only fall, and every key is read."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from fedtmle.errors import InputError
from fedtmle.protocol.policy import UNGUARDED, Direction, Limit, Policy

LIMITS = Policy.limits()


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.name for limit in LIMITS])
def test_a_key_may_be_made_stricter_and_never_laxer(limit: Limit) -> None:
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
