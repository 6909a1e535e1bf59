"""Any value at all as a dictionary: it is read, or refused by one error that begins with the key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fedtmle.errors import InputError
from fedtmle.initial.variables import KINDS, Variable, Variables, read_variable
from fedtmle.protocol.plan import canonical
from fedtmle.studyfile.draft import variables_text
from fedtmle.studyfile.file import StudyFileErrors, read_study
from tests.premise import Premise

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(KINDS)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["kind", "range", "levels", "label", "unit", "missing"])
LABEL = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
ENDS = st.tuples(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12)).filter(lambda ends: ends[0] < ends[1])


def entries() -> st.SearchStrategy[dict[str, Any]]:
    """Entries that are usually right."""
    words = {"label": st.just("") | LABEL, "unit": st.just("") | LABEL}
    levels = st.lists(LABEL, min_size=2, max_size=6, unique=True)
    return st.one_of(
        st.fixed_dictionaries({"kind": st.just("number"), "range": ENDS}, optional=words),
        st.fixed_dictionaries(
            {"kind": st.just("count"), "range": st.tuples(st.integers(0, 9), st.integers(10, 99))},
            optional=words,
        ),
        st.fixed_dictionaries({"kind": st.just("binary")}, optional=words),
        st.fixed_dictionaries({"kind": st.just("identifier")}, optional=words),
        st.fixed_dictionaries({"kind": st.just("category"), "levels": levels}, optional=words),
        st.fixed_dictionaries(
            {"kind": st.just("category"), "levels": st.dictionaries(LABEL, LABEL, min_size=2, max_size=5)}
        ),
    )


is_refused = Premise("the entry is refused", at_least=0.5)


@is_refused
@given(st.dictionaries(KEYS, VALUES, max_size=5) | VALUES)
def test_garbage_is_refused_by_one_error(entry: Any) -> None:
    message = None
    try:
        read_variable(entry)
    except InputError as error:
        message = str(error)
    if is_refused.holds(message is not None):
        assert message is not None
        assert ": " in message


@given(st.dictionaries(LABEL, entries(), min_size=1, max_size=5))
def test_a_dictionary_is_the_same_after_a_file(declared: dict[str, dict[str, Any]]) -> None:
    """Python, TOML and the plan agree on every field."""
    variables = Variables(declared)
    read = Variables(tomllib.loads(variables_text(variables))["variables"])
    assert read == variables
    assert hash(read) == hash(variables)
    assert canonical(read) == canonical(variables)


@given(entries(), st.sampled_from(["kind", "range", "levels", "label", "unit"]), VALUES)
def test_one_wrong_key_changes_nothing_else(entry: dict[str, Any], key: str, value: Any) -> None:
    try:
        changed = read_variable({**entry, key: value})
    except InputError:
        return
    assert isinstance(changed, Variable)
    assert read_variable(entry) == read_variable(dict(entry))


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=60))
def test_any_text_as_the_section_is_a_study_or_a_list_of_defects(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "study.toml"
    body = '[target]\nkind = "ATE"\noutcome = "y"\ntreatment = "a"\n[models.outcome]\nformula = "1"\n'
    body += '[models.treatment]\nformula = "1"\n[silos]\none = "one.csv"\n[variables]\n'
    Path(path).write_text(body + text, encoding="utf-8", newline="")
    with pytest.raises(StudyFileErrors) as caught:
        read_study(path)
    assert caught.value.defects
