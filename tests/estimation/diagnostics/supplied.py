"""Studies that ran with the present package, as sheets of supplied columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool
from fedtmle.estimation.flow import run_open
from fedtmle.model.table import Table
from fedtmle.runtime.session import Finished
from fedtmle_core.dictionary import Dictionary, Identifier, Numeric
from fedtmle_core.leaves import Number
from fedtmle_core.plan import Plan
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, Term
from tests.effects.studies import finish
from tests.effects.test_pooled import OPTIONS, TARGETS, people, study_of
from tests.narrow import targeted

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Supplied:
    """Columns of several hospitals, as terms."""

    plan: Plan
    sheets: tuple[Sheet, ...]

    @classmethod
    def of(cls, silos: Sequence[Columns]) -> Supplied:
        """Return the numbers of some silos; each column is declared with the range that it has."""
        names = [name for name in silos[0] if name != "cluster"]
        spans = {name: np.concatenate([silo[name] for silo in silos]) for name in names}
        variables = [
            Numeric(name=name, low=float(np.nanmin(x)), high=float(np.nanmax(x))) for name, x in spans.items()
        ]
        clusters = [Identifier(name="cluster", largest=8)] if "cluster" in silos[0] else []
        dictionary = Dictionary((*variables, *clusters))
        sheets = [
            Sheet.read(
                dictionary,
                {name: silo[name] for name in names},
                {},
                {"cluster": silo["cluster"]} if clusters else None,
            )
            for silo in silos
        ]
        plan = Plan(dictionary=dictionary, models=(), members=(), study=b"", author="")
        return cls(plan, tuple(sheets))

    @property
    def n(self) -> int:
        return sum(sheet.n for sheet in self.sheets)

    @property
    def pool(self) -> Pool:
        return Pool(n=self.n, silos=len(self.sheets))

    def term(self, name: str) -> Term:
        """Return a column in its own unit; a column of ones is `ONE`."""
        variable = self.plan.dictionary.numeric(name)
        if variable.low == variable.high == 1.0:
            return ONE
        return Number(name, variable.exponent) * 2.0**variable.exponent

    def terms(self, prefix: str) -> tuple[Term, ...]:
        """Return the columns prefix 0, prefix 1, ..."""
        names = [f"{prefix} {k}" for k in range(100)]
        held = {variable.name for variable in self.plan.dictionary.variables}
        return tuple(self.term(name) for name in names if name in held)

    def ask(self, diagnostic: AbstractDiagnostic) -> Any:
        """Return what a diagnostic reads of all hospitals."""
        return run_open(diagnostic.ask(), self.sheets, self.plan).result

    def numbers(self, diagnostic: AbstractDiagnostic) -> int:
        return run_open(diagnostic.ask(), self.sheets, self.plan).numbers


def supplied(finished: Finished, tables: Sequence[Table]) -> Supplied:
    """Return the rows of a finished study of an effect, nuisances evaluated, and the EIF at its law."""
    outcome = targeted(finished)
    problem = outcome.problem
    silos = []
    for table in tables:
        rows = problem.prepare(table)
        g = problem.prepare.scores(table)
        moments = problem.moment_columns(outcome.law, rows)
        columns = {
            "y": rows.y,
            "observed": rows.observed,
            "weight": rows.weight,
            "before": problem.factual(problem.start(), rows),
            "after": problem.factual(outcome.law, rows),
            "denominator": rows.denominator,
            **{f"taken {a}": rows.arm == a for a in range(len(g))},
            **{f"g {a}": column for a, column in enumerate(g)},
            **{f"H {r}": column for r, column in enumerate(rows.covariates)},
            **{f"truncated {a}": column for a, column in enumerate(rows.truncated)},
            **{f"u {r}": column for r, column in enumerate(moments.u)},
            **{f"m {r}": column for r, column in enumerate(moments.m)},
            **{f"t {r}": column for r, column in enumerate(moments.t)},
        }
        silo = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
        silo |= {f"x {name}": np.array(column) for name, column in table.numeric.items()}
        for name, factor in table.factors.items():
            if name != problem.prepare.columns.cluster:
                levels = problem_levels(finished, name)
                codes = factor.recode(levels)
                silo |= {f"x {name} {code}": (codes == code) * 1.0 for code in range(len(levels))}
        if rows.cluster is not None:
            silo["cluster"] = np.array(rows.cluster)
        silos.append(silo)
    return Supplied.of(silos)


def problem_levels(finished: Finished, name: str) -> tuple[str, ...]:
    """Return the levels of a factor of a study."""
    details = targeted(finished).details
    columns = details.problem.prepare.columns
    if name == columns.treatment:
        return columns.arms
    return details.levels[name]


STUDIES = {
    f"{name}, {option}": (name, option)
    for name in ("ATE", "three arms", "ATT, three arms", "ATO", "strata", "rules", "mean")
    for option in ("plain", "all")
}


def ran(name: str, option: str, n: int = 400):
    """A study of the tests: itself, its outcome, and its rows in three silos."""
    study = study_of(TARGETS[name], **OPTIONS[option])
    data = people(study, n, seed=3)
    where = np.random.default_rng(1).integers(0, 3, size=data["family"].max() + 1)[data["family"]]
    return pooled(study, data, [np.flatnonzero(where == m) for m in range(3)])


def pooled(study: ft.Study, data: Columns, parts: Sequence[np.ndarray]):
    """A study that ran with all records in one silo, where nothing is hidden, and its rows in several."""
    finished, (table,) = finish_one(study, data)
    return study, targeted(finished), supplied(finished, [table.take(part) for part in parts])


def finish_one(study: ft.Study, data: Columns) -> tuple[Finished, list[Table]]:
    finished, tables = finish(study, {"pooled": data})
    return finished, list(tables.values())
