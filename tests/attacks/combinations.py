"""Attacks by combinations: every told number is a sum over many, and a combination of them is one person."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.protocol.messages import Reason
from fedtmle_core.exact import Sums
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.settings import Server
from tests.attacks.small import AbstractStudyAttack, Columns
from tests.attacks.steering import RangeQuery
from tests.declare import declare

PERSON = 17
VARIABLES = declare(
    y=(0, 1), a="binary", w=(-1, 1), hiv="binary", smoker="binary", weight=(0, 10), site=["x", "y"]
)


class AbstractCombination(AbstractStudyAttack):
    """On a study whose person 17 alone is HIV positive; ``formula`` is that of the treatment model.

    The gradient at zero has the sums of (1/2 - a) x over columns x: ``mix`` combines these so that 1/2 - a of
    person 17 is left.
    """

    yields = "the arm of the one person with HIV, exactly"
    keys: tuple[str, ...] = ("min_people",)
    formula = ""
    mix: tuple[float, ...] = ()

    def __init__(self) -> None:
        self.options = {"treatment_model": ft.GLM(self.formula), "variables": VARIABLES, "sums": "exact"}

    def columns(self) -> Columns:
        row = np.arange(60)
        a = np.random.default_rng(8).permutation(row % 2)
        return {
            **super().columns(),
            "a": a,
            "hiv": (row == PERSON) * 1.0,
            "smoker": (row % 3 == 0) * 1.0,
            "weight": np.ones(60),
            "site": np.where(row < 30, "x", "y"),
        }

    def common(self) -> Columns:
        return {**AbstractCombination.columns(self), "hiv": np.zeros(60)}

    def gradient(self, server: Server, tally: Any) -> np.ndarray:
        """The sums of (1/2 - a) x over the columns as the formula has them."""
        answer = server.tell(tally)
        model = server.query.problem
        sums = answer.values()[: model.dim]
        return np.asarray(sums * np.exp2(np.array(model.scales)))

    def run(self, victim: Victim) -> Any:
        server, tally = self.server(victim)
        return float(0.5 - np.dot(self.mix, self.gradient(server, tally)))

    def works(self, learned: Any) -> bool:
        return bool(abs(learned - self.columns()["a"][PERSON]) < 1e-3)


class Complement(AbstractCombination):
    """Asks about everyone but the one: intercept minus column is the person."""

    formula = "I(1 - hiv)"
    mix = (1.0, -1.0)


class Spike(AbstractCombination):
    """Has a column that is 1 for everyone and 2 for one value of a covariate."""

    yields = "the arm of the one person with w = 0.3141, to 1e-3"
    formula = "I(1 + 1/(1 + (100000*(w - 0.3141))**2))"
    mix = (-1.0, 1.0)

    def columns(self) -> Columns:
        columns = super().columns()
        columns["w"][PERSON] = 0.3141
        return columns


class NearDuplicate(AbstractCombination):
    """Has two columns that differ by a millionth in one person."""

    formula = "w + I(w + 0.000001*hiv)"
    mix = (0.0, -1e6, 1e6)


class DependentColumns(AbstractCombination):
    """Hides the person in a third column that is nearly the sum of two others."""

    formula = "w + smoker + I(2*w - 3*smoker + hiv)"
    mix = (0.0, -2.0, 3.0, 1.0)


class ProductOfColumns(AbstractCombination):
    """Has an indicator and its product with the complement of one person."""

    formula = "smoker + I(smoker*(1 - hiv)) + I((1 - smoker)*(1 - hiv))"
    mix = (1.0, 0.0, -1.0, -1.0)


class SharedFactor(AbstractCombination):
    """Cuts a factor by the complement of one person: a level less its part is the person."""

    formula = "C(site) + I(1 - hiv):C(site)"

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        sums = self.gradient(server, tally)
        names = server_names(server)
        whole, parts = sums[names.index("1")], [k for k, name in enumerate(names) if "hiv" in name]
        return float(0.5 - (whole - sums[parts].sum()))


class HighPolynomial(AbstractCombination):
    """Has powers of a covariate, a polynomial of which is 1 at the outermost person and near 0 elsewhere."""

    yields = "the arm of the person with the largest w, to 0.02"
    formula = "w + I(w**2) + I(w**3) + I(w**4) + I(w**5) + I(w**6)"

    def common(self) -> Columns:
        return {**super().common(), "w": np.random.default_rng(4).uniform(-0.3, 0.3, 60)}

    def columns(self) -> Columns:
        columns = {**super().columns(), "w": self.common()["w"]}
        columns["w"][PERSON] = 0.97
        return columns

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        sums = self.gradient(server, tally)
        w = 0.97  # the attacker knows where the person is, not the arm
        powers = np.linspace(-0.3, 0.3, 200)[:, None] ** np.arange(7)
        at = w ** np.arange(7)
        mix = np.linalg.solve(powers.T @ powers + 1e-9 * np.eye(7), at)
        return float(0.5 - mix @ sums / (mix @ at))

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.columns()["a"][PERSON]) < 0.02)


def server_names(server: Server) -> list[str]:
    return list(server.query.problem.columns)


class TwoModels(AbstractCombination):
    """Weighs two candidate models, one with a column that counts one person more than the other's."""

    def __init__(self) -> None:
        library = ft.SuperLearner((ft.GLM("smoker"), ft.GLM("I(smoker + hiv)")), folds=2)
        self.options = {"treatment_model": library, "variables": VARIABLES, "sums": "exact"}

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        answer = server.tell(tally)
        found = {}
        for query, sums in zip(server.query.members, server.query.split(answer), strict=True):
            model = query.problem
            found[model.columns[1], model.response] = sums.values()[1] * 2.0 ** model.scales[1]
        names = ["smoker", next(name for name, _ in found if name != "smoker")]
        parts = {response for _, response in found}
        alone = [found[names[1], part] - found[names[0], part] for part in parts]
        return float(0.5 - max(alone, key=abs))


class TwoRules(AbstractCombination):
    """Asks for the means under two rules that differ in one person."""

    yields = "the arm and the propensity score of the one person between two cut-offs, exactly"

    def __init__(self) -> None:
        self.options = {"variables": VARIABLES}

    def study(self) -> ft.Study:
        rules = (ft.Threshold("w", 0.30, "1", "0"), ft.Threshold("w", 0.32, "1", "0"))
        return ft.Study(
            target=ft.PolicyMeans(outcome="y", treatment="a", rules=rules),
            outcome_model=ft.Supplied("q0", "q1"),
            treatment_model=ft.Supplied("g"),
            algorithm=ft.Gradient(tolerance=1e-6),
            variables=VARIABLES,
        )

    def common(self) -> Columns:
        columns = super().common()
        w = columns["w"]
        w[(w > 0.28) & (w < 0.34)] = 0.1
        return columns

    def columns(self) -> Columns:
        columns = {**super().columns(), "w": self.common()["w"]}
        columns["w"][PERSON] = 0.31
        g = np.full(60, 0.5)
        g[PERSON] = 0.4
        return {**columns, "g": g}

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        overlap = server.tell(tally)[0].values()
        return float(overlap[0] - overlap[1])  # H of the person, with the sign of the arm

    def works(self, learned: float) -> bool:
        arm = self.columns()["a"][PERSON]
        return bool(abs(learned - (1 / 0.4 if arm else -1 / 0.6)) < 1e-9)


class ChosenPrediction(AbstractCombination):
    """Gives the outcome model public coefficients, so that its predictions are an indicator of one person."""

    yields = "any function of the covariates of the one person with w = 0.3141: here, smoking"
    of_arm = 0.0  # coefficient

    def __init__(self) -> None:
        spike = "I(smoker/(1 + (100000*(w - 0.3141))**2))"
        model = ft.Pilot.from_coefficients(
            f"a + {spike}", {}, "gaussian", (0.0, self.of_arm, 1.0 - self.of_arm)
        )
        self.options = {"variables": VARIABLES, "outcome_model": model, "algorithm": ft.OneStep()}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["w"][PERSON] = 0.3141
        columns["smoker"][PERSON] = 1.0
        return columns

    def run(self, victim: Victim) -> float:
        """The sum of predictions at the overlap or, if the silo omits it, in the closing sums."""
        server, tally = self.server(victim)
        overlap = server.tell(tally)
        told = self.at_overlap(tally, overlap)
        return told if told is not None else float(server.go_on(overlap)[0].values()[4])

    def at_overlap(self, tally: Any, overlap: Any) -> float | None:
        """The person's part in the sum of predictions, None if a silo omits it; the arm's is known from H."""
        people = sum(tally.values()[:2])
        weights, predictions, _ = overlap[-1].values().tolist()
        treated = overlap[0].values()[1] / 2  # g = 1/2
        return float(predictions - self.of_arm * treated) / (1 - self.of_arm) if weights == people else None

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.columns()["smoker"][PERSON]) < 0.05)


class HeavyWeight(AbstractCombination):
    """Asks for sums of weights by arm where one person's weight is nearly all of one."""

    yields = "a person's weight, to 1 %, and the arm"

    def __init__(self) -> None:
        self.options = {"weights": "weight", "variables": VARIABLES}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["weight"] = self.common()["weight"]
        columns["weight"][PERSON] = 9.25
        return columns

    def common(self) -> Columns:
        return {**super().common(), "weight": np.full(60, 0.001)}

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        untreated, treated = server.query.columns.layout.split(tally.values())["arm weight"]
        return float(max(untreated, treated) * (1 if treated > untreated else -1))

    def works(self, learned: float) -> bool:
        sign = 1 if self.columns()["a"][PERSON] else -1
        return bool(abs(sign * learned - 9.25) < 0.01 * 9.25)


class SteepHessian(RangeQuery):
    """Steers a nuisance model to a threshold at one person: the Hessian there has rank one."""

    yields = "the person's covariate, to 1e-3: the ratio of two entries"
    reason = Reason.POLICY
    keys = ("min_people",)
    steep = 180.0

    def crowd(self, silo: str) -> Any:  # noqa: ARG002 - the same at both
        return super().rows().with_numeric("w", np.linspace(-0.9, 0.9, 60) ** 3)

    def rows(self) -> Any:
        w = np.linspace(-0.9, 0.9, 60) ** 3
        w[PERSON] = 0.95
        return super().rows().with_numeric("w", w)

    def run(self, victim: Victim) -> float:
        self.cut = 0.95
        server = self.connect(victim)
        n = server.open()
        tally = server.begin(n)
        server.tell(tally)
        query = server.query
        target = np.array([-2 * self.steep * self.cut, self.steep]) / 2.2  # within the cap
        small = 2.0**-12
        ratio = target[0] / target[1]
        values = [0.0, -small * target[1], small, -small * ratio, small * (1 + ratio**2)]
        units = tuple(round(n * v * 2.0**s) for v, s in zip(values, query.shifts, strict=True))
        hessian = server.tell(Sums(units, query.shifts)).values()[2:]
        return float(hessian[1] / hessian[0] / 2.0)  # the intercept is halved

    def works(self, learned: float) -> bool:
        return abs(learned - 0.95) < 1e-3


ATTACKS: tuple[AbstractAttack, ...] = (
    Complement(),
    Spike(),
    NearDuplicate(),
    DependentColumns(),
    ProductOfColumns(),
    SharedFactor(),
    HighPolynomial(),
    TwoModels(),
    TwoRules(),
    ChosenPrediction(),
    HeavyWeight(),
    SteepHessian(),
)
