"""The outcome over questions has all that a result's document is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import roster
from fedtmle.results.document import document
from fedtmle.solver import CompletedRun
from fedtmle.studyfile.file import study_plan
from tests.effects.studies import NEWTON, change, cut, finish
from tests.effects.test_pooled import OPTIONS, TARGETS, partitions, people, study_of
from tests.estimation.over_questions import run_over_questions

# The run's own, and bounds that follow from public intervals and an exact curvature: they are smaller.
SMALLER = ("largest_share", "/convergence", "/certificate", "/trajectory", "/warnings")


def documents(study: ft.Study, silos: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the document of the package's run, and that of the outcome over questions in its place."""
    finished, _ = finish(study, silos)
    plan = study_plan(study, roster(list(silos)))
    for outcome in (finished.outcome, run_over_questions(study, silos).result):
        assert isinstance(outcome, Targeted)
        run = CompletedRun(plan=plan, finished=replace(finished, outcome=outcome))
        details: Any = outcome.details
        result = run.result(law=details.start, algorithm=study.algorithm)
        yield document(plan, run.finished, result, ())


def numbers(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of a document, by their places."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for k, item in enumerate(value):
            yield from numbers(item, f"{path}/{k}")
    else:
        yield path, value


def numeric(value: object) -> float:
    """Return a value after a check that it is a number."""
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["newton", "coded"])
@pytest.mark.parametrize("name", ["ATE", "strata", "three arms", "ATO", "mean", "OR"])
def test_the_document_is_that_of_the_package(name: str, algorithm: ft.AbstractAlgorithm) -> None:
    study = change(study_of(TARGETS[name], **OPTIONS["all"]), algorithm=algorithm, diagnostics=False)
    data = people(study, 400, seed=2)
    before, after = documents(study, cut(data, partitions(data, 3)["random"]))
    assert before.keys() == after.keys()
    one, other = dict(numbers(before)), dict(numbers(after))
    compared = {path for path in one if not any(part in path for part in SMALLER)}
    assert compared == {path for path in other if not any(part in path for part in SMALLER)}
    for path in compared:
        if isinstance(one[path], float):
            tolerance = 1.0 if path.startswith("/fits") else 1e-4  # fits end elsewhere within their accuracy
            assert other[path] == pytest.approx(one[path], rel=tolerance, abs=1e-6), path
        else:
            assert other[path] == one[path], path
    shares = [path for path in one if path.endswith("largest_share")]
    assert shares
    assert all(numeric(other[path]) <= 1.0001 * numeric(one[path]) for path in shares)
    assert after["convergence"]["estimands"]
