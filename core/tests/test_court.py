"""The rules around a plan's sums, together: judged, admitted, joined and published."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import sheet
from test_admit import AT, MODEL, SEEN, VOCABULARY, H, Y, fit
from test_blocks import PLAN
from test_judgement import run

from fedtmle_core.admit import NotAdmittedError
from fedtmle_core.blocks import Cells, Moments
from fedtmle_core.court import Court
from fedtmle_core.errors import DecodeError
from fedtmle_core.evaluate import Workspace
from fedtmle_core.judgement import Step
from fedtmle_core.plan import Question
from fedtmle_core.terms import ONE, product, total


def court(people: int = 600, floor: int = 5) -> Court:
    return Court(replace(PLAN, models=(MODEL,), floor=floor), Workspace(sheet(people, seed=3)))


def test_a_study_goes_from_judgement_to_judgement() -> None:
    found = court()
    assert run([found.before_fits(1)])[-1] is Step.PASSED
    found.admit(Question(blocks=(fit(),)))
    seen = product(H, SEEN)
    closing = Question(blocks=(Moments.gram((seen, ONE)),))
    with pytest.raises(NotAdmittedError):
        found.admit(closing)
    assert run([found.before_targeting([seen, product(seen, Y)], 1)])[-1] is Step.PASSED
    found.admit(closing)
    found.admit(Question(blocks=(fit(),)))  # what the fits asked may still be asked


def test_few_people_behind_a_column_refuse_a_study() -> None:
    assert run([court(people=30, floor=12).before_fits(1)])[-1] is Step.REFUSED


def test_bins_of_few_people_are_joined() -> None:
    question = Question(blocks=(Cells(of=total(VOCABULARY, AT), edges=(0.0,), groups=(SEEN,)),))
    assert court().shown(question, (3, 9)) == (0, 12)
    assert court(floor=1).shown(question, (3, 9)) == (3, 9)


@pytest.mark.parametrize("exact", [b"", b"{", b"\xff"])
def test_what_is_no_document_is_not_published(exact: bytes) -> None:
    with pytest.raises(DecodeError):
        court().publish(exact)
