"""The responses of a study's nuisance regressions, as values: treatment, being observed, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedtmle.initial.crossfit import Folds
from fedtmle.initial.glm import AbstractResponse
from fedtmle.model.table import Table
from fedtmle.model.types import Array, product
from fedtmle.targets.effects.prepare import EffectColumns


@final
@dataclass(frozen=True, kw_only=True)
class ArmResponse(AbstractResponse):
    """1{A = arm ``code``} among those in arm 0 or in an arm from ``code`` on."""

    columns: EffectColumns
    weight_mean: float
    code: int

    def of(self, table: Table) -> tuple[Array, Array]:
        columns = self.columns
        taken, w = columns.taken(table, self.code), columns.relative_weight(table, self.weight_mean)
        if self.code == 1:  # everyone is in arm 0, in arm 1 or in a later one
            return taken, w
        arm = columns.arm(table)
        return taken, w * ((arm == 0) | (arm >= self.code))


@final
@dataclass(frozen=True, kw_only=True)
class ObservedResponse(AbstractResponse):
    """Delta: whether the outcome was observed."""

    columns: EffectColumns
    weight_mean: float

    def of(self, table: Table) -> tuple[Array, Array]:
        return self.columns.observed(table), self.columns.relative_weight(table, self.weight_mean)


@final
@dataclass(frozen=True, kw_only=True)
class OutcomeResponse(AbstractResponse):
    """The outcome on the unit scale, among those whose outcome was observed."""

    columns: EffectColumns
    weight_mean: float

    def of(self, table: Table) -> tuple[Array, Array]:
        weight = self.columns.relative_weight(table, self.weight_mean)
        return self.columns.y(table), product(weight, self.columns.observed(table))


@final
@dataclass(frozen=True, kw_only=True)
class WithoutFold(AbstractResponse):
    """The same response on the rows of the other folds."""

    response: AbstractResponse
    folds: Folds
    fold: int

    def of(self, table: Table) -> tuple[Array, Array]:
        y, w = self.response.of(table)
        return y, w * (self.folds.of(table) != self.fold)
