"""The policy: ten keys, stricter at will, laxer only with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_blocks import PLAN

from fedtmle_core.errors import InputError
from fedtmle_core.policy import Policy


def test_there_are_at_most_ten_keys_and_each_is_a_sentence() -> None:
    sentences = Policy.sentences()
    assert len(sentences) <= 10
    assert all(sentence.endswith(".") for sentence in sentences.values())


def test_one_key_says_no_cell_under_eleven() -> None:
    assert Policy.read({"floor": 11}).floor == 11


@pytest.mark.parametrize(
    ("name", "value"), [("floor", 4), ("min_hospitals", 2), ("max_numbers", 30_000), ("lifetime_days", 31)]
)
def test_a_laxer_key_needs_a_reason(name: str, value: int) -> None:
    with pytest.raises(InputError, match=f"{name}: .*reason"):
        Policy.read({name: value})
    with pytest.raises(InputError, match=f"{name}: .*reason"):
        Policy.read({name: value, "reasons": {name: "  "}})
    policy = Policy.read({name: value, "reasons": {name: "one institution"}})
    assert policy.laxer == ((name, "one institution"),)


def test_a_stricter_key_needs_none() -> None:
    policy = Policy.read({"floor": 20, "min_hospitals": 5, "max_numbers": 10, "max_epsilon": 1})
    assert policy.laxer == ()


@pytest.mark.parametrize(
    "table",
    [
        {"flor": 11},
        {"floor": "11"},
        {"floor": True},
        {"floor": 0},
        {"floor": 5.5},
        {"max_epsilon": 0},
        {"max_epsilon": "none"},
        {"authors": "me"},
        {"authors": [""]},
        {"allow_code": [1]},
        {"release": 1},
        {"reasons": "none"},
        {"reasons": {"floor": 1}},
        {"reasons": {"flor": "a typing error"}},
        {"reasons": {"floor": "x" * 301}},
        {"reasons": {"floor": "two\nlines"}},
    ],
)
def test_what_is_no_policy_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Policy.read(table)


def test_a_misspelt_key_is_suggested() -> None:
    with pytest.raises(InputError, match="did you mean 'floor'"):
        Policy.read({"flor": 11})


def test_a_plan_keeps_to_the_policy() -> None:
    policy = Policy(authors=("author",))
    assert policy.refuses(replace(PLAN, most_numbers=100)) == ""
    for name, change in {
        "floor": {"floor": 4},
        "min_hospitals": {"min_hospitals": 2},
        "max_numbers": {"most_numbers": 20_001},
        "authors": {"author": "somebody"},
    }.items():
        assert policy.refuses(replace(PLAN, **{"most_numbers": 100, **change})) == name  # type: ignore[arg-type]
