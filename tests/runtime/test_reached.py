"""A run that a silo refuses or that loses a silo says how far it got, and that is true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.data import load_all
from fedtmle.errors import DeadlineError, ProtocolError, Reached, RefusedError
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.protocol.query import Phase
from fedtmle.results.inference import SEVERAL, reported
from fedtmle.runtime.result import NO_RESIDUAL, NOT_BEGUN
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studies.over import run_over
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle.theory.statistical import TOO_FAR
from tests.premise import Premise
from tests.theory.test_anytime import STUDY, silos

TABLES = silos(2)


def refused_after(study: ft.Study, rounds: int, tables: Any = TABLES) -> Reached:
    """Return how far a run got whose silos answer so many rounds and refuse the next."""
    with pytest.raises(RefusedError) as caught:
        ft.run(study, tables, policy=replace(UNGUARDED, max_queries=rounds))
    assert caught.value.reached is not None
    assert caught.value.reached.rounds == rounds
    return caught.value.reached


@pytest.fixture(scope="module")
def whole() -> ft.StudyResult:
    """The same study to the end, more exactly."""
    return ft.run(replace(STUDY, algorithm=ft.Coded(tolerance=1e-10)), TABLES)


def phases(result: ft.StudyResult) -> list[Phase]:
    assert result.run is not None
    return [bits.phase for bits in result.run.account.by_round]


@pytest.mark.parametrize("seed", range(2))
def test_every_round_is_a_true_stop(seed: int) -> None:
    """Before targeting there is nothing; during it a bound for a fit nobody knows; then an estimate."""
    tables = silos(seed)
    full = ft.run(replace(STUDY, algorithm=ft.Coded(tolerance=1e-10)), tables)
    plain = ft.run(STUDY, tables)
    assert full.run is not None
    assert full.run.psi is not None
    (end,) = full.document["convergence"]["estimands"]
    done = phases(plain)
    first, rounds = done.index(Phase.TARGETING), len(done)
    bounded = Premise("the residual is small enough for a bound", at_least=0.3)
    with bounded:
        for stop in range(rounds):
            reached = refused_after(STUDY, stop, tables)
            assert reached.phase == (done[stop - 1] if stop else "")
            if stop <= first:
                assert (reached.estimate, reached.bounds, reached.reason) == (None, None, NOT_BEGUN)
                continue
            if not bounded.holds(reached.bounds is not None):
                assert reached.reason == TOO_FAR
                continue
            assert reached.bounds is not None
            if reached.estimate is None:  # the fit that a run with this budget returns
                stopped = ft.run(replace(STUDY, algorithm=ft.Coded(max_rounds=stop - first)), tables)
                assert stopped.run is not None
                assert stopped.run.psi is not None
                certificate = stopped.run.certificate
                assert certificate is not None
                assert certificate.distance is not None
                assert reached.bounds == certificate.distance.bounds
                gap = np.abs(stopped.run.psi - full.run.psi)
                assert (gap <= np.array(reached.bounds) + end["bound"]).all()
                assert reached.names == ("E[Y(0)]", "E[Y(1)]")
            else:
                (row,) = full.document["estimates"]
                (stated,) = plain.document["convergence"]["estimands"]
                assert reached.names == (row["estimand"],)
                assert reached.bounds == (stated["bound"],)
                assert abs(reached.estimate[0] - row["estimate"]) <= stated["bound"] + end["bound"]
                assert reached.covariance[0][0] ** 0.5 == pytest.approx(row["std_error"], rel=1e-6)


class Losing(InProcess):
    """A federation that loses a silo in one of its exchanges."""

    def __init__(self, silos: list[Silo], at: int) -> None:
        super().__init__(silos)
        self.left = at

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        self.left -= 1
        if self.left < 0:
            raise DeadlineError((next(iter(requests)),), 30.0)
        return super().exchange(requests)


def lost_at(study: ft.Study, exchange: int) -> Reached | None:
    plan = study_plan(study, roster(list(TABLES)))
    parties = [Silo(name, plan, table) for name, table in load_all(TABLES, schema_of(study)).items()]
    with pytest.raises(DeadlineError) as caught:
        run_over(plan, Losing(parties, exchange))
    return caught.value.reached


def test_a_lost_silo_is_told_as_a_refusal_is(whole: ft.StudyResult) -> None:
    done = phases(ft.run(STUDY, TABLES))
    assert lost_at(STUDY, 0) is None  # no silo has opened
    for stop in (0, len(done) - 1):
        assert lost_at(STUDY, 1 + stop) == refused_after(STUDY, stop)
    closed = lost_at(STUDY, 1 + len(done))  # all rounds are over, the broadcasts are not compared yet
    assert closed is not None
    (row,) = whole.document["estimates"]
    assert closed.estimate == pytest.approx((row["estimate"],), abs=1e-5)


def test_exact_sums_know_an_estimate_at_the_start_and_no_bound() -> None:
    """The tolerance is set by the standard errors at the initial law: the estimate there is pooled."""
    study = replace(STUDY, algorithm=ft.Gradient())
    done = phases(ft.run(study, TABLES))
    first = done.index(Phase.TARGETING)
    start = refused_after(study, first)
    assert start.is_initial
    assert start.estimate == (0.0,)  # the outcome model has no treatment in it
    assert (start.bounds, start.reason) == (None, NO_RESIDUAL)
    later = refused_after(study, first + 1)
    assert later.estimate == start.estimate
    assert later.bounds is None
    assert "rounded sums" in later.reason


def test_a_solved_problem_has_a_bound_at_its_start() -> None:
    """The loss of a mean is quadratic: the bound is attained, up to rounding."""
    problem = ft.Mean(bounds=(0.0, 10.0))
    program = TargetingProgram(problem=problem, law=problem.start(5.0), algorithm=ft.Coded())
    plan = Plan(program=program, roster=roster(["a", "b"]))
    parties = [Silo("a", plan, np.array([1.0, 2.0])), Silo("b", plan, np.array([6.0]))]
    with pytest.raises(DeadlineError) as caught:
        Session(plan, Losing(parties, at=4)).run()  # after the opening, two looks and the first gradient
    reached = caught.value.reached
    assert reached is not None
    assert (reached.phase, reached.estimate, reached.is_initial) == ("targeting", (5.0,), True)
    assert reached.bounds is not None
    assert list(reached.bounds) == pytest.approx([2.0], rel=1e-4)  # the mean is 3


def test_local_fits_have_no_residual() -> None:
    reached = refused_after(replace(STUDY, algorithm=ft.LocalAverage()), 12)
    assert (reached.phase, reached.is_initial, reached.reason) == ("targeting", True, NO_RESIDUAL)
    assert reached.estimate == (0.0,)  # the outcome model has no treatment in it
    given = refused_after(replace(STUDY, algorithm=ft.LocalAverage(tolerance=1e-6)), 11)
    assert (given.phase, given.estimate, given.reason) == ("targeting", None, NO_RESIDUAL)


def test_silos_that_heard_different_things_state_nothing() -> None:
    plan = study_plan(STUDY, roster(list(TABLES)))
    parties = [Silo(name, plan, table) for name, table in load_all(TABLES, schema_of(STUDY)).items()]
    parties[0]._position.heard.update(b"something else")
    with pytest.raises(ProtocolError, match="different broadcasts") as caught:
        Session(plan, InProcess(parties)).run()
    assert caught.value.reached is None


def test_one_of_several_imputed_data_sets_is_no_estimate() -> None:
    known = Reached(rounds=9, phase="closing", names=("a",), estimate=(1.0,), covariance=((1.0,),))
    missing = ft.Variables(
        {**STUDY.variables, "w": {"kind": "number", "range": (-4, 4), "missing": "impute"}}
    )
    study = replace(STUDY, variables=missing)
    assert study.imputes
    told = reported(study, known)
    assert (told.estimate, told.reason) == (None, SEVERAL)
