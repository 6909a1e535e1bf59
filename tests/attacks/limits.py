"""What a silo under the default policy still tells: each is run, and its figures stand in docs/threats.md."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.protocol.coded import Action, Rounded
from fedtmle.protocol.plan import Member, Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.sites import OwnEstimateQuery
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.batches import PROBLEM, START, Y
from tests.attacks.honest import run_honest
from tests.attacks.protocol import ForgedAction, SecondSession
from tests.attacks.settings import Server, Setting
from tests.attacks.small import VARIABLES as SMALL
from tests.attacks.small import AbstractStudyAttack, Columns, TwoWayCell
from tests.attacks.steering import TREATED, RangeQuery
from tests.attacks.tables import table_of
from tests.declare import declare
from tests.narrow import load_all


def met(attack: AbstractAttack) -> Victim:
    """The attack's silo, under the default policy."""
    return attack.victim(attack.keeper(Policy(allow_targets=None)))


def all_others_known() -> float:
    """The error of the 60th outcome, to a server that knows the other 59 and asks one honest round."""
    attack = ForgedAction()
    problem, rows = PROBLEM, attack.rows()
    plan = Plan(
        program=TargetingProgram(
            problem=problem, law=problem.start(START), algorithm=ft.Gradient(tolerance=1e-6)
        ),
        roster=(Member(name="a"), Member(name="b")),
    )
    server = Server(plan, Silo("a", plan, rows, keeper=Keeper(policy=Policy())).step)
    n = server.open()
    (total,) = server.begin(n).values()
    return abs(float(total) + START * n - Y[:-1].sum() - Y[-1])


def steering_within_the_rules() -> float:
    """The number of treated, by two false but well-formed gradients: predictions of 1, then of 0."""
    attack = SecondSession()
    server = Server(attack.plan(), met(attack).step)
    server.begin(server.open())
    low = attack.move(server, -30.0)
    return attack.count_treated(low, attack.move(server, 60.0))


def dithering_within_the_rules() -> tuple[float, float]:
    """The silo's mean from rounded answers: error and width of what is left, in grid units."""
    attack = ForgedAction()
    server = Server(attack.plan(), met(attack).step)
    (z,) = server.begin(server.open())
    lattice = server.query.lattice
    h, low, high = float(lattice.h), -np.inf, np.inf
    for moved in range(60):
        centre = h * z + moved * h / float(lattice.beta)
        low, high = max(low, centre - h / 2), min(high, centre + h / 2)
        for q in (8, -7):  # each so large that a step must follow; together, one unit
            (z,) = server.tell(Rounded(q=(q,), action=Action.STEP))
    return abs(START + (low + high) / 2 - Y.mean()) / h, (high - low) / h


def blurred_range_query() -> tuple[float, int]:
    """A count of rows above a threshold by coefficients within the cap, and the true one."""
    attack = RangeQuery()
    attack.steep = 0.5 * Policy().max_coefficient
    counted = attack.run(met(attack))
    w = attack.rows().numeric["w"]
    return counted, int(np.count_nonzero(w > attack.cut))


def two_way_cell() -> float:
    """A cell of one person in the two-way table of a nuisance model's columns."""
    attack = TwoWayCell()
    return float(attack.run(met(attack)))


def false_size() -> tuple[float, float]:
    """The average of local fits when a silo of 50 is truthful, and when it claims to have 450."""
    a, b = np.linspace(4, 6, 50), np.linspace(14, 16, 50)

    def estimate(weight: float) -> float:
        algorithm = ft.LocalAverage(weights={"a": 1 - weight, "b": weight}, max_updates=1)
        result = ft.solve(PROBLEM, PROBLEM.start(9.0), {"a": a, "b": b}, algorithm)
        return float(result.psi[0])

    return estimate(50 / 100), estimate(450 / 500)


def treated() -> int:
    return int(TREATED.sum())


def combination_of_a_curvature() -> float:
    """The largest share of one of 60 people in a combination of the entries of an exact curvature."""
    rng = np.random.default_rng(3)
    X = np.concatenate([np.ones((1, 60)), rng.normal(size=(4, 60))])
    upper, lower = np.triu_indices(len(X))
    return largest_leverage(lambda: [PersonRows(X[upper] * X[lower])])


def difference_of_two_rounds() -> tuple[float, float]:
    """The largest share of one of 60 people in a logistic gradient, and in the difference of two of them."""
    w = np.random.default_rng(5).normal(size=60)
    X = np.stack([np.ones(60), w])
    y = (np.arange(60) % 2).astype(float)

    def largest(eps: tuple[float, float], other: tuple[float, float] | None = None) -> float:
        rows = X * (1 / (1 + np.exp(-np.array(eps) @ X)) - y)
        if other is not None:
            rows = rows - X * (1 / (1 + np.exp(-np.array(other) @ X)) - y)
        return largest_leverage(lambda: [PersonRows(rows)])

    steep = 8.0
    return largest((-1.9 * steep, steep)), largest((-1.9 * steep, steep), (-2.2 * steep, steep))


class ReleasedEstimate(AbstractStudyAttack):
    """A masked study of six silos, of which silo a releases its own estimate."""

    setting = Setting.MASKED
    options = {  # noqa: RUF012 - read only
        "outcome_model": ft.GLM("a + w"),
        "treatment_model": ft.GLM("w"),
        "variables": declare(SMALL, y="binary"),
    }

    def columns(self) -> Columns:
        columns = super().columns()
        return {**columns, "y": (columns["y"] > 0.5) * 1.0}

    def common(self) -> Columns:
        return self.columns()

    def run(self, victim: Victim) -> Any:
        server, answer = self.server(victim)
        while True:
            for query, part in zip(server.query.members, server.query.split(answer), strict=True):
                if isinstance(query, OwnEstimateQuery):
                    return query, part
            answer = server.go_on(answer)

    def works(self, learned: Any) -> bool:
        raise NotImplementedError("`released_estimate` counts the outcomes that are found")


def released_estimate(people: int = 12) -> int:
    """How many outcomes a server finds that knows all other records of the silo, from the estimate alone."""
    attack = ReleasedEstimate()
    query, own = attack.run(attack.victim(attack.keeper(Policy(allow_targets=None, release=True))))
    columns, found = attack.columns(), 0
    for person in range(people):
        guesses = []
        for y in (0.0, 1.0):
            table = table_of(
                attack.study(), {**columns, "y": np.where(np.arange(60) == person, y, columns["y"])}
            )
            estimate = query.own_fit.estimate(LocalRows("a", table, 60, None))
            guesses.append(np.abs(estimate.rounded().psi - own.psi).max())
        found += int(np.argmin(guesses)) == columns["y"][person]
    return found


def imputed_refusals(share: float, studies: int = 8) -> int:
    """How many open, honest studies refuse where a share of a covariate is imputed in three silos of 200."""
    w = {"kind": "number", "range": (-5, 5), "missing": "impute"}
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + w + z"),
        treatment_model=ft.GLM("w + z"),
        variables=ft.Variables({**declare(y="binary", a="binary", z=(-5, 5)), "w": w}),
        imputations=5,
        diagnostics=False,
    )
    refused = 0
    for seed in range(studies):
        rng, silos = np.random.default_rng(seed), {}
        for silo in "abc":
            z = rng.normal(size=200).clip(-4, 4)
            x = (0.5 * z + rng.normal(size=200)).clip(-4, 4)
            a = (rng.random(200) < 1 / (1 + np.exp(-0.4 * x))) * 1.0
            y = (rng.random(200) < 1 / (1 + np.exp(-0.5 * x - 0.4 * a))) * 1.0
            silos[silo] = {"y": y, "a": a, "w": np.where(rng.random(200) < share, np.nan, x), "z": z}
        tables = load_all(silos, schema_of(study))
        refused += run_honest(study_plan(study, roster(list(silos))), tables) == ("refused", "min_people")
    return refused
