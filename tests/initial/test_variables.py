"""The dictionary of a study: what is accepted, what is refused, and what follows from it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import InputError
from fedtmle.initial.variables import KINDS, Variable, Variables
from fedtmle.protocol.plan import canonical

AGE: dict[str, object] = {"kind": "number", "range": [18, 110], "unit": "years", "label": "Age at enrolment"}
SEX = {"kind": "category", "levels": {"f": "female", "m": "male"}}


def test_what_follows_from_a_dictionary() -> None:
    variables = Variables(
        {"age": AGE, "sex": SEX, "died": {"kind": "binary"}, "visits": Variable(kind="count", range=(0, 99))}
    )
    assert variables["age"] == Variable(
        kind="number", range=(18.0, 110.0), unit="years", label="Age at enrolment"
    )
    assert variables["sex"].codes == ("f", "m")
    assert variables.ranges == {"age": (18.0, 110.0), "died": (0.0, 1.0), "visits": (0.0, 99.0)}
    assert [variables.label(name) for name in ("age", "died")] == ["Age at enrolment", "died"]
    assert [variables[name].codes for name in ("age", "died")] == [(), ("0", "1")]


def test_the_plan_holds_every_word_of_it() -> None:
    base = canonical(Variables({"age": AGE}))
    changes: list[dict[str, object]] = [
        {"range": [18, 111]},
        {"unit": "months"},
        {"label": "Age"},
        {"kind": "count"},
    ]
    assert all(canonical(Variables({"age": {**AGE, **change}})) != base for change in changes)
    assert canonical(Variables({"Age": AGE})) != base
    assert canonical(Variables({"age": Variables({"age": AGE})["age"]})) == base


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"range": [0, 1]}, "kind: this is missing"),
        ({"kind": "text"}, "expected one of binary, number, count, category"),
        ({"kind": "number"}, "needs its least and its largest possible value"),
        ({"kind": "number", "range": [1, 0]}, "the first below the second"),
        ({"kind": "number", "range": [0, float("inf")]}, "two finite numbers"),
        ({"kind": "number", "range": [0, 1, 2]}, "two numbers"),
        ({"kind": "number", "range": [False, True]}, "two numbers"),
        ({"kind": "number", "range": "01"}, "two numbers"),
        ({"kind": "number", "range": [0, 1], "levels": ["0", "1"]}, "a variable with levels is a category"),
        ({"kind": "count", "range": [0, 2.5]}, "one whole number of at least 0 to another"),
        ({"kind": "count", "range": [-1, 5]}, "one whole number of at least 0 to another"),
        ({"kind": "category"}, "needs at least two"),
        ({"kind": "category", "levels": ["a"]}, "needs at least two"),
        ({"kind": "category", "levels": ["a", "a"]}, "two of them have the same code"),
        ({"kind": "category", "levels": ["a", ""]}, "must not be empty"),
        ({"kind": "category", "levels": ["a", " b"]}, "no blanks at its ends"),
        ({"kind": "category", "levels": "ab"}, "expected a list of codes"),
        ({"kind": "category", "levels": ["a", True]}, "text or a whole number"),
        ({"kind": "category", "levels": [str(k) for k in range(201)]}, "at most 200"),
        ({"kind": "category", "levels": ["a", "b"], "range": [0, 1]}, "has levels, not a range"),
        ({"kind": "binary", "levels": ["a", "b", "c"]}, "has two, that of 0 first, or none"),
        ({"kind": "binary", "label": "two\nlines"}, "one line"),
        ({"kind": "binary", "unit": 3}, "expected text"),
        ({"kind": "binary", "lable": "BMI"}, "lable: there is no such key; did you mean 'label'?"),
        ({"kind": "binary", "molar": 180}, "molar: there is no such key; there are kind, label, "),
    ],
)
def test_a_mistake_names_the_variable_and_the_key(entry: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Variables({"bmi": entry})
    assert "variable 'bmi'" in str(caught.value)
    assert message in str(caught.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={"kind": PLAIN, "range": PLAIN, "levels": PLAIN, "label": PLAIN, "unit": PLAIN, "other": PLAIN},
)


@given(st.dictionaries(st.text(max_size=5), ENTRIES | PLAIN, max_size=3))
def test_any_plain_data_is_read_or_refused_with_one_error(document: dict[str, object]) -> None:
    with suppress(InputError):
        Variables(document)  # type: ignore[arg-type]  # whatever a file holds
