"""The expected cost of a budget of differential privacy to a study, before there are any data.

The study's own flow is run over a few thousand records that are drawn from the dictionary and stand for n
people: sums are scaled to n, and noise is counted but not drawn. So the account of the result has the
variances that a run is expected to have. Nothing is read but the study.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.data import Column, Kind, load_all
from fedtmle.defects import expect_integer, expect_number
from fedtmle.errors import InputError
from fedtmle.initial.glm import Supplied
from fedtmle.model.budget import Privacy
from fedtmle.model.table import Table
from fedtmle.programs.flow import StudyDetails, StudyProgram
from fedtmle.programs.noisy import PrivacyAccount, study_design
from fedtmle.programs.study import Study
from fedtmle.protocol.sums import NoisySums
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array

POPULATION = 4096  # records that stand for n people
SMALLEST = 100  # records that a plan can be made for
SMALLEST_N, LARGEST_N = 1_000, 10**8  # between which the smallest useful n is sought
DEVIATIONS = 6.0  # standard deviations that a number's range is assumed to span
BINARY_MEAN, NUMBER_MEAN = 0.3, 0.5  # mean outcome on the unit scale, unless it is given
SEED = 20


@final
@dataclass(frozen=True, kw_only=True)
class PrivacyCost:
    """The expected cost of privacy at one n and epsilon.

    ``std_errors`` are those of the estimated contrast, or of the means that the estimand is made of.
    ``without_noise`` are the same without noise. ``limits`` say why the interval would not be promised to
    cover. They are empty if it would.
    """

    n: int
    epsilon: float
    std_errors: tuple[float, ...]
    without_noise: tuple[float, ...]
    limits: tuple[str, ...]

    @property
    def inflation(self) -> float:
        """How many times as wide as without noise the intervals are; the largest over the parameters."""
        return max(a / b for a, b in zip(self.std_errors, self.without_noise, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """A study with privacy and what is assumed about its records, to plan n and epsilon before any data.

    Numbers are assumed to be normal in their declared ranges, which span six standard deviations, and levels
    to be equally frequent. The models are assumed to be correct.

    Parameters
    ----------
    study
        The study, with its budget.
    silos
        The number of silos, which share the noise.
    treated
        The share of records in the second arm.
    outcome_mean
        The mean outcome, in its unit. If None, 0.3 for a binary outcome, else the middle of the range.
    outcome_sd
        The standard deviation of an outcome that is a number, given the covariates. If None, a sixth of
        its range.
    observed
        The share of outcomes that are observed, if the study has a model of missingness.
    strength
        The standard deviation of each model's linear predictor: how much the covariates explain.

    Raises
    ------
    InputError
        The study has no budget, or a number is out of its range.

    Examples
    --------
    >>> study = ft.Study(
    ...     target=ft.ATE(outcome="y", treatment="a"),
    ...     outcome_model=ft.GLM("a + x"),
    ...     treatment_model=ft.GLM("x"),
    ...     variables=ft.Variables(
    ...         {
    ...             "y": {"kind": "binary"},
    ...             "a": {"kind": "binary"},
    ...             "x": {"kind": "number", "range": (0, 10)},
    ...         }
    ...     ),
    ...     privacy=ft.Privacy(epsilon=1.0),
    ... )
    >>> plan = ft.PrivacyPlan(study=study, silos=5)
    >>> round(plan.cost(n=20_000).inflation, 1)
    1.1
    >>> plan.cost(n=200).limits[0][:15]
    'noise makes the'
    """

    study: Study
    silos: int
    treated: float = 0.5
    outcome_mean: float | None = None
    outcome_sd: float | None = None
    observed: float = 0.8
    strength: float = 0.6

    def __post_init__(self) -> None:
        expect_integer("silos", self.silos)
        for name in ("treated", "observed", "strength"):
            expect_number(name, getattr(self, name))
        for name in ("treated", "observed"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise InputError(f"{name}: expected a share between 0 and 1, not {getattr(self, name)}")
        if not 0.0 <= self.strength <= 5.0:
            raise InputError(f"strength: expected a number from 0 to 5, not {self.strength}")
        self._program(self.privacy)  # refuses a number of silos that is too small
        self.outcome  # noqa: B018 - refuses an outcome out of its range

    @property
    def privacy(self) -> Privacy:
        """The study's budget."""
        if self.study.privacy is None:
            raise InputError(
                "privacy: the study has no budget to plan; add a [privacy] section with an epsilon"
            )
        return self.study.privacy

    @cached_property
    def outcome(self) -> tuple[float, float]:
        """The mean outcome on the unit scale, and its variance over that of a binary one."""
        (low, high), is_binary = self.study.outcome_bounds, self.study.response == "binary"
        mean = BINARY_MEAN if is_binary else NUMBER_MEAN
        if self.outcome_mean is not None:
            expect_number("outcome_mean", self.outcome_mean)
            mean = (self.outcome_mean - low) / (high - low)
        if not 0.0 < mean < 1.0:
            raise InputError(
                f"outcome_mean: expected a number between {low:g} and {high:g}, not {self.outcome_mean:g}"
            )
        if is_binary:
            if self.outcome_sd is not None:
                raise InputError("outcome_sd: leave it out; that of a binary outcome follows from its mean")
            return mean, 1.0
        largest = math.sqrt(mean * (1.0 - mean))
        sd = largest / (DEVIATIONS / 2.0)
        if self.outcome_sd is not None:
            expect_number("outcome_sd", self.outcome_sd)
            sd = self.outcome_sd / (high - low)
        if not 0.0 < sd < largest:
            raise InputError(
                f"outcome_sd: expected a number between 0 and {largest * (high - low):.3g}, which the range "
                f"and the mean allow, not {self.outcome_sd:g}"
            )
        return mean, (sd / largest) ** 2

    def cost(self, n: int, epsilon: float | None = None) -> PrivacyCost:
        """Return the expected cost with n records in all silos together.

        Without ``epsilon`` it is the study's.
        """
        expect_integer("n", n)
        if n < SMALLEST:
            raise InputError(f"n: expected at least {SMALLEST} records, not {n}")
        privacy = self.privacy if epsilon is None else replace(self.privacy, epsilon=epsilon)
        account = self._account(n, privacy)
        parts = zip(account.sampling, account.noise, account.remainder, strict=True)
        return PrivacyCost(
            n=n,
            epsilon=privacy.epsilon,
            std_errors=tuple(math.sqrt(sum(each)) for each in parts),
            without_noise=tuple(map(math.sqrt, account.sampling)),
            limits=account.limits,
        )

    def smallest_n(self, epsilon: float | None = None) -> int | None:
        """Return the smallest n from 1,000, to two digits, whose interval is promised; None if none is."""
        if self.cost(LARGEST_N, epsilon).limits:
            return None
        if not self.cost(SMALLEST_N, epsilon).limits:
            return SMALLEST_N
        low, high = math.log(SMALLEST_N), math.log(LARGEST_N)
        while high - low > 0.02:
            middle = (low + high) / 2
            if self.cost(round(math.exp(middle)), epsilon).limits:
                low = middle
            else:
                high = middle
        digit = int(10 ** (math.floor(math.log10(math.exp(high))) - 1))
        return math.ceil(math.exp(high) / digit) * digit

    def _program(self, privacy: Privacy) -> StudyProgram:
        names = [f"silo {m + 1}" for m in range(self.silos)]
        return StudyProgram.of(replace(self.study, privacy=privacy), names)

    def _account(self, n: int, privacy: Privacy) -> PrivacyAccount:
        flow = self._program(privacy).flow(n)
        query = next(flow)
        sums = self._gram
        while isinstance(query, NoisySums):
            units = tuple(unit * n // POPULATION for unit in sums.units)
            try:
                query = flow.send(Sums(units, sums.shifts))
            except StopIteration as stop:
                details = stop.value.details
                if isinstance(details, StudyDetails) and details.privacy is not None:
                    return details.privacy
            else:
                sums = query.answer(self._records)
        raise AssertionError("a study with privacy asks for noisy sums and returns an account")

    @cached_property
    def _gram(self) -> Sums:
        """The sums of the first round over the records, without noise; they are the same for every budget."""
        first = next(self._program(self.privacy).flow(POPULATION))
        if not isinstance(first, NoisySums):
            raise TypeError("a study with privacy begins with noisy sums")
        return first.answer(self._records)

    @cached_property
    def _records(self) -> LocalRows:
        """Records with the covariates of the dictionary, drawn once."""
        study, rng = self.study, np.random.default_rng(SEED)
        target, schema = study.target, schema_of(study)
        columns = {column.name: _drawn(column, rng) for column in schema.columns}
        table = load_all({"plan": columns}, schema)["plan"]
        if not isinstance(table, Table):
            raise AssertionError("drawn records are in memory")
        design = study_design(study)
        covariates = design.scaled(table)
        ones = np.ones(POPULATION)

        def index(role: str) -> Array:
            """The linear predictor of a model, without its intercept."""
            if role not in design.models or not design.models[role].covariates:
                return 0.0 * ones
            chosen = covariates[design.models[role].covariates]
            spread = chosen.std(axis=1, keepdims=True)
            signs = (-1.0) ** np.arange(len(chosen))
            total = signs @ ((chosen - chosen.mean(axis=1, keepdims=True)) / np.maximum(spread, 1e-9))
            return np.asarray(self.strength * total / max(float(total.std()), 1e-9))

        if target.treatment is not None:
            if isinstance(study.treatment_model, Supplied):
                g = columns[study.treatment_model.columns[0]].astype(np.float64)
            else:
                g = _expit(_logit(self.treated) + index("treatment"))
            columns[target.treatment] = np.array(target.arms)[(rng.random(POPULATION) < g).astype(int)]
        mean, dispersion = self.outcome
        Q = np.clip(_expit(_logit(mean) + index("outcome")), 1e-6, 1 - 1e-6)
        if dispersion == 1.0:
            unit = (rng.random(POPULATION) < Q).astype(np.float64)
        else:
            precision = 1.0 / dispersion - 1.0
            unit = rng.beta(precision * Q, precision * (1.0 - Q))
        low, high = study.outcome_bounds
        y = low + (high - low) * unit
        if study.response == "count":
            y = np.rint(y)
        if "missingness" in study.models:
            y[rng.random(POPULATION) > _expit(_logit(self.observed) + index("missingness"))] = np.nan
        columns[target.outcome] = y
        table = load_all({"plan": columns}, schema)["plan"]
        return LocalRows("plan", table, POPULATION)


def _drawn(column: Column, rng: np.random.Generator) -> Array:
    """Return values of a column: levels are equally frequent, numbers normal within their range."""
    if column.levels:
        return np.asarray(np.array(column.levels)[rng.integers(0, len(column.levels), POPULATION)])
    if column.kind is Kind.BINARY:
        return rng.integers(0, 2, POPULATION).astype(np.float64)
    if column.bounds is None:
        raise InputError(f"column '{column.name}': the dictionary declares no range")
    low, high = column.bounds
    values = (low + high) / 2 + (high - low) / DEVIATIONS * rng.standard_normal(POPULATION)
    if column.kind is Kind.COUNT:
        values = np.rint(values)
    return np.asarray(np.clip(values, low, high))


def _expit(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))
