"""The cohort before a study runs: the columns of its Table 1, as hospitals hand them to the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.estimation.diagnostics.balance import Measured
from fedtmle.estimation.diagnostics.base import Pool
from fedtmle.estimation.diagnostics.characteristics import Characteristics, Step
from fedtmle.estimation.flow import run_open
from fedtmle.estimation.people import levels, number
from fedtmle.model.table import Table
from fedtmle.targets.diagnostics import BaselineTable, Covariate
from fedtmle_core.dictionary import Categorical, Dictionary, Numeric
from fedtmle_core.leaves import Known
from fedtmle_core.plan import Plan
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, Term, product

OBSERVED = "\0observed"  # the column that says whose outcome is known: nothing else of it is read
STEPS = ("without treatment or a covariate", "of the rest, without an outcome")


@final
@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The columns that Table 1 describes; without a ``treatment`` everyone is in the one arm."""

    arms: tuple[str, ...]
    treatment: str | None
    outcome: str
    numbers: tuple[Covariate, ...]
    factors: Mapping[str, tuple[str, ...]]

    @cached_property
    def dictionary(self) -> Dictionary:
        """The variables of a sheet; of each some values may be missing."""
        named = dict(self.factors) | ({} if self.treatment is None else {self.treatment: self.arms})
        return Dictionary(
            (
                *(Numeric(name=each.name, low=each.low, high=each.high) for each in self.numbers),
                *(Categorical(name=name, levels=listed) for name, listed in named.items()),
                Numeric(name=OBSERVED, low=0.0, high=1.0),
            )
        )

    def sheet(self, table: Table) -> Sheet:
        """Return the sheet of a hospital's table."""
        named = [each for each in self.dictionary.variables if isinstance(each, Categorical)]
        return Sheet.read(
            self.dictionary,
            {
                **{each.name: table.numeric[each.name] for each in self.numbers},
                OBSERVED: (~missing_in(table, self.outcome)).astype(np.float64),
            },
            {each.name: table.factors[each.name].recode(each.levels).astype(np.int16) for each in named},
        )

    def described(self, tables: Sequence[Table], floor: int | None) -> BaselineTable:
        """Return Table 1 over the hospitals of this process."""
        sheets = [self.sheet(table) for table in tables]
        pool = Pool(n=sum(sheet.n for sheet in sheets), silos=len(sheets))
        plan = Plan(dictionary=self.dictionary, models=(), members=(), study=b"", author="")
        return run_open(self.characteristics(pool, floor).ask(), sheets, plan).result

    def characteristics(self, pool: Pool, floor: int | None) -> Characteristics:
        """Return the question behind the table."""
        known = {each.name: Known(each.name) for each in self.numbers}
        known |= {name: Known(name, is_level=True) for name in self.factors}
        taken: tuple[Term, ...] = (ONE,)
        if self.treatment is not None:
            known[self.treatment] = Known(self.treatment, is_level=True)
            taken = levels(self.dictionary, self.treatment, self.arms)
        complete, observed = product(*known.values()), number(self.dictionary, OBSERVED)
        order = (*self.factors, *(each.name for each in self.numbers))
        order = order if self.treatment is None else (*order, self.treatment)
        return Characteristics(
            pool=pool,
            arms=self.arms,
            taken=taken,
            covariates=(*map(self._number, self.numbers), *self._levels),
            lost=(
                Step(name=STEPS[0], lost=1.0 - complete),
                Step(name=STEPS[1], lost=product(complete, 1.0 - observed)),
            ),
            missing=(
                *(Step(name=name, lost=1.0 - known[name]) for name in order),
                Step(name=self.outcome, lost=1.0 - observed),
            ),
            floor=floor,
        )

    def _number(self, covariate: Covariate) -> Measured:
        there, width = Known(covariate.name), covariate.high - covariate.low
        x = number(self.dictionary, covariate.name) * (1.0 / width)
        return Measured(covariate=covariate, x=product(there, x - covariate.low / width), known=there)

    @property
    def _levels(self) -> tuple[Measured, ...]:
        return tuple(
            Measured(
                covariate=Covariate(name=name, level=level, levels=listed),
                x=indicator,
                known=Known(name, is_level=True),
            )
            for name, listed in self.factors.items()
            for level, indicator in zip(listed, levels(self.dictionary, name, listed), strict=True)
        )


def missing_in(table: Table, name: str) -> np.ndarray:
    """Return where a column is missing, as a number or as a factor, shape (N,)."""
    if name in table.numeric:
        return np.isnan(table.numeric[name])
    return np.asarray(table.factors[name].codes < 0)
