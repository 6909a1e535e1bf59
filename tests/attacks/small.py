"""Attacks on sums and counts that rest on few people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.privacy.audit import DisclosureLimit, LimitedAttribute, at_centre
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.file import study_plan
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.settings import Server
from tests.attacks.tables import table_of
from tests.declare import declare

Columns = dict[str, np.ndarray]


class TinySilo(AbstractAttack):
    """Has a silo of eight take part, of whom the server knows seven."""

    yields = "the eighth's outcome, exactly"
    reason = Reason.POLICY
    keys: tuple[str, ...] = ("min_rows",)
    y = np.array([1.0, 19.0, 4.0, 17.0, 3.0, 15.0, 6.0, 13.25])

    def plan(self) -> Plan:
        problem = ft.Mean(bounds=(0.0, 20.0))
        return Plan(
            program=TargetingProgram(
                problem=problem, law=problem.start(10.0), algorithm=ft.Gradient(tolerance=1e-6)
            ),
            roster=self.members,
        )

    def rows(self) -> np.ndarray:
        return self.y

    def crowd(self, silo: str) -> np.ndarray:  # noqa: ARG002 - the same at both
        return np.linspace(1.0, 19.0, 40)

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        n = server.open()
        (total,) = server.begin(n).values()
        return float(total + 10.0 * n - self.y[:-1].sum())

    def works(self, learned: float) -> bool:
        return abs(learned - self.y[-1]) < 1e-9


class FewSilos(TinySilo):
    """Has one silo alone take part: what is pooled is its own."""

    yields = "the silo's own mean, published as the pooled one"
    reason = Reason.TOO_FEW_SILOS
    keys = ("min_silos",)
    y = np.linspace(1.0, 19.0, 40) ** 1.01 % 20

    def plan(self) -> Plan:
        problem = ft.Mean(bounds=(0.0, 20.0))
        return Plan(
            program=TargetingProgram(
                problem=problem, law=problem.start(10.0), algorithm=ft.Gradient(tolerance=1e-6)
            ),
            roster=roster(["a"]),
        )


VARIABLES = declare(
    y=(0, 1),
    a="binary",
    w=(-1, 1),
    site=["common", "rare", "north", "south", "east"],
    north="binary",
    smoker="binary",
)


class AbstractStudyAttack(AbstractAttack):
    """On a study of 60 rows, half treated, with supplied or fitted nuisances."""

    reason = Reason.POLICY
    options: dict[str, Any] = {}  # noqa: RUF012 - read only
    target: dict[str, Any] = {}  # noqa: RUF012 - read only

    def study(self) -> ft.Study:
        settings = {
            "outcome_model": ft.Supplied("q0", "q1"),
            "treatment_model": ft.Supplied("g"),
            "algorithm": ft.Gradient(tolerance=1e-6),
            "variables": VARIABLES,
            **self.options,
        }
        return ft.Study(target=ft.ATE(outcome="y", treatment="a", **self.target), **settings)

    def plan(self) -> Plan:
        return study_plan(self.study(), self.members)

    def columns(self) -> Columns:
        rng = np.random.default_rng(3)
        n = 60
        return {
            "y": rng.uniform(0.2, 0.8, n),
            "a": np.arange(n) % 2,
            "q0": rng.uniform(0.3, 0.7, n),
            "q1": rng.uniform(0.3, 0.7, n),
            "g": np.full(n, 0.5),
            "w": rng.uniform(-1, 1, n),
            "site": np.array(["north", "south", "east"])[np.arange(n) // 2 % 3],
        }

    def rows(self) -> Any:
        return table_of(self.study(), self.columns())

    def common(self) -> Columns:
        """The columns of another silo."""
        return AbstractStudyAttack.columns(self)

    def crowd(self, silo: str) -> Any:  # noqa: ARG002 - the same at both
        return table_of(self.study(), self.columns() | self.common())

    def server(self, victim: Victim) -> tuple[Server, Any]:
        server = self.connect(victim)
        return server, server.begin(server.open())


class TinyArm(AbstractStudyAttack):
    """Asks for the counts of a silo where three were treated."""

    yields = "that three were treated"
    keys = ("min_arm_rows",)
    treated = 3

    def columns(self) -> Columns:
        return {**super().columns(), "a": (np.arange(60) < self.treated) * 1}

    def run(self, victim: Victim) -> float:
        _, tally = self.server(victim)
        return float(tally.values()[1])

    def works(self, learned: float) -> bool:
        return learned == self.treated


class TinyComplement(TinyArm):
    """Asks for the counts of a silo where all but three were treated."""

    yields = "that three were not treated"
    treated = 57


class AbsentArm(TinyArm):
    """Asks for the counts of a silo where nobody was treated, whose owner minds."""

    yields = "that nobody was treated"
    keys = ("allow_one_arm",)
    strict = {"allow_one_arm": False}  # noqa: RUF012 - read only
    treated = 0


class TinyStratum(AbstractStudyAttack):
    """Asks for the counts by a stratum in which the silo has three people."""

    yields = "that three are in the stratum"
    keys = ("min_arm_rows",)
    target = {"strata": "site"}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        site = np.where(np.arange(60) < 3, "rare", "common")
        return {**super().columns(), "site": site}

    def run(self, victim: Victim) -> float:
        _, tally = self.server(victim)
        return float(tally.values()[-4])  # the levels after "rare" are nobody's

    def works(self, learned: float) -> bool:
        return learned == 3


class RareLevel(AbstractStudyAttack):
    """Puts a factor into a nuisance model of which the silo has a level three times."""

    yields = "how many of those three were treated"
    keys: tuple[str, ...] = ("min_support",)
    options = {"treatment_model": ft.GLM("C(site)")}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        return {**super().columns(), "site": np.where(np.arange(60) < 3, "rare", "common")}

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        gradient = server.tell(tally)  # at zero, the sum over the level is that of 1/2 - a
        return float(1.5 - gradient.values()[1] * 2.0)

    def works(self, learned: float) -> bool:
        return learned == 1  # rows 0, 1 and 2: one of them was


class RareColumn(RareLevel):
    """Does the same by a column of numbers that is zero but for three rows."""

    keys = ("min_support",)
    options = {"treatment_model": ft.GLM("w")}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        return {**super().columns(), "w": (np.arange(60) < 3) * 1.0}

    def common(self) -> Columns:
        return {**super().common(), "w": np.zeros(60)}


class TwoWayCell(AbstractStudyAttack):
    """Reads a two-way table off the curvature at zero of a model with two factors, whose owner minds."""

    yields = "that one person is both northern and a smoker"
    keys = ("allow_curvature",)
    strict = {"allow_curvature": False}  # noqa: RUF012 - read only
    options = {"treatment_model": ft.GLM("north + smoker")}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        row = np.arange(60)
        return {**super().columns(), "north": (row < 20) * 1.0, "smoker": (row >= 19) * (row < 40) * 1.0}

    def common(self) -> Columns:
        row = np.arange(60)
        return {**super().common(), "smoker": (row >= 20) * (row < 40) * 1.0}

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        hessian = server.tell(tally).values()[3:]  # a quarter of sums of 1, 1 n, 1 s, n n, n s, s s
        return float(4 * hessian[4] * 2.0**2)  # both columns are halved

    def works(self, learned: float) -> bool:
        return learned == 1


class FewMissing(AbstractStudyAttack):
    """Asks for the counts of a silo where one outcome is missing, whose owner minds."""

    yields = "that one treated person was lost"
    keys = ("min_missing",)
    strict = {"min_missing": 3}  # noqa: RUF012 - read only
    options = {"missingness_model": ft.GLM("1")}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        columns = super().columns()
        columns["y"][1] = np.nan
        return columns

    def run(self, victim: Victim) -> float:
        _, tally = self.server(victim)
        return float(tally.values()[1] - tally.values()[3])

    def works(self, learned: float) -> bool:
        return learned == 1


class HeavyRow(AbstractStudyAttack):
    """Asks for sums of inverse probabilities of which one row makes up nearly all."""

    yields = "that row's treatment probability, where the others' are known, to 1e-9"
    keys = ("min_people",)
    options = {"g_bounds": 1e-4}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        columns = super().columns()
        columns["g"][1] = 0.0031  # treated all the same
        return columns

    def run(self, victim: Victim) -> float:
        server, tally = self.server(victim)
        sums = server.tell(tally)[0].values()
        program: Any = self.plan().program
        arm = program.study.target.arms.index("1")
        return float(1.0 / (sums[arm] - 2.0 * 29))

    def works(self, learned: float) -> bool:
        return abs(learned - 0.0031) < 1e-9


class ManyFolds(AbstractStudyAttack):
    """Cross-fits with so many folds that each holds two rows; the fits without a fold tell the fold."""

    yields = "how many were treated in each pair of rows, exactly"
    keys = ("min_fold",)
    options = {"treatment_model": ft.GLM("1"), "folds": 30}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> np.ndarray:
        server, tally = self.server(victim)
        at_zero = server.tell(tally)  # all folds in one round
        left_out = [float(sums.values()[0]) * 2.0 for sums in at_zero]  # the intercept is halved
        within = sum(left_out) / 29 - np.array(left_out)  # sums of 1/2 - a over each fold
        return np.asarray(1.0 - within)

    def works(self, learned: np.ndarray) -> bool:
        study = self.study()
        from fedtmle.initial.crossfit import Folds

        fold = Folds(count=30, seed=study.seed).of(self.rows())
        true = np.bincount(fold, weights=self.columns()["a"])
        return bool(np.abs(learned - true).max() < 1e-9)


class ShippedModel(AbstractStudyAttack):
    """Names the silo as the pilot that ships a model of its own rows, whose owner minds."""

    yields = "the coefficients of the silo's own regression"
    keys = ("allow_models",)
    strict = {"allow_models": False}  # noqa: RUF012 - read only
    options = {"outcome_model": ft.Pilot(ft.GLM("a"), at="a")}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> tuple[float, ...]:
        server, tally = self.server(victim)
        (model,) = server.tell(tally)
        return tuple(model.coefficients)

    def works(self, learned: tuple[float, ...]) -> bool:
        y, a = self.columns()["y"], self.columns()["a"]
        means = y[a == 0].mean(), y[a == 1].mean()
        return np.allclose(learned, (means[0], means[1] - means[0]), atol=1e-9)


class ExactMean(TinySilo):
    """Asks one gradient, which tells the mean of a column that the owner wants kept unknown within 1."""

    yields = "the silo's own mean, exactly"
    reason = Reason.DISCLOSURE
    keys = ()
    check = "`[disclosure]` in the silo's file: a floor on omega, at a public centre"
    y = np.linspace(2.0, 18.0, 40)

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        problem = ft.Mean(bounds=(0.0, 20.0))
        public = problem.read(np.linspace(0.0, 20.0, 25))
        centre = LocalRows("a", public, len(public), None)
        mean = LimitedAttribute(name="mean", gradient=np.full(25, 1 / 25), radius=10.0 * 25**0.5)
        jacobian = at_centre(centre, public, "outcome")
        floor = DisclosureLimit(
            attributes=(mean,), smallest_omega=1.0, noise=0.0, records=25, jacobian=jacobian
        )
        return replace(super().keeper(policy, ledger), limit=floor)

    def disarmed_keeper(self) -> Keeper:
        return replace(self.keeper(self.guarded()), limit=None)


ATTACKS: tuple[AbstractAttack, ...] = (
    TinySilo(),
    FewSilos(),
    TinyArm(),
    TinyComplement(),
    AbsentArm(),
    TinyStratum(),
    RareLevel(),
    RareColumn(),
    TwoWayCell(),
    FewMissing(),
    HeavyRow(),
    ManyFolds(),
    ShippedModel(),
    ExactMean(),
)
