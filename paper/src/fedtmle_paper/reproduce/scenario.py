"""What is run: data sets, partitions and methods, each a value that names itself (S.3)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.gradient import Gradient
from fedtmle.algorithms.local import LocalAverage
from fedtmle.algorithms.optimizers import Backtracking, GradientDescent
from fedtmle.model.fit import EXACT_NEWTON, FirstOrderFits
from fedtmle_core.types import Array
from fedtmle_paper.benchmark import (
    client_sizes,
    curved_mixture,
    gaussian_mixture,
    random_partition,
    spatial_partition,
)
from fedtmle_paper.density.law import DensityLaw
from fedtmle_paper.optimal_transport import OptimalTransport

ROUND_BUDGET = 200  # of figure 4
STANDSTILL = 1e-7  # an update of L no longer than this: its fixed point, to 1e-5 in the residual


class Dgp(enum.StrEnum):
    """The data-generating distributions of S.3."""

    GAUSSIAN = "gaussian"  # DGP 1
    CURVED = "curved"  # DGP 2

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        return gaussian_mixture(n, rng) if self is Dgp.GAUSSIAN else curved_mixture(n, rng)


class Partition(enum.StrEnum):
    """How rows are dealt to clients; both kinds have the same sizes."""

    RANDOM = "random"
    SPATIAL = "spatial"


class Method(enum.StrEnum):
    """The paper's three methods and two of ours."""

    GRADIENT = "G"
    LOCAL_SIZE = "L size"
    LOCAL_UNIFORM = "L uniform"
    CODED_RAW = "coded raw"
    CODED_WHITENED = "coded whitened"

    def algorithm(self, scale: Scale, profile: Profile) -> AbstractAlgorithm:
        return _ALGORITHMS[self](scale, profile)

    @property
    def is_papers(self) -> bool:
        return self in (Method.GRADIENT, Method.LOCAL_SIZE, Method.LOCAL_UNIFORM)


class Profile(enum.StrEnum):
    """Two readings of what the paper leaves open: how long G's inner solves are, and how L fits."""

    A = "A"  # G: inner solves to 0.1 r^k; L: fits by Newton's method
    B = "B"  # G: T_k = 1, one step with backtracking per update; L: first-order fits, by L-BFGS

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that are run under it: ours have no reading of their own."""
        return tuple(method for method in Method if method.is_papers or self is Profile.A)


# The step rule is ours, the paper gives none: Armijo 1e-4, first step 1/lambda_max of the curvature at
# p^0, trial twice the last step, halving; every query is a round.
_ALGORITHMS: dict[Method, Callable[[Scale, Profile], AbstractAlgorithm]] = {
    Method.GRADIENT: lambda scale, profile: Gradient(
        tolerance=scale.tolerance,
        optimizer=GradientDescent(
            step=Backtracking(armijo=1e-4, grow=2.0), stop=0.1, max_steps=1 if profile is Profile.B else 1000
        ),
        max_updates=10_000,
    ),
    Method.LOCAL_SIZE: lambda scale, profile: _local(scale, profile, "size"),
    Method.LOCAL_UNIFORM: lambda scale, profile: _local(scale, profile, "uniform"),
    Method.CODED_RAW: lambda scale, _: Coded(tolerance=scale.coded_tolerance, coordinates="raw"),
    Method.CODED_WHITENED: lambda scale, _: Coded(tolerance=scale.coded_tolerance, coordinates="whitened"),
}
FIRST_ORDER = FirstOrderFits(gradient=1e-9)


def _local(scale: Scale, profile: Profile, weights: str) -> LocalAverage:
    # The last of the budget's rounds is the EIF check at k = K.
    return LocalAverage(
        tolerance=scale.tolerance,
        weights=weights,
        max_updates=ROUND_BUDGET - 1,
        progress_tolerance=STANDSTILL,
        solver=FIRST_ORDER if profile is Profile.B else EXACT_NEWTON,
        lattice=None,  # as the paper has it: real numbers
    )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the experiment is; the defaults are the paper's."""

    n: int = 10_000
    pilot: int = 2_000
    clients: tuple[int, ...] = (5, 10, 20, 40)
    reference_clients: int = 10  # of figures 1 and 2, and of the reference unit
    tolerance: float = 1e-5  # r^K of G and L: so low that no fixed time of figure 3 is beyond a stop
    targeted: float = 1e-4  # a residual above this counts as not targeted
    coded_tolerance: float = 1e-3  # Algorithm 4's delta is also its lattice and its inner stop


QUICK = Scale(
    n=1_500,
    pilot=300,
    clients=(3, 5),
    reference_clients=5,
    tolerance=1e-3,
    targeted=1e-3,
    coded_tolerance=3e-2,
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One panel's data: a seed, a distribution, a partition and a number of clients."""

    seed: int
    dgp: Dgp
    partition: Partition
    clients: int
    scale: Scale = Scale()

    @property
    def name(self) -> str:
        return f"{self.dgp}, {self.partition}, M={self.clients}"


@dataclass(frozen=True, kw_only=True)
class Data:
    """A scenario's problem, initial law, pooled rows (n, 2) and silos."""

    problem: OptimalTransport
    law: DensityLaw
    rows: Array
    silos: dict[str, Array]

    @cached_property
    def start_loss(self) -> float:
        """P_n L(p^0)."""
        return float(np.mean(self.problem.losses(self.law, self.problem.read(self.rows))))


def build(scenario: Scenario) -> Data:
    """The data of a scenario: pilot and rows depend on (seed, dgp) alone, so all its scenarios share them."""
    which = list(Dgp).index(scenario.dgp)
    rng = np.random.default_rng([scenario.seed, which])
    problem = OptimalTransport()
    law = problem.start(scenario.dgp.draw(scenario.scale.pilot, rng))
    rows = scenario.dgp.draw(scenario.scale.n, rng)
    sizes = client_sizes(scenario.scale.n, scenario.clients)
    dealer = np.random.default_rng(
        [scenario.seed, which, scenario.clients, list(Partition).index(scenario.partition)]
    )
    if scenario.partition is Partition.RANDOM:
        parts = random_partition(sizes, dealer)
    else:
        parts = spatial_partition(rows, sizes, dealer)
    silos = {f"silo {m + 1}": rows[part] for m, part in enumerate(parts)}
    return Data(problem=problem, law=law, rows=rows, silos=silos)
