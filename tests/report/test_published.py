"""What may be published: every key of every kind of result has a rule, and nothing else goes out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.report.page import render as page
from fedtmle.runtime.result import Result
from fedtmle.text.certificate import certificate_table
from fedtmle.text.result import render as text
from fedtmle_core.publish import published_result
from fedtmle_core.publish.allowed import RESULT
from tests.docs.test_result import keys_of, top_level
from tests.golden.runs import RUNS
from tests.report.studies import ALGORITHMS, TARGETS, result

K = 11


def unlisted(exact: Any, shown: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of keys that are not on the list: they do not go out, and nothing stands for them."""
    if isinstance(exact, list) and isinstance(shown, list) and len(exact) == len(shown):
        for one, other in zip(exact, shown, strict=True):
            yield from unlisted(one, other, f"{path}[]")
    if isinstance(exact, dict) and isinstance(shown, dict) and shown:
        for key, item in exact.items():
            if key not in shown:
                yield f"{path}.{key}"
            else:
                yield from unlisted(item, shown[key], f"{path}.{key}")


NOT_OF_A_RESULT = {"emulation"}  # added by `fedtmle emulate`, of counts that owners share with another floor


def test_every_key_at_the_top_of_a_document_is_on_the_list() -> None:
    assert (top_level() | set(keys_of(Result.to_dict))) - NOT_OF_A_RESULT <= set(RESULT)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("target", ["ATE", "strata"])
def test_every_key_of_a_result_has_a_rule(algorithm: str, target: str) -> None:
    document = result(algorithm, target).document
    assert list(unlisted(document, published_result(document, K))) == []
    json.dumps(published_result(document, K), allow_nan=False)


STUDIES = [name for name in RUNS if name.startswith(("study/", "target/"))]


@pytest.mark.parametrize("name", STUDIES)
def test_every_golden_study_is_published(name: str, tmp_path: Path) -> None:
    found = RUNS[name](tmp_path)
    if not isinstance(found, ft.StudyResult):
        pytest.skip("no result of a study")
    shown = found.published(5).document
    assert list(unlisted(found.document, shown)) == []
    json.dumps(shown, allow_nan=False)
    for words in (page(shown), text(shown), certificate_table(shown)):
        assert len(words) > 60


@pytest.mark.parametrize("target", TARGETS)
def test_every_targets_result_is_published(target: str) -> None:
    document = result(target=target, observe=True).document
    assert list(unlisted(document, published_result(document, K))) == []
    shown = published_result(document, K)
    assert set(shown) == {*document, "published"}
    assert shown["published"] == {"floor": K}
    assert "nothing is of 1 to 10 people" in shown["notes"][-1]
    for exact, row in zip(document["estimates"], shown["estimates"], strict=True):
        assert abs(row["estimate"] - exact["estimate"]) <= exact["std_error"] / 79
        assert abs(row["std_error"] / exact["std_error"] - 1) < 0.005
        for limit in ("conf_low", "conf_high"):
            assert abs(row[limit] - exact[limit]) <= 0.05 * exact["std_error"] * max(1, abs(exact[limit]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_published_result_can_be_shown(algorithm: str) -> None:
    for target in TARGETS if algorithm == "coded" else ("ATE",):
        shown = result(algorithm, target, observe=True).published(K)
        for words in (page(shown.document), text(shown.document), certificate_table(shown.document)):
            assert len(words) > 60
        assert "nothing is of 1 to 10 people" in page(shown.document)


def test_a_result_is_published_once() -> None:
    shown = result().published(K)
    assert shown.published(5) is shown
    with pytest.raises(ft.InputError, match="already"):
        published_result(shown.document, K)


def test_a_key_that_nobody_listed_stays() -> None:
    document = {**result().document, "secret": 3}
    assert list(unlisted(document, published_result(document, K))) == [".secret"]
    assert "secret" not in published_result(document, K)


def test_iterates_messages_and_single_silos_are_left_out() -> None:
    document = result(observe=True).document
    shown = published_result(document, K)
    assert shown["trajectory"]["points"] == []
    assert shown["transcript"] is None
    assert set(shown["sizes"].values()) == {None}
    assert shown["account"]["by_round"]["up"] == {}
    assert shown["certificate"]["constants"] == []
    assert document["trajectory"]["points"]
    assert document["certificate"]["constants"]


def test_a_few_without_an_outcome_are_not_counted() -> None:
    document = result().document
    few = {**document, "observed_counts": [document["arm_counts"][0] - 3, *document["arm_counts"][1:]]}
    assert published_result(few, K)["observed_counts"] == document["arm_counts"]
    assert published_result(few, K)["participants"]["with_outcome"] == document["n"]
