"""What every algorithm must hold on every target."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Answered, Ask, Begin, Close, Compare, Open
from fedtmle.protocol.plan import Plan, roster
from fedtmle.runtime.session import Session
from tests.cases import ALGORITHMS, TARGETS, Case, targets
from tests.replay import Replay


@pytest.fixture(scope="module", params=TARGETS)
def case(request: pytest.FixtureRequest) -> Case:
    return targets()[request.param]


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def run(request: pytest.FixtureRequest, case: Case) -> tuple[Case, ft.Result, Any]:
    algorithm = ALGORITHMS[request.param](case.tolerance)
    result = ft.solve(case.problem, case.law, case.silos(case.split(4)), algorithm)
    return case, result, algorithm


def residual_vector(case: Case, result: ft.Result) -> np.ndarray:
    """P_n D at the returned law, by the definition of D."""
    rows = case.pooled()
    pooled = case.problem.finish(result.law, case.problem.moments(result.law, rows), case.n)
    return case.problem.eif(result.law, rows, pooled.psi).mean(axis=0)


def test_residual_is_what_it_says(run: tuple[Case, ft.Result, Any]) -> None:
    case, result, _ = run
    true = float(np.linalg.norm(residual_vector(case, result)))
    if result.residual is None:
        assert isinstance(result.certificate, type(None))
    elif result.residual_kind == "computed":
        assert result.residual == pytest.approx(true, abs=1e-9)
        assert true <= result.certificate.residual_bound + 1e-12
    elif result.status is ft.Status.CONVERGED:
        assert true <= result.residual <= case.tolerance
    if result.status is ft.Status.CONVERGED:
        assert true <= case.tolerance


def test_pooled_estimate_is_the_plug_in(run: tuple[Case, ft.Result, Any]) -> None:
    case, result, _ = run
    rows = case.pooled()
    if result.psi is None:
        assert set(result.silos) == set(result.sizes)
        return
    expected = case.problem.finish(result.law, case.problem.moments(result.law, rows), case.n)
    assert result.psi.tobytes() == expected.psi.tobytes()
    eif = case.problem.eif(result.law, rows, result.psi)
    if (
        expected.correction is not None
    ):  # a factor of D over the rows: `test_optimal_transport` has it longhand
        eif = eif @ expected.correction.T
    covariance = np.atleast_2d(np.cov(eif.T)) / case.n
    assert np.allclose(result.covariance, covariance, rtol=1e-12, atol=0)


def test_bits_counted_are_bits_sent(run: tuple[Case, ft.Result, Any]) -> None:
    _, result, _ = run
    up = down = 0
    for exchange in result.transcript.exchanges:
        for silo, request in exchange.requests.items():
            message = messages.decode_request(request)
            assert isinstance(message, Open | Begin | Ask | Close | Compare)
            if isinstance(message, Ask | Close):
                down += message.pooled.length
            reply = messages.decode_reply(exchange.replies[silo])
            if isinstance(reply, Answered):
                up += reply.payload.length
    assert sum(result.account.bits_up.values()) == up
    assert sum(result.account.bits_down.values()) == down


def test_replay_of_the_transcript_gives_the_same_outcome(run: tuple[Case, ft.Result, Any]) -> None:
    case, result, algorithm = run
    replay = Replay(result.transcript)
    plan = Plan(
        program=TargetingProgram(problem=case.problem, law=case.law, algorithm=algorithm),
        roster=roster(replay.silos),
    )
    again = Session(plan, replay).run()
    outcome: Any = again.outcome  # targeted or personalised
    assert outcome.accepted == result.trajectory.accepted
    assert outcome.status is result.status
    assert again.transcript.exchanges == result.transcript.exchanges


def test_threads_change_no_byte(run: tuple[Case, ft.Result, Any]) -> None:
    case, result, algorithm = run
    again = ft.solve(case.problem, case.law, case.silos(case.split(4)), algorithm, threads=3)
    assert again.transcript.exchanges == result.transcript.exchanges


def test_result_is_plain_data_on_request(run: tuple[Case, ft.Result, Any]) -> None:
    _, result, _ = run
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["status"] == result.status.name.lower()
    assert document["bits"] == result.bits
    assert len(document["trajectory"]["accepted"]) == result.updates


def test_law_is_rebuilt_from_the_accepted_history(run: tuple[Case, ft.Result, Any]) -> None:
    case, result, _ = run
    law = case.law
    for eps in result.trajectory.accepted:
        law = case.problem.move(law, np.array(eps))
    rows = case.pooled()
    assert case.problem.losses(law, rows).tobytes() == case.problem.losses(result.law, rows).tobytes()


def test_observed_loss_descends_where_the_theory_says_so(case: Case) -> None:
    """Exact inner steps and certified rounded steps never raise the pooled loss."""
    for algorithm in (
        ft.Central(tolerance=case.tolerance),
        ft.Coded(tolerance=case.tolerance, smoothness=ft.Certified(), max_rounds=40),
    ):
        result = ft.solve(case.problem, case.law, case.silos(case.split(3)), algorithm, observe=True)
        loss = result.trajectory.loss
        assert loss is not None
        assert all(b <= a + 1e-12 for a, b in itertools.pairwise(loss))
        assert len(loss) == result.updates + 1
        assert len(result.trajectory.loss_by_round or ()) == len(result.trajectory.points)
