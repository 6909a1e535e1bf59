"""FedTMLE-L and FedTMLE-LR against longhand numpy, and their endings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import optimize

import fedtmle as ft
from fedtmle.errors import DecodeError
from fedtmle.protocol import messages
from fedtmle.protocol.codes import decode, encode, fixed_width
from fedtmle.protocol.fits import FitAnswer, FitOutcome, FitQuery, RetirementRule, Weighting
from fedtmle.protocol.messages import Answered
from fedtmle_core.exact import GRID_BITS, Sums
from tests.cases import Case, targets
from tests.premise import Premise

LOW, WIDTH = -10.0, 20.0


@dataclass
class LonghandSilo:
    """The two-arm problem at one silo, in plain numpy: loss, gradient and fit of eps from a base sum."""

    y: np.ndarray
    offset: np.ndarray
    X: np.ndarray

    def loss(self, eps: np.ndarray, base: np.ndarray) -> float:
        eta = self.offset + self.X @ (base + eps)
        return float(np.mean(np.logaddexp(0, eta) - self.y * eta))

    def gradient(self, eps: np.ndarray, base: np.ndarray) -> np.ndarray:
        eta = self.offset + self.X @ (base + eps)
        return self.X.T @ (1 / (1 + np.exp(-eta)) - self.y) / len(self.y)

    def fit(self, base: np.ndarray) -> np.ndarray:
        found = optimize.minimize(
            self.loss, np.zeros(2), args=(base,), jac=self.gradient, method="BFGS", options={"gtol": 1e-13}
        )
        eps = found.x
        for _ in range(10):  # polish by Newton
            eta = self.offset + self.X @ (base + eps)
            p = 1 / (1 + np.exp(-eta))
            eps = eps - np.linalg.solve(self.X.T @ (self.X * (p * (1 - p))[:, None]), self.X.T @ (p - self.y))
        return eps


def longhand(rows: dict[str, np.ndarray]) -> LonghandSilo:
    a, g = rows["treatment"], rows["g"]
    q = (np.where(a == 1, rows["Q1"], rows["Q0"]) - LOW) / WIDTH
    X = -WIDTH * np.stack([a / g, (1 - a) / (1 - g)], axis=1)
    return LonghandSilo((rows["outcome"] - LOW) / WIDTH, np.log(q / (1 - q)), X)


def two_arm_silos(count: int = 4) -> tuple[Case, dict[str, dict[str, np.ndarray]]]:
    case = targets()["two arms"]
    return case, case.silos(case.split(count, seed=2))


@pytest.mark.parametrize("weights", ["size", "uniform", "given"])
def test_local_average_follows_the_longhand_trajectory(weights: str) -> None:
    case, silos = two_arm_silos()
    plain = {name: longhand(rows) for name, rows in silos.items()}
    sizes = np.array([len(s.y) for s in plain.values()])
    alpha = {"size": sizes / case.n, "uniform": np.full(4, 0.25), "given": np.array([0.1, 0.2, 0.3, 0.4])}[
        weights
    ]
    given = dict(zip(silos, alpha, strict=True)) if weights == "given" else weights
    K = 4
    result = ft.solve(
        case.problem,
        case.law,
        silos,
        ft.LocalAverage(tolerance=1e-12, weights=given, max_updates=K, lattice=None),
        observe=True,
    )
    base = np.zeros(2)
    for k in range(K + 1):
        score = (
            sum(n * s.gradient(np.zeros(2), base) for n, s in zip(sizes, plain.values(), strict=True))
            / case.n
        )
        loss = sum(n * s.loss(np.zeros(2), base) for n, s in zip(sizes, plain.values(), strict=True)) / case.n
        assert result.trajectory.residual[k] == pytest.approx(float(np.linalg.norm(score)), abs=1e-10)
        assert result.trajectory.loss[k] == pytest.approx(loss, abs=1e-12)
        if k < K:
            eps = sum(w * s.fit(base) for w, s in zip(alpha, plain.values(), strict=True))
            assert np.allclose(result.trajectory.accepted[k], eps, atol=1e-11)
            base = base + eps
    assert result.status is ft.Status.UPDATE_BUDGET
    assert result.rounds == K + 1  # one collection per update, and the last EIF evaluation


def last_asked(result: ft.Result) -> dict[str, int]:
    """The last exchange in which each silo was asked anything."""
    return {
        silo: max(i for i, exchange in enumerate(result.transcript.exchanges) if silo in exchange.requests)
        for silo in result.sizes
    }


@pytest.mark.parametrize(("aggregation", "fewest"), [("open", 1), ("masked", 3)])
@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("spacing", [0.0005, 0.001, 0.002])
def test_personalized_follows_the_longhand_lattice_rule(
    weights: str, spacing: float, aggregation: Any, fewest: int
) -> None:
    case, silos = two_arm_silos()
    plain = {name: longhand(rows) for name, rows in silos.items()}
    K = 6
    algorithm = ft.Personalized(weights=weights, lattice=spacing, max_updates=K)
    result = ft.solve(case.problem, case.law, silos, algorithm, aggregation=aggregation)
    active, base, retired, laws = list(plain), np.zeros(2), {}, [np.zeros(2)]
    for k in range(K + 1):
        fits = {name: np.rint(plain[name].fit(base) / spacing) * spacing for name in active}
        for name in [name for name in active if not fits[name].any()]:
            retired[name] = k
            active.remove(name)
        assert result.active[k].silos == len(active)
        if len(active) < fewest or k == K:
            break
        if weights == "size":
            assert result.active[k].people == sum(len(plain[name].y) for name in active)
        alpha = {name: len(plain[name].y) if weights == "size" else 1.0 for name in active}
        eps = sum(alpha[name] * fits[name] for name in active) / sum(alpha.values())
        eps = np.rint(eps / (spacing / 16)) * (spacing / 16)  # the broadcast's own lattice
        assert np.allclose(result.trajectory.accepted[k], eps, atol=1e-12)
        base = base + eps
        laws.append(base)
    assert {name: local.retired_at for name, local in result.silos.items()} == {
        name: retired.get(name) for name in silos
    }
    few = ft.Status.FEW_ACTIVE if k < K else ft.Status.UNFINISHED
    assert result.status is (few if active else ft.Status.ALL_RETIRED)
    assert len(result.active) == k + 1
    for name, local in result.silos.items():
        frozen = laws[retired[name]] if name in retired else base
        law: Any = local.law
        assert np.allclose(law.total(), frozen, atol=1e-11)
        # Psi_m uses the silo's own covariate marginal.
        rows = silos[name]
        for arm, (q, g) in enumerate((("Q1", rows["g"]), ("Q0", 1 - rows["g"]))):
            p = (rows[q] - LOW) / WIDTH
            moved = 1 / (1 + np.exp(-(np.log(p / (1 - p)) - WIDTH * frozen[arm] / g)))
            assert local.estimate.psi[arm] == pytest.approx(LOW + WIDTH * moved.mean(), abs=1e-9)


def test_a_retired_silo_answers_to_the_end_and_never_changes() -> None:
    case, silos = two_arm_silos()
    run = {
        K: ft.solve(case.problem, case.law, silos, ft.Personalized(lattice=0.001, max_updates=K))
        for K in (2, 6)
    }
    assert set(last_asked(run[6]).values()) == {len(run[6].transcript.exchanges) - 1}
    early = [name for name, local in run[2].silos.items() if local.retired_at is not None]
    assert early, "the case must have a silo that retires early"
    for name in early:
        assert run[6].silos[name].law == run[2].silos[name].law
        assert run[6].silos[name].estimate.psi.tobytes() == run[2].silos[name].estimate.psi.tobytes()


def test_lattice_retirement_bounds_the_local_gap() -> None:
    """MATH: a fit that rounds to zero has gap <= beta d lambda^2/8 and EIF mean <= beta sqrt(d) lambda/2."""
    case, silos = two_arm_silos()
    spacing = 0.002
    result = ft.solve(case.problem, case.law, silos, ft.Personalized(lattice=spacing, max_updates=6))
    with Premise("the silo retires", at_least=0.25) as retires:
        for name, local in result.silos.items():
            if not retires.holds(local.retired_at is not None):
                assert local.gap_bound is None
                continue
            plain = longhand(silos[name])
            law: Any = local.law
            base = law.total()
            gap = plain.loss(np.zeros(2), base) - plain.loss(plain.fit(base), base)
            score = float(np.linalg.norm(plain.gradient(np.zeros(2), base)))
            beta = 0.25 * np.linalg.norm(plain.X.T @ plain.X / len(plain.y), 2)
            assert local.gap_bound == pytest.approx(beta * 2 * spacing**2 / 8, rel=1e-9)
            assert gap <= local.gap_bound
            assert score <= beta * np.sqrt(2) * spacing / 2


def test_noise_rule_is_a_fraction_of_the_sampling_noise() -> None:
    case, silos = two_arm_silos()
    retires = Premise("the silo retires", at_least=0.2)
    stays = Premise("the silo does not retire", at_least=0.2)
    with retires, stays:
        for noise, updates in itertools.product((0.3, 1.5), (1, 6)):
            result = ft.solve(
                case.problem, case.law, silos, ft.Personalized(noise=noise, max_updates=updates)
            )
            for name, local in result.silos.items():
                law: Any = local.law
                g = longhand(silos[name]).gradient(np.zeros(2), law.total())
                chi = float(g @ np.linalg.solve(local.estimate.covariance, g))
                assert (chi <= noise**2 * 2) == retires.holds(local.retired_at is not None)
                stays.holds(local.retired_at is None)


def opposed_silos() -> tuple[ft.Mean, dict[str, np.ndarray]]:
    """Two silos whose fits from mu = 5 are exactly +1 and -1 under uniform weights, sizes unequal."""
    return ft.Mean(bounds=(0.0, 10.0)), {"a": np.array([4.0, 4.0]), "b": np.array([6.0] * 6)}


def test_exact_cancellation_is_stagnation_not_convergence() -> None:
    problem, silos = opposed_silos()
    result = ft.solve(problem, problem.start(5.0), silos, ft.LocalAverage(weights="uniform"))
    assert result.status is ft.Status.CANCELLATION
    assert not result.status.is_converged
    assert "stagnation" in result.status.value
    assert result.updates == 0
    assert result.law == problem.start(5.0)
    assert result.residual == pytest.approx(0.5)  # |P_n(y - 5)| is left


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_cancellation_on_the_lattice_is_exact(weights: str) -> None:
    """3 * 7 = 7 * 3 lattice steps: as floats the average is 3.5e-19 and the run goes on to its cap."""
    steps = {"a": (3, 7), "b": (7, -3)} if weights == "size" else {"a": (2, 3), "b": (5, -1), "c": (9, -2)}
    problem = ft.Mean(bounds=(0.0, 10.0))
    silos = {name: np.full(rows, 5.0 + 0.01 * z) for name, (rows, z) in steps.items()}
    algorithm = ft.Personalized(weights=weights, lattice=0.01, max_updates=5)
    result = ft.solve(problem, problem.start(5.0), silos, algorithm)
    assert result.status is ft.Status.CANCELLATION
    assert result.updates == 0
    assert result.law == problem.start(5.0)


@pytest.mark.parametrize("weights", ["size", "uniform", "given"])
def test_the_lattice_average_is_the_exact_one_rounded_once(weights: str) -> None:
    """The nearest lattice point to the rational average, half to even, in every order of the silos."""
    rng = np.random.default_rng(6)
    problem = ft.Mean(bounds=(0.0, 10.0))
    zeros, draws = 0, 400
    for _ in range(draws):
        rows = rng.integers(1, 50, size=rng.integers(1, 5)).tolist()
        told = rng.integers(-40, 41, size=len(rows)).tolist()
        if rng.random() < 0.5:  # a second half that cancels the first
            rows, told = rows * 2, told + [-z for z in told]
        sizes = {f"silo {j}": count for j, count in enumerate(rows)}
        steps = dict(zip(sizes, told, strict=True))
        given = {name: (count + 0.5) / 7 for name, count in sizes.items()}
        spacing = float(rng.choice([0.01, 0.1, 0.3, 1e-7, 0.25, 1 / 3]))
        query = FitQuery(
            problem=problem,
            law=problem.start(5.0),
            n=sum(rows),
            update=0,
            radius=64.0,
            exhaustive=False,
            weights=given if weights == "given" else Weighting(weights),
            rule=RetirementRule(lattice=spacing),
            retiring=True,
        )
        answers = {name: fit_answer(query, z) for name, z in steps.items()}
        alpha = {"size": sizes, "uniform": dict.fromkeys(sizes, 1), "given": given}[weights]
        active = [name for name, z in steps.items() if z]
        total = sum((Fraction(alpha[name]) * steps[name] for name in active), Fraction(0))
        mass = sum((Fraction(alpha[name]) for name in active), Fraction(0)) or Fraction(1)
        pooled = query.pool(answers, sizes)
        eps = pooled.eps
        assert pooled.steps == (round(16 * total / mass),)
        assert eps[0] == float(Fraction(spacing) / 16 * round(16 * total / mass))
        assert decode(query.pooled_code, encode(query.pooled_code, pooled)).steps == pooled.steps
        order = rng.permutation(list(sizes)).tolist()
        assert query.pool({name: answers[name] for name in order}, sizes).eps.tobytes() == eps.tobytes()
        zeros += total == 0
    assert 0.3 * draws < zeros < 0.7 * draws


def fit_answer(query: FitQuery, steps: int) -> FitAnswer:
    assert query.lattice is not None
    return FitAnswer(
        outcome=FitOutcome.FITTED if steps else FitOutcome.ZERO,
        eps=query.lattice.eps((steps,)),
        origin=None if query.retiring else Sums((0,), query.shifts),
        steps=(steps,),
    )


@pytest.mark.parametrize("retiring", [True, False])
def test_a_lattice_fit_is_sent_as_integers_within_the_ball(retiring: bool) -> None:
    """Fixed-width integers up to radius/lambda, not 64-bit floats; the width tells nothing of the fit.

    EIF sums are sent only where they are used: not by silos that retire.
    """
    problem = ft.Mean(bounds=(0.0, 10.0))
    query = FitQuery(
        problem=problem,
        law=problem.start(5.0),
        n=10,
        update=0,
        radius=64.0,
        exhaustive=False,
        weights=Weighting.SIZE,
        rule=RetirementRule(lattice=0.01),
        retiring=retiring,
    )
    lengths = set()
    for steps in (-6400, -1, 0, 3, 6400):
        answer = fit_answer(query, steps)
        bits = encode(query.answer_code, answer)
        lengths.add(bits.length)
        again = decode(query.answer_code, bits)
        assert (again.outcome, again.steps, again.eps.tolist()) == (
            answer.outcome,
            (steps,),
            answer.eps.tolist(),
        )
    origin = 0 if retiring else fixed_width(10 << GRID_BITS)
    assert lengths == {2 + fixed_width(6400) + origin}
    assert query.lattice is not None
    assert query.lattice.steps(np.array([64.0])) == (6400,)
    assert query.lattice.steps(np.array([64.01])) == (6400,)  # never beyond the ball


def test_a_lattice_fit_whose_outcome_does_not_agree_is_refused() -> None:
    problem, silos = opposed_silos()
    query = FitQuery(
        problem=problem,
        law=problem.start(5.0),
        n=sum(map(len, silos.values())),
        update=0,
        radius=64.0,
        exhaustive=False,
        weights=Weighting.SIZE,
        rule=RetirementRule(lattice=0.01),
        retiring=True,
    )
    for outcome, steps in ((FitOutcome.ZERO, 3), (FitOutcome.FITTED, 0)):
        bits = encode(query.answer_code, replace(fit_answer(query, steps), outcome=outcome))
        with pytest.raises(DecodeError, match="does not agree"):
            decode(query.answer_code, bits)


def test_no_progress_is_named_apart() -> None:
    problem, silos = opposed_silos()
    result = ft.solve(
        problem, problem.start(5.25), silos, ft.LocalAverage(weights="uniform", progress_tolerance=0.6)
    )
    assert result.status is ft.Status.NO_PROGRESS
    assert result.residual is not None
    assert result.residual > 0


def test_separated_local_outcomes_end_the_run_and_are_never_averaged() -> None:
    case, silos = two_arm_silos()
    name = next(iter(silos))
    rows = {k: v.copy() for k, v in silos[name].items()}
    rows["outcome"] = np.full_like(rows["outcome"], 10.0)  # at the bound: no finite fit
    for algorithm in (ft.LocalAverage(), ft.Personalized(lattice=0.01)):
        result = ft.solve(case.problem, case.law, {**silos, name: rows}, algorithm)
        assert result.status is ft.Status.BOUNDARY_FIT
        assert result.updates == 0


def test_infeasible_average_returns_the_unchanged_law() -> None:
    problem = ft.Mean(bounds=(0.0, 10.0))
    silos = {"a": np.array([0.0, 0.0]), "b": np.array([10.0])}

    AnyMean: Any = ft.Mean  # final, but a test may narrow it

    class Narrow(AnyMean):
        """A problem whose admissible set is a shell: fits are in it, their average is not."""

        def admits(self, law: object, eps: np.ndarray) -> bool:  # noqa: ARG002
            return abs(float(eps[0])) > 4

    narrow = Narrow(bounds=problem.bounds)
    result = ft.solve(narrow, narrow.start(5.0), silos, ft.LocalAverage(weights={"a": 0.6, "b": 0.4}))
    assert result.status is ft.Status.INFEASIBLE
    assert result.updates == 0


def test_every_silo_that_took_part_answered_with_fixed_length() -> None:
    """The length of a fit message tells nothing of the fit."""
    case, silos = two_arm_silos()
    result = ft.solve(case.problem, case.law, silos, ft.Personalized(lattice=0.001, max_updates=3))
    lengths = {
        reply.payload.length
        for exchange in result.transcript.exchanges
        for reply in map(messages.decode_reply, exchange.replies.values())
        if isinstance(reply, Answered)
    }
    assert len(lengths) == 1
