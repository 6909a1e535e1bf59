"""The base class of the algorithms, and the steps that their flows share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Self, TypeVar, final

import numpy as np

from fedtmle.errors import InputError, NumericalError
from fedtmle.model import linear
from fedtmle.model.problem import Estimate
from fedtmle.protocol.lattice import finest_tolerance
from fedtmle.protocol.outcome import Certificate, Personalised, SiteTest, Status, Targeted, Visit
from fedtmle.protocol.plan import AbstractProgram
from fedtmle.protocol.query import Flow, Law, Model, MomentsQuery, Phase, Problem
from fedtmle.protocol.sites import PopulationsQuery, SpreadQuery
from fedtmle.protocol.sums import SumsQuery, mean_gradient, norm
from fedtmle_core import kernels
from fedtmle_core.exact import GRID_BITS, Sums
from fedtmle_core.types import Array, IntArray, Part, unpack

# Whether the silos' rows are draws from one population, which bounds on averages of fits assume.

TESTED = "influence function"
SINGULAR = 1e-10  # share of the largest variance below which a coordinate has none of its own


def compare_populations(problem: Problem, law: Law, n: int) -> Flow[SiteTest | None]:
    """Ask in two rounds whether the silos' gradients at ``law`` have one mean; None if Sigma is singular.

    Sigma is estimated with f degrees of freedom. T is multiplied by (f - d - 1)/f, since the expected inverse
    of such an estimate is f/(f - d - 1) times the inverse, for normal rows.
    """
    pooled: Sums = yield SpreadQuery(problem=problem, law=law, n=n)
    d, f = problem.dim, pooled.units[-1]
    if f <= d + 1:
        return None
    Sigma = unpack(pooled[d:-1].values(f), d)
    factor = linear.cholesky(Sigma, floor=SINGULAR * float(np.diag(Sigma).max()))
    if factor is None:
        return None
    answer: Sums = yield PopulationsQuery(
        problem=problem, law=law, n=n, mean=pooled[:d].values(n), root=linear.invert_lower(factor)
    )
    statistic, silos = answer.values().tolist()
    return SiteTest(model=TESTED, statistic=statistic * (f - d - 1) / f, silos=int(silos), dim=d)


LARGEST_SCALE = 1024.0  # largest ratio of a coordinate's tolerance to the smallest

UNMASKABLE = (
    "'masked' is for algorithms that add up integers: Coded (unless its smoothness is each silo's own), "
    "OneStep, Gradient without batches, and LocalAverage or Personalized on a lattice without given weights; "
    "choose one of these, or 'open'"
)


class AbstractAlgorithm(ABC):
    """Base of algorithms: configuration, and the flow that every party runs.

    Examples
    --------
    >>> isinstance(ft.Coded(), ft.AbstractAlgorithm)
    True
    """

    @abstractmethod
    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Targeted | Personalised]:
        """Yield queries, receive what was pooled, return the outcome."""

    @property
    def rounds_sums(self) -> bool:
        """Whether the sums of a study around this algorithm are rounded too, unless it says otherwise.

        The algorithms that use exact sums give the same bits in any partition of the rows.
        """
        return False

    @property
    def fluctuates(self) -> bool:
        """Whether the algorithm moves the initial law; if not, its predictions are not truncated."""
        return True

    @property
    def adds_integers(self) -> bool:
        """Whether every pooled value is a sum of integers with public bounds, which silos can mask."""
        return True

    @property
    def pools_rows(self) -> bool:
        """Whether the rows must be in one silo (the centralised comparator)."""
        return False

    @property
    def fits_locally(self) -> bool:
        """Whether it averages local fits: its bounds then assume that silos come from one population."""
        return False

    @property
    def fewest_active(self) -> int | None:
        """The fewest silos whose fits are averaged, if silos may retire; None if none may."""
        return None

    def with_fewest_active(self, fewest: int) -> Self:
        """Return the algorithm that averages the fits of no fewer silos than this, if silos may retire."""
        return self

    @property
    def silo_weights(self) -> Mapping[str, float] | None:
        """The weights by silo that the user gave, which must name every silo; None for the others."""
        return None


@final
@dataclass(frozen=True, kw_only=True)
class TargetingProgram(AbstractProgram[object]):
    """One problem, targeted by one algorithm from an initial law."""

    problem: Problem
    law: Law
    algorithm: AbstractAlgorithm
    compares_populations: bool = False

    def count(self, rows: object) -> int:
        return self.problem.count(rows)

    def smallest_part(self, rows: object) -> int:
        return self.problem.smallest_part(rows)

    @property
    def fewest_active(self) -> int | None:
        return self.algorithm.fewest_active

    def with_fewest_active(self, fewest: int) -> Self:
        return replace(self, algorithm=self.algorithm.with_fewest_active(fewest))

    def flow(self, n: int) -> Flow[Targeted | Personalised]:
        populations = None
        if self.compares_populations:
            populations = yield from compare_populations(self.problem, self.law, n)
        outcome = yield from self.algorithm.flow(self.problem, self.law, n)
        return replace(outcome, populations=populations)


Tolerance = float | Literal["practical", "negligible"]
Model_co = TypeVar("Model_co", bound=Model, covariant=True)


@dataclass
class Run(Generic[Model_co]):
    """The public state that flows share: problem, pooled n, and the trajectory so far."""

    problem: Model_co
    n: int
    phase: Phase = Phase.TARGETING
    tolerance: float | None = None  # once it is settled
    visits: list[Visit] = field(default_factory=list)
    step_smoothness: list[float] = field(default_factory=list)  # one value per step, if the steps set it

    @property
    def rounds(self) -> int:
        return len(self.visits)

    def norm(self, vector: Array) -> float:
        """Return the Euclidean norm, the same at every party."""
        return norm(vector)

    def pooled_gradient(self, sums: Sums, law: Law, eps: Array) -> Array:
        """Return the pooled mean gradient at eps; the public part is added once."""
        return mean_gradient(self.problem, law, eps, sums, self.n)

    def ask(self, law: Law, eps: Array, parts: Part, *, batch: IntArray | None = None) -> Flow[Sums]:
        """Ask for one round of exact sums."""
        sums: Sums = yield SumsQuery(
            problem=self.problem,
            law=law,
            eps=eps,
            parts=parts,
            n=self.n,
            batch=batch,
            phase=self.phase,
            tolerance=self.tolerance,
        )
        return sums

    def record(
        self,
        *,
        update: int,
        step: int,
        eps: Array,
        gradient_norm: float | None,
        loss_change: float | None = None,
    ) -> None:
        self.visits.append(
            Visit(
                round=len(self.visits) + 1,
                update=update,
                step=step,
                eps=tuple(map(float, eps)),
                gradient_norm=gradient_norm,
                at_origin=step == 0,
                loss_change=loss_change,
            )
        )


def close(run: Run[Problem], law: Law) -> Flow[Estimate]:
    """Ask for the closing round; return psi and its covariance."""
    query = MomentsQuery(problem=run.problem, law=law, n=run.n)
    return query.estimate((yield query))


def conclude(
    run: Run[Problem],
    law: Law,
    *,
    status: Status,
    residual: float,
    tolerance: float,
    accepted: Sequence[tuple[float, ...]],
    steps: int,
) -> Flow[Targeted]:
    """Close a run whose parties know the pooled residual itself; return its outcome."""
    arithmetic = arithmetic_error(run.problem, law)
    estimate = yield from close(run, law)
    return Targeted(
        problem=run.problem,
        law=law,
        status=status,
        steps=steps,
        updates=len(accepted),
        residual=residual,
        residual_kind="computed",
        trajectory=tuple(run.visits),
        accepted=tuple(accepted),
        certificate=Certificate(
            tolerance=tolerance, residual_bound=residual + arithmetic, arithmetic=arithmetic
        ),
        estimate=estimate,
    )


def settle_tolerance(run: Run[Problem], law: Law, tolerance: Tolerance) -> Flow[float]:
    """Settle delta for the run and return it; a rule needs one counted look at the standard errors at p^0.

    "practical": 1e-6 of the smallest, rounded down to a power of two, so that the estimate equals
    the pooled one for every practical purpose; where declared bounds are so wide that this cannot be
    certified, the finest that can, up to 1e-3. "negligible": 0.1 of the smallest over log n.
    """
    run.tolerance = yield from _settled(run, law, tolerance)
    return run.tolerance


def _settled(run: Run[Problem], law: Law, tolerance: Tolerance) -> Flow[float]:
    if isinstance(tolerance, int | float):
        return float(tolerance)
    known = run.problem.calibration(law)
    if known is None:
        pooled: Sums = yield MomentsQuery(problem=run.problem, law=law, n=run.n, phase=Phase.CALIBRATION)
        smallest = float(np.sqrt(np.diag(run.problem.finish(law, pooled, run.n).covariance)).min())
    else:
        smallest = min(known.errors)
    if not (math.isfinite(smallest) and smallest > 0):
        raise NumericalError(
            "tolerance: a standard error is zero or unknown at the initial law, so the tolerance cannot "
            "be set by it; give a number"
        )
    if tolerance == "negligible":
        return 0.1 * smallest / kernels.log(float(max(run.n, 3)))
    wanted = power_below(1e-6 * smallest)
    finest = finest_tolerance(arithmetic_error(run.problem, law))
    if wanted < finest <= 1e-3 * smallest:
        power = power_below(finest)
        return power if power == finest else 2.0 * power
    return wanted


def tolerance_scales(errors: Sequence[float]) -> tuple[int, ...]:
    """Return each standard error over the smallest, rounded down to a power of two; () if all are one.

    The smallest is positive and finite. Beyond `LARGEST_SCALE` nothing more is gained.
    """
    smallest = min(errors)
    scales = tuple(int(power_below(min(error / smallest, LARGEST_SCALE))) for error in errors)
    return scales if max(scales) > 1 else ()


def power_below(value: float) -> float:
    """Return the largest power of two that is at most ``value``, which must be positive."""
    return math.ldexp(0.5, math.frexp(value)[1])


def require_tolerance(tolerance: Tolerance, *, zero: bool = False) -> None:
    """Check that a tolerance is a number above zero (or zero, with ``zero``), or the name of a rule.

    A tolerance of zero tests for an exact root, which sums in finite precision seldom meet: such a run goes
    on until its budget is used up, and its certificate states the residual that it reached.
    """
    if isinstance(tolerance, str):
        if tolerance not in ("practical", "negligible"):
            raise InputError(f"tolerance: expected a number, 'practical' or 'negligible', not {tolerance!r}")
    elif not (zero and tolerance == 0):
        require_positive(tolerance=tolerance)


def arithmetic_error(problem: Problem, law: Law) -> float:
    """Return a bound on the error of a residual by exact sums and quadrature: sqrt(d) C_row 2^-51 + eta."""
    row = 2.0 ** (problem.row_bound(law).gradient - GRID_BITS - 1)
    return math.sqrt(problem.dim) * row + problem.accuracy(law)


def require_positive(**arguments: float | None) -> None:
    """Check that each argument that is given is a finite number above zero."""
    for name, value in arguments.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{name}: expected a finite number above zero, not {value}")


def require_budget(**arguments: int) -> None:
    """Check that each argument is an integer of at least zero."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{name}: expected an integer of at least 0, not {value!r}")
