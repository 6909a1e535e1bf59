"""Attacks by false pooled gradients: the silo evaluates what follows from them."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan
from fedtmle.studyfile.file import study_plan
from fedtmle_core.exact import Sums
from fedtmle_paper.two_arm import TwoArm
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.settings import Server
from tests.attacks.tables import table_of
from tests.declare import declare

N = 60
TREATED = np.arange(N) < 30
RNG = np.random.default_rng(21)
Q1, Q0 = RNG.uniform(0.3, 0.7, size=(2, N))
Y = RNG.uniform(0.25, 0.75, size=N)


class AbstractSteering(AbstractAttack):
    """On two arms with P(A = 1 | W) = 1/2 and outcomes in [0, width]; descent by fixed steps."""

    width = 1.0
    step = 1.0
    max_steps = 1000

    def plan(self) -> Plan:
        optimizer = ft.GradientDescent(step=self.step, max_steps=self.max_steps)
        problem = self.problem()
        return Plan(
            program=TargetingProgram(
                problem=problem,
                law=problem.start(),
                algorithm=ft.Gradient(tolerance=1e-12, optimizer=optimizer, max_updates=10_000),
            ),
            roster=self.members,
        )

    def problem(self) -> TwoArm:
        return TwoArm(outcome_bounds=(0.0, self.width), weight_ceiling=4.0)

    def columns(self) -> dict[str, np.ndarray]:
        return {"outcome": Y, "treatment": TREATED * 1.0, "Q1": Q1, "Q0": Q0, "g": np.full(N, 0.5)}

    def rows(self) -> Any:
        return self._read(self.columns())

    def crowd(self, silo: str) -> Any:  # noqa: ARG002 - the same at both
        return self._read(AbstractSteering.columns(self))

    def _read(self, columns: dict[str, np.ndarray]) -> Any:
        scaled = {name: self.width * column for name, column in columns.items()}
        return self.problem().read({**scaled, "treatment": columns["treatment"], "g": columns["g"]})

    def move(self, server: Server, by: float) -> float:
        """Moves eps of the treated arm by ``by``, and returns the silo's sum of that arm's gradient."""
        shifts = server.query.shifts
        units = round(-by / self.step * server.query.n * 2 ** shifts[0])
        answer: Sums = server.tell(Sums((units, *(0 for _ in shifts[1:])), shifts))
        return float(answer.values()[0])

    def count_treated(self, low: float, high: float) -> float:
        """At the two ends, predictions are 1 and 0: the sums are X sum (1 - y) and -X sum y."""
        return (low - high) / (-self.width / 0.5)


class HugeEps(AbstractSteering):
    """Drives the predictions of an arm to 1: only those who did not have the event still count."""

    yields = "the treatment probability, thus covariates, of the one treated person without the event"
    reason = Reason.POLICY
    keys = ("min_people",)
    step = 16.0
    target = 11

    def columns(self) -> dict[str, np.ndarray]:
        g = np.full(N, 0.5)
        g[self.target] = 0.37
        y = np.where(TREATED, 1.0, Y)
        y[self.target] = 0.0
        return {"outcome": y, "treatment": TREATED * 1.0, "Q1": Q1, "Q0": Q0, "g": g}

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        server.begin(server.open())
        return -1.0 / self.move(server, -60.0)

    def works(self, learned: float) -> bool:
        return abs(learned - 0.37) < 1e-9


class FarEps(AbstractSteering):
    """Sends eps so far that every prediction is 1, then 0, and takes the difference of the sums."""

    yields = "the number of treated rows, exactly"
    reason = Reason.TOO_FAR
    keys = ("max_eps",)
    width = 0.1
    step = 1000.0

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        server.begin(server.open())
        low = self.move(server, -400.0)
        self.move(server, 400.0)
        return self.count_treated(low, self.move(server, 400.0))

    def works(self, learned: float) -> bool:
        return abs(learned - TREATED.sum()) < 1e-6


class PathScan(AbstractSteering):
    """Goes as far as that in many short steps, each accepted into the law."""

    yields = "the number of treated rows, exactly"
    reason = Reason.TOO_FAR
    keys = ("max_path",)
    width = 0.01
    step = 20_000.0
    max_steps = 1

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        server.begin(server.open())
        for _ in range(23):
            low = self.move(server, -90.0)
        for _ in range(46):
            high = self.move(server, 90.0)
        return self.count_treated(low, high)

    def works(self, learned: float) -> bool:
        return abs(learned - TREATED.sum()) < 1e-6


class EndlessRounds(AbstractSteering):
    """Never lets the run converge, and has the gradient evaluated wherever it likes."""

    yields = "the arm's whole response curve, 60 points of it to 1e-9"
    reason = Reason.TOO_MANY_QUERIES
    keys = ("max_queries",)
    strict = {"max_queries": 40}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> list[float]:
        server = self.connect(victim)
        server.begin(server.open())
        return [self.move(server, -0.05) for _ in range(60)]

    def works(self, learned: list[float]) -> bool:
        eps = -0.05 * np.arange(1, 61)
        q = np.log(Q1[TREATED] / (1 - Q1[TREATED]))
        curve = [(-2.0 * (1 / (1 + np.exp(-(q - 2.0 * e))) - Y[TREATED])).sum() for e in eps]
        return bool(np.abs(np.array(curve) - learned).max() < 1e-9)


class EndlessNumbers(EndlessRounds):
    """The same, held against the count of numbers instead of rounds."""

    reason = Reason.TOO_MANY_FUNCTIONALS
    keys = ("max_functionals",)
    strict = {"max_functionals": 100}  # noqa: RUF012 - read only


class RangeQuery(AbstractAttack):
    """Gives a nuisance model coefficients so steep that it counts rows on one side of a threshold."""

    yields = "how many rows have a covariate above any value, to 0.01 of a row"
    reason = Reason.TOO_FAR
    keys: tuple[str, ...] = ("max_coefficient", "min_people")
    cut, steep = 0.25, 8000.0

    def study(self) -> ft.Study:
        return ft.Study(
            target=ft.ATE(outcome="y", treatment="a"),
            outcome_model=ft.Supplied("q0", "q1"),
            treatment_model=ft.GLM("w"),
            variables=declare(y=(0, 1), a="binary", w=(-0.99, 0.99)),
            sums="exact",
        )

    def plan(self) -> Plan:
        return study_plan(self.study(), self.members)

    def rows(self) -> Any:
        return table_of(self.study(), {"y": Y, "a": TREATED * 1, "q0": Q0, "q1": Q1, "w": 2 * Q1 - 1})

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        n = server.open()
        tally = server.begin(n)
        server.tell(tally)  # the counts, as they are
        query = server.query
        target = np.array([-2 * self.steep * self.cut, self.steep])  # of the scaled columns 1/2 and w
        small = 2.0**-12
        ratio = target[0] / target[1]  # the Newton step is the target, though the intercept's slope is zero
        values = [0.0, -small * target[1], small, -small * ratio, small * (1 + ratio**2)]
        units = tuple(round(n * v * 2.0**s) for v, s in zip(values, query.shifts, strict=True))
        answer = server.tell(Sums(units, query.shifts))
        return float(2 * answer.values()[0] + tally.values()[1])  # sum of (p - a)/2, and that of a

    def works(self, learned: float) -> bool:
        w = 2 * Q1 - 1
        return bool(abs(learned - np.count_nonzero(w > self.cut)) < 0.01)


ATTACKS: tuple[AbstractAttack, ...] = (
    HugeEps(),
    FarEps(),
    PathScan(),
    EndlessRounds(),
    EndlessNumbers(),
    RangeQuery(),
)
