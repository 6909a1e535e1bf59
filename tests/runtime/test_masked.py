"""A masked run broadcasts what the open run broadcasts, and a lying server gets noise or a refusal."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import fedtmle as ft
from fedtmle import solver
from fedtmle.errors import DecodeError, FedTMLEError, InputError, RefusedError
from fedtmle.protocol import messages
from fedtmle.protocol.guard import RefusalError
from fedtmle.protocol.masked import AbstractLook
from fedtmle.protocol.messages import Answered, Ask, Begin, Close, Counted, Payload, Reason
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import Query
from fedtmle.report.page import render
from fedtmle.runtime.certificate import heard_rounds, overhear, replay
from fedtmle.runtime.ledger import Transcript
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo, check_standing, doubted_silos
from tests.golden.data import cohort
from tests.golden.runs import REGIMES, RUNS, study_of
from tests.homes import home_at
from tests.regimes import law as regimes
from tests.runtime.faults import CASES, keeper_without_ledger, key_of
from tests.runtime.simulator import Fate, Faults, SimulatedJournal


def broadcasts(transcript: Transcript) -> list[Payload]:
    """Return what was pooled, round by round."""
    requests = [messages.decode_request(next(iter(e.requests.values()))) for e in transcript.exchanges]
    return [request.pooled for request in requests if isinstance(request, Ask | Close)]


def hides(query: Query) -> bool:
    """Whether some part of a masked query is left out, because too few silos would disclose it, or not."""
    members = [getattr(member, "query", member) for member in query.members]  # without views
    return any(getattr(member, "hidden", ()) or getattr(member, "is_hidden", False) for member in members)


def check_broadcasts(plain: Transcript, masked: Transcript, plan: Plan) -> None:
    """Assert that both runs pooled the same in every round but the masked run's looks, and what it hides."""
    heard = heard_rounds(plan, masked, dict.fromkeys(plan.silos, 0))
    asked = [
        (each.query, pooled)
        for each, pooled in zip(heard, broadcasts(masked), strict=True)
        if not isinstance(each.query, AbstractLook)
    ]
    for (query, pooled), other in zip(asked, broadcasts(plain), strict=True):
        assert pooled == other or hides(query)


def runs_of(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, masked: bool
) -> tuple[Any, Finished, Plan]:
    """Return the result of a golden run, its session and its plan."""
    seen: list[tuple[Finished, Plan]] = []
    run = solver.run_in_process
    importlib.import_module("fedtmle.studies.run")  # it must not be imported while the function is replaced

    def watched(*arguments: Any, **options: Any) -> Any:
        completed = run(*arguments, **(options | {"is_masked": masked}))
        seen.append((completed.finished, completed.plan))
        return completed

    with monkeypatch.context() as patched:
        patched.setattr("fedtmle.solver.run_in_process", watched)
        patched.setattr("fedtmle.studies.run.run_in_process", watched)
        result = (RUNS | OVER_TIME)[name](folder)
    return getattr(result, "run", result), *seen[0]


def in_three_silos(study: ft.Study, data: Mapping[str, Any], _: Path) -> Any:
    """Run a golden study of treatment over time, which has two silos, on three."""
    records = regimes.draw(400, 2, 7, **data)
    return ft.run(study, {"a": records[:150], "b": records[150:270], "c": records[270:]})


OVER_TIME = {f"over time/{name}": partial(in_three_silos, *each) for name, each in REGIMES.items()}

# These flows differ under masks, or do not exist there.
UNMASKABLE = (
    *("central", "local given", "local cancels", "study/local"),
    *("sgd", "certified", "personalized", "switching", "retires"),
)
SAME = [
    name
    for name in RUNS
    if name.split("/")[0] in ("solve", "study", "file")
    and not any(word in name for word in (*UNMASKABLE, "imputed", "keyed", "regimes"))
]
NAMED = {
    "study/ATE",
    "study/ATE three arms",
    "study/RR strata",
    "study/one step",
    "study/clusters, spanning, coded",
    "study/folds, spanning",
    "study/super learner, trees",
    "study/released",
    "study/indicator",
    "study/time/RiskDifference",
    "study/time/curve",
    "study/time/finer grid",
    "file/default policy",
    "file/larger cells",
}
FAST = [name for name in SAME if name.startswith("solve/") or name in NAMED]


def check_same(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, plain, _ = runs_of(name, folder, monkeypatch, masked=False)
    (folder / "masked").mkdir()
    other, masked, masked_plan = runs_of(name, folder / "masked", monkeypatch, masked=True)
    check_broadcasts(plain.transcript, masked.transcript, masked_plan)
    assert np.array_equal(one.psi, other.psi)
    assert np.array_equal(one.covariance, other.covariance)
    assert one.trajectory == other.trajectory
    assert plain.n == masked.n
    assert set(masked.sizes.values()) == {None}


def test_the_named_runs_are_among_them() -> None:
    assert set(SAME) >= NAMED


@pytest.mark.parametrize("name", FAST)
def test_broadcasts_and_results_are_those_of_the_open_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same(name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in SAME if name not in FAST), *OVER_TIME])
def test_so_are_those_of_every_other_golden_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same(name, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "how",
    [
        ft.LocalAverage(max_updates=1, weights={"a": 0.25, "b": 0.25, "c": 0.5}),
        ft.LocalAverage(max_updates=1, lattice=None),
        ft.Personalized(max_updates=1, lattice=None),
        ft.Coded(smoothness=ft.Certified()),
        ft.Adaptive(tolerance=0.1),
        ft.Gradient(optimizer=ft.StochasticGradientDescent(batch=5, step=0.1, steps=2, seed=1)),
    ],
    ids=lambda how: type(how).__name__,
)
def test_what_is_no_sum_is_refused_before_it_is_asked(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the algorithm says of itself, and by the session if it says otherwise."""
    problem = ft.Mean(bounds=(0.0, 10.0))
    silos = {name: np.arange(8.0) + k for k, name in enumerate("abc")}
    with pytest.raises(InputError, match="aggregation: 'masked' is for algorithms that add up integers"):
        ft.solve(problem, problem.start(4.0), silos, how, aggregation="masked")
    monkeypatch.setattr(type(how), "adds_integers", True)
    with pytest.raises(InputError, match="aggregation: masked sums do not provide"):
        ft.solve(problem, problem.start(4.0), silos, how, aggregation="masked")


def test_bad_settings_are_named() -> None:
    problem = ft.Mean(bounds=(0.0, 10.0))
    two = {"a": np.arange(5.0), "b": np.arange(4.0)}
    with pytest.raises(InputError, match="at least 3 silos, not 2"):
        ft.solve(problem, problem.start(4.0), two, ft.Coded(), aggregation="masked")
    bad: Any = "hidden"
    with pytest.raises(InputError, match="expected 'open' or 'masked', not 'hidden'"):
        ft.solve(problem, problem.start(4.0), two, ft.Coded(), aggregation=bad)


def test_a_masked_result_is_shown_and_reported() -> None:
    """Nobody knows the silos' sizes, and the page says what the server read."""
    study = replace(study_of(algorithm=ft.Coded()), aggregation="masked")
    result = ft.run(study, cohort(), release=("a", "b"))
    page = render(result.document)
    assert "sums were masked" in page
    assert "by themselves, not only their sum" not in page
    assert "not disclosed" in page
    plain = render(ft.run(replace(study, aggregation="open"), cohort(), release=("a", "b")).document)
    assert "by themselves, not only their sum" in plain
    assert "not disclosed" not in plain
    assert result.document["estimates"] == ft.run(study, cohort()).document["estimates"]


def test_a_masked_run_is_replayed_for_its_owner_alone() -> None:
    plan, rows = CASES["study, relayed"]()
    _, silos = parties("study, relayed")
    finished = Session(plan, InProcess(silos)).run()
    one = plan.silos[0]
    heard = list(heard_rounds(plan, finished.transcript, finished.sizes))
    assert [r.answers for r in heard] == [{}] * len(heard)
    own = replay(plan, rows[one], finished.transcript, one)
    assert own.n == finished.n
    assert [asked.query.explanation for asked in own.answered] == [r.query.explanation for r in heard]
    assert overhear(plan, finished.transcript, one) == ()


@pytest.mark.parametrize(("vouched", "is_refused"), [(None, False), ("ab", True), ("abc", False), ("", True)])
def test_a_silo_takes_part_with_enough_vouched_for(vouched: str | None, is_refused: bool) -> None:
    """Two of the others, if one may collude; its own key does not count."""
    plan, rows = CASES["two arms, relayed"]()
    own, *others = plan.silos
    named = {"a": own, "b": others[0], "c": others[1]}
    peers = None if vouched is None else frozenset(key_of(named[letter]).public_keys for letter in vouched)
    key = key_of(own)
    policy = replace(UNGUARDED, colluders=1)
    silo = Silo(
        own, plan, rows[own], keeper=Keeper(policy=policy, key=key, mask_key=key.mask_key, peers=peers)
    )
    opening = messages.encode(messages.Open(messages.WIRE_FORMAT, b"session", plan.digest))
    reply = messages.decode_reply(silo.step(opening))
    assert isinstance(reply, messages.Refused) == is_refused
    assert silo.refused_by == ("peers" if is_refused else "")


@pytest.mark.parametrize(("vouched", "is_refused"), [("ce", False), ("bcdf", True), ("bcdef", False)])
def test_with_looks_enough_of_the_own_group_are_vouched_for(vouched: str, is_refused: bool) -> None:
    """Six silos look in the groups a, c, e and b, d, f, and the server may have invented the others."""
    members = [Member(name=n, key=key_of(n).public, mask_key=key_of(n).mask_key.public) for n in "abcdef"]
    plan = replace(CASES["two arms, relayed"]()[0], roster=tuple(members), colluders=1)
    keeper = Keeper(policy=Policy(), peers=frozenset(key_of(name).public_keys for name in vouched))
    with pytest.raises(RefusalError, match="peers") if is_refused else nullcontext():
        check_standing(plan, "a", keeper, datetime.date(2026, 1, 1))
    assert doubted_silos(plan, "a", keeper) == set("bcdef") - set(vouched)


def test_the_peers_of_a_home(tmp_path: Path) -> None:
    (tmp_path / "silo.toml").write_text('[silo]\nname = "a"\n\n[data]\npath = "a.csv"\n')
    home = home_at(tmp_path / "silo.toml")
    assert home.peers is None
    listed = key_of("b").public_keys
    (home.folder / "peers").write_text(f"# by telephone\n\n{listed.hex()} south\n")
    assert home.peers == frozenset([listed])
    (home.folder / "peers").write_text("south\n")
    with pytest.raises(InputError, match="peers, line 1: expected the 128 hexadecimal digits"):
        _ = home.peers


# A server that lies.

Change = Callable[[str, messages.Request], messages.Request]


class Lying(InProcess):
    """Changes requests on their way to the silos."""

    def __init__(self, silos: list[Silo], change: Change) -> None:
        super().__init__(silos)
        self._change = change

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        changed = {
            name: messages.encode(self._change(name, messages.decode_request(data)))
            for name, data in requests.items()
        }
        return super().exchange(changed)


def parties(case: str) -> tuple[Any, list[Silo]]:
    plan, rows = CASES[case]()
    calm = Fate(0, Faults())
    return plan, [
        Silo(
            name,
            plan,
            rows[name],
            keeper=keeper_without_ledger(name, SimulatedJournal(bytearray(), calm), calm),
        )
        for name in plan.silos
    ]


def lied(case: str, change: Change) -> FedTMLEError:
    plan, silos = parties(case)
    with pytest.raises(FedTMLEError) as stopped:
        Session(plan, Lying(silos, change)).run()
    return stopped.value


def flipped(payload: Payload, bit: int = 0) -> Payload:
    data = bytearray(payload.data)
    data[bit // 8] ^= 0x80 >> bit % 8
    return Payload(payload.length, bytes(data))


def test_another_broadcast_to_one_silo_leaves_noise() -> None:
    """Without the relay the silo goes on, but the masks of the next round do not cancel."""
    name = CASES["mean, masked"]()[0].silos[1]

    def change(silo: str, message: messages.Request) -> messages.Request:
        if silo == name and isinstance(message, Ask) and message.round == 3:
            return msgspec.structs.replace(message, pooled=flipped(message.pooled, message.pooled.length - 3))
        return message

    error = lied("mean, masked", change)
    assert isinstance(error, DecodeError | RefusedError)


def test_another_n_to_one_silo_leaves_noise() -> None:
    name = CASES["mean, masked"]()[0].silos[2]

    def change(silo: str, message: messages.Request) -> messages.Request:
        if silo == name and isinstance(message, Begin):
            return msgspec.structs.replace(message, n=message.n - 1)
        return message

    error = lied("mean, masked", change)
    assert isinstance(error, DecodeError)
    assert "do not cancel" in str(error)


RELAYED: dict[str, Callable[[Any], Any]] = {
    "a false broadcast": lambda ask: msgspec.structs.replace(ask, pooled=flipped(ask.pooled, 1)),
    "no relay": lambda ask: msgspec.structs.replace(ask, relayed=()),
    "one silo missing": lambda ask: msgspec.structs.replace(ask, relayed=ask.relayed[1:]),
    "two silos exchanged": lambda ask: msgspec.structs.replace(
        ask, relayed=(ask.relayed[1], ask.relayed[0], *ask.relayed[2:])
    ),
    "another answer": lambda ask: msgspec.structs.replace(
        ask,
        relayed=(
            msgspec.structs.replace(ask.relayed[0], payload=flipped(ask.relayed[0].payload)),
            *ask.relayed[1:],
        ),
    ),
    "no signature": lambda ask: msgspec.structs.replace(
        ask, relayed=(msgspec.structs.replace(ask.relayed[0], signature=b""), *ask.relayed[1:])
    ),
}


@pytest.mark.parametrize("name", RELAYED)
def test_a_silo_adds_up_the_relayed_answers_itself(name: str) -> None:
    def change(_: str, message: messages.Request) -> messages.Request:
        if isinstance(message, Ask) and message.round == 3:
            changed: messages.Request = RELAYED[name](message)
            return changed
        return message

    error = lied("two arms, relayed", change)
    assert isinstance(error, RefusedError)
    assert error.code == Reason.RELAY.value


def test_an_old_relay_is_refused() -> None:
    """Signatures are of one round."""
    seen: list[Any] = []

    def change(_: str, message: messages.Request) -> messages.Request:
        if isinstance(message, Ask):
            seen.append(message.relayed)
            if message.round == 4:
                return msgspec.structs.replace(message, relayed=seen[0])
        return message

    error = lied("two arms, relayed", change)
    assert isinstance(error, RefusedError)
    assert error.code == Reason.RELAY.value


def test_an_open_plan_takes_no_relay() -> None:
    def change(_: str, message: messages.Request) -> messages.Request:
        if isinstance(message, Ask):
            extra = messages.SignedAnswer(Payload(0, b""), b"")
            return msgspec.structs.replace(message, relayed=(extra,))
        return message

    error = lied("mean, coded", change)
    assert isinstance(error, RefusedError)
    assert error.code == Reason.OUT_OF_ORDER.value


def test_no_silo_says_its_number_of_rows() -> None:
    case = "mean, masked"
    plan, silos = parties(case)
    transcript = Session(plan, InProcess(silos)).run().transcript
    kinds = [type(messages.decode_reply(next(iter(e.replies.values())))) for e in transcript.exchanges]
    assert kinds[0] is Counted
    assert set(kinds[1:-2]) == {Answered}
    assert all("Opened" not in kind.__name__ for kind in kinds)
