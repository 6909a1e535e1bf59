"""Attacks on predictions, tables, bins, clusters and void rounds, by a plan that looks like any other."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.programs.missing import MissingColumns
from fedtmle.protocol.bins import BinsQuery, BinTotal
from fedtmle.protocol.clusters import ClustersQuery
from fedtmle.protocol.query import MomentsQuery
from fedtmle.targets.effects.balance import BalanceBins
from fedtmle.targets.effects.moments import ClosingLayout, ClosingSums
from fedtmle.targets.effects.prepare import ArmResponse, WithoutFold, cluster_digest
from fedtmle.targets.effects.statistics import CalibrationBins, PredictionErrors, PropensityBins
from fedtmle_core.exact import Sums
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.combinations import PERSON
from tests.attacks.differences import FOLDS
from tests.attacks.followup import asked, counts
from tests.attacks.invented import ROW, AbstractInvented, LoneCluster, closing
from tests.attacks.over_time import AbstractOverTime, first_sums, sums_of, until
from tests.attacks.settings import Server
from tests.attacks.small import AbstractStudyAttack, Columns
from tests.declare import declare

SPIKE = "I(smoker/(1 + (100000*(w - 0.3141))**2))"  # 1 for the one smoker with this w, else 0


def binned(server: Server, answer: Any, kind: type) -> tuple[Any, list[list[np.ndarray]]]:
    """Go on honestly to a statistic by bin; return it with the sums of the bins of each group, those told."""
    while True:
        for query, part in zip(server.query.members, server.query.split(answer), strict=True):
            if isinstance(query, BinsQuery) and isinstance(query.bins, kind):
                shifts = query.pooled_code.shifts
                return query.bins, [
                    [
                        (Sums(each.units, shifts) if isinstance(each, BinTotal) else each.total).values()
                        for each in group
                        if each is not None and each.count
                    ]
                    for group in part
                ]
        answer = server.go_on(answer)


class PredictionOfOne(AbstractInvented):
    """Gives the outcome model public coefficients: predictions are 1/2, and 3/4 for one person."""

    yields = "any function of the covariates of the one person with w = 0.3141: here, smoking"
    keys = ()
    extra = {  # noqa: RUF012 - read only
        "outcome_model": ft.Pilot.from_coefficients(f"a + {SPIKE}", {}, "gaussian", (0.5, 0.0, 0.25)),
        "algorithm": ft.OneStep(),
    }

    def columns(self) -> Columns:
        columns = super().columns()
        columns["w"][PERSON], columns["smoker"][PERSON] = 0.3141, 1.0
        return columns

    def run(self, victim: Victim) -> float:
        sums = ClosingLayout(2).read(closing(*self.server(victim)))
        return 4.0 * float(sums.m[0] - sums.t[0] / 2)

    def works(self, learned: float) -> bool:
        return abs(learned - 1.0) < 1e-3


class ErrorOfOne(PredictionOfOne):
    """Does the same, and compares squared errors with the sums of the outcome and its square."""

    yields = "the outcome of the one person with w = 0.3141, to 1e-6"
    extra = {**PredictionOfOne.extra, "diagnostics": True}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> float:
        _, told = asked(*self.server(victim), PredictionErrors)
        people, y, squares, before = told.values()[:4]
        alone = before - (squares - y + people / 4)  # (y - 3/4)^2 - (y - 1/2)^2
        return float(0.625 - 2.0 * alone)

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.columns()["y"][PERSON]) < 1e-6)


class SumLessTable(AbstractInvented):
    """Counts one more person in a model's column than the table of covariates by arm does."""

    yields = "the arm of the one person with HIV, exactly"
    keys = ()
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("I(smoker + hiv)"),
        "outcome_model": ft.GLM("smoker"),
        "diagnostics": True,
    }

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        answer = until(server, answer, ArmResponse)
        ((query, sums),) = sums_of(server, answer, ArmResponse)
        table, by_covariate = binned(server, answer, BalanceBins)
        place = [covariate.name for covariate in table.covariates].index("smoker")
        untreated, treated = (sums[0] for sums in by_covariate[place])
        model = float(sums[1] * 2.0 ** query.problem.scales[1])  # sum of (1/2 - a) times the column
        return float(0.5 - (model - (untreated - treated) / 2))

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.columns()["a"][PERSON]) < 1e-9)


class HistogramLessTable(SumLessTable):
    """Does the same with rounded sums: a histogram of propensity scores counts those in the column."""

    extra = {  # noqa: RUF012 - read only
        **SumLessTable.extra,
        "outcome_model": ft.GLM("smoker:w"),
        "algorithm": ft.OneStep(),
        "sums": "rounded",
    }

    def common(self) -> Columns:
        smokers = ROW % 20 < 8
        arm = np.where(smokers, ROW % 20 < 6, ROW % 3 == 0) * 1  # so that scores are above 1/2 for smokers
        return {**super().common(), "smoker": smokers * 1.0, "a": arm}

    def columns(self) -> Columns:
        return {**self.common(), "hiv": super().columns()["hiv"]}

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        while not any(
            isinstance(getattr(query, "bins", None), BalanceBins) for query in server.query.members
        ):
            answer = server.go_on(answer)
        table, by_covariate = binned(server, answer, BalanceBins)
        place = [covariate.name for covariate in table.covariates].index("smoker")
        _, told = asked(server, answer, PropensityBins)
        counted = [sum(above[6:]) for above in counts(told)]  # of those above 1/2, by arm
        more = [count - sums[0] for count, sums in zip(counted, by_covariate[place], strict=True)]
        return float(np.argmax(more))


class OutlierInATable(AbstractInvented):
    """Has a covariate in a model by a bounded function alone, and reads the table of the covariate itself."""

    yields = "the dose of the one person whose dose is far above all others, to 5 %, and the arm"
    keys = ()
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("I(1/(dose + 0.05))"),
        "outcome_model": ft.GLM("smoker"),
        "diagnostics": True,
    }
    declared = {"dose": (0, 1000)}  # noqa: RUF012 - read only

    def common(self) -> Columns:
        return {**super().common(), "dose": np.random.default_rng(6).uniform(0.0, 0.2, 60)}

    def columns(self) -> Columns:
        columns = {**super().columns(), "dose": self.common()["dose"]}
        columns["dose"][PERSON] = 777.0
        return columns

    def run(self, victim: Victim) -> tuple[int, float]:
        table, by_covariate = binned(*self.server(victim), BalanceBins)
        place = [covariate.name for covariate in table.covariates].index("dose")
        sums = [1000.0 * float(sums[0]) for sums in by_covariate[place]]
        return int(np.argmax(sums)), max(sums)

    def works(self, learned: tuple[int, float]) -> bool:
        arm, dose = learned
        return bool(arm == self.columns()["a"][PERSON] and abs(dose / 777.0 - 1.0) < 0.05)


class WeightInABin(AbstractInvented):
    """Has weights that are zero for all but one of those whose outcome is predicted to be high."""

    yields = "the outcome of the one person with a weight in a bin of predictions, to 1e-9"
    keys = ()
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("1"),
        "outcome_model": ft.GLM("w"),
        "weights": "weight",
        "diagnostics": True,
        "algorithm": ft.OneStep(),
    }
    high = ROW >= 45

    def common(self) -> Columns:
        columns, rng = super().common(), np.random.default_rng(6)
        w = np.where(self.high, 0.85, np.where(ROW % 3, 0.5, -0.5)) + rng.uniform(-0.02, 0.02, 60)
        y = 0.5 + 0.3 * w + rng.uniform(-0.1, 0.1, 60)
        return {"y": y, "a": columns["a"], "w": w, "weight": np.where(self.high, 0.0, 1.0)}

    def columns(self) -> Columns:
        columns = {**super().columns(), **self.common()}
        columns["weight"][50] = 1.0
        return columns

    def run(self, victim: Victim) -> float:
        _, (bins,) = binned(*self.server(victim), CalibrationBins)
        weight, y, *_ = bins[-1]
        return float(y / weight)

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.columns()["y"][50]) < 1e-9)


class PaddedCluster(LoneCluster):
    """Puts one person and two without weight into a cluster, and everyone else into another."""

    extra = {**LoneCluster.extra, "weights": "weight"}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        columns = super().columns()
        few = np.isin(ROW, (3, 5, PERSON))
        weight = np.where(few & (PERSON != ROW), 0.0, 1.0)
        return {**columns, "family": np.where(few, "few", "others"), "weight": weight}


class PaddedStratum(LoneCluster):
    """Puts one person and ten of another stratum into a cluster, and asks for means by stratum."""

    target = {"strata": "site"}  # noqa: RUF012 - read only
    mean = 3  # of the treated in the person's stratum; the first two are of everyone

    def columns(self) -> Columns:
        few = (ROW == PERSON) | (ROW >= 50)
        return {**super().columns(), "family": np.where(few, "few", "others")}

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        told = closing(server, answer)
        self.closing = next(query for query in server.query.members if isinstance(query, MomentsQuery))
        problem: Any = self.closing.problem
        d = len(problem.combination[0])
        sums = ClosingLayout(d).read(told)
        squares = sums.uu[[(r, s) for r in range(d) for s in range(r, d)].index((self.mean, self.mean))]
        total = float(sums.u[self.mean])
        return float(0.5 * (total - max(0.0, 2.0 * float(squares) - total * total) ** 0.5))

    def works(self, learned: float) -> bool:
        problem: Any = self.closing.problem
        true = problem.moment_columns(self.closing.law, problem.rows(self.rows())).u[self.mean, PERSON]
        return bool(abs(learned - true) < 1e-6)


class WeightInAFold(AbstractInvented):
    """Cross-fits with weights that are zero for all but one person of a fold, and subtracts the fits."""

    yields = "the arm of the one person who has a weight in a fold"
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("1"),
        "folds": FOLDS.count,
        "weights": "weight",
    }
    fold = FOLDS._draw(ROW)

    def common(self) -> Columns:
        return {**super().common(), "weight": np.where(self.fold == self.fold[PERSON], 0.0, 1.0)}

    def columns(self) -> Columns:
        return {**super().columns(), "weight": np.where(ROW == PERSON, 1.0, self.common()["weight"])}

    def run(self, victim: Victim) -> bool:
        without = {}
        for query, sums in first_sums(*self.server(victim), WithoutFold):
            model = query.problem
            if isinstance(model.response.response, ArmResponse):
                without[model.response.fold] = sums[0] * 2.0 ** model.scales[0]
        within = sum(without.values()) / (FOLDS.count - 1) - without[int(self.fold[PERSON])]
        return bool(within < 0.0)  # 1/2 less the arm, times the weight

    def works(self, learned: bool) -> bool:
        return learned == bool(self.columns()["a"][PERSON])


class AbstractSpanning(LoneCluster):
    """On clusters that may be in several silos: the server says which are, and gets the sums over each."""

    extra = {**LoneCluster.extra, "cluster_scope": "spanning"}  # noqa: RUF012 - read only
    claimed: tuple[str, ...] = tuple("012345678")

    def family(self) -> np.ndarray:
        """The cluster of each person: one of nine, and a tenth of six people."""
        family = (ROW % 9).astype("<U6")
        family[[PERSON, *range(55, 60)]] = "few"
        return family

    def columns(self) -> Columns:
        return {**super().columns(), "family": self.family()}

    def sums(self, victim: Victim) -> ClosingSums:
        """The closing sums by name, once some clusters were said to be in another silo."""
        server, answer = self.server(victim)
        while not isinstance(server.query, ClustersQuery):
            answer = server.go_on(answer)
        answer = server.tell(tuple(sorted(map(cluster_digest, self.claimed))))
        told = ClosingLayout(2).read(closing(server, answer))
        self.closing = next(query for query in server.query.members if isinstance(query, MomentsQuery))
        return told

    def run(self, victim: Victim) -> float:
        told = self.sums(victim)
        return float(told.u[1] - sum(part.u[1] for part in told.spanning))


class RestOfClusters(AbstractSpanning):
    """Says that all clusters but one person's are in other silos too, and subtracts their sums."""

    keys = ("min_cell", "min_people")

    def family(self) -> np.ndarray:
        family = super().family()
        family[55:] = "8"
        return family


class LoneAmongSpanning(AbstractSpanning):
    """Says so of all clusters but two, of which one is a single person: squares tell the two apart."""

    def family(self) -> np.ndarray:
        family = super().family()
        family[PERSON] = "alone"
        return family

    def run(self, victim: Victim) -> float:
        told = self.sums(victim)
        total = float(told.u[1] - sum(part.u[1] for part in told.spanning))
        return float(0.5 * (total - max(0.0, 2.0 * float(told.uu[2]) - total * total) ** 0.5))


class WeightInASpanningCluster(AbstractSpanning):
    """Gets the sum over a cluster of six of which one person alone has a weight."""

    keys = ()
    extra = {**AbstractSpanning.extra, "weights": "weight"}  # noqa: RUF012 - read only
    claimed = ("few",)

    def columns(self) -> Columns:
        columns = super().columns()
        return {**columns, "weight": np.where((columns["family"] == "few") & (PERSON != ROW), 0.0, 1.0)}

    def run(self, victim: Victim) -> float:
        (part,) = self.sums(victim).spanning
        return float(part.u[1])


class CountedLeaver(AbstractOverTime):
    """Counts who is at risk by period, because a covariate over time may be missing."""

    yields = "that one person was censored in the first period"
    extra = {**AbstractOverTime.extra, "censoring_model": ft.GLM("1"), "imputations": 5}  # noqa: RUF012

    def study(self) -> ft.Study:
        over_time = {name: (f"{name}1", f"{name}2") for name in "acl"}
        return ft.Study(
            target=ft.RegimeMean(
                outcome="y", treatment="a", over_time=over_time, censoring="c", rules=self.rules
            ),
            algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-9),
            variables=ft.Variables(
                {
                    **declare(y="binary", a="binary", c="binary"),
                    "l": {"kind": "number", "range": (-1, 1), "missing": "impute"},
                }
            ),
            diagnostics=False,
            sums="exact",
            **self.extra,
        )

    def common(self) -> Columns:
        columns = {name: column * 1.0 for name, column in super().common().items()}
        columns["l2"][::4] = np.nan
        return {**columns, "c1": np.zeros(60), "c2": np.zeros(60)}

    def columns(self) -> Columns:
        columns = self.common()
        columns["c1"][PERSON] = 1.0
        for name in ("l2", "a2", "c2", "y"):
            columns[name][PERSON] = np.nan
        return columns

    def run(self, victim: Victim) -> float:
        statistic, told = asked(*self.server(victim), MissingColumns)
        at_risk = told.values()[-len(statistic.periods) :]
        return float(at_risk[0] - at_risk[1])

    def works(self, learned: float) -> bool:
        return learned == 1.0


class VoidRound(AbstractStudyAttack):
    """Has closing sums of which one person is nearly all; a silo may ask for a look at the rows of all."""

    yields = "the arm and the outcome of the one person with a high outcome, to 0.1"
    keys = ("min_people",)
    options = {"algorithm": ft.OneStep(), "diagnostics": False, "sums": "exact"}  # noqa: RUF012 - read only

    def common(self) -> Columns:
        columns, low = super().common(), np.full(60, 0.03)
        y = low + np.random.default_rng(9).uniform(-0.005, 0.005, 60)
        return {**columns, "y": y, "q0": low, "q1": low}

    def columns(self) -> Columns:
        columns = {**super().columns(), **self.common()}
        columns["y"][PERSON] = 0.777
        return columns

    def run(self, victim: Victim) -> tuple[int, float]:
        sums = ClosingLayout(2).read(closing(*self.server(victim)))
        residuals = [float(u - m) / 2 for u, m in zip(sums.u, sums.m, strict=True)]  # g = 1/2
        return int(np.argmax(residuals)), 0.03 + max(residuals)

    def works(self, learned: tuple[int, float]) -> bool:
        arm, y = learned
        return bool(arm == self.columns()["a"][PERSON] and abs(y - 0.777) < 0.1)


ATTACKS: tuple[AbstractAttack, ...] = (
    PaddedCluster(),
    PaddedStratum(),
    WeightInAFold(),
    RestOfClusters(),
    LoneAmongSpanning(),
    CountedLeaver(),
    VoidRound(),
)
WORKING: tuple[AbstractAttack, ...] = (  # the default policy does not stop these
    PredictionOfOne(),
    ErrorOfOne(),
    SumLessTable(),
    HistogramLessTable(),
    OutlierInATable(),
    WeightInABin(),
    WeightInASpanningCluster(),
)
