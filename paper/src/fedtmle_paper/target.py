"""The paper's target in a study: the offsets of entropic optimal transport, through the door for all targets.

A study file names it as any target of another distribution (`fedtmle.targets.residuals`). The start is the
kernel density of a pilot sample, which is public: its points are in the study file, and so in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal, final

import numpy as np

from fedtmle.defects import expect_column
from fedtmle.errors import InputError
from fedtmle.programs.target import AbstractTarget, BegunStudy, StartedTarget
from fedtmle.protocol.query import Flow
from fedtmle.targets.effects.estimands import ColumnUse, Scale, Summary
from fedtmle.targets.residuals import OnColumns
from fedtmle_core.types import Array
from fedtmle_paper.density.fluctuation import AbstractFluctuation, ExponentialTilt, LogisticFluctuation
from fedtmle_paper.density.law import DensityLaw
from fedtmle_paper.optimal_transport import SQUARE, OptimalTransport

Points = tuple[tuple[float, ...], ...]
FLUCTUATIONS: dict[str, AbstractFluctuation] = {
    "logistic": LogisticFluctuation(),
    "exponential": ExponentialTilt(),
}


@final
@dataclass(frozen=True, kw_only=True)
class TransportOffsets(AbstractTarget):
    """The offsets theta that allocate records at ``columns`` to ``destinations`` with the ``capacities``.

    ``pilot`` is a public sample of the columns, from which the initial density is made. The first column
    stands for the outcome of a study. Defaults are those of the paper's section 5.
    """

    description = "offsets of entropic optimal transport to fixed destinations"
    fixed_options: ClassVar[tuple[str, ...]] = (*AbstractTarget.fixed_options, "folds", "g_bounds")

    outcome: str = field(init=False, default="")
    columns: tuple[str, ...]
    pilot: Points
    destinations: Points = SQUARE
    capacities: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    regularisation: float = 1.0
    fluctuation: Literal["logistic", "exponential"] = "logistic"
    spacing: float = 0.15

    def __post_init__(self) -> None:
        for name in self.columns:
            expect_column("columns", name)
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise InputError("columns: expected at least one, each once")
        if self.fluctuation not in FLUCTUATIONS:
            raise InputError(f"fluctuation: expected 'logistic' or 'exponential', not {self.fluctuation!r}")
        for name in ("columns", "capacities"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("pilot", "destinations"):
            points = tuple(tuple(map(float, point)) for point in getattr(self, name))
            if any(len(point) != len(self.columns) for point in points):
                raise InputError(f"{name}: expected points of {len(self.columns)} number(s), one per column")
            object.__setattr__(self, name, points)
        object.__setattr__(self, "outcome", self.columns[0])
        AbstractTarget.__post_init__(self)
        _started(self.problem, self.pilot)  # a pilot without a kernel density is an error here

    @property
    def problem(self) -> OptimalTransport:
        """The problem on plain arrays."""
        return OptimalTransport(
            destinations=self.destinations,
            capacities=self.capacities,
            regularisation=self.regularisation,
            fluctuation=FLUCTUATIONS[self.fluctuation],
            spacing=self.spacing,
        )

    def question_stem(self) -> str:
        where, count = " and ".join(self.columns), len(self.destinations)
        return f"Which offsets allocate the records at {where} to {count} destinations with their capacities"

    def more_columns(self) -> Mapping[str, ColumnUse]:
        return dict.fromkeys(self.columns[1:], "number")

    def start(self, begun: BegunStudy) -> Flow[StartedTarget]:  # noqa: ARG002 - the pilot is public
        yield from ()  # nothing is fitted
        law = _started(self.problem, self.pilot)
        return StartedTarget(problem=OnColumns(problem=self.problem, columns=self.columns), law=law)

    def summarise(self, psi: Array, label: str) -> list[Summary]:  # noqa: ARG002 - of everyone
        return [
            Summary(name=name, value=float(psi[j]), gradient=np.eye(len(psi))[j], scale=Scale.VALUE)
            for j, name in enumerate(self.problem.names)
        ]


@lru_cache(maxsize=8)
def _started(problem: OptimalTransport, pilot: Points) -> DensityLaw:
    """Return the initial law; the silos of one process share its quadrature."""
    return problem.start(np.array(pilot))
