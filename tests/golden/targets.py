"""Targets with problems of their own, for the golden runs. The plan holds the digest of this file's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.model.table import Table
from fedtmle.programs.target import AbstractTarget, BegunStudy, StartedTarget
from fedtmle.protocol.query import Flow
from fedtmle.targets.residuals import OnColumns, Residual, ResidualProblem


class LyingMean(ft.Mean):  # type: ignore[misc]  # a final class, broken on purpose
    """A mean whose influence function has the wrong sign."""

    def eif(self, law: Any, rows: Any, psi: Any) -> Any:
        return -super().eif(law, rows, psi)


@dataclass(frozen=True, kw_only=True)
class PlainMean(AbstractTarget):
    """E[Y], or a problem that claims to be."""

    lies: bool = False

    def question_stem(self) -> str:
        return f"What is the mean of {self.outcome}"

    def start(self, begun: BegunStudy) -> Flow[StartedTarget]:
        yield from ()  # nothing is fitted
        low, high = begun.columns.outcome_bounds
        mean = (LyingMean if self.lies else ft.Mean)(bounds=(low, high))
        problem = OnColumns(problem=mean, columns=(self.outcome,))
        return StartedTarget(problem=problem, law=mean.start(0.5 * (low + high)))

    def summarise(self, psi: Any, label: str) -> list[ft.Summary]:  # noqa: ARG002 - of everyone
        return [ft.Summary(name="mean", value=float(psi[0]), gradient=np.ones(1), scale=ft.Scale.VALUE)]


@dataclass(frozen=True, kw_only=True)
class TwoResponses(AbstractTarget):
    """The mean of the outcome and of another number, each a residual of its own."""

    other: str

    def question_stem(self) -> str:
        return f"What are the means of {self.outcome} and {self.other}"

    def more_columns(self) -> dict[str, Any]:
        return {self.other: "number"}

    def start(self, begun: BegunStudy) -> Flow[StartedTarget]:
        yield from ()
        names = (self.outcome, self.other)
        bounds = tuple(begun.study.variables.ranges[name] for name in names)

        def prepare(table: Table) -> tuple[Residual, ...]:
            one = np.ones((1, table.n_rows))
            return tuple(
                Residual(
                    y=(table.numeric[name] - low) / (high - low),
                    q=0.5 * one[0],
                    weights=one,
                    plug_in=0.5 * one,
                    plug_in_weights=one,
                )
                for name, (low, high) in zip(names, bounds, strict=True)
            )

        problem = ResidualProblem(
            components=(("y",), ("other",)), bounds=bounds, ceiling=1.0, prepare=prepare
        )
        return StartedTarget(problem=problem, law=problem.start())

    def summarise(self, psi: Any, label: str) -> list[ft.Summary]:  # noqa: ARG002 - of everyone
        gradient = np.array([1.0 / psi[1], -psi[0] / psi[1] ** 2])
        return [ft.Summary(name="ratio", value=float(psi[0] / psi[1]), gradient=gradient)]
