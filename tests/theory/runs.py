"""Finished runs with what the theory needs of them: lattice, path and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm, TargetingProgram
from fedtmle.algorithms.coded import Coded
from fedtmle.protocol.coded import RoundedGradientQuery
from fedtmle.protocol.lattice import Lattice
from fedtmle.protocol.plan import Plan, roster
from fedtmle.runtime.certificate import heard_rounds, personal_rounds
from fedtmle.theory.averaging import FitRound
from fedtmle.theory.path import TargetingPath, follow
from fedtmle_core.types import IntArray
from tests.cases import Case


@dataclass(frozen=True)
class CodedRun:
    case: Case
    result: ft.Result
    lattice: Lattice
    path: TargetingPath
    one_step: bool

    @property
    def known(self) -> dict[str, float]:
        """The certificate's constants by name."""
        return {constant.name: constant.value for constant in self.result.certificate.constants}


def plan_of(case: Case, algorithm: AbstractAlgorithm, result: ft.Result) -> Plan:
    """The plan that a result came from."""
    program = TargetingProgram(problem=case.problem, law=case.law, algorithm=algorithm)
    return Plan(program=program, roster=roster(list(result.sizes)))


def coded_run(case: Case, parts: Sequence[IntArray], algorithm: Coded) -> CodedRun:
    silos = case.silos(parts)
    result = ft.solve(case.problem, case.law, silos, algorithm, observe=True)
    heard = heard_rounds(plan_of(case, algorithm, result), result.transcript, result.sizes)
    *_, targeting = (round_.query for round_ in heard if isinstance(round_.query, RoundedGradientQuery))
    lattice = targeting.lattice
    rows = {name: case.problem.read(own) for name, own in silos.items()}
    points, accepted = result.trajectory.points, result.trajectory.accepted
    by_step = result.certificate.smoothness.by_step
    path = follow(case.problem, case.law, rows, points, accepted, lattice, by_step)
    return CodedRun(case, result, lattice, path, algorithm.inner == "step")


def personal_run(
    case: Case, parts: Sequence[IntArray], algorithm: ft.Personalized
) -> tuple[ft.Result, tuple[FitRound, ...]]:
    silos = case.silos(parts)
    result = ft.solve(case.problem, case.law, silos, algorithm, observe=True)
    rows = {name: case.problem.read(own) for name, own in silos.items()}
    plan, transcript = plan_of(case, algorithm, result), result.transcript
    return result, personal_rounds(plan, case.problem, case.law, algorithm, transcript, rows, result.updates)
