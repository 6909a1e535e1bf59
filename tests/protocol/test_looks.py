"""Under masks a model's sums are judged against the rows of all silos, never too leniently."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.gradient import Central
from fedtmle.data import load_all
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.errors import RefusedError
from fedtmle.model.leverage import LEAST_RESIDUAL, PersonRows, deviations, largest_leverage
from fedtmle.model.problem import JudgedTogether
from fedtmle.protocol.guard import Guard
from fedtmle.protocol.looks import LookGroups, Looks, Rule, groups_left_out
from fedtmle.protocol.masked import (
    NO_END,
    AbstractLook,
    GainsQuery,
    LookQuery,
    PeopleQuery,
    PooledGram,
    gains_of,
    gains_unit,
)
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import Evaluation, Local, Query
from fedtmle.protocol.subjects import NEAR, Hazards, Subject, Union
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.types import Array, Family, Part, unpack, upper_pairs
from tests.attacks import refusals
from tests.attacks.honest import run_honest
from tests.attacks.truth import truth_of
from tests.declare import declare
from tests.premise import Premise
from tests.runtime.faults import key_of


def masked(
    study: ft.Study, silos: Mapping[str, Any], policy: Policy | None = None, *, colluders: int = 1
) -> tuple[Finished, Plan]:
    """Run a study under masks with relayed answers; every silo has the same policy."""
    keys = {name: key_of(name) for name in silos}
    members = [Member(name=n, key=key.public, mask_key=key.mask_key.public) for n, key in keys.items()]
    plan = replace(study_plan(study, tuple(members)), colluders=colluders)
    rows = dict(load_all(silos, schema_of(study)))
    parties = [
        Silo(n, plan, rows[n], keeper=Keeper(policy=policy or Policy(), key=key, mask_key=key.mask_key))
        for n, key in keys.items()
    ]
    try:
        return Session(plan, InProcess(parties)).run(), plan
    except RefusedError:
        refused = {silo.refused_by for silo in parties} - {""}
        raise AssertionError(f"refused: {sorted(refused)}") from None


def test_ihdp_runs_whole_under_the_default_policy_and_gives_the_pooled_estimate() -> None:
    """Of eight hospitals four have one to three children in a column: their own rows would refuse."""
    silos = ihdp_silos()
    finished, plan = masked(IHDP, silos)
    assert isinstance(finished.outcome, Targeted)
    pooled = ft.run(replace(IHDP, algorithm=Central(tolerance=1e-10)), silos)
    row, psi = pooled.document["estimates"][0], finished.outcome.estimate.psi
    error = row["std_error"]
    effect = float(psi[1] - psi[0])
    assert abs(effect - row["estimate"]) <= 1e-6 * error
    assert (round(effect, 3), round(error, 3)) == (9.34, 1.093)
    rounds = [heard.query for heard in heard_rounds(plan, finished.transcript, finished.sizes)]
    looks = sum(isinstance(query, AbstractLook) for query in rounds)
    assert looks <= 9
    assert len(rounds) - looks == 16


class Seen:
    """The true pooled leverages behind every answer that was judged together, and those that silos stated."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, Part], list[Array]] = {}
        self.stated: dict[tuple[int, int, Part], list[Array]] = {}

    def examine(self, guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        number = guard.queries
        assert looks is not None
        for k, member in enumerate(query.members):
            for point in member.evaluations():
                for part in point.parts:
                    if not looks.knows(point, part):
                        continue
                    told = local.submodel(point.model, point.law).disclosed_rows(point.eps, part)
                    rows = np.concatenate([piece.rows for piece in told], axis=1)
                    space, _ = next(looks.spaces(point, part, local))
                    self.rows.setdefault((number, k, part), []).append(rows)
                    self.stated.setdefault((number, k, part), []).append(space.leverages(PersonRows(rows)))


COVARIATES: dict[str, Any] = {"w": (-8, 8), "z": (-8, 8), "rare": "binary"}


def cohort(seed: int, sizes: tuple[int, ...], share: float, *, binary: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    silos = {}
    for m, n in enumerate(sizes):
        w, z = rng.standard_normal((2, n))
        a = rng.permutation(np.arange(n) % 2).astype(float)
        y = np.clip(rng.normal(5 + a + w, 1.5, n), 0, 10)
        if binary:
            y = (y > 6).astype(float)
        silos[f"silo {m}"] = {"y": y, "a": a, "w": w, "z": z, "rare": (rng.random(n) < share).astype(float)}
    return silos


def asked(formula: str, *, binary: bool = False, site: Any = "binary", **options: Any) -> ft.Study:
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(formula, **options),
        treatment_model=ft.GLM("w + z"),
        variables=declare(y="binary" if binary else (0, 10), a="binary", site=site, **COVARIATES),
    )


@pytest.mark.parametrize("family", ["auto", "gaussian", "binomial"])
def test_no_leverage_is_stated_smaller_than_it_is(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every point of every model, whatever was rounded, and not larger than twice."""
    seen, binary = Seen(), family == "binomial"
    monkeypatch.setattr(Guard, "examine", lambda *arguments: seen.examine(*arguments))  # noqa: PLW0108 - it binds the guard
    study = asked("a + w + z + rare + a:w", binary=binary, family=family)
    masked(study, cohort(3, (40, 60, 50, 55, 45, 50), 0.1, binary=binary), UNGUARDED)
    with Premise("the own rows would say more than twice as much", at_least=0.5) as premise:
        check_leverages(seen, premise)


def check_leverages(seen: Seen, premise: Premise) -> None:
    for key, rows in seen.rows.items():
        pooled = np.concatenate(rows, axis=1)
        true = np.einsum("in,ij,jn->n", pooled, np.linalg.inv(pooled @ pooled.T), pooled)
        stated = np.concatenate(seen.stated[key])
        assert (stated >= true * (1 - 1e-9)).all()
        assert (stated <= 2.0 * true + 1e-6).all()
        premise.holds(max(map(largest, rows)) > 2 * true.max())
    assert len(seen.rows) >= 8


def largest(rows: Array) -> float:
    return largest_leverage(lambda: [PersonRows(rows)])


@pytest.mark.parametrize("family", [Family.LOGISTIC, Family.GAUSSIAN])
def test_sums_shrink_no_faster_than_the_bound_says(family: Family) -> None:
    """s(eps)^2 >= s(0)^2 / factor for every row in the declared ranges, hence S(eps) >= S(0) / factor."""
    rng = np.random.default_rng(8)
    ranges = ((1.0, 1.0), (0.0, 0.5), (-1.0, 0.25))
    facts = JudgedTogether(family, None, ranges, 1.0)
    low, high = np.array(ranges).T
    worst = 0.0
    for _ in range(300):
        eps, direction = rng.normal(size=3), rng.normal(size=3)
        X = rng.uniform(low[:, None], high[:, None], size=(3, 400))
        X[:, :8] = np.where(np.indices((2, 2, 2)).reshape(3, 8), high[:, None], low[:, None])
        y = rng.random(400) if family is Family.GAUSSIAN else rng.integers(0, 2, 400).astype(float)
        move = direction * NEAR[family] / facts.largest_move(direction.tolist())
        delta = facts.largest_move(move.tolist())
        assert np.abs(move @ X).max() == pytest.approx(delta)
        if family is Family.GAUSSIAN:  # some residuals fall to the least, and most are far below it
            y = eps @ X
            y[:8] += np.sign(move @ X[:, :8]) * 1.125 * LEAST_RESIDUAL
        before, after = (deviations(family, e @ X, y) for e in (eps, eps + move))
        model: Any = None
        factor = Subject(Evaluation(model, None, eps), Part.GRADIENT, facts).shrunk(
            Evaluation(model, None, eps + move * (1 - 1e-12))
        )
        assert 1.3 < factor < 4 / 3
        worst = max(worst, float((before**2 / after**2).max()))
        assert worst <= factor * (1 + 1e-9)
    assert worst > 1.18


@pytest.mark.parametrize(
    ("rare", "farthest", "largest_factor"), [(29, 1 / 6, 1.05), (30, 1.0, 4 / 3), (0, 1.0, 4 / 3)]
)
@pytest.mark.parametrize("family", [Family.LOGISTIC, Family.GAUSSIAN])
def test_a_look_lasts_less_long_if_few_people_have_a_column(
    family: Family, rare: int, farthest: float, largest_factor: float
) -> None:
    """A column that nobody has does not count; the people are those of all groups together."""
    facts, model = JudgedTogether(family, None, ((1.0, 1.0), (0.0, 1.0)), 1.0), cast("Any", None)
    subject = Subject(Evaluation(model, None, np.zeros(2)), Part.GRADIENT, facts)
    gram = PooledGram(
        subject=subject,
        C=np.eye(2),
        groups=(np.eye(2), np.eye(2)),
        sizes=(3, 3),
        people=((100, rare - rare // 3), (100, rare // 3)),
        error=0.01,
        exponent=0,
        n=400,
    )
    for part in (-1.0, 1.0):
        inside, outside = (
            Evaluation(model, None, np.array([part * NEAR[family] * farthest * factor, 0.0]))
            for factor in (0.999, 1.001)
        )
        assert gram.holds_at(inside)
        assert not gram.holds_at(outside)
        assert subject.shrunk(inside) < largest_factor
        for far in (1.001, 20.0):  # no bound is known there, although the formulas have a value
            beyond = Evaluation(model, None, np.array([part * NEAR[family] * far, 0.0]))
            assert subject.shrunk(beyond) == math.inf


def one_with(silos: dict[str, Any], *, others: int, at: int | None = None) -> dict[str, Any]:
    """Exactly one person of the first silo has the rare covariate, and so many in each other silo, or one."""
    for m, rows in enumerate(silos.values()):
        count = 1 if not m else others if at in (None, m) else 0
        rows["rare"] = (np.arange(len(rows["y"])) < count).astype(float)
    return silos


def six(seed: int = 5) -> dict[str, Any]:
    """Six silos: 0, 2 and 4 are one group, 1, 3 and 5 the other."""
    return cohort(seed, (60,) * 6, 0.0)


def test_one_person_hides_among_the_others_of_all_silos(monkeypatch: pytest.MonkeyPatch) -> None:
    study, silos = asked("a + w + rare"), one_with(six(), others=4)
    masked(study, silos)
    monkeypatch.setattr(Looks, "knows", lambda *_: False)  # by its own rows
    with pytest.raises(AssertionError, match=r"refused: .*min_support"):
        masked(study, silos)


FORMULAS = ["a + w + rare", "a + w + I(1 - rare)", "a + w + I(w + 0.001*rare)"]


@pytest.mark.parametrize("formula", FORMULAS)
def test_one_person_over_all_silos_is_not_told(formula: str) -> None:
    """Neither as a column, nor as a complement, nor as the difference of two nearly equal columns."""
    silos = one_with(six(), others=0)
    floor = "min_support" if formula == FORMULAS[0] else "min_pooled"
    with pytest.raises(AssertionError, match=rf"refused: .*{floor}"):
        masked(asked(formula), silos)


def test_nothing_but_their_number_is_told_of_four_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that four people of all silos have is refused before its products are pooled."""
    looked: list[LookQuery] = []
    answer = LookQuery.answer

    def watched(query: LookQuery, local: Local) -> tuple[int, ...]:
        looked.append(query)
        return answer(query, local)

    monkeypatch.setattr(LookQuery, "answer", watched)
    with pytest.raises(AssertionError, match=r"refused: .*min_support"):
        masked(asked("a + w + rare"), one_with(six(), others=3, at=3))
    assert not looked
    masked(asked("a + w + rare"), one_with(six(), others=12, at=3), TRUSTING)
    assert looked


def followed(seed: int, sizes: tuple[int, ...], *, leaves: float = 0.15) -> dict[str, Any]:
    """Follow-up over four periods, in each of which people have the event or are censored."""
    rng = np.random.default_rng(seed)
    silos = {}
    for m, n in enumerate(sizes):
        left = np.minimum(rng.geometric(leaves, n), 4)
        event = (rng.random(n) < 0.6).astype(float)
        a = rng.permutation(np.arange(n) % 2).astype(float)
        silos[f"silo {m}"] = {"time": left - 0.5, "event": event, "a": a, "w": rng.uniform(-1, 1, n)}
    return silos


def hazards(formula: str) -> ft.Study:
    return ft.Study(
        target=ft.Risk(outcome="event", time="time", treatment="a", periods=4, period_length=1.0),
        hazard_model=ft.GLM(formula),
        censoring_model=ft.GLM("1"),
        treatment_model=ft.GLM("1"),
        variables=declare(event="binary", time=(0, 4), a="binary", w=(-1, 1)),
        diagnostics=False,
    )


def sums_over_periods(rows: Mapping[str, Array]) -> Array:
    """What each person adds to the gradients at zero, written longhand, (9, N).

    They are those of C(period) + w:C(period) for the event, and of 1 for censoring before the last period.
    """
    people = []
    for time, event, w in zip(rows["time"], rows["event"], rows["w"], strict=True):
        last, added = int(time + 0.5), np.zeros((2, 4))
        for period in range(1, last + 1):
            residual = 0.5 - (event if period == last else 0.0)
            added[:, period - 1] += residual * np.array([1.0, w])
        (one, slope), first = added, added.sum(axis=1)
        at_risk = min(last - int(event), 3)
        people.append([first[0], *one[1:], *slope, 0.5 * at_risk - (not event and last < 4)])
    return np.array(people).T


@pytest.mark.parametrize("silos", [6, 3])
def test_sums_over_periods_are_judged_by_the_rows_of_all_silos(
    silos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each silo's rows are those written longhand, and no leverage is stated smaller than it is."""
    data, examine = followed(8, (60,) * silos), Guard.examine
    longhand = {name: sums_over_periods(rows) for name, rows in data.items()}
    pooled = np.concatenate(list(longhand.values()), axis=1)
    true = largest(pooled)
    judged: set[str] = set()

    def watched(guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        examine(guard, query, local, looks)
        assert looks is not None
        for point in (point for member in query.members for point in member.evaluations()):
            for union in (each for each in looks.unions(point) if "w:C(period)[2]" in each.names):
                rows = np.concatenate([piece.rows for piece in union.rows(local)], axis=1)
                assert largest(rows) == pytest.approx(largest(longhand[local.name]))
                space, _ = next(looks.union_spaces(union, local))
                stated = space.leverages(PersonRows(rows))
                assert (stated >= 0.999 * leverages_in(pooled, longhand[local.name])).all()
                assert stated.max() <= 2.0 * true
                judged.add(local.name)

    monkeypatch.setattr(Guard, "examine", watched)
    masked(hazards("C(period) + w:C(period)"), data)
    assert judged == set(data)


def leverages_in(pooled: Array, rows: Array) -> Array:
    return np.einsum("in,ij,jn->n", rows, np.linalg.inv(pooled @ pooled.T), rows)


@pytest.mark.parametrize(("silos", "event", "own"), [(6, 0.0, ""), (4, 1.0, ""), (6, 1.0, " + C(silo)")])
def test_whoever_leaves_a_period_alone_is_not_told(silos: int, event: float, own: str) -> None:
    """Nor where each silo has an intercept of its own."""
    data, study = followed(8, (60,) * silos), hazards(f"C(period) + w:C(period){own}")
    masked(study, data)
    for rows in data.values():
        rows["time"] = np.maximum(rows["time"], 2.5)
    data["silo 0"]["time"][7], data["silo 0"]["event"][7] = 0.5, event
    with pytest.raises(AssertionError, match=r"refused: .*min_pooled"):
        masked(study, data)


def test_sums_over_periods_are_looked_at_after_the_model_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say who of a few had the event: a silo that refuses the model does not answer."""
    looked: list[bool] = []  # whether sums were looked at, by silo 0
    answer = LookQuery.answer

    def watched(query: LookQuery, local: Local) -> tuple[int, ...]:
        if local.name == "silo 0":
            looked.append(any(isinstance(each.subject, Union | Hazards) for each in query.asked))
        return answer(query, local)

    monkeypatch.setattr(LookQuery, "answer", watched)
    data = followed(8, (60,) * 6)
    data["silo 0"]["w"][7] = 0.777
    with pytest.raises(AssertionError, match=r"refused: .*min_pooled"):
        masked(hazards("C(period) + I(1 + 1/(1 + (1e6*(w - 0.777))**2))"), data)
    assert looked
    assert not any(looked)
    masked(hazards("C(period) + w"), data)
    assert any(looked)


class Lie:
    """A silo that says in every look that many people have every column, as much as its bounds allow."""

    def __init__(self, silo: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.silo, self.look, self.people, self.told = silo, LookQuery.answer, PeopleQuery.answer, 0
        monkeypatch.setattr(LookQuery, "answer", lambda query, local: self.in_look(query, local))  # noqa: PLW0108 - it binds
        monkeypatch.setattr(PeopleQuery, "answer", lambda query, local: self.of_people(query, local))  # noqa: PLW0108 - it binds

    def of_people(self, query: PeopleQuery, local: Local) -> tuple[int, ...]:
        answer = self.people(query, local)
        return answer if local.name != self.silo else (60,) * len(answer)

    def in_look(self, query: LookQuery, local: Local) -> tuple[int, ...]:
        answer = self.look(query, local)
        if local.name != self.silo:
            return answer
        self.told += 1
        pairs = [pair for each in query.asked for pair in upper_pairs(each.dim)]
        told = zip(answer, pairs, query.lanes, strict=True)
        return tuple(z + min(1 << 12, lane.reach // 8) * (0 < j == k) for z, (j, k), lane in told)


TRUSTING = Policy(colluders=0)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("liar", ["silo 1", "silo 2"], ids=["of the other group", "of the same group"])
def test_a_silo_that_lies_in_a_look_makes_nobody_tell(
    formula: str, liar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person with the rare covariate is alone in all silos; where the owners trust, the lie works."""
    silos, lie = one_with(six(), others=0), Lie(liar, monkeypatch)
    with pytest.raises(AssertionError, match=r"refused: .*min_people"):
        masked(asked(formula), silos)
    assert lie.told
    if formula == FORMULAS[0]:
        masked(asked(formula), silos, TRUSTING)


@pytest.mark.parametrize("at", [1, 2], ids=["of the other group", "of the same group"])
def test_people_of_an_accomplice_hide_nobody(at: int) -> None:
    """All others with the covariate are at one silo, which could subtract them."""
    silos = one_with(six(), others=20, at=at)
    with pytest.raises(AssertionError, match=r"refused: .*min_people"):
        masked(asked("a + w + rare"), silos)
    masked(asked("a + w + rare"), silos, TRUSTING)


def five() -> dict[str, Any]:
    """Too few silos for two groups that hide theirs."""
    return cohort(5, (60,) * 5, 0.0)


def test_sums_over_periods_are_bounded_in_every_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five silos of 200 with 16 columns are not crowded, but few people leave in each period."""
    plan, rows = refusals.study("8 periods, hazard 3.0 %, and w by period, 5 silos of 200", 4)
    under = refusals.masked(plan)
    assert run_honest(under, rows) == ("finished", "")
    monkeypatch.setattr(PooledGram, "is_crowded", False)
    assert run_honest(under, rows) == ("refused", "min_people")


def test_own_rows_do_not_stand_in_for_those_of_all_silos(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this study of raw costs one person has 0.53 of a combination over all silos, 0.83 at no silo."""
    plan, rows = refusals.study("raw costs, 5 silos of 100", 8)
    under = refusals.masked(plan)
    assert run_honest(under, rows) == ("refused", "min_pooled")
    monkeypatch.setattr(Guard, "_may_try_own_rows", lambda *_: True)
    assert run_honest(under, rows) == ("finished", "")
    assert round(truth_of(under, rows)[0].pooled, 2) == 0.53


def test_few_silos_believe_each_other_if_their_owners_let_them() -> None:
    study, silos = asked("a + w + rare"), one_with(five(), others=4)
    masked(study, silos)
    masked(study, silos, TRUSTING, colluders=0)
    for policy, colluders in ((Policy(trust_looks=False), 1), (Policy(), 0)):
        with pytest.raises(AssertionError, match=r"refused: .*min_support"):  # by the own rows
            masked(study, silos, policy, colluders=colluders)


def test_a_curious_silo_of_few_has_nobody_alone_after_it_subtracts_its_rows() -> None:
    """All but one of those with the covariate are at one silo: without them the one would be alone."""
    silos = one_with(five(), others=20, at=3)
    with pytest.raises(AssertionError, match=r"refused: .*min_support"):  # by the own rows
        masked(asked("a + w + rare"), silos)
    masked(asked("a + w + rare"), silos, TRUSTING, colluders=0)


def test_a_silo_of_few_that_lies_in_a_look_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what few silos are not protected from (docs/threats.md), unless an owner believes nobody."""
    silos, lie = one_with(five(), others=0), Lie("silo 1", monkeypatch)
    masked(asked("a + w + rare"), silos)
    assert lie.told
    with pytest.raises(AssertionError, match=r"refused: .*min_support"):
        masked(asked("a + w + rare"), silos, Policy(trust_looks=False))


@pytest.mark.parametrize("sizes", [(60,) * 5, (40, 200, 50), (80, 45, 60, 300)], ids=str)
def test_what_few_silos_state_holds_after_any_one_took_out_its_rows(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leverage in all rows, over the share that the others surely leave, bounds it in what remains."""
    seen: dict[tuple[int, int, Part], dict[str, tuple[Array, Array]]] = {}

    def examine(guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        assert looks is not None
        assert looks.groups.discloses_shares
        for k, member in enumerate(query.members):
            for point in member.evaluations():
                for part in (part for part in point.parts if looks.knows(point, part)):
                    told = local.submodel(point.model, point.law).disclosed_rows(point.eps, part)
                    rows = np.concatenate([piece.rows for piece in told], axis=1)
                    rule = Rule((), "min_people", colluders=1)
                    (space, rest), *_ = looks.spaces(point, part, local, rule)
                    stated = space.leverages(PersonRows(rows)) / rest
                    seen.setdefault((guard.queries, k, part), {})[local.name] = rows, stated

    monkeypatch.setattr(Guard, "examine", lambda *arguments: examine(*arguments))  # noqa: PLW0108 - it binds
    masked(asked("a + w + z + rare + a:w"), cohort(3, sizes, 0.1), UNGUARDED)
    with Premise("what is stated without the shares would be too little", at_least=0.5) as premise:
        for by_silo in seen.values():
            truths: list[tuple[Array, Array]] = []
            for gone, (name, (rows, stated)) in itertools.product(by_silo, by_silo.items()):
                if name != gone:
                    rest = np.concatenate([r for other, (r, _) in by_silo.items() if other != gone], axis=1)
                    inverse = np.linalg.inv(rest @ rest.T)
                    truths.append((np.einsum("in,ij,jn->n", rows, inverse, rows), stated))
            for true, stated in truths:
                assert (stated >= true * (1 - 1e-9)).all()
            pooled = np.concatenate([rows for rows, _ in by_silo.values()], axis=1)
            most = max(float(true.max()) for true, _ in truths)
            premise.holds(largest(pooled) < most)
            assert max(float(stated.max()) for _, stated in truths) < 12 * most
    assert len(seen) >= 8


def crowded(seed: int, sizes: tuple[int, ...], columns: int) -> tuple[ft.Study, dict[str, Any]]:
    """Few people to a column, and an outcome that differs much more at one silo than at the others."""
    rng, names = np.random.default_rng(seed), [f"w{j}" for j in range(columns)]
    silos = {}
    for m, n in enumerate(sizes):
        w = rng.standard_normal((columns, n)).clip(-8, 8)
        a = rng.permutation(np.arange(n) % 2).astype(float)
        y = np.clip(rng.normal(5 + a + w[0], 2.5 if m == 0 else 1.0, n), 0, 10)
        silos[f"silo {m}"] = {"y": y, "a": a, **dict(zip(names, w, strict=True))}
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(f"a + {' + '.join(names)}"),
        treatment_model=ft.GLM("1"),
        variables=declare(y=(0, 10), a="binary", **dict.fromkeys(names, (-8, 8))),
    )
    return study, silos


@pytest.mark.parametrize(
    ("sizes", "columns"), [((40,) * 5, 12), ((30, 45, 60, 24), 10), ((60, 24, 24, 24, 30), 14)], ids=str
)
def test_gains_bound_what_remains_after_any_other_silo_took_out_its_rows(
    sizes: tuple[int, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each metric, at the point of a look and near it; the smallest is less than that by shares."""
    seen: dict[tuple[int, int], dict[str, tuple[Array, list[Array]]]] = {}
    rule = Rule((), "min_people", colluders=1)

    def examine(guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        assert looks is not None
        for k, member in enumerate(query.members):
            for point in member.evaluations():
                if not looks.knows(point, Part.GRADIENT):
                    continue
                disclosed = local.submodel(point.model, point.law).disclosed_rows(point.eps)
                rows = PersonRows(np.concatenate([piece.rows for piece in disclosed], axis=1))
                spaces = list(looks.spaces(point, Part.GRADIENT, local, rule))
                stated = [space.leverages(rows) / factor for space, factor in spaces]
                gram = looks._held(point, Part.GRADIENT)
                half = [2.0 * space.leverages(rows) for space in gram.spaces_without_one(local)]
                twice = [space.leverages(rows) for space in gram.spaces_without_one(local, shrunk=2.0)]
                assert np.allclose(half, twice)
                seen.setdefault((guard.queries, k), {})[local.name] = rows.rows, stated

    monkeypatch.setattr(Guard, "examine", lambda *arguments: examine(*arguments))  # noqa: PLW0108 - it binds
    study, silos = crowded(7, sizes, columns)
    masked(study, silos, UNGUARDED)
    tried, ratios = 0, []
    with Premise("gains prove more than shares", at_least=0.9) as premise:
        for by_silo in (each for each in seen.values() if len(each["silo 0"][1]) > 1):
            for name, (rows, (by_shares, *by_gains)) in by_silo.items():
                true = np.zeros(rows.shape[1])
                for gone in by_silo.keys() - {name}:
                    rest = np.concatenate([r for other, (r, _) in by_silo.items() if other != gone], axis=1)
                    inverse = np.linalg.inv(rest @ rest.T)
                    true = np.maximum(true, np.einsum("in,ij,jn->n", rows, inverse, rows))
                for stated in by_gains:
                    assert (stated >= true * (1 - 1e-9)).all()
                    tried += 1
                least = min(float(stated.max()) for stated in by_gains)
                premise.holds(least < by_shares.max())
                ratios.append(least / true.max())
    assert tried >= 200
    assert max(ratios) < 2.5
    assert np.median(ratios) < 1.8


def test_gains_are_the_sums_of_squares_of_shares() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(4, 9))
    P = rows @ rows.T / 40.0
    stated = unpack(np.array(gains_of(np.eye(4) / math.sqrt(40.0), lambda: [PersonRows(rows)], 5), float), 4)
    longhand = sum(np.linalg.matrix_power(P, k) for k in range(2, 400))
    unit = gains_unit(4, 5)
    assert np.abs(stated * unit - longhand).max() <= unit / 2 * (1 + 1e-9)
    assert 4 * 5 * unit <= 1 / 64
    most = math.sqrt(0.99 / np.linalg.eigvalsh(rows @ rows.T)[-1])  # nearly all of a combination
    nearly = gains_of(np.eye(4) * most, lambda: [PersonRows(rows)], 5)
    assert (unpack(np.array(nearly, float), 4) * unit == NO_END * np.eye(4)).all()


@pytest.mark.parametrize(("silos", "asks"), [(3, False), (4, True), (5, True), (6, False)])
def test_gains_are_asked_of_four_and_five_silos_with_few_people_to_a_column(silos: int, asks: bool) -> None:
    study, data = crowded(2, (40,) * silos, 12)
    finished, plan = masked(study, data, UNGUARDED)
    kinds = {type(heard.query) for heard in heard_rounds(plan, finished.transcript, finished.sizes)}
    assert (GainsQuery in kinds) == asks
    finished, plan = masked(*crowded(2, (400,) * silos, 3), UNGUARDED)
    kinds = {type(heard.query) for heard in heard_rounds(plan, finished.transcript, finished.sizes)}
    assert LookQuery in kinds
    assert GainsQuery not in kinds


def test_gains_are_not_stated_if_one_person_has_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of shares rest on fewer people than shares: who refuses the sums does not state gains."""
    stated: list[str] = []
    answer = GainsQuery.answer

    def watched(query: GainsQuery, local: Local) -> tuple[int, ...]:
        stated.append(local.name)
        return answer(query, local)

    monkeypatch.setattr(GainsQuery, "answer", watched)
    study, data = crowded(2, (40,) * 5, 12)
    masked(study, data)
    assert set(stated) == set(data)
    stated.clear()
    for own in data.values():
        own["w5"] = own["w5"] * 0.05
    data["silo 3"]["w5"][7] = 7.7
    with pytest.raises(AssertionError, match=r"refused: .*min_pooled"):
        masked(study, data)
    assert "silo 3" not in stated


def test_what_is_stated_holds_for_any_silos_that_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each silo that leaves with its rows, no leverage in the others' rows is above what was stated."""
    seen: dict[tuple[int, int, Part], dict[str, tuple[Array, Array]]] = {}

    def examine(guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        assert looks is not None
        choices = groups_left_out(looks.groups.groups, 1)
        assert choices is not None
        for k, member in enumerate(query.members):
            for point in member.evaluations():
                for part in (part for part in point.parts if looks.knows(point, part)):
                    told = local.submodel(point.model, point.law).disclosed_rows(point.eps, part)
                    rows = np.concatenate([piece.rows for piece in told], axis=1)
                    rules = (Rule(choice, "min_people") for choice in choices)
                    spaces = (next(looks.spaces(point, part, local, rule)) for rule in rules)
                    stated = np.max([space.leverages(PersonRows(rows)) for space, _ in spaces], axis=0)
                    seen.setdefault((guard.queries, k, part), {})[local.name] = rows, stated

    monkeypatch.setattr(Guard, "examine", lambda *arguments: examine(*arguments))  # noqa: PLW0108 - it binds
    study = asked("a + w + rare + C(site)", site=[str(m) for m in range(6)])
    silos = cohort(3, (60,) * 6, 0.1)
    for m, rows in enumerate(silos.values()):
        rows["site"] = np.full(60, str(m))
    masked(study, silos, UNGUARDED)
    for by_silo in seen.values():
        for gone in by_silo:
            rest = np.concatenate([rows for name, (rows, _) in by_silo.items() if name != gone], axis=1)
            inverse = np.linalg.pinv(rest @ rest.T, rcond=1e-12, hermitian=True)
            for name, (rows, stated) in by_silo.items():
                if name != gone:
                    true = np.einsum("in,ij,jn->n", rows, inverse, rows)
                    assert (stated >= true * (1 - 1e-9)).all()
                    assert stated.max() <= 3.0 * true.max()
    assert len(seen) >= 8


def test_groups_have_two_silos_more_than_may_lie() -> None:
    for silos, liars in itertools.product(range(3, 60), range(5)):
        looks = LookGroups.of(map(str, range(silos)), liars)
        groups = looks.groups
        assert looks == LookGroups.of(map(str, reversed(range(silos))), liars)
        assert all(len(group) >= liars + 2 for group in groups)
        assert bool(groups) == (silos >= liars + 2)
        assert (len(groups) > liars) == (silos >= (liars + 1) * (liars + 2))
        assert looks.discloses_shares == (0 < len(groups) <= liars)
        assert not groups or sorted(itertools.chain(*groups)) == sorted(map(str, range(silos)))


def test_groups_with_doubted_silos_are_left_out_always() -> None:
    groups = (("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i"))
    assert groups_left_out(groups, 0) == [()]
    assert groups_left_out(groups, 1) == [(0,), (1,), (2,)]
    assert groups_left_out(groups, 2) == [(0, 1), (0, 2), (1, 2)]
    assert groups_left_out(groups, 3) is None
    assert groups_left_out(groups, 1, {"e"}) == [(1, 0), (1, 2)]
    assert groups_left_out(groups, 1, {"e", "i"}) is None
    assert groups_left_out((), 0) is None


def test_few_silos_are_believed_only_if_none_is_doubted() -> None:
    few = LookGroups.of("abcde", 1)
    assert few.rules(1) == [Rule((), "min_pooled"), Rule((), "min_people", 1)]
    assert few.rules(2) == [Rule((), "min_pooled"), Rule((), "min_people", 2)]
    assert few.rules(0) == [Rule((), "min_pooled")]
    assert few.rules(1, {"c"}) is None
    assert few.rules(1, trusts=False) is None
    assert LookGroups.of("abcde", 0).rules(1) is None  # their shares are not told
