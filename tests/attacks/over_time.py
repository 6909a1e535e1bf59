"""Attacks on treatment over time, long tables, imputation, dates, and what a silo says about itself."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.data.silofile import ColumnMap, LongTable
from fedtmle.initial.glm import GLMModel
from fedtmle.initial.own import ProfiledModel
from fedtmle.programs.imputation import ResidualColumns
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.query import Query
from fedtmle.protocol.sums import SumsQuery, TallyQuery
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.effects.prepare import ArmResponse, OutcomeResponse
from fedtmle.targets.regimes.statistics import AmongAtRisk, Fluctuated, ModifiedRows
from fedtmle_core.exact import Sums
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.combinations import PERSON, VARIABLES, AbstractCombination
from tests.attacks.invented import ROW, AbstractInvented, until_fit
from tests.attacks.settings import Server
from tests.attacks.small import AbstractStudyAttack, Columns
from tests.declare import declare
from tests.narrow import load


def inner(query: Query) -> Any:
    """Return the query that a view wraps."""
    return getattr(query, "query", query)


def sums_of(server: Server, answer: Any, kind: type) -> list[tuple[Any, np.ndarray]]:
    """Return the queries of a round about models whose response is of a kind, with their sums."""
    found = []
    for member, part in zip(server.query.members, server.query.split(answer), strict=True):
        query = inner(member)
        asked = query.problem if isinstance(query, SumsQuery) else None
        model = asked.whole if isinstance(asked, ProfiledModel) else asked
        if isinstance(model, GLMModel) and isinstance(model.response, kind):
            found.append((query, part.values()))
    return found


def until(server: Server, answer: Any, kind: type) -> Any:
    """Go on honestly until models with a response of a kind are asked, and return the answer."""
    while not sums_of(server, answer, kind):
        answer = server.go_on(answer)
    return answer


def first_sums(server: Server, answer: Any, kind: type) -> list[tuple[Any, np.ndarray]]:
    """Go on honestly until models with a response of a kind are asked; return these with their sums."""
    return sums_of(server, until(server, answer, kind), kind)


class AbstractOverTime(AbstractInvented):
    """On a study of two periods, of 60 people, half treated in each."""

    rules: tuple[Any, ...] = (ft.Static("0"), ft.Static("1"))
    extra = {"treatment_model": ft.GLM("l"), "outcome_model": ft.GLM("l + a")}  # noqa: RUF012 - read only
    arms: Any = "binary"

    def study(self) -> ft.Study:
        names = ("l", "a")
        return ft.Study(
            target=ft.RegimeMean(
                outcome="y",
                treatment="a",
                over_time={name: (f"{name}1", f"{name}2") for name in names},
                rules=self.rules,
            ),
            algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-9),
            variables=declare(y="binary", a=self.arms, l=(-1, 1)),
            diagnostics=False,
            sums="exact",
            **self.extra,
        )

    def common(self) -> Columns:
        rng = np.random.default_rng(5)
        columns = {f"l{t}": rng.uniform(-1, 1, 60) for t in (1, 2)}
        for level in columns.values():
            level[(level > 0.25) & (level < 0.35)] = 0.1
        return {
            **columns,
            "a1": rng.permutation(ROW % 2),
            "a2": rng.permutation(ROW % 2),
            "y": rng.permutation(ROW % 2) * 1.0,
        }

    def columns(self) -> Columns:
        return self.common()


class TwoRulesOverTime(AbstractOverTime):
    """Asks for the means under two rules over time that one person alone follows differently."""

    yields = "the outcome of the one person between two cut-offs, exactly"
    rules = (ft.Threshold("l", 0.30, "1", "0"), ft.Threshold("l", 0.32, "1", "0"))

    def columns(self) -> Columns:
        columns = self.common()
        columns["l1"][PERSON], columns["l2"][PERSON] = 0.31, 0.8
        columns["a1"][PERSON] = columns["a2"][PERSON] = 1
        columns["y"][PERSON] = 1.0
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        (_, one), (_, other) = first_sums(server, answer, Fluctuated)
        slope, bend = one - other  # of the person alone, whose prediction is 1/2 at first
        return float(0.5 - 0.25 * slope / bend)

    def works(self, learned: float) -> bool:
        return abs(learned - 1.0) < 1e-6


class LoneShift(AbstractOverTime):
    """Asks for a shifted dose that a limit leaves to one person alone: the rows of all others cancel."""

    yields = "a covariate of the one person whose dose is shifted, to 1e-9"
    rules = (ft.Shift(by=0.5, most=-4.0), ft.Shift())
    arms = (-5, 5)
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("l + a + a:l"),
        "outcome_model": ft.GLM("l + a"),
    }

    def common(self) -> Columns:
        columns, rng = super().common(), np.random.default_rng(6)
        return {**columns, "a1": rng.uniform(-3, 4, 60), "a2": rng.uniform(-3, 4, 60)}

    def columns(self) -> Columns:
        columns = self.common()
        columns["a1"][PERSON], columns["l1"][PERSON] = -4.8, 0.777
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        (query, sums), *_ = first_sums(server, answer, ModifiedRows)
        model = query.problem
        gradient = sums[: model.dim] * np.exp2(np.array(model.scales))
        names = list(model.design_names)
        return float(gradient[names.index("a:l")] / gradient[names.index("a")])

    def works(self, learned: float) -> bool:
        return abs(learned - 0.777) < 1e-9


class TwoShifts(LoneShift):
    """Asks for two shifted doses whose limits differ in one person."""

    yields = "a covariate of the one person between two limits, to 1e-9"
    rules = (ft.Shift(by=0.5, most=2.0), ft.Shift(by=0.5, most=2.2))

    def common(self) -> Columns:
        columns = super().common()
        for name in ("a1", "a2"):
            dose = columns[name]
            dose[(dose > 1.4) & (dose < 1.8)] = 0.3
        return columns

    def columns(self) -> Columns:
        columns = self.common()
        columns["a1"][PERSON], columns["l1"][PERSON] = 1.6, 0.777
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        (query, one), (_, other), *_ = first_sums(server, answer, ModifiedRows)
        model = query.problem
        gradient = (one - other)[: model.dim] * np.exp2(np.array(model.scales))
        names = list(model.design_names)
        return float(gradient[names.index("a:l")] / gradient[names.index("a")])


class LoneLeaver(AbstractOverTime):
    """Models a treatment that nobody changes in both periods, between which one person is censored."""

    yields = "the arm and a covariate of the one person who left, exactly"
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("w"),
        "outcome_model": ft.GLM("w + a"),
        "censoring_model": ft.GLM("1"),
    }

    def study(self) -> ft.Study:
        return ft.Study(
            target=ft.RegimeMean(
                outcome="y",
                treatment="a",
                over_time={name: (f"{name}1", f"{name}2") for name in ("a", "c")},
                censoring="c",
                rules=self.rules,
            ),
            algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-9),
            variables=declare(y="binary", a="binary", c="binary", w=(-1, 1)),
            diagnostics=False,
            sums="exact",
            **self.extra,
        )

    def common(self) -> Columns:
        columns = super().common()
        return {
            "w": columns["l1"],
            "a1": columns["a1"] * 1.0,
            "a2": columns["a1"] * 1.0,
            "c1": np.zeros(60),
            "c2": np.zeros(60),
            "y": columns["y"],
        }

    def columns(self) -> Columns:
        columns = self.common()
        columns["w"][PERSON], columns["a1"][PERSON], columns["c1"][PERSON] = 0.777, 1.0, 1.0
        for name in ("a2", "c2", "y"):
            columns[name][PERSON] = np.nan
        return columns

    def run(self, victim: Victim) -> tuple[float, float]:
        server, answer = self.server(victim)
        found = [
            (query, sums)
            for query, sums in first_sums(server, answer, AmongAtRisk)
            if isinstance(query.problem.response.response, ArmResponse)
        ]
        (query, first), (_, second) = found
        one, w = (first - second)[:2] * np.exp2(np.array(query.problem.scales))
        return float(0.5 - one), float(w / one)

    def works(self, learned: tuple[float, float]) -> bool:
        return abs(learned[0] - 1.0) < 1e-9 and abs(learned[1] - 0.777) < 1e-9


class LoneEvent(AbstractInvented):
    """Models the hazard by covariate and period where one person alone leaves in the first period."""

    yields = "a covariate of the one person with an event in the first period, to 1e-9"

    def study(self) -> ft.Study:
        return ft.Study(
            target=ft.Risk(outcome="event", time="time", treatment="a", periods=4, period_length=1.0),
            hazard_model=ft.GLM("C(period) + w:C(period)"),
            treatment_model=ft.GLM("1"),
            algorithm=ft.Gradient(tolerance=1e-6),
            variables=declare(event="binary", time=(0, 4), a="binary", w=(-1, 1)),
            sums="exact",
            diagnostics=False,
        )

    def common(self) -> Columns:
        columns = super().common()
        return {
            "event": (ROW % 3 == 0) * 1.0,
            "time": np.where(ROW % 3 == 0, 2.5, 3.5),
            "a": columns["a"],
            "w": columns["w"],
        }

    def columns(self) -> Columns:
        columns = self.common()
        columns["time"][PERSON], columns["event"][PERSON], columns["w"][PERSON] = 0.5, 1.0, 0.777
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = until_fit(*self.server(victim))
        for query, part in zip(server.query.members, server.query.split(answer), strict=True):
            names = list(query.problem.design_names)
            if "w:C(period)[2]" in names:
                scales = np.exp2(np.array(query.problem.scales))
                sums = dict(zip(names, part.values()[: len(names)] * scales, strict=True))
                return self.alone(sums)
        raise AssertionError("no model of the hazard")

    def alone(self, sums: dict[str, float]) -> float:
        """Return the person's covariate, from the sums of (1/2 - y) w over those at risk in two periods."""
        return -2.0 * (sums["w:C(period)[1]"] - sums["w:C(period)[2]"])

    def works(self, learned: float) -> bool:
        return abs(learned - 0.777) < 1e-9


class LoneCensored(LoneEvent):
    """Models the hazard by covariate and period where one person alone is censored in the first period."""

    yields = "a covariate of the one person who was censored in the first period, to 1e-9"

    def columns(self) -> Columns:
        columns = super().columns()
        columns["event"][PERSON] = 0.0
        return columns

    def alone(self, sums: dict[str, float]) -> float:
        return -super().alone(sums)


class AbstractImputed(AbstractInvented):
    """On a study whose covariate w is imputed where it is missing."""

    extra = {"treatment_model": ft.GLM("w"), "outcome_model": ft.GLM("w"), "imputations": 5}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        w = {"kind": "number", "range": (-1, 1), "missing": "impute"}
        self.options["variables"] = ft.Variables({**VARIABLES, "w": w})


class TwoCompletions(AbstractImputed):
    """Imputes a covariate that one person lacks, and subtracts the sums over two completed data sets."""

    yields = "the arm and the outcome of the one person whose value is imputed, to 1e-9"

    def columns(self) -> Columns:
        columns = super().columns()
        return {**columns, "w": np.where(ROW == PERSON, np.nan, columns["w"])}

    def common(self) -> Columns:
        return {**super().common(), "w": super().columns()["w"]}

    def run(self, victim: Victim) -> tuple[float, float]:
        server, count = self.server(victim)
        answer = server.tell(Sums((20 << count.shifts[0],), count.shifts))  # the guard refuses fewer
        answer = until(server, answer, ArmResponse)
        (_, a1), (_, a2), *_ = sums_of(server, answer, ArmResponse)
        (_, y1), (_, y2), *_ = sums_of(server, answer, OutcomeResponse)
        ratio = float((y1 - y2)[1] / (a1 - a2)[1])  # -y / (1/2 - a)
        return float(ratio > 0), abs(ratio) / 2

    def works(self, learned: tuple[float, float]) -> bool:
        columns = self.columns()
        truth = columns["a"][PERSON], columns["y"][PERSON]
        return bool(np.abs(np.array(learned) - truth).max() < 1e-9)


class OffTheLine(AbstractImputed):
    """Imputes a covariate that is a function of another in all but one: the residuals are that person's."""

    yields = "how far the one person is off the line on which all others are, to 2 %"
    extra = {**AbstractImputed.extra, "treatment_model": ft.GLM("w + weight")}  # noqa: RUF012

    def common(self) -> Columns:
        columns = super().common()
        weight = np.linspace(1.0, 9.0, 60)
        return {**columns, "weight": weight, "w": np.where(ROW % 4 == 0, np.nan, weight / 10 - 0.5)}

    def columns(self) -> Columns:
        columns = self.common()
        columns["w"][PERSON] += 0.5
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        while True:
            for member, part in zip(server.query.members, server.query.split(answer), strict=True):
                query = inner(member)
                if isinstance(query, TallyQuery) and isinstance(query.columns, ResidualColumns):
                    people, squares = part.values().tolist()
                    left = 1.0 - 4.0 / people  # of a deviation, after four coefficients were fitted
                    return float(2.0 * np.sqrt(squares / left))  # on a range of 2
            answer = server.go_on(answer)

    def works(self, learned: float) -> bool:
        return abs(learned - 0.5) < 0.01


class DayOfBirth(AbstractCombination):
    """Has a spike at the age of those who were born on one day, from two columns of dates."""

    yields = "the arm of the one person who was born on a known day, to 1e-3"
    formula = "I(1 + 1/(1 + (1000*(365.25*age - 18262))**2))"
    mix = (-1.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        age = {"kind": "date difference", "range": (0, 120), "unit": "years"}
        self.options["variables"] = ft.Variables({**VARIABLES, "age": age})

    def _table(self, columns: Columns, first: int) -> Any:
        seen = datetime.date(2024, 5, 17)
        days = np.where(ROW == PERSON, first, 9000 + 311 * ROW)
        born = [str(seen - datetime.timedelta(days=int(each))) for each in days]
        dated = {**columns, "born": np.array(born), "seen": np.array([str(seen)] * 60)}
        mapping = {"age": ColumnMap(start="born", end="seen")}
        return load(dated, schema_of(self.study()), silo="a", mapping=mapping)

    def rows(self) -> Any:
        return self._table(self.columns(), 18262)

    def crowd(self, silo: str) -> Any:  # noqa: ARG002 - the same at all
        return self._table(self.columns() | self.common(), 12000)


class LastVisit(AbstractCombination):
    """Has the number of visits as a covariate, read from a long table in which one person has one more."""

    yields = "the arm of the one person with a third visit, exactly"
    formula = "visit_last"
    mix = (-2.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        visits = {"kind": "count", "range": (0, 10)}
        self.options["variables"] = ft.Variables({**VARIABLES, "visit_last": visits})

    def _table(self, columns: Columns, most: int) -> Any:
        people = np.repeat(ROW, np.where(ROW == PERSON, most, 2))
        visit = np.concatenate([np.arange(1, count + 1) for count in np.bincount(people)])
        data = pd.DataFrame({name: column[people] for name, column in columns.items()})
        long = LongTable(data=data.assign(patient=people, visit=visit), person="patient", period="visit")
        return load(long, schema_of(self.study()), silo="a")

    def rows(self) -> Any:
        return self._table(self.columns(), 3)

    def crowd(self, silo: str) -> Any:  # noqa: ARG002 - the same at all
        return self._table(self.columns() | self.common(), 2)


class SaidToBeAbsent(AbstractStudyAttack):
    """Says at the start that all other silos have left: what is pooled is the silo's own."""

    yields = "the silo's own number of treated, published as the pooled one"
    reason = Reason.TOO_FEW_SILOS
    keys = ("min_silos",)
    options = {"on_refusal": "go on"}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        n, absent = server.open(), tuple(silo for silo in server.plan.silos if silo != "a")
        server.plan = server.plan.without(absent)
        return float(server.begin(n, absent=absent).values()[1])

    def works(self, learned: float) -> bool:
        return learned == self.columns()["a"].sum()


def silo_alone(model: Any, sums: np.ndarray) -> tuple[float, float]:
    """Return the people and the treated of the first silo, from the sums of a treatment model at zero."""
    names, scales = list(model.design_names), np.exp2(np.array(model.scales))
    dim = len(names)
    own = np.array([(name == "1") - name.startswith("C(") for name in names])  # all but the others
    first = sums[dim : 2 * dim] * scales * scales[0]  # the Hessian's first row: a quarter of each count
    people = 4.0 * float(own @ first)
    return people, people / 2 - float(own @ (sums[:dim] * scales))


class OwnIntercept(AbstractCombination):
    """Has an intercept of each silo in a model, whose column would have one silo's own sum for its total."""

    yields = "the silo's own number of people and of those treated, exactly"
    formula = "w + C(silo)"
    only_masked = True
    keys = ()

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have a column for each silo."""
        monkeypatch.setattr("fedtmle.programs.nuisance.own_formula", lambda *_: None)

    def run(self, victim: Victim) -> tuple[float, float]:
        server, answer = self.server(victim)
        answer = until(server, answer, ArmResponse)
        ((query, sums),) = sums_of(server, answer, ArmResponse)
        return silo_alone(query.problem, sums)

    def works(self, learned: tuple[float, float]) -> bool:
        return bool(np.abs(np.array(learned) - (60, self.columns()["a"].sum())).max() < 1e-6)


class OwnSlope(OwnIntercept):
    """Has a slope of each silo in a model, whose column would have one silo's own sum for its total."""

    formula = "smoker + w*C(silo)"


class OwnInterceptOverTime(AbstractOverTime):
    """Has an intercept of each silo in a model of each period, whose column would have one silo's own sum."""

    yields = OwnIntercept.yields
    only_masked = True
    keys = ()
    formula = "l + C(silo)"
    strict: dict[str, Any] = {}  # noqa: RUF012 - read only

    def __init__(self) -> None:
        super().__init__()
        self.extra = {"treatment_model": ft.GLM(self.formula), "outcome_model": ft.GLM("l + a")}

    disarm = OwnIntercept.disarm

    def run(self, victim: Victim) -> tuple[float, float]:
        server, answer = self.server(victim)
        (query, sums), *_ = first_sums(server, answer, AmongAtRisk)
        return silo_alone(query.problem, sums)

    def works(self, learned: tuple[float, float]) -> bool:
        return bool(np.abs(np.array(learned) - (60, self.columns()["a1"].sum())).max() < 1e-6)


class OwnSlopeOverTime(OwnInterceptOverTime):
    """Has a slope of each silo in a model of each period, whose column would have one silo's own sum."""

    formula = "lag1_a + l*C(silo)"


class OwnLevel(OwnIntercept):
    """Has a column of the table in a model that names the silo, so that a total is one silo's own sum."""

    formula = "w + C(site)"
    strict: dict[str, Any] = {}  # noqa: RUF012 - read only

    def __init__(self) -> None:
        super().__init__()
        variables = ft.Variables({**VARIABLES, **declare(site=list("abcdef"))})
        self.options = {**self.options, "variables": variables}

    def columns(self) -> Columns:
        return {**super().columns(), "site": np.repeat("a", 60)}

    def crowd(self, silo: str) -> Any:
        return load({**self.columns(), "site": np.repeat(silo, 60)}, schema_of(self.study()), silo=silo)


ATTACKS: tuple[AbstractAttack, ...] = (
    TwoRulesOverTime(),
    LoneShift(),
    TwoShifts(),
    LoneLeaver(),
    LoneEvent(),
    LoneCensored(),
    LastVisit(),
    TwoCompletions(),
    OffTheLine(),
    DayOfBirth(),
    SaidToBeAbsent(),
)
HIDDEN: tuple[AbstractAttack, ...] = (  # nothing of one silo is asked for
    OwnIntercept(),
    OwnSlope(),
    OwnInterceptOverTime(),
    OwnSlopeOverTime(),
)
WORKING: tuple[AbstractAttack, ...] = (OwnLevel(),)
