"""Silos that retire: masked runs are the open ones, nobody sees who retired, a restart forgets nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import DecodeError, InputError
from fedtmle.model.fit import fit_local
from fedtmle.protocol import messages
from fedtmle.protocol.fits import FitAverage, FitCounts, FitOutcome, FitQuery
from fedtmle.protocol.messages import Answered
from fedtmle.protocol.plan import Member, Plan
from fedtmle.runtime.certificate import heard_rounds, overhear, replay
from fedtmle.runtime.session import InProcess, Session
from fedtmle.solver import embedded_keys, run_in_process
from fedtmle.studyfile.file import study_plan
from tests.cases import targets
from tests.golden.data import VARIABLES, cohort
from tests.golden.runs import study_of
from tests.initial.silos import pooled_table, split, trial
from tests.premise import Premise
from tests.runtime.faults import CASES, RETIRING, SIX, key_of, restarted
from tests.runtime.test_masked import check_broadcasts, parties

PARTITIONS = ((30, 31, 22, 24, 23, 21), (20, 25, 22, 24, 23), (60, 40, 50))
RULES: dict[str, Any] = {
    "coarse": ft.Personalized(lattice=0.05, max_updates=4, min_active=3),
    "fine": ft.Personalized(max_updates=3, min_active=3),
    "noise": ft.Personalized(noise=0.3, weights="uniform", max_updates=4, min_active=3),
    "gap": ft.Personalized(gap=1e-3, lattice=2.0**-20, max_updates=4, min_active=4),
    "average": ft.LocalAverage(tolerance=1e-3, max_updates=3),
    "uniform average": ft.LocalAverage(tolerance=1e-3, weights="uniform", max_updates=3),
}


def silos_of(case: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    cuts = np.cumsum((0, *sizes))
    return targets()[case].silos([np.arange(a, b) for a, b in itertools.pairwise(cuts)])


def both(plan_for: Any, rows: Mapping[str, Any], algorithm: Any) -> list[Any]:
    """The open run and the masked one."""
    return [
        run_in_process(
            plan_for, rows, algorithm=algorithm, pool=lambda _: None, is_masked=is_masked, threads=1
        )
        for is_masked in (False, True)
    ]


def assert_same(plain: Any, masked: Any) -> None:
    """Broadcasts, outcomes and every silo's own estimate are the same; who retired is known to one only."""
    one, other = plain.finished, masked.finished
    check_broadcasts(one.transcript, other.transcript, masked.plan)
    assert one.outcome.status is other.outcome.status
    assert one.outcome.accepted == other.outcome.accepted
    assert plain.local.keys() == masked.local.keys()
    for name, local in plain.local.items():
        again = masked.local[name]
        assert (local.retired_at, local.gap_bound) == (again.retired_at, again.gap_bound)
        assert local.estimate.psi.tobytes() == again.estimate.psi.tobytes()
        assert local.estimate.covariance.tobytes() == again.estimate.covariance.tobytes()
    assert other.retired_at == {}


@pytest.mark.parametrize("rule", RULES)
def test_masked_runs_are_the_open_ones(rule: str) -> None:
    """Nobody retires from an average, and by an exact zero alone if no rule lets a silo retire earlier."""
    retires = Premise("a silo retires", at_least=0.4)
    with retires if rule in ("coarse", "noise", "gap") else nullcontext():
        for case, sizes in itertools.product(("mean", "two arms"), PARTITIONS):
            one = targets()[case]
            rows = {name: one.problem.read(raw) for name, raw in silos_of(case, sizes).items()}

            def plan_for(members: tuple[Member, ...], one: Any = one) -> Plan:
                program = TargetingProgram(problem=one.problem, law=one.law, algorithm=RULES[rule])
                return Plan(program=program, roster=members)

            plain, masked = both(plan_for, rows, RULES[rule])
            assert_same(plain, masked)
            retires.holds(any(local.retired_at is not None for local in plain.local.values()))


@pytest.mark.parametrize("rule", ["noise", "average"])
@pytest.mark.parametrize("silos", [3, 5])
def test_so_are_masked_studies(rule: str, silos: int) -> None:
    tables = split(pooled_table(90 * silos, 3), silos)
    study = trial(ft.GLM("a + x"), algorithm=RULES[rule])
    plain, masked = both(lambda members: study_plan(study, members), tables, RULES[rule])
    assert_same(plain, masked)


@pytest.mark.parametrize("noise", [5.0, 1e-9])
def test_silos_that_fill_missing_covariates_have_their_own_estimates(noise: float) -> None:
    """The rows of a silo's own estimate are those of its fits, whether it retired or not."""
    silos = {
        name: {**columns, "w": np.where(np.arange(len(columns["w"])) % 9, columns["w"], np.nan)}
        for name, columns in cohort().items()
    }
    declared = {**VARIABLES, "w": replace(VARIABLES["w"], missing="indicator")}
    study = study_of(
        algorithm=ft.Personalized(noise=noise, max_updates=2, min_active=3), variables=ft.Variables(declared)
    )
    plain, masked = (ft.run(replace(study, aggregation=how), silos).run for how in ("open", "masked"))
    assert plain is not None
    assert masked is not None
    assert plain.silos.keys() == masked.silos.keys() == silos.keys()
    for name, local in plain.silos.items():
        assert local.estimate.psi.tobytes() == masked.silos[name].estimate.psi.tobytes()
        assert local.retired_at == masked.silos[name].retired_at
    assert any(local.retired_at is not None for local in plain.silos.values()) == (noise > 0.1)


def asked(plan: Plan, transcript: Any) -> list[Any]:
    return list(heard_rounds(plan, transcript, dict.fromkeys(plan.silos, 0)))


def test_the_fits_of_too_few_are_never_asked() -> None:
    """A count comes before each total of fits; it has at least three silos, or the run has ended."""
    stopped = Premise("too few silos still fitted", at_least=0.1)
    with stopped:
        for case, sizes, lattice in itertools.product(
            ("mean", "two arms"), PARTITIONS, (0.002, 0.01, 0.05, 0.2)
        ):
            one, silos = targets()[case], silos_of(case, sizes)
            algorithm = ft.Personalized(lattice=lattice, max_updates=4)
            result = ft.solve(one.problem, one.law, silos, algorithm, aggregation="masked")
            keys = embedded_keys(silos)
            program = TargetingProgram(problem=one.problem, law=one.law, algorithm=algorithm)
            members = tuple(Member(name=name, mask_key=key.public) for name, key in keys.items())
            rounds = asked(Plan(program=program, roster=members), result.transcript)
            for before, after in itertools.pairwise(rounds):
                if isinstance(after.pooled, FitAverage):
                    assert before.pooled.fitting == after.pooled.fitting >= 3
            last = rounds[-1].pooled
            if stopped.holds(result.status is ft.Status.FEW_ACTIVE):
                assert isinstance(last, FitCounts)
                assert 0 < last.fitting < 3


def swapped(rows: Mapping[str, Any], order: list[int]) -> dict[str, Any]:
    """The same rows under other names."""
    values = list(rows.values())
    return {name: values[k] for name, k in zip(rows, order, strict=True)}


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_two_runs_that_differ_in_who_retires_broadcast_the_same(weights: str) -> None:
    """Whoever retires: the totals, the lengths of all messages and the result's document are the same."""
    one, rows = targets()["mean"], silos_of("mean", SIX)
    algorithm = replace(RETIRING, weights=weights)
    results = [
        ft.solve(one.problem, one.law, swapped(rows, order), algorithm, aggregation="masked")
        for order in ([0, 1, 2, 3, 4, 5], [1, 0, 3, 4, 5, 2])
    ]
    retired = [{name: local.retired_at for name, local in result.silos.items()} for result in results]
    assert retired[0] != retired[1]
    assert len({at for at in retired[0].values() if at is not None}) > 1  # in different rounds
    heard = [[dict(e.requests) for e in result.transcript.exchanges] for result in results]
    assert heard[0] == heard[1]
    lengths = [[{s: len(r) for s, r in e.replies.items()} for e in x.transcript.exchanges] for x in results]
    assert lengths[0] == lengths[1]
    assert len({each["silo 0"] == each["silo 1"] for each in lengths[0]}) == 1
    plain = [result.to_dict() for result in results]
    for document in plain:
        del document["transcript"]  # a digest of masked answers too
    assert plain[0] == plain[1]
    assert plain[0]["retired_at"] == {}


def test_the_answers_of_retired_silos_look_like_any_others() -> None:
    """Every bit of a masked answer is 1 in half of the sessions, whether the silo retired or not."""
    plan, _ = CASES["mean, personalized and relayed"]()
    answers: dict[tuple[str, int], list[np.ndarray]] = {}
    sessions = 100
    for number in range(sessions):
        _, silos = parties("mean, personalized and relayed")
        run = Session(plan, InProcess(silos), session=number.to_bytes(16, "big")).run()
        for exchange in run.transcript.exchanges:
            for silo, data in exchange.replies.items():
                reply = messages.decode_reply(data)
                if isinstance(reply, Answered) and reply.round in (5, 6):  # a count, and fits
                    bits = np.unpackbits(np.frombuffer(reply.payload.data, np.uint8))[: reply.payload.length]
                    answers.setdefault((silo, reply.round), []).append(bits)
    outcomes = {silo.name: silo.local.retired_at for silo in silos if silo.local is not None}
    assert {outcomes[name] for name, _ in answers} > {1, None}  # some had retired by round 5, some had not
    for sent in answers.values():
        share = np.mean(sent, axis=0)
        assert len(sent) == sessions
        assert np.abs(share - 0.5).max() < 5.0 * 0.5 / np.sqrt(sessions)
    assert len(answers) == 2 * len(plan.silos)


def test_a_boundary_fit_ends_the_run_before_any_fit_is_sent() -> None:
    """The silos count who has none, so that all learn that somebody has, and nobody who."""
    one = targets()["two arms"]
    silos = silos_of("two arms", PARTITIONS[1])
    requests = []
    for name in ("silo 0", "silo 3"):
        rows = {key: np.array(value) for key, value in silos[name].items()}
        rows["outcome"] = np.full_like(rows["outcome"], 10.0)  # at the bound: no finite fit
        other = {**silos, name: rows}
        for algorithm in (ft.Personalized(lattice=0.001), ft.LocalAverage()):
            result = ft.solve(one.problem, one.law, other, algorithm, aggregation="masked")
            assert result.status is ft.Status.BOUNDARY_FIT
            assert result.updates == 0
            if isinstance(algorithm, ft.Personalized):
                assert result.rounds == 1
                pooled = messages.decode_request(result.transcript.exchanges[-2].requests["silo 1"])
                assert isinstance(pooled, messages.Close)
                requests.append(pooled.pooled)
    assert requests[0] == requests[1]


def test_a_retired_silo_of_a_masked_run_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until a reply would otherwise tell who retired."""
    done: dict[int, int] = {}

    def counted(submodel: Any, *arguments: Any, **options: Any) -> Any:
        done[submodel.n_rows] = done.get(submodel.n_rows, 0) + 1
        return fit_local(submodel, *arguments, **options)

    monkeypatch.setattr("fedtmle.protocol.fits.fit_local", counted)
    one, rows = targets()["mean"], silos_of("mean", SIX)
    result = ft.solve(one.problem, one.law, rows, RETIRING, aggregation="masked")
    assert {local.retired_at for local in result.silos.values()} > {1, None}
    assert set(done) == set(SIX)
    assert set(done.values()) == {result.updates + 1}  # one for each law: a count and its fits share it


def test_a_restarted_silo_knows_that_it_retired() -> None:
    """Nothing but the journal says so, and it holds masked answers alone: the silo takes its masks off."""
    plan, rows = CASES["mean, personalized and relayed"]()
    _, silos = parties("mean, personalized and relayed")
    Session(plan, InProcess(silos)).run()
    for silo in silos:
        journal: Any = silo._keeper.journal
        again = restarted(plan, rows, silo.name, bytes(journal._medium))
        assert silo.local is not None
        assert again.local is not None
        assert again.local.retired_at == silo.local.retired_at
        assert again.local.law == silo.local.law
    assert {silo.local.retired_at for silo in silos if silo.local} > {1, None}


@pytest.mark.parametrize("case", ["mean, personalized and relayed", "mean, personalized and counted"])
def test_an_audit_does_not_count_what_a_retired_silo_answers(case: str) -> None:
    """Zeros tell nothing about its rows; until then each answer is computed again and compared."""
    plan, rows = CASES[case]()
    _, silos = parties(case)
    run = Session(plan, InProcess(silos)).run()
    for silo in silos:
        key = key_of(silo.name).mask_key if plan.is_masked else None
        own = replay(plan, rows[silo.name], run.transcript, silo.name, mask_key=key)
        kinds = [type(each.query).__name__ for each in own.answered]
        assert silo.local is not None
        at = silo.local.retired_at
        if at is not None:
            assert kinds == ["FitCountQuery", "FitQuery"] * at + ["FitCountQuery"]
            assert own.answered[-1].answer is FitOutcome.ZERO
        if not plan.is_masked:
            assert [a.query for a in overhear(plan, run.transcript, silo.name)] == [
                a.query for a in own.answered
            ]
        other = next(name for name in plan.silos if name != silo.name)
        with pytest.raises(InputError, match="do not give the recorded answers"):
            replay(plan, rows[other], run.transcript, silo.name, mask_key=key)


def test_a_fit_whose_people_do_not_agree_with_its_silos_is_refused() -> None:
    plan, _ = CASES["mean, personalized and counted"]()
    query = next(r.query for r in asked_of("mean, personalized and counted") if isinstance(r.query, FitQuery))
    assert plan.program.fewest_active == 3
    assert query.lanes is not None
    good = (100, 40, 2, 4, 0, 0)
    assert query.pool_totals(good).people == 40
    for totals in ((100, 0, 2, 4, 0, 0), (0, 40, 0, 6, 0, 0), (100, 40, -1, 7, 0, 0), (0, 0, 0, 0, 0, 0)):
        with pytest.raises(DecodeError):
            query.pool_totals(totals)


def asked_of(case: str) -> list[Any]:
    plan, silos = parties(case)
    run = Session(plan, InProcess(silos)).run()
    return list(heard_rounds(plan, run.transcript, run.sizes))


def test_bad_settings_are_named() -> None:
    for bad in (0, True, 1.5):
        value: Any = bad
        with pytest.raises(InputError, match="min_active: expected an integer of at least 1"):
            ft.Personalized(min_active=value)
    problem = ft.Mean(bounds=(0.0, 10.0))
    many = {f"s{k}": np.arange(3.0) for k in range(51)}
    with pytest.raises(InputError, match="at most 50 silos can, not 51"):
        ft.solve(problem, problem.start(4.0), many, ft.Personalized(), aggregation="masked")


def test_a_document_shows_who_releases_and_no_other() -> None:
    study = study_of(algorithm=ft.Personalized(noise=0.5, max_updates=3))
    result = ft.run(replace(study, aggregation="masked"), cohort(), release=("b",))
    document = result.document
    assert set(document["personalized"]) == {"b"}
    assert document["personalized"]["b"]["estimates"]
    assert document["retired_at"] == {}
    assert document["active"][0]["silos"] == 3
    assert set(ft.run(study, cohort()).document["personalized"]) == {"a", "b", "c"}
