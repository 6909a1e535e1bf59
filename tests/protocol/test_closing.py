"""Closing sums under masks: judged by all silos' rows where a silo's own prove too little."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.errors import DecodeError, RefusedError
from fedtmle.model.problem import ClosingBlock
from fedtmle.protocol import messages
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.looks import LookGroups, Looks, closings_of
from fedtmle.protocol.masked import (
    AbstractLook,
    LookQuery,
    MaskedForm,
    PeopleQuery,
    PooledLevels,
    SharesQuery,
    ShownQuery,
)
from fedtmle.protocol.messages import Ask, Payload
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import VOID, DisclosedColumns, JointQuery, Local, MomentsQuery, Phase, Query
from fedtmle.protocol.subjects import ClosingRows
from fedtmle.runtime.certificate import heard_rounds, replay
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.types import Array
from tests.golden.runs import RUNS
from tests.premise import Premise
from tests.runtime.faults import RARE, key_of, rare

BY_ARM = replace(RARE, outcome_model=ft.GLM("a"), treatment_model=ft.GLM("1"))


def parties_of(
    data: Mapping[str, Any], policy: Policy, study: ft.Study = RARE, *, signs: bool = True
) -> tuple[Plan, list[Silo]]:
    keys = {name: key_of(name) for name in data}
    members = [
        Member(name=n, key=key.public if signs else b"", mask_key=key.mask_key.public)
        for n, key in keys.items()
    ]
    plan, rows = study_plan(study, tuple(members)), dict(load_all(data, schema_of(study)))
    keepers = {n: Keeper(policy=policy, key=key, mask_key=key.mask_key) for n, key in keys.items()}
    return plan, [Silo(n, plan, rows[n], keeper=keepers[n]) for n in data]


def run(data: Mapping[str, Any], policy: Policy | None = None) -> tuple[Finished, Plan, list[Silo]]:
    plan, parties = parties_of(data, policy or Policy())
    try:
        return Session(plan, InProcess(parties)).run(), plan, parties
    except RefusedError:
        raise AssertionError(f"refused: {sorted({p.refused_by for p in parties} - {''})}") from None


def kinds_of(finished: Finished, plan: Plan) -> list[tuple[type[Query], bool]]:
    """Return the kind of each round that looks at closing sums or asks for them, and whether it is void."""
    heard = heard_rounds(plan, finished.transcript, finished.sizes)
    closing = [(r.query, r.pooled is VOID) for r in heard if r.query.phase is not Phase.NUISANCE]
    asked = [
        (query, void)
        for query, void in closing
        if closings_of(query) or (isinstance(query, AbstractLook) and not isinstance(query, ShownQuery))
    ]
    return [(MomentsQuery if closings_of(query) else type(query), void) for query, void in asked]


@pytest.mark.parametrize("silos", [3, 5, 8])
def test_few_events_at_a_silo_do_not_stop_a_study(silos: int) -> None:
    """One person is nearly all of an arm's residuals at each silo; nothing else than the rounds differs."""
    data = rare(silos, events=1 if silos > 3 else 3)
    if silos == 3:  # one of them has too few
        data["silo 1"] = rare(3)["silo 1"]
    finished, plan, _ = run(data)
    shares = [(SharesQuery, False)] if silos < 6 else []
    looks = [(PeopleQuery, False), (LookQuery, False), *shares]
    assert kinds_of(finished, plan) == [(MomentsQuery, True), *looks, (MomentsQuery, False)]
    without, other, _ = run(data, replace(UNGUARDED, colluders=1))
    assert kinds_of(without, other) == [(MomentsQuery, False)]
    assert isinstance(finished.outcome, Targeted)
    assert isinstance(without.outcome, Targeted)
    assert np.array_equal(finished.outcome.estimate.psi, without.outcome.estimate.psi)
    assert np.array_equal(finished.outcome.estimate.covariance, without.outcome.estimate.covariance)


def test_where_own_rows_prove_enough_nobody_looks_and_no_round_is_void() -> None:
    finished, plan, _ = run(rare(5, events=20))
    assert kinds_of(finished, plan) == [(MomentsQuery, False)]


@pytest.mark.parametrize("events", [0, 30])
def test_one_event_among_none_or_among_a_curious_silos_is_not_told(events: int) -> None:
    """The look shows it, and the silo refuses: all others have none, or one silo has them all."""
    data = rare(5)
    for m in range(1, 5):
        data[f"silo {m}"] = rare(5, events=events if m == 1 else 0)[f"silo {m}"]
    data["silo 0"]["y"][:] = 0.0
    data["silo 0"]["y"][[3, 4]] = 1.0
    plan, parties = parties_of(data, Policy(), BY_ARM)
    with pytest.raises(RefusedError):
        Session(plan, InProcess(parties)).run()
    assert parties[0].refused_by in ("min_people", "min_pooled")
    assert isinstance(parties[0]._position.query, JointQuery)


def test_an_owner_who_believes_nobody_refuses_as_before() -> None:
    with pytest.raises(AssertionError, match=r"refused: \['min_people'\]"):
        run(rare(5), Policy(trust_looks=False))


def test_a_void_round_is_replayed_for_its_owner() -> None:
    data = rare(5)
    data["silo 4"] = rare(5, events=20)["silo 4"]  # its own rows prove enough
    finished, plan, parties = run(data)
    for name, answers in (("silo 0", 1), ("silo 4", 2)):  # noise is no answer
        rows = parties[list(data).index(name)]._source
        again = replay(plan, rows, finished.transcript, name, policy=Policy(), mask_key=key_of(name).mask_key)
        closing = [each for each in again.answered if closings_of(each.query)]
        assert len(closing) == answers


class Told:
    """What a silo sends in the round of the closing sums, and how its totals come out."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.plan, parties = parties_of(data, Policy())
        finished = Session(self.plan, InProcess(parties)).run()
        self.rounds = list(heard_rounds(self.plan, finished.transcript, finished.sizes))
        self.number = next(k for k, each in enumerate(self.rounds) if each.pooled is VOID)
        exchange = [e for e in finished.transcript.exchanges if _is_answered(e.replies)][self.number]
        self.sent = {name: _bits(reply) for name, reply in exchange.replies.items()}


def _is_answered(replies: Mapping[str, bytes]) -> bool:
    return all(isinstance(messages.decode_reply(each), messages.Answered) for each in replies.values())


def _bits(reply: bytes) -> Any:
    answered = messages.decode_reply(reply)
    assert isinstance(answered, messages.Answered)
    return answered.payload.bits()


def test_a_void_round_says_nothing_of_any_sum() -> None:
    """The total of the lanes is noise: it has nothing to do with the sums that are asked again later."""
    told = Told(rare(5))
    query, later = told.rounds[told.number].query, told.rounds[-1].pooled
    assert MaskedForm(query, may_be_void=True).pool(told.sent) is VOID
    with pytest.raises(DecodeError):
        MaskedForm(query).pool(told.sent)
    form = MaskedForm(query)
    residues = [form.read(bits)[0] for bits in told.sent.values()]
    whole = residues[0]
    for each in residues[1:]:
        whole = form.packing.add(whole, each)
    sums = [part for part in query.split(later) if hasattr(part, "units")]
    own = form.packing.pack(
        [x for member, part in zip(query.members, query.split(later), strict=True) if member.lanes is not None
         for x in (part.units if hasattr(part, "units") else (0,) * len(member.lanes))]
    )  # fmt: skip
    assert sums
    differ = bin(own.packed ^ whole.packed).count("1")
    assert 0.4 < differ / form.packing.bits < 0.6


def test_a_server_that_calls_a_round_void_gets_a_look_and_the_same_sums() -> None:
    """Without signed answers it may say so; it learns no sum that it would not have learned."""
    data = rare(5, events=20)

    def played(*, lies: bool) -> tuple[list[str], Any]:
        plan, parties = parties_of(data, Policy(), signs=False)
        session = Session(plan, InProcess(parties))
        pool, asked = session._pool, []

        def pooled(follower: Any, payloads: Any, sizes: Any) -> Any:
            honest = pool(follower, payloads, sizes)
            is_first = follower.masked_form.may_be_void
            asked.append(type(follower.query).__name__)
            return Ask(b"", 0, Payload(0, b"")).pooled.bits() if lies and is_first else honest

        session._pool = pooled  # type: ignore[method-assign]
        finished = session.run()
        assert isinstance(finished.outcome, Targeted)
        return asked, finished.outcome.estimate.psi

    honest, lying = played(lies=False), played(lies=True)
    assert np.array_equal(honest[1], lying[1])
    assert lying[0][-4:] == ["PeopleQuery", "LookQuery", "SharesQuery", "JointQuery"]
    assert honest[0] == [*lying[0][:-5], "JointQuery"]


def test_a_server_cannot_call_a_round_void_that_silos_add_up_themselves() -> None:
    plan, parties = parties_of(rare(5, events=20), Policy())
    session = Session(plan, InProcess(parties))
    pool = session._pool

    def pooled(follower: Any, payloads: Any, sizes: Any) -> Any:
        honest = pool(follower, payloads, sizes)
        return Payload(0, b"").bits() if follower.masked_form.may_be_void else honest

    session._pool = pooled  # type: ignore[method-assign]
    with pytest.raises(RefusedError):
        session.run()
    assert {silo.refused_by for silo in parties} == {"relay"}


def test_no_other_round_may_be_void() -> None:
    """An empty broadcast is not one there."""
    plan, parties = parties_of(rare(5, events=20), Policy(), signs=False)
    session = Session(plan, InProcess(parties))
    pool = session._pool
    session._pool = lambda *given: (pool(*given), Payload(0, b"").bits())[1]  # type: ignore[method-assign]
    with pytest.raises(DecodeError):
        session.run()


def test_one_who_is_alone_is_refused_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules that differ in one person: nothing but the refusal is disclosed."""
    asked: list[LookQuery] = []
    answer = LookQuery.answer

    def watched(query: LookQuery, local: Local) -> tuple[int, ...]:
        asked.append(query)
        return answer(query, local)

    monkeypatch.setattr(LookQuery, "answer", watched)
    data = rare(5, events=20)
    study = ft.Study(
        target=ft.PolicyMeans(
            outcome="y",
            treatment="a",
            rules=tuple(ft.Threshold("w", cut, arm="1", otherwise="0") for cut in (0.5, 0.6)),
        ),
        outcome_model=RARE.outcome_model,
        treatment_model=RARE.treatment_model,
        variables=RARE.variables,
    )
    for rows in data.values():
        rows["w"] = np.where((rows["w"] > 0.45) & (rows["w"] < 0.65), 0.4, rows["w"])
    data["silo 2"]["w"][7] = 0.55
    plan, parties = parties_of(data, Policy(), study)
    with pytest.raises(RefusedError):
        Session(plan, InProcess(parties)).run()
    assert {silo.refused_by for silo in parties} - {""} == {"min_people"}
    assert not any(isinstance(each.subject, ClosingRows) for query in asked for each in query.asked)


# What silos state of their rows, against all rows: synthetic columns, at random.


@dataclass
class Rows:
    """A silo's columns."""

    name: str
    columns: Array

    @property
    def n_rows(self) -> int:
        return self.columns.shape[1]


class Columns:
    """Stands for closing sums over given columns."""

    hideable = 0
    noise = None
    lanes = ()
    phase = Phase.CLOSING
    explanation = "closing sums"

    def __init__(self, blocks: tuple[ClosingBlock, ...]) -> None:
        self.closing_blocks = blocks

    @property
    def members(self) -> tuple[Columns, ...]:
        return (self,)

    def retired_answer(self) -> None:
        return None

    def evaluations(self) -> tuple[()]:
        return ()

    def rows_of(self, local: Rows) -> Rows:
        return local

    def disclosed_columns(self, local: Rows) -> DisclosedColumns:
        half = local.n_rows // 2
        return DisclosedColumns(lambda: (local.columns[:, :half], local.columns[:, half:]))


BLOCK = ClosingBlock(
    ("u", "v", "s", "t"), (0, 1, 2, 3), (8.0, 8.0, 1.0, 1.0), (True, True, False, False), (2, 3)
)
Answers = Callable[[Query, Rows], tuple[int, ...]]


def truthful(query: Query, local: Rows) -> tuple[int, ...]:
    return cast("tuple[int, ...]", query.answer(cast("Local", local)))


def looked(
    silos: Sequence[Rows], block: ClosingBlock = BLOCK, answer: Answers = truthful
) -> tuple[Looks, PooledLevels]:
    """Return what the silos know after a look at their columns."""
    looks = Looks(sum(silo.n_rows for silo in silos), LookGroups.of((silo.name for silo in silos), 1))
    flow = looks._look_at_closings(closings_of(cast("Query", Columns((block,)))), Phase.CLOSING)
    pooled: Any = None
    while True:
        try:
            query = flow.send(pooled)
        except StopIteration as stop:
            return looks, stop.value[0][0]
        pooled = query.pool({silo.name: answer(query, silo) for silo in silos}, {})


def columns(rng: np.random.Generator, n: int, size: float, *, same: bool) -> Array:
    """Return u, v, s and t: one to three people have large u or v, at a size that nobody knows beforehand."""
    rows = np.concatenate([1e-3 * size * rng.random((2, n)), np.ones((2, n))])
    if not same:
        rows[3] = rng.random(n) < 0.7
    for column in rows[:2]:
        events = rng.choice(n, rng.choice([1, 1, 2, 3]), replace=False)
        column[events] = size * rng.uniform(0.5, 1.0, len(events))
    return rows


def leverages(rows: Array, whole: Array) -> Array:
    inverse = np.linalg.pinv(whole @ whole.T, rcond=1e-13, hermitian=True)
    return np.asarray(np.einsum("in,ij,jn->n", rows, inverse, rows))


@pytest.mark.parametrize("another", [0.0, 1e-5, 1e-2])
def test_a_silo_voids_a_round_unless_one_person_is_alone(another: float) -> None:
    """No other silo can change that a person is all of a combination at this one: nothing is asked first."""
    silo = Rows("0", np.concatenate([np.zeros((2, 50)), np.ones((1, 50)), np.arange(50.0)[None] % 2]))
    silo.columns[0, 3], silo.columns[0, 4] = 1.0, another
    silo.columns[1, 10:20] = 1.0
    looks = Looks(250, LookGroups.of(map(str, range(5)), 1))
    looks.may_be_void = True
    guard = Guard(Policy(), None, is_masked=True)
    query, local = cast("Query", Columns((BLOCK,))), cast("Local", silo)
    if another**2 < 1e-6:
        with pytest.raises(RefusalError):
            guard._examine_columns(query, 0, local, looks)
    else:
        guard._examine_columns(query, 0, local, looks)
    assert guard.is_void == (another**2 >= 1e-6)


def test_after_a_void_round_later_closing_sums_are_asked_after_their_look() -> None:
    rng = np.random.default_rng(1)
    silos = [Rows(str(m), columns(rng, 50, 4.0, same=True)) for m in range(5)]
    query = cast("Query", Columns((BLOCK,)))

    def closings() -> Any:
        yield query
        yield query

    looks = Looks(250, LookGroups.of((silo.name for silo in silos), 1))
    flow, asked, pooled = looks.before(closings()), [], cast("Any", None)
    while True:
        try:
            now = flow.send(pooled)
        except StopIteration:
            break
        asked.append("closing" if now is query else type(now).__name__)
        if now is query:
            pooled = VOID if looks.may_be_void else ()
        else:
            pooled = now.pool({silo.name: truthful(now, silo) for silo in silos}, {})
    look = ["PeopleQuery", "LookQuery", "SharesQuery"]
    assert asked == ["closing", *look, "closing", *look, "closing"]


@pytest.mark.parametrize("count", [3, 5, 6, 9])
def test_no_share_is_stated_smaller_than_it_is_whoever_subtracts(count: int) -> None:
    """After any one silo took out its rows, nobody's share of what remains exceeds what was stated."""
    rng = np.random.default_rng(count)
    with (
        Premise("the own rows do not prove the rule", at_least=0.5) as needed,
        Premise("then the rows of all silos do", at_least=0.2 if count < 6 else 0.05) as proved,
    ):
        for _ in range(10):
            size, same = 8.0 * 2.0 ** -int(rng.integers(0, 8)), rng.random() < 0.5
            silos = [Rows(str(m), columns(rng, 200, size, same=same)) for m in range(count)]
            looks, levels = looked(silos)
            rules = looks.groups.rules(1) or []
            for silo in silos:
                local = cast("Local", silo)
                rest = levels.rest(local, 0 if looks.groups.groups[1:] else 1)
                stated = {rule: looks.closing_leverage(levels, local, rule.left_out, 0.0) for rule in rules}
                assert stated[rules[0]] >= _left(silo, silos, ()) * (1 - 1e-9)
                after = max(stated[rule] for rule in rules[1:]) / max(rest, 1e-12)
                others = [each for each in silos if each is not silo]
                assert after >= max(_left(silo, silos, (gone,)) for gone in others) * (1 - 1e-9)
                if needed.holds(float(leverages(silo.columns, silo.columns).max()) > 1 / 1.2):
                    proved.holds(after <= 1 / 1.2)


def _left(silo: Rows, silos: Sequence[Rows], gone: tuple[Rows, ...]) -> float:
    rest = np.concatenate([each.columns for each in silos if not any(each is g for g in gone)], axis=1)
    return float(leverages(silo.columns, rest).max())


@pytest.mark.parametrize("liar", ["1", "2"], ids=["of the other group", "of the same group"])
def test_a_silo_that_lies_about_closing_rows_hides_nobody(liar: str) -> None:
    """Six silos are two groups: what it adds or takes away is in the choices that leave its group out."""
    rng = np.random.default_rng(17)

    def answer(query: Query, local: Rows) -> tuple[int, ...]:
        told = truthful(query, local)
        if local.name != liar:
            return told
        if isinstance(query, LookQuery):
            return tuple(z + int(rng.integers(0, 2000)) for z in told)
        return tuple(max(0, z + int(rng.integers(-300, 300))) for z in told)

    with Premise("some choice of groups proves the rule", at_least=0.1) as premise:
        for _ in range(20):
            same = rng.random() < 0.5
            silos = [Rows(str(m), columns(rng, 200, 4.0, same=same)) for m in range(6)]
            looks, levels = looked(silos, answer=answer)
            (other,) = (silo for silo in silos if silo.name == liar)
            rules = [rule for rule in looks.groups.rules(1) or () if rule.floor == "min_people"]
            for silo in silos:
                local = cast("Local", silo)
                if silo is other or not levels.subject.loses_nothing(local):
                    continue
                found = [looks.closing_leverage(levels, local, rule.left_out, 0.0) for rule in rules]
                assert max(found) >= _left(silo, silos, (other,)) * (1 - 1e-9)
                premise.holds(min(found) < 1 / 1.2)


def test_a_column_that_was_left_out_by_a_lie_is_noticed() -> None:
    """A liar says that nobody has a column, or that two are equal; whose rows say otherwise refuses."""
    rng = np.random.default_rng(3)
    silos = [Rows(str(m), columns(rng, 100, 4.0, same=True)) for m in range(5)]
    silos[2].columns[3, 7] = 0.0  # t is not s for one person

    def answer(query: Query, local: Rows) -> tuple[int, ...]:
        told = truthful(query, local)
        if isinstance(query, PeopleQuery) and local.name == "4":
            return (*told[:4], told[4] - 1)
        return told

    _, honest = looked(silos)
    assert honest.subject.kept == (0, 1, 2, 3)
    _, levels = looked(silos, answer=answer)
    assert levels.subject.kept == (0, 1, 2)
    assert [levels.subject.loses_nothing(cast("Local", silo)) for silo in silos] == [
        True, True, False, True, True
    ]  # fmt: skip


def test_a_look_at_closing_rows_rounds_to_about_a_person() -> None:
    """Its totals over all silos are off by at most one person with the largest values, at every level."""
    rng = np.random.default_rng(8)
    for count, n in itertools.product((3, 5, 9), (60, 333)):
        silos = [Rows(str(m), columns(rng, n, 4.0, same=False)) for m in range(count)]
        _, levels = looked(silos)
        for gram in levels.levels:
            assert 0.25 < count * gram.unit / 2.0 <= 1.0
            whole = np.concatenate([silo.columns for silo in silos], axis=1) / gram.subject.largest[:, None]
            cut = whole / np.maximum(np.abs(whole).max(axis=0), 1.0)
            error = np.abs(gram.n * gram.matrix - cut @ cut.T)
            assert error.max() <= count * gram.unit / 2.0 + 1e-9
            assert error.max() > 0


def test_the_columns_of_every_target_are_all_in_one_block(tmp_path: Path) -> None:
    """Those that silos judge together are those behind the closing sums, each within its bound."""
    seen: list[MomentsQuery] = []
    examine = Guard.examine

    def watched(guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        for member in query.members:
            if isinstance(member, MomentsQuery):
                rows = np.concatenate(list(member.disclosed_columns(local).pieces()), axis=1)
                blocks = member.closing_blocks
                assert sorted(j for block in blocks for j in block.columns) == list(range(len(rows)))
                for block in blocks:
                    sizes = np.array(block.sizes)[:, None]
                    assert (np.abs(rows[list(block.columns)]) <= sizes * (1 + 1e-12)).all()
                seen.append(member)
        examine(guard, query, local, looks)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Guard, "examine", watched)
        run(rare(5, events=20))
        _run_targets(tmp_path)
    assert len({type(member.problem) for member in seen}) >= 3


def _run_targets(folder: Path) -> None:
    """Run studies of time to an event, of clusters and of treatment over time."""
    for name in ("study/time/RiskDifference", "study/clusters", "study/regimes"):
        golden = next(each for each in RUNS if each.startswith(name))
        RUNS[golden](folder)


def test_a_look_tells_whether_one_person_who_is_nearly_alone_stands_out() -> None:
    """The figure of docs/threats.md: the look itself comes before the judgement."""
    rng, right = np.random.default_rng(5), 0
    for _ in range(100):
        silos = [Rows(str(m), columns(rng, 200, 2.0, same=True)) for m in range(5)]
        for silo in silos:
            silo.columns[0] = 0.02 * rng.random(200)
        stands_out = rng.random() < 0.5
        silos[1].columns[0, 17] = 2.0 if stands_out else 0.01
        _, levels = looked(silos)
        at = next(gram for gram in levels.levels if gram.subject.largest[0] == 2.0)
        right += (at.n * at.matrix[0, 0] > 0.5) == stands_out
    assert right == 100
