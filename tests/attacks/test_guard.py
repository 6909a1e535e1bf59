"""The guard where it is subtle: the bound of concentration, counts in joint queries, folds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedtmle as ft
from fedtmle.model.exact import Sums
from fedtmle.model.families import Family
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import RowBound
from fedtmle.protocol.bins import BinsQuery, Group
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.learners import JointQuery
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import Cell, Spread
from fedtmle.protocol.tables import TallyQuery
from fedtmle.runtime.rows import LocalRows
from tests.attacks.small import AbstractStudyAttack, TinyArm
from tests.attacks.tables import table_of


@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from([Family.LOGISTIC, Family.GAUSSIAN, Family.LINEAR]),
    n=st.integers(1, 40),
    d=st.integers(1, 3),
    reach=st.floats(0, 30),
    weighted=st.booleans(),
    sparse=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_the_bound_is_never_below_the_true_share(
    seed: int, family: Family, n: int, d: int, reach: float, weighted: bool, sparse: bool
) -> None:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(d, n)) * np.exp(rng.normal(size=(d, n)))
    if sparse:
        X *= rng.random((d, n)) < 0.3
    model = GeneralisedLinear(
        family=family,
        X=X,
        offset=rng.normal(size=n) * 3,
        y=rng.random(n),
        w=rng.exponential(size=n) if weighted else None,
        bound=RowBound(gradient=40, curvature=40),
    )
    here = rng.normal(size=d)
    there = here + reach * rng.normal(size=d) * 10.0 ** rng.uniform(-6, 0)
    bound = model.concentration(here).share_within(there)
    true = model.concentration(there)
    assert bound >= true.share * (1 - 1e-12)
    if 0 < bound < 1:  # what the guard skips on the strength of the bound it would not have refused
        assert true.effective >= (1 - 1e-12) / bound


def test_the_bound_can_be_too_small_if_it_forgets_how_far_eps_moved() -> None:
    """The property above has teeth: at the old eps the share is a third, at the new one it is nearly one."""
    model = GeneralisedLinear(
        family=Family.LOGISTIC,
        X=np.ones((1, 3)),
        y=np.array([1.0, 1.0, 0.0]),
        bound=RowBound(gradient=2, curvature=2),
    )
    here, there = model.concentration(np.zeros(1)), model.concentration(np.array([8.0]))
    assert here.share == pytest.approx(1 / 3)
    assert there.share > 0.99
    assert here.share_within(np.array([8.0])) == 1.0


def sums(*values: int) -> Sums:
    return Sums(values, (0,) * len(values))


def tally(*cells: Cell, spread: tuple[Spread, ...] = ()) -> TallyQuery:
    return TallyQuery(
        columns=lambda _: np.zeros((2, 1)), exponents=(90, 90), n=1000, counts=cells, spread=spread
    )


@pytest.mark.parametrize(
    ("count", "whole", "refused"),
    [(0, 60, False), (9, 60, True), (10, 60, False), (50, 60, False), (51, 60, True), (60, 60, False)],
)
def test_a_count_and_its_complement(count: int, whole: int, refused: bool) -> None:
    guard, query = Guard(Policy()), tally(Cell(0))
    for asked, answer in ((query, sums(count, 0)), (JointQuery((query,)), (sums(count, 0),))):
        if refused:
            with pytest.raises(RefusalError, match="min_arm_rows") as refusal:
                guard.examine_answer(asked, answer, whole)
            assert refusal.value.reason is Reason.POLICY
        else:
            guard.examine_answer(asked, answer, whole)


def test_a_joint_query_hides_no_count_in_any_of_its_parts() -> None:
    inner = JointQuery((tally(), tally(Cell(0))))
    with pytest.raises(RefusalError, match="min_arm_rows"):
        Guard(Policy()).examine_answer(
            JointQuery((tally(), inner)), (sums(1, 1), (sums(1, 1), sums(3, 0))), 60
        )


def test_a_sum_and_its_squares_tell_how_many_rows_are_behind_it() -> None:
    query = tally(spread=(Spread(0, 1),))
    Guard(Policy()).examine_answer(query, sums(10, 10), 60)  # ten ones
    with pytest.raises(RefusalError, match="min_effective"):
        Guard(Policy()).examine_answer(query, sums(110, 10_010), 60)  # ten ones and a hundred
    Guard(Policy()).examine_answer(query, sums(0, 0), 60)  # nobody


@pytest.mark.parametrize(("folds", "smallest"), [(None, 60), (2, 30), (7, 8), (30, 2)])
def test_the_smallest_fold(folds: int | None, smallest: int) -> None:
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a", arms=("0", "1"), outcome_bounds=(0.0, 1.0)),
        outcome_model=ft.GLM("a"),
        treatment_model=ft.GLM("1"),
        folds=folds,
    )
    columns = AbstractStudyAttack.columns(TinyArm())
    assert study.smallest_part(table_of(study, columns)) == smallest


def test_the_folds_of_a_super_learner_count_too_within_those_of_the_study() -> None:
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a", arms=("0", "1"), outcome_bounds=(0.0, 1.0)),
        outcome_model=ft.SuperLearner((ft.GLM("a"), ft.GLM("a + w")), folds=5),
        treatment_model=ft.GLM("1"),
    )
    columns = AbstractStudyAttack.columns(TinyArm())
    table = table_of(study, columns)
    assert study.smallest_part(table) == 12
    crossed = dataclasses.replace(study, folds=3)  # 40 rows are left, in folds of 12 less those left out
    assert study.smallest_part(table) > crossed.smallest_part(table) >= 4


@pytest.mark.parametrize(("policy", "told"), [(Policy.unguarded(), 1), (Policy(), None)])
def test_a_few_truncated_rows_are_hidden(policy: Policy, told: int | None) -> None:
    """A count of few is not refused but left out, and so is the rest that would tell it."""
    rows = np.zeros(60, dtype=np.uint8)
    rows[7] = 1
    query = BinsQuery(
        groups=lambda bins: [Group(bins=bins)],
        sizes=(2,),
        exponents=(),
        n=60,
        what="probabilities below their bound",
        floors=("min_truncated", "min_cell"),
    )
    ((rest, few),) = query.answer(LocalRows("a", rows, 60, None, policy))
    assert few == (None if told is None else (told,))
    assert rest == (None if told is None else (60 - told,))
    strict = dataclasses.replace(policy, min_truncated=100)
    assert query.answer(LocalRows("a", rows, 60, None, strict)) == ((None, None),)
