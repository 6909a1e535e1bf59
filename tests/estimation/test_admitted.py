"""Every question of an effect is one that a core answers: of columns that were judged, or named before."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import fedtmle as ft
from fedtmle.estimation.diagnostics.effects import EFFECT_DIAGNOSIS
from fedtmle.estimation.flow import Flow, blocks_of, named_by
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.planned import plan_of
from fedtmle.estimation.study import effect_flow
from fedtmle.protocol.outcome import Targeted
from fedtmle_core.admit import Judged, admit
from fedtmle_core.blocks import Score
from fedtmle_core.evaluate import Workspace, values_of
from fedtmle_core.plan import Question
from tests.effects.studies import NEWTON, change, cut
from tests.effects.test_pooled import OPTIONS, TARGETS, partitions, people, study_of
from tests.estimation.over_questions import sheets_of
from tests.estimation.test_effects import FURTHER, MADE, STUDIES, holes, made, study_with_holes


def asked(study: ft.Study, silos: Mapping[str, object]) -> int:
    """Follow a study's questions, each admitted before it is answered; return how many there are."""
    declared = Declared(study)
    # Log losses, of binary outcomes, have no bound of 1.
    diagnosis = None if study.response == "binary" else EFFECT_DIAGNOSIS
    return admitted(effect_flow(declared, hospitals=len(silos), diagnosis=diagnosis), declared, silos)


def admitted(flow: Flow[Targeted], declared: Declared, silos: Mapping[str, object]) -> int:
    """Follow a flow's questions, each admitted before it is answered; return how many there are."""
    plan = plan_of(declared, (), study=b"", author="test")
    judged, questions = Judged.of(plan), 0
    workspaces = [Workspace(sheet) for sheet in sheets_of(declared, silos)]
    try:
        yielded = next(flow)
        while True:
            if columns := named_by(yielded):
                judged = judged.with_named(columns)
            if not (blocks := blocks_of(yielded)):
                yielded = flow.send([])
                continue
            question = Question(blocks=blocks)
            for block in blocks:
                try:
                    admit(Question(blocks=(block,)), judged)
                except Exception as error:
                    kind = block.part if isinstance(block, Score) else type(block).__name__
                    raise AssertionError(f"question {questions}, {kind}: {error}") from error
            questions += 1
            answers = [workspace.answer(question, plan) for workspace in workspaces]
            totals = [sum(column) for column in zip(*answers, strict=True)]
            yielded = flow.send(values_of(question, totals, plan))
    except StopIteration:
        return questions


@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["newton", "coded"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_every_question_is_admitted(name: str, option: str, algorithm: ft.AbstractAlgorithm) -> None:
    study = change(study_of(TARGETS[name], **OPTIONS[option]), algorithm=algorithm)
    data = people(study, 300, seed=3)
    assert asked(study, cut(data, partitions(data, 3)["random"])) > 5


# On the linear scale a prediction has no bound, so that moving it makes another column.
@pytest.mark.parametrize("option", sorted(FURTHER.keys() - {"linear"}))
def test_every_option_is_admitted(option: str) -> None:
    study = change(study_of(TARGETS["ATE"], **OPTIONS["missing"]), **FURTHER[option])
    data = people(study, 300, seed=5)
    assert asked(study, cut(data, partitions(data, 3)["random"])) > 5


@pytest.mark.parametrize("name", STUDIES)
def test_every_formula_is_admitted(name: str) -> None:
    assert asked(ft.Study(variables=MADE, **STUDIES[name]), made(len(name))) > 3


def test_indicators_of_missing_values_are_admitted() -> None:
    for silos in (made(3), holes(made(3))):
        assert asked(study_with_holes(), silos) > 3
