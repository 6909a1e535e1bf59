"""The local average treatment effect with a binary instrument Z, a binary treatment A and an outcome Y.

With psi_Yz = E[E(Y | Z = z, W)] and psi_Az = E[E(A | Z = z, W)], the effect among compliers is

    LATE = (psi_Y1 - psi_Y0) / (psi_A1 - psi_A0).

Each record has two residuals, Y - E(Y | Z, W) and A - E(A | Z, W), both weighted by
H_z = 1{Z = z} / P(Z = z | W). All four means are targeted at once, and so is every function of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import numpy as np

from fedtmle.defects import expect_column
from fedtmle.errors import InputError, NumericalError
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.glm import GLM
from fedtmle.model.table import Table
from fedtmle.programs.study import NuisanceModel
from fedtmle.programs.target import AbstractTarget, BegunStudy, StartedTarget
from fedtmle.protocol.query import Flow
from fedtmle.targets.effects.estimands import ColumnUse, Scale, Summary
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.residuals import Residual, ResidualProblem
from fedtmle_core.types import Array

WEAKEST = 1e-6  # share of compliers below which the ratio is not computed
MARGIN = 1e-6  # predictions are truncated this far inside (0, 1)


@final
@dataclass(frozen=True, kw_only=True)
class LATE(AbstractTarget):
    """The effect of ``treatment`` on ``outcome`` among those who take it because of ``instrument``."""

    description = "the effect among compliers, with an instrument"
    has_treatment: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("outcome", "treatment", "instrument")

    instrument: str
    instrument_model: NuisanceModel = GLM("1")  # a randomised instrument

    def __post_init__(self) -> None:
        AbstractTarget.__post_init__(self)
        expect_column("instrument", self.instrument)
        if self.instrument in (self.outcome, self.treatment):
            raise InputError(f"instrument: '{self.instrument}' is the outcome or the treatment")
        if len(self.arms) > 2:
            raise InputError("arms: LATE compares two arms")

    def question_stem(self) -> str:
        return (
            f"How much does {self.comparison} change the mean of {self.outcome} among those who take it "
            f"because of {self.instrument}"
        )

    def assumptions(self) -> tuple[str, ...]:
        z, a = self.instrument, self.treatment
        return (
            f"Within levels of the covariates of the models, {z} is as good as random, each of its levels "
            f"could have been anyone's, and it changes {self.outcome} through {a} only (exclusion).",
            f"Nobody takes the opposite of what {z} suggests (monotonicity).",
        )

    def more_columns(self) -> Mapping[str, ColumnUse]:
        return {self.instrument: "factor"}

    def excluded(self, role: str) -> dict[str, str]:
        instrument = {self.instrument: "instrument"} if role == "instrument" else {}
        return {self.outcome: "outcome", str(self.treatment): "treatment", **instrument}

    def start(self, begun: BegunStudy) -> Flow[StartedTarget]:
        floor = begun.g_floor
        if not floor > 0:
            raise InputError("g_bounds: LATE divides by the instrument's probability, so it needs a bound")
        fits = yield from begun.fit(
            {
                "outcome": begun.regression("outcome"),
                "treatment": begun.regression("treatment"),
                "instrument": begun.indicator("instrument", self.instrument),
            }
        )
        roles, bounds = begun.as_treatment(self.instrument), begun.columns.outcome_bounds
        problem = ResidualProblem(
            components=(("E[Y | Z=0]", "E[Y | Z=1]"), ("E[A | Z=0]", "E[A | Z=1]")),
            bounds=(bounds, (0.0, 1.0)),
            ceiling=1.0 / floor,
            prepare=partial(residuals, fits=fits, taken=begun.columns, assigned=roles, floor=floor),
        )
        return StartedTarget(problem=problem, law=problem.start(), fits=fits, g_floor=floor)

    def summarise(self, psi: Array, label: str) -> list[Summary]:  # noqa: ARG002 - of everyone
        y0, y1, a0, a1 = psi.tolist()
        effect, compliers = y1 - y0, a1 - a0
        if abs(compliers) < WEAKEST:
            raise NumericalError("LATE: the instrument does not change the treatment")
        late = effect / compliers
        ratio = np.array([-1.0, 1.0, late, -late]) / compliers
        share = np.array([0.0, 0.0, -1.0, 1.0])
        return [
            Summary(name="LATE", value=late, gradient=ratio),
            Summary(name="Share of compliers", value=compliers, gradient=share, scale=Scale.DIFFERENCE),
        ]


def residuals(
    table: Table, *, fits: Mapping[str, Fitted], taken: EffectColumns, assigned: EffectColumns, floor: float
) -> tuple[Residual, ...]:
    """Return the residuals of Y and A, each with the weights of both levels of Z."""
    z, p = assigned.arm(table), fits["instrument"].predict(table)
    inverse = 1.0 / np.maximum(np.stack([1.0 - p, p]), floor)
    weights = np.where(z == np.array([[0], [1]]), inverse, 0.0)
    worlds = [assigned.in_arm(table, code) for code in (0, 1)]

    def residual(fit: Fitted, y: Array) -> Residual:
        means = np.clip(np.stack([fit.predict(world) for world in worlds]), MARGIN, 1 - MARGIN)
        q = np.where(z == 1, means[1], means[0])
        return Residual(y=y, q=q, weights=weights, plug_in=means, plug_in_weights=inverse)

    return residual(fits["outcome"], taken.y(table)), residual(fits["treatment"], taken.taken(table, 1))
