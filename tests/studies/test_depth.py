"""The depth of a TOML text is judged before it is parsed."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.studyfile.file import StudyFileErrors, read_study
from fedtmle.studyfile.toml import DEEPEST, too_deep
from fedtmle.trials.file import read_trial


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\n" + ".".join("k" * 40) + " = 1", 2),
        ("[" + ".".join("k" * 40) + "]", 1),
        ('"q".' * 40 + "x = 1", 1),
        ("a = " + "[" * 40, 1),
        ("a = [\n" * 40, 17),
        ("a = {b = " * 40, 1),
        ("'''\n\n''' = 1\n" + "a." * 40 + "b = 2", 4),
    ],
)
def test_deep_texts_are_found(text: str, line: int) -> None:
    assert too_deep(text) == line


@pytest.mark.parametrize(
    "text",
    [
        'a = "' + "." * 100 + '"',
        "a = '" + "[" * 100 + "'",
        '"""' + "." * 100 + '"""',
        "# " + "x.y." * 100,
        "a = [" + ", ".join(["1.5"] * 100) + "]",
        'a = "\\"' + "[" * 100 + '"',
        "a = '''\n" + "[[[[\n" * 100 + "'''\nb = 1",
    ],
)
def test_what_is_quoted_is_not_deep(text: str) -> None:
    assert too_deep(text) is None


DECOYS = ["", '# "', 'x = "\\"["\n', "y = '''\n\"'''\n", 'z = """\'"""\n', "# '''\n"]
PARTS = ["a", '"b.c"', "'d'", "e-f"]


@given(
    st.sampled_from(DECOYS),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=40),
    st.integers(min_value=0, max_value=40),
)
def test_a_text_is_deep_if_and_only_if_the_parser_nests_it(decoy: str, parts: list[str], array: int) -> None:
    decoy = decoy + "\n" if decoy and not decoy.endswith("\n") else decoy
    text = f"{decoy}{' . '.join(parts)} = {'[' * array}{']' * array or '1'}"
    value: object = tomllib.loads(text)
    assert isinstance(value, dict)
    is_deep = len(parts) - 1 > DEEPEST or array > DEEPEST
    assert (too_deep(text) is not None) is is_deep


@pytest.mark.parametrize("read", [read_study, read_trial])
def test_a_hostile_key_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "study.toml"
    path.write_text("a" + ".a" * 32_000 + " = 1\n")
    began = time.monotonic()
    with pytest.raises(StudyFileErrors, match="nested more than 16 levels"):
        read(path)
    assert time.monotonic() - began < 1.0
