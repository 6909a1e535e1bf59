"""Attacks on the rule for combinations: by clusters, responses, rules, periods, regimes, folds and pilots."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.model.exact import Sums
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.query import MomentsQuery
from fedtmle.targets.effects.moments import ClosingLayout
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.combinations import PERSON, VARIABLES, AbstractCombination
from tests.attacks.settings import RefusedBySiloError, Server
from tests.attacks.small import Columns
from tests.declare import declare

ROW = np.arange(60)


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


class FalseDictionary(AbstractInvented):
    """Declares a range of a covariate that is a thousandth of the true one, so that steep models look flat."""

    yields = "how many rows have a covariate above any value, as if there were no `max_coefficient`"
    reason = Reason.CANNOT_ANSWER
    keys = ()
    check = "a silo's values must lie in the declared ranges"
    extra = {"treatment_model": ft.GLM("w")}  # noqa: RUF012 - read only
    declared = {"w": (-0.001, 0.001)}  # noqa: RUF012 - read only
    patched = False


class PooledMinusOwn(AbstractAttack):
    """Is the other of two hospitals, and subtracts its own sums from what is broadcast."""


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
        total, squares = float(sums.u[0]), float(sums.uu[0])
        return 0.5 * (total - np.sqrt(2.0 * squares - total * total))  # the smaller of u_1 + u_2, u_1^2 + u_2^2

    def works(self, learned: float) -> bool:
        return False


class DiscordantResponses(AbstractInvented):
    """Models outcome and arm alike where they differ in one person: the two gradients differ by that row."""

    yields = "the covariates of the one person whose outcome is not the arm, to 1e-9"
    extra = {  # noqa: RUF012 - read only
        "treatment_model": ft.GLM("w + smoker"),
        "outcome_model": ft.GLM("w + smoker"),
    }
    declared = {"y": "binary"}  # noqa: RUF012 - read only

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
    extra = {"treatment_model": ft.GLM("w")}  # noqa: RUF012 - read only

    def __init__(self) -> None:
        super().__init__()
        declared = {**VARIABLES, "w": {"kind": "number", "range": (-1, 1), "missing": "indicator"}}
        self.options["variables"] = ft.Variables(declared)

    def columns(self) -> Columns:
        return {**super().columns(), "w": np.where(ROW == PERSON, np.nan, super().columns()["w"])}

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        while not hasattr(server.query.members[0], "problem"):
            answer = server.go_on(answer)
        model = server.query.members[0].problem
        sums = server.query.split(answer)[0].values()[: model.dim] * np.exp2(np.array(model.scales))
        return float(0.5 - sums[-1])


class TwoPilots(AbstractInvented):
    """Weighs two public models whose predictions differ in one person only."""

    yields = "the arm of the one person with HIV, exactly"

    def __init__(self) -> None:
        super().__init__()
        pilots = [
            ft.Pilot.from_coefficients("hiv", {}, "binomial", (0.0, steep)) for steep in (0.0, 1.0)
        ]
        self.options["treatment_model"] = ft.SuperLearner(tuple(pilots), folds=2)

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        answer = server.tell(tally)
        first, cross, second = server.query.split(answer)[0].values()[:3]
        one, other = 0.5, 1 / (1 + np.exp(-1.0))
        return float((one + other) / 2 + (second - first) / (2 * (one - other)))

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
    keys = ("min_fold",)
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
        parts = server.query.split(server.tell(tally))
        within = min((float(part.values()[0]) * 2.0 for part in parts), key=abs)
        return 0.5 - within


class LastPeriod(AbstractInvented):
    """Follows people until one alone is left, and models the hazard of each period."""


class LoneRegime(AbstractInvented):
    """Asks for the mean under a regime that one person alone has followed."""
