"""Finished runs with what the theory needs of them: lattice, path and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import fedtmle as ft
from fedtmle.algorithms.coded import Coded
from fedtmle.model.types import IntArray
from fedtmle.protocol.lattice import Lattice
from fedtmle.runtime.certificate import heard_lattice, personal_rounds
from fedtmle.theory.fits import FitRound
from fedtmle.theory.path import Path, follow
from tests.cases import Case


@dataclass(frozen=True)
class CodedRun:
    case: Case
    result: ft.Result
    lattice: Lattice
    path: Path
    one_step: bool

    @property
    def known(self) -> dict[str, float]:
        """The certificate's constants by name."""
        return {constant.name: constant.value for constant in self.result.certificate.constants}


def coded_run(case: Case, parts: Sequence[IntArray], algorithm: Coded) -> CodedRun:
    silos = case.silos(parts)
    result = ft.solve(case.problem, case.law, silos, algorithm, observe=True)
    lattice = heard_lattice(case.problem, case.law, algorithm, result.transcript, result.sizes)
    rows = {name: case.problem.read(own) for name, own in silos.items()}
    points, accepted = result.trajectory.points, result.trajectory.accepted
    path = follow(case.problem, case.law, rows, points, accepted, lattice)
    return CodedRun(case, result, lattice, path, algorithm.inner == "step")


def personal_run(
    case: Case, parts: Sequence[IntArray], algorithm: ft.Personalized
) -> tuple[ft.Result, tuple[FitRound, ...]]:
    silos = case.silos(parts)
    result = ft.solve(case.problem, case.law, silos, algorithm, observe=True)
    rows = {name: case.problem.read(own) for name, own in silos.items()}
    return result, personal_rounds(case.problem, case.law, algorithm, result.transcript, rows, result.updates)
