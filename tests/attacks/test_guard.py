"""The guard where it is subtle: the bound of concentration, counts in joint queries, folds."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle import data
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.model.leverage import Look
from fedtmle.model.problem import AbstractProblem
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear, NoNormaliser
from fedtmle.model.table import AbstractBins, AbstractBoundedColumns, Group, StreamedTable
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.guard import Guard, RefusalError, _Examined, _largest_of_columns
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import AbstractQuery, CountCell, DisclosedColumns, JointQuery, Model, Phase
from fedtmle.protocol.sums import SumsQuery, TallyQuery
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.exact import Sums
from fedtmle_core.types import Family, IntArray, Part, RowBound
from fedtmle_paper.two_arm import TwoArm, TwoArmLaw
from tests.attacks.combinations import TwoModels
from tests.attacks.settings import RefusedBySiloError
from tests.attacks.small import VARIABLES, AbstractStudyAttack, TinyArm
from tests.attacks.tables import table_of


class CountedRows(LocalRows):
    """Rows that remember how often the guard looked at them."""

    looks = 0

    def submodel(self, model: Model, law: object, batch: IntArray | None = None) -> AbstractSubmodel:
        self.looks += 1
        return super().submodel(model, law, batch)


# At mu = 0 all rows weigh alike; at mu = 0.5 the last one stands out.
ALIKE = np.array([0.5] * 60 + [0.9])
THREE = dataclasses.replace(Policy(), min_people=3, min_support=0)
MEAN = ft.Mean()
FROM_ZERO = MEAN.start(0.0)


def ask_mean(problem: ft.Mean, law: object, eps: float) -> SumsQuery:
    return SumsQuery(problem=problem, law=law, eps=np.array([eps]), parts=Part.GRADIENT, n=61)


@pytest.mark.parametrize(
    "query",
    [
        ask_mean(MEAN, FROM_ZERO, -0.5),
        ask_mean(MEAN, MEAN.start(0.5), 0.0),  # another law: in its own coordinates eps did not move
    ],
    ids=["far along the path", "another law"],
)
def test_what_was_seen_at_one_point_does_not_answer_for_a_far_one(query: SumsQuery) -> None:
    guard, rows = Guard(THREE), LocalRows("a", ALIKE, 61, None)
    guard.examine(ask_mean(MEAN, FROM_ZERO, 0.0), rows)
    with pytest.raises(RefusalError, match="min_people"):
        guard.examine(query, rows)


def test_a_look_from_a_law_along_the_path_is_measured_from_there() -> None:
    guard, rows = Guard(THREE), CountedRows("a", ALIKE, 61, None)
    guard.examine(ask_mean(MEAN, MEAN.start(0.2), 0.0), rows)
    guard.examine(ask_mean(MEAN, MEAN.start(0.3), 0.1), rows)  # mu = 0.2 again
    assert rows.looks == 1
    with pytest.raises(RefusalError, match="min_people"):
        guard.examine(ask_mean(MEAN, MEAN.start(0.3), -0.2), rows)


def test_a_look_from_a_law_near_the_end_does_not_answer_for_the_start() -> None:
    guard, rows = Guard(THREE), CountedRows("a", ALIKE, 61, None)
    guard.examine(ask_mean(MEAN, MEAN.start(0.3), 0.0), rows)
    guard.examine(ask_mean(MEAN, FROM_ZERO, 0.0), rows)
    assert rows.looks == 2


def test_a_mean_that_returns_to_its_start_has_not_shortened_its_path() -> None:
    """Its law is one number, of which no distance could be seen: the path is part of every problem."""
    guard, rows = Guard(Policy(max_path=1.0)), LocalRows("a", ALIKE, 61, None)
    law = FROM_ZERO
    for step in (0.45, -0.45):
        guard.admit(ask_mean(MEAN, law, 0.0), rows)
        law = MEAN.move(law, np.array([step]))
    assert law == FROM_ZERO
    guard.admit(ask_mean(MEAN, law, 0.05), rows)
    with pytest.raises(RefusalError, match="max_path"):
        guard.admit(ask_mean(MEAN, law, 0.2), rows)


def test_no_problem_can_leave_its_path_out() -> None:
    assert "path" in AbstractProblem.__abstractmethods__


def plan_of(silos: int) -> Plan:
    program = TargetingProgram(problem=MEAN, law=FROM_ZERO, algorithm=ft.Gradient())
    return Plan(program=program, roster=roster([f"silo {m}" for m in range(silos)]))


@pytest.mark.parametrize(
    ("silos", "n_rows", "smallest_part", "key"),
    [(2, 40, 7, "min_silos"), (3, 39, 7, "min_rows"), (3, 40, 6, "min_fold")],
)
def test_the_limits_of_a_plan_are_exact(silos: int, n_rows: int, smallest_part: int, key: str) -> None:
    policy = dataclasses.replace(Policy(), min_silos=3, min_rows=40, min_fold=7)
    Guard(policy).open(plan_of(3), 40, 7)
    with pytest.raises(RefusalError, match=key):
        Guard(policy).open(plan_of(silos), n_rows, smallest_part)


@pytest.mark.parametrize("key", ["max_queries", "max_functionals"])
def test_the_limits_of_a_session_are_exact(key: str) -> None:
    query, rows = ask_mean(MEAN, FROM_ZERO, 0.0), LocalRows("a", ALIKE, 61, None)
    most = 3 if key == "max_queries" else 3 * query.functionals
    limit: dict[str, Any] = {key: most}
    guard = Guard(dataclasses.replace(Policy(), **limit))
    for _ in range(3):
        guard.admit(query, rows)
    with pytest.raises(RefusalError, match=key):
        guard.admit(query, rows)


FAR = TwoArmLaw(history=((3.0, -4.0), (0.0, 1.0)))  # a path of length 6


@pytest.mark.parametrize(
    ("law", "eps", "key"),
    [
        (TwoArmLaw(), (0.0, 2.0), ""),
        (TwoArmLaw(), (0.0, 2.001), "max_eps"),
        (TwoArmLaw(), (1.5, 1.5), "max_eps"),
        (TwoArmLaw(), (math.nan, 0.0), "max_eps"),
        (FAR, (1.0, 0.0), ""),
        (FAR, (1.001, 0.0), "max_path"),
    ],
)
def test_the_limits_of_a_path_are_exact(law: TwoArmLaw, eps: tuple[float, float], key: str) -> None:
    policy = dataclasses.replace(Policy(), max_eps=2.0, max_path=7.0)
    query = SumsQuery(problem=TwoArm(), law=law, eps=np.array(eps), parts=Part.GRADIENT, n=61)
    rows = LocalRows("a", None, 61, None)
    if not key:
        Guard(policy).admit(query, rows)
    else:
        with pytest.raises(RefusalError, match=key) as refusal:
            Guard(policy).admit(query, rows)
        assert refusal.value.reason is Reason.TOO_FAR


@pytest.mark.parametrize(("size", "is_refused"), [(50.0, False), (50.001, True), (math.inf, True)])
def test_the_limit_of_coefficients_is_exact(size: float, is_refused: bool) -> None:
    guard = Guard(dataclasses.replace(Policy(), max_coefficient=50.0, max_eps=0.1))
    query = dataclasses.replace(ask_mean(MEAN, FROM_ZERO, size), phase=Phase.NUISANCE)
    with pytest.raises(RefusalError, match="max_coefficient") if is_refused else nullcontext():
        guard.admit(query, LocalRows("a", ALIKE, 61, None))


@pytest.mark.parametrize(
    ("people", "is_refused"),
    [((), False), ((0, 10), False), ((10, 11), False), ((40, 9), True), ((1,), True)],
)
def test_the_floor_of_people_is_exact(people: tuple[int, ...], is_refused: bool) -> None:
    query: Any = SimpleNamespace(
        floors=("min_cell",),
        people=lambda _: people,
        ships_model=lambda _: False,
        rare_columns=lambda _: (),
    )
    guard = Guard(dataclasses.replace(Policy(), min_cell=10))
    with pytest.raises(RefusalError, match="min_cell") if is_refused else nullcontext():
        guard._examine_people(query, LocalRows("a", ALIKE, 61, None))


def test_the_limits_of_batches_are_exact() -> None:
    policy = dataclasses.replace(Policy(), min_batch=10)
    twenty = np.arange(20)
    Guard(policy)._follow_batch(np.arange(10), 100)
    for rows, n_rows in ((np.arange(9), 100), (twenty, 29)):  # a small batch, a small rest
        with pytest.raises(RefusalError, match="min_batch"):
            Guard(policy)._follow_batch(rows, n_rows)
    for second in (twenty[:12], np.arange(10, 30)):  # a part of a batch, an overlap
        guard = Guard(policy)
        guard._follow_batch(twenty, 100)
        guard._follow_batch(twenty, 100)
        with pytest.raises(RefusalError, match="min_batch"):
            guard._follow_batch(second, 100)


@pytest.mark.parametrize("order", [1, -1])
def test_a_batch_is_a_set_of_rows(order: int) -> None:
    rows = np.arange(30)[::order]
    Guard(Policy())._follow_batch(rows, 100)
    with pytest.raises(RefusalError, match="min_batch"):
        Guard(Policy())._follow_batch(np.append(rows, rows[-1]), 100)


def test_a_batch_is_looked_at_though_all_rows_were() -> None:
    policy = dataclasses.replace(Policy(), min_batch=0)
    guard, rows = Guard(policy), LocalRows("a", np.append(np.full(50, 0.5), 0.9), 51, None)
    rows.place(0)
    guard.examine(ask_mean(MEAN, FROM_ZERO, 0.0), rows)
    batch = dataclasses.replace(ask_mean(MEAN, FROM_ZERO, 0.0), batch=np.array([49, 50]))
    with pytest.raises(RefusalError, match="min_support"):
        guard.examine(batch, rows)
    nobody_here = dataclasses.replace(batch, batch=np.array([51, 52]))
    guard.examine(nobody_here, rows)


@dataclasses.dataclass(frozen=True)
class OneColumn:
    """A model without a law, as a nuisance model is, of one of the rows' columns."""

    which: int
    dim: int = 1
    design_names = None  # not a regression on a table
    known_people = ()
    judged_together = None

    def submodel(self, law: None, rows: np.ndarray) -> AbstractSubmodel:  # noqa: ARG002
        return GeneralisedLinear(
            family=Family.LINEAR, X=rows[[self.which]], bound=RowBound(gradient=0, curvature=0)
        )

    def normaliser(self, law: None) -> NoNormaliser:  # noqa: ARG002
        return NoNormaliser(1)


def test_what_was_seen_of_one_model_does_not_answer_for_another() -> None:
    guard, rows = Guard(Policy()), LocalRows("a", np.array([[1.0] * 20, [1.0] + [0.01] * 19]), 20, None)
    first, second = (
        SumsQuery(problem=cast(Any, OneColumn(which)), law=None, eps=np.zeros(1), parts=Part.GRADIENT, n=20)
        for which in (0, 1)
    )
    guard.examine(first, rows)
    with pytest.raises(RefusalError, match="min_people"):
        guard.examine(second, rows)


def test_what_was_seen_at_one_point_answers_for_near_ones() -> None:
    guard, rows = Guard(THREE), CountedRows("a", ALIKE, 61, None)
    guard.examine(ask_mean(MEAN, FROM_ZERO, 0.0), rows)
    assert rows.looks == 1
    guard.examine(ask_mean(MEAN, FROM_ZERO, -0.02), rows)
    guard.examine(ask_mean(MEAN, MEAN.start(0.02), 0.0), rows)
    assert rows.looks == 1
    guard.examine(ask_mean(MEAN, FROM_ZERO, -0.3), rows)
    assert rows.looks == 2


def sums(*values: int) -> Sums:
    return Sums(values, (0,) * len(values))


class TwoColumns(AbstractBoundedColumns[np.ndarray]):
    """Two columns whose sums are on a grid of one."""

    label = "count"
    names = ("one", "other")
    exponents = (90, 90)

    def evaluate(self, piece: np.ndarray) -> np.ndarray:
        return np.zeros((2, len(piece)))


def tally(*cells: CountCell) -> TallyQuery:
    return TallyQuery(columns=TwoColumns(), n=1000, counts=cells)


@pytest.mark.parametrize(
    ("count", "whole", "refused"),
    [(0, 60, False), (9, 60, True), (10, 60, False), (50, 60, False), (51, 60, True), (60, 60, False)],
)
def test_a_count_and_its_complement(count: int, whole: int, refused: bool) -> None:
    guard, query = Guard(Policy()), tally(CountCell(0))
    cases: list[tuple[AbstractQuery[Any, Any], Any]] = [
        (query, sums(count, 0)),
        (JointQuery((query,)), (sums(count, 0),)),
    ]
    for asked, answer in cases:
        if refused:
            with pytest.raises(RefusalError, match="min_arm_rows") as refusal:
                guard.release(asked, answer, whole)
            assert refusal.value.reason is Reason.POLICY
        else:
            guard.release(asked, answer, whole)


def test_a_joint_query_hides_no_count_in_any_of_its_parts() -> None:
    inner = JointQuery((tally(), tally(CountCell(0))))
    with pytest.raises(RefusalError, match="min_arm_rows"):
        Guard(Policy()).release(JointQuery((tally(), inner)), (sums(1, 1), (sums(1, 1), sums(3, 0))), 60)


@dataclasses.dataclass(frozen=True)
class Weighted(AbstractBoundedColumns[np.ndarray]):
    """The rows themselves as columns, and the square of the first."""

    label = "weight"
    names = ("weight", "other", "weight squared")
    exponents = (10, 10, 20)

    @property
    def judged(self) -> tuple[int, ...]:
        return (0, 1)

    def evaluate(self, piece: np.ndarray) -> np.ndarray:
        return np.stack([*piece, piece[0] ** 2])


@pytest.mark.parametrize(
    ("weight", "other", "is_refused"),
    [
        (np.ones(40), np.arange(40.0), False),
        (np.append(np.full(39, 0.1), 100.0), np.arange(40.0), True),  # one weighs nearly all
        (np.ones(40), np.append(np.ones(39), 0.0), True),  # the complement of one
        (np.ones(40), np.append(np.ones(35), np.zeros(5)), False),
        (np.zeros(40), np.zeros(40), False),  # nobody
    ],
)
def test_no_combination_of_tallied_columns_is_one_person(
    weight: np.ndarray, other: np.ndarray, is_refused: bool
) -> None:
    rows = LocalRows("a", np.stack([weight, other]), 40, None)
    query = TallyQuery(columns=Weighted(), n=40)
    for asked in (query, JointQuery((query, query))):
        with pytest.raises(RefusalError, match="min_people") if is_refused else nullcontext():
            Guard(Policy()).examine(asked, rows)


@pytest.mark.parametrize(("few", "is_told"), [(1, False), (5, True)])
def test_optional_sums_are_left_out_instead_of_refused(few: int, is_told: bool) -> None:
    """Only the optional member is replaced by zeros; the round goes on."""
    weight = np.ones(40)
    rows = LocalRows("a", np.stack([weight, np.append(np.ones(40 - few), np.zeros(few))]), 40, None)
    plain = LocalRows("a", np.stack([weight, np.arange(40.0)]), 40, None)
    optional = TallyQuery(columns=Weighted(), n=40, optional=True)
    guard = Guard(Policy())
    guard.examine(optional, rows)
    told = guard.release(optional, optional.answer(rows), 40)
    assert any(told.units) is is_told
    other = TallyQuery(columns=Weighted(), n=40)
    joint = JointQuery((other, optional))
    guard.examine(joint, plain)
    assert guard.release(joint, joint.answer(plain), 40) == joint.answer(plain)  # the last look alone counts
    if not is_told:
        with pytest.raises(RefusalError, match="min_people"):
            guard.examine(joint, rows)


def test_the_floor_of_people_in_effect_is_exact() -> None:
    groups = (np.arange(40) < 8).astype(float)
    rows = LocalRows("a", np.stack([groups, 1 - groups]), 40, None)
    query = TallyQuery(columns=Weighted(), n=40)
    Guard(dataclasses.replace(Policy(), min_people=8)).examine(query, rows)
    with pytest.raises(RefusalError, match="min_people"):
        Guard(dataclasses.replace(Policy(), min_people=8.001)).examine(query, rows)


@pytest.mark.parametrize(("folds", "smallest"), [(None, 60), (2, 30), (7, 8), (30, 2)])
def test_the_smallest_fold(folds: int | None, smallest: int) -> None:
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a"),
        treatment_model=ft.GLM("1"),
        variables=VARIABLES,
        folds=folds,
    )
    columns = AbstractStudyAttack.columns(TinyArm())
    assert study.smallest_part(table_of(study, columns)) == smallest


def test_the_folds_of_a_super_learner_count_too_within_those_of_the_study() -> None:
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.SuperLearner((ft.GLM("a"), ft.GLM("a + w")), folds=5),
        treatment_model=ft.GLM("1"),
        variables=VARIABLES,
    )
    columns = AbstractStudyAttack.columns(TinyArm())
    table = table_of(study, columns)
    assert study.smallest_part(table) == 12
    crossed = dataclasses.replace(study, folds=3)  # 40 rows are left, in folds of 12 less those left out
    assert study.smallest_part(table) > crossed.smallest_part(table) >= 4


@pytest.mark.parametrize(("policy", "told"), [(UNGUARDED, 1), (Policy(), None)])
def test_a_few_truncated_rows_are_hidden(policy: Policy, told: int | None) -> None:
    """A count of few is not refused but left out, and so is the rest that would tell it."""
    rows = np.zeros(60, dtype=np.uint8)
    rows[7] = 1
    query = BinsQuery(bins=TwoBins(), n=60, floors=("min_truncated", "min_cell"))
    answer = query.answer(LocalRows("a", rows, 60, None))
    ((rest, few),) = Guard(policy).release(query, answer, 60)
    assert (few and few.count) == told
    assert (rest and rest.count) == (None if told is None else 60 - told)
    strict = dataclasses.replace(policy, min_truncated=100)
    assert Guard(strict).release(query, answer, 60) == ((None, None),)


class TwoBins(AbstractBins[np.ndarray]):
    """The rows are their own bins, 0 or 1."""

    label = "how many people have a very low treatment probability"
    sizes = (2,)

    def groups(self, piece: np.ndarray) -> list[Group]:
        return [Group(bins=piece)]


def test_a_look_holds_as_far_as_its_radius_and_no_further() -> None:
    look = Look(largest=0.1, columns=np.ones(1), family=Family.LOGISTIC)
    law = object()

    def point(eps: float) -> Any:
        return SimpleNamespace(law=law, eps=np.array([eps]))

    examined = _Examined(point(1.0), look, radius=0.25)
    assert examined.covers(point(1.25))
    assert not examined.covers(point(1.26))
    assert not examined.covers(point(0.74))


def test_columns_that_are_judged_alone_are_judged_each() -> None:
    """The first rests on all people, the second on one."""
    together, wide, one = np.ones(50), np.ones(50), np.eye(50)[0]
    told = DisclosedColumns(lambda: [np.stack([together, wide, one])], alone=2)
    assert _largest_of_columns(told, enough=0.0) == pytest.approx(1.0)
    told = DisclosedColumns(lambda: [np.stack([together, wide, wide + 1])], alone=2)
    assert _largest_of_columns(told, enough=0.0) == pytest.approx(1 / 50)


@pytest.mark.parametrize(("allowed", "is_refused"), [((), True), (("fedtmle-paper",), False)])
def test_a_target_of_another_distribution_needs_its_owners_consent(
    allowed: tuple[str, ...], is_refused: bool
) -> None:
    program = TargetingProgram(problem=TwoArm(), law=TwoArmLaw(), algorithm=ft.Coded())
    guard = Guard(Policy(allow_targets=allowed))
    with pytest.raises(RefusalError) if is_refused else nullcontext():
        guard.open(Plan(program=program, roster=roster(["a", "b"])), n_rows=1000, smallest_part=1000)


def test_models_over_a_streamed_table_are_judged_together(tmp_path: Path) -> None:
    """Two candidate models whose columns differ in one person, of a table that is read at every query."""

    class Streamed(TwoModels):
        def rows(self) -> Any:
            pd.DataFrame(self.columns()).to_csv(tmp_path / "a.csv", index=False)
            text = '[silo]\nname = "a"\n[data]\npath = "a.csv"\nstream = true\n'
            (tmp_path / "a.toml").write_text(text, encoding="utf-8")
            return data.load(tmp_path / "a.toml", schema_of(self.study()), silo="a")

    attack = Streamed()
    assert isinstance(attack.rows(), StreamedTable)
    victim = attack.victim(attack.keeper(attack.guarded()))
    with pytest.raises(RefusedBySiloError):
        attack.run(victim)
    assert victim.refused_by == "min_people"
    assert attack.works(attack.run(attack.victim(attack.open_keeper())))
