"""Attacks on the rule for combinations: by clusters, responses, rules, periods, regimes, folds and pilots."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.query import MomentsQuery
from fedtmle.targets.effects.moments import ClosingLayout
from fedtmle_core.exact import Sums
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.combinations import PERSON, VARIABLES, AbstractCombination
from tests.attacks.settings import RefusedBySiloError, Server, Setting
from tests.attacks.small import Columns, TinySilo
from tests.declare import declare

ROW = np.arange(60)


def until_fit(server: Server, answer: Any) -> tuple[Server, Any]:
    """Go on honestly until a model is fitted, and return the server with that round's answer."""
    while not any(list(member.evaluations()) for member in server.query.members):
        answer = server.go_on(answer)
    return server, answer


class AbstractInvented(AbstractCombination):
    """On a study whose other options are these; the attack says how it combines what is told."""

    extra: dict[str, Any] = {}  # noqa: RUF012 - read only
    declared: dict[str, Any] = {}  # noqa: RUF012 - read only

    def __init__(self) -> None:
        more = declare(**self.declared) if self.declared else {}
        variables = ft.Variables({**VARIABLES, **more})
        self.options = {"variables": variables, "sums": "exact", "diagnostics": False, **self.extra}


def closing(server: Server, answer: Any) -> Sums:
    """Goes on honestly until the closing sums are told, and returns them."""
    while True:
        for query, part in zip(server.query.members, server.query.split(answer), strict=True):
            if isinstance(query, MomentsQuery):
                found: Sums = part
                return found
        answer = server.go_on(answer)


class LargestPower(AbstractInvented):
    """Has a column of high powers of two, of which the largest is nearly the whole sum."""

    yields = "the covariate of the person with the largest w, to 1e-3"
    extra = {"treatment_model": ft.GLM("I(2**(40*w))")}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        return {**super().columns(), "w": self._spread(0.777)}

    def common(self) -> Columns:
        return {**super().common(), "w": self._spread(0.2)}

    def _spread(self, largest: float) -> np.ndarray:
        w = np.linspace(-0.9, 0.2, 60)
        w[PERSON] = largest
        return w

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        return float(np.log2(2.0 * abs(self.gradient(server, tally)[1])) / 40.0)

    def works(self, learned: float) -> bool:
        return abs(learned - 0.777) < 1e-3


class PooledMinusOwn(TinySilo):
    """Is the other of two hospitals, and subtracts its own sums from what is broadcast."""

    yields = "the first hospital's sum of outcomes, exactly"
    reason = Reason.TOO_FEW_SILOS
    keys = ("min_silos",)
    strict = {"min_silos": 3}  # noqa: RUF012 - read only
    y = np.linspace(2.0, 18.0, 40) ** 1.01 % 20

    def crowd(self, silo: str) -> np.ndarray:
        return np.linspace(1.0, 18.0 if silo == "b" else 14.0, 40)

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        answer, own = server.begin(server.open()).values()[0], self.crowd("b")
        pooled = answer + (own - 10.0).sum() if self.setting is Setting.OPEN else answer  # as all hear it
        return float(pooled - (own - 10.0).sum() + 10.0 * len(self.y))

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.y.sum()) < 1e-9)


class LoneCluster(AbstractInvented):
    """Puts everyone but one person into one cluster: squares of the two clusters' sums tell them apart."""

    yields = "the person's part of the estimate, from which the outcome follows, to 1e-9"
    extra = {"cluster": "family", "cluster_scope": "silo"}  # noqa: RUF012 - read only
    declared = {"family": "identifier"}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        return {**super().columns(), "family": np.where(ROW == PERSON, "alone", "others")}

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        sums = ClosingLayout(2).read(closing(server, tally))
        self.closing = next(query for query in server.query.members if isinstance(query, MomentsQuery))
        total, squares = float(sums.u[1]), float(sums.uu[2])
        return float(0.5 * (total - math.sqrt(max(0.0, 2.0 * squares - total * total))))  # the smaller sum

    def works(self, learned: float) -> bool:
        """Compare with u of the second mean, (y - Q)/g + Q of the person at the law of the closing sums."""
        problem: Any = self.closing.problem
        rows = problem.rows(self.rows())
        return bool(abs(learned - problem.moment_columns(self.closing.law, rows).u[1, PERSON]) < 1e-6)


class DiscordantResponses(AbstractInvented):
    """Models outcome and arm alike where they differ in one person: the two gradients differ by that row."""

    yields = "the covariates of the one person whose outcome is not the arm, to 1e-9"
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("w + smoker"),
        "outcome_model": ft.GLM("w + smoker"),
    }
    declared = {"y": "binary"}  # noqa: RUF012 - read only
    keys = ()

    def columns(self) -> Columns:
        columns = super().columns()
        return {**columns, "y": np.where(ROW == PERSON, 1 - columns["a"], columns["a"]) * 1.0}

    def common(self) -> Columns:
        columns = super().common()
        return {**columns, "y": columns["a"] * 1.0}

    def run(self, victim: Victim) -> np.ndarray:
        server, tally = self.server(victim)
        answer = server.tell(tally)
        pairs = zip(server.query.members, server.query.split(answer), strict=True)
        one, other = (part.values()[:3] * np.exp2(np.array(q.problem.scales)) for q, part in pairs)
        alone = one - other
        return np.asarray(alone / alone[0])

    def works(self, learned: np.ndarray) -> bool:
        columns = self.columns()
        return bool(np.abs(learned - [1.0, columns["w"][PERSON], columns["smoker"][PERSON]]).max() < 1e-9)


class MissingIndicator(AbstractInvented):
    """Models with an indicator of a missing covariate, which one person lacks."""

    yields = "the arm of the one person without a value, exactly"
    keys = ("min_support", "min_people")
    extra = {"treatment_model": ft.GLM("w")}  # noqa: RUF012 - read only

    def __init__(self) -> None:
        super().__init__()
        declared: dict[str, Any] = dict(VARIABLES)
        declared["w"] = {"kind": "number", "range": (-1, 1), "missing": "indicator"}
        self.options["variables"] = ft.Variables(declared)

    def columns(self) -> Columns:
        return {**super().columns(), "w": np.where(ROW == PERSON, np.nan, super().columns()["w"])}

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        while not (points := list(server.query.members[0].evaluations())):
            answer = server.go_on(answer)
        model: Any = points[0].model
        sums = server.query.split(answer)[0].values()[: model.dim] * np.exp2(np.array(model.scales))
        return float(0.5 - sums[-1])


class TwoPilots(AbstractInvented):
    """Weighs two public models whose predictions differ in one person only."""

    yields = "the arm of the one person with HIV, exactly"

    def __init__(self) -> None:
        super().__init__()
        pilots = [ft.Pilot.from_coefficients("hiv", {}, "binomial", (0.0, steep)) for steep in (0.0, 1.0)]
        self.options["treatment_model"] = ft.SuperLearner(tuple(pilots), folds=2)

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        answer = server.tell(tally)
        _, first, _, second = server.query.split(answer)[0].values()[:4]
        one, other = 0.5, 1 / (1 + np.exp(-1.0))
        return float((one + other) / 2 + (second - first) / (2 * (one - other)))  # (a - p)^2 - (a - 1/2)^2

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.columns()["a"][PERSON]) < 1e-6)


class RuleInAStratum(AbstractInvented):
    """Asks for means by stratum under two rules that differ in one person of a large stratum."""

    yields = "the arm and the propensity score of the one person between two cut-offs, exactly"

    def study(self) -> ft.Study:
        rules = (ft.Threshold("w", 0.30, "1", "0"), ft.Threshold("w", 0.32, "1", "0"))
        return ft.Study(
            target=ft.PolicyMeans(outcome="y", treatment="a", rules=rules, strata="site"),
            outcome_model=ft.Supplied("q0", "q1"),
            treatment_model=ft.Supplied("g"),
            algorithm=ft.Gradient(tolerance=1e-6),
            variables=VARIABLES,
            diagnostics=False,
        )

    def common(self) -> Columns:
        columns = super().common()
        columns["w"][(columns["w"] > 0.28) & (columns["w"] < 0.34)] = 0.1
        return columns

    def columns(self) -> Columns:
        columns = {**super().columns(), "w": self.common()["w"], "g": np.where(ROW == PERSON, 0.4, 0.5)}
        columns["w"][PERSON] = 0.31
        return columns

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        answer = server.tell(tally)
        sums = server.query.split(answer)[0]
        H = server.query.members[0].columns.layout.split(sums.values())["H"].reshape(-1, 2)
        return float((H[1, 0] - H[1, 1]) / 2)  # of the first stratum, which has half of the people

    def works(self, learned: float) -> bool:
        arm = self.columns()["a"][PERSON]
        return bool(abs(learned - (1 / 0.4 if arm else -1 / 0.6)) < 1e-9)


class ThirdArm(AbstractInvented):
    """Asks for the means under two rules that differ in one person, who is in an arm of neither."""

    yields = "the difference of two predictions of the one person between two cut-offs, to 1e-9"

    def study(self) -> ft.Study:
        rules = (ft.Threshold("w", 0.30, "1", "0"), ft.Threshold("w", 0.32, "1", "0"))
        return ft.Study(
            target=ft.PolicyMeans(outcome="y", treatment="a", rules=rules, arms=("0", "1", "2")),
            outcome_model=ft.Supplied("q0", "q1", "q2"),
            treatment_model=ft.Supplied("g0", "g1", "g2"),
            algorithm=ft.OneStep(),
            variables=declare(
                y=(0, 1), a=["0", "1", "2"], w=(-1, 1), **{f"{q}{k}": (0, 1) for q in "qg" for k in range(3)}
            ),
            diagnostics=False,
            sums="exact",
        )

    def common(self) -> Columns:
        rng = np.random.default_rng(7)
        w = rng.uniform(-1, 1, 60)
        w[(w > 0.28) & (w < 0.34)] = 0.1
        shares = {f"g{k}": np.array([0.25, 0.25, 0.5])[k] * np.ones(60) for k in range(3)}
        predictions = {f"q{k}": rng.uniform(0.2, 0.8, 60) for k in range(3)}
        return {"y": rng.random(60), "a": (ROW % 3).astype(str), "w": w, **shares, **predictions}

    def columns(self) -> Columns:
        columns = self.common()
        columns["w"][PERSON], columns["a"][PERSON] = 0.31, "2"
        columns["q1"][PERSON], columns["q0"][PERSON] = 0.75, 0.125
        return columns

    def run(self, victim: Victim) -> float:
        plug_in = closing(*self.server(victim)).values()[4:6]
        return float(plug_in[0] - plug_in[1])

    def works(self, learned: float) -> bool:
        return abs(learned - 0.625) < 1e-9


class OnlyOneWeighs(AbstractInvented):
    """Gives every observation the weight of a covariate that one person alone has."""

    yields = "whether the one person with HIV was treated, exactly"
    extra = {"weights": "hiv"}  # noqa: RUF012 - read only
    declared = {"hiv": (0, 10)}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        untreated, treated = server.query.columns.layout.split(tally.values())["arm weight"]
        return float(treated - untreated)

    def works(self, learned: float) -> bool:
        return learned == (1.0 if self.columns()["a"][PERSON] else -1.0)


class LoneFold(AbstractInvented):
    """Cross-fits by clusters of which one is a single person, so that a fold is that person."""

    yields = "the arm of the person who is a fold alone, exactly"
    keys = ("min_fold", "min_support", "min_people")
    extra = {  # noqa: RUF012 - read only
        "cluster": "family",
        "cluster_scope": "silo",
        "folds": 2,
        "treatment_model": ft.GLM("1"),
    }
    declared = {"family": "identifier"}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        return {**super().columns(), "family": np.where(ROW == PERSON, "alone", "others")}

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        answer = server.tell(tally)
        parts = server.query.split(answer)
        within = min((float(part.values()[0]) * 2.0 for part in parts), key=abs)
        return 0.5 - within


class LastPeriod(AbstractInvented):
    """Models the hazard by arm and period until one person in each arm is left."""

    yields = "whether the last person at risk in an arm has the event, exactly"
    keys = ("min_support", "min_people")

    def study(self) -> ft.Study:
        return ft.Study(
            target=ft.Risk(outcome="event", time="time", treatment="a", periods=4, period_length=1.0),
            hazard_model=ft.GLM("a*C(period)"),
            treatment_model=ft.GLM("1"),
            algorithm=ft.Gradient(tolerance=1e-6),
            variables=declare(event="binary", time=(0, 4), a="binary"),
            sums="exact",
            diagnostics=False,
        )

    def common(self) -> Columns:
        return {"event": (ROW % 3 == 0) * 1.0, "time": ROW % 3 + 0.5, "a": super().common()["a"]}

    def columns(self) -> Columns:
        columns = self.common()
        last = np.array([int(np.flatnonzero(columns["a"] == arm)[-1]) for arm in (0, 1)])
        columns["time"][last] = 3.5
        columns["event"][last] = 1.0
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = until_fit(*self.server(victim))
        for query, part in zip(server.query.members, server.query.split(answer), strict=True):
            names = query.problem.design_names
            if "a:C(period)[4]" in names:
                return float(0.5 - 2.0 * part.values()[names.index("a:C(period)[4]")])  # columns are halved
        raise AssertionError("no model of the hazard")

    def works(self, learned: float) -> bool:
        return learned == 1.0


class LookProducts(AbstractInvented):
    """Reads a person's products with all columns off the looks, which are told before they are judged."""

    yields = "a covariate of the one person with HIV in all silos, to 0.02 where it ranges from -1 to 1"
    extra = {"treatment_model": ft.GLM("w + smoker + I(1 - hiv)")}  # noqa: RUF012 - read only
    only_masked = True
    keys = ()

    def columns(self) -> Columns:
        columns = super().columns()
        columns["w"][PERSON] = 0.9
        return columns

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        with contextlib.suppress(RefusedBySiloError):
            server.tell(tally)
        (gram, *_) = server.looks[-1]
        back = np.linalg.inv(gram.C)
        S = back @ gram.matrix @ back.T
        person = np.array([1.0, 0.0, 0.0, -1.0])  # everybody less those without HIV
        return float(person @ S[:, 1] / (person @ S @ person))  # both in units of their declared ranges

    def works(self, learned: float) -> bool:
        return abs(learned - 0.9) < (0.02 if self.setting is Setting.MASKED else 0.05)


ATTACKS: tuple[AbstractAttack, ...] = (
    LargestPower(),
    PooledMinusOwn(),
    MissingIndicator(),
    TwoPilots(),
    RuleInAStratum(),
    ThirdArm(),
    OnlyOneWeighs(),
    LoneFold(),
    LastPeriod(),
    LoneCluster(),
)
WORKING: tuple[AbstractAttack, ...] = (  # the default policy does not stop these
    DiscordantResponses(),
    LookProducts(),
)
