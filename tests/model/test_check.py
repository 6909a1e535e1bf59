"""The conformance suite passes what conforms and names what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fedtmle.errors import CheckFailedError, DataError, FedTMLEError, NumericalError
from fedtmle.model.check import FiniteLaw, check_problem
from fedtmle.model.check_case import CheckReport, Outcome
from fedtmle.model.leverage import Look, PersonRows, RowSpace
from fedtmle.model.problem import (
    AbstractProblem,
    Estimate,
    PoolableRows,
    mean_and_covariance,
    second_moment_shifts,
    second_moments,
)
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel, GeneralisedLinear, NoNormaliser
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Family, IntArray, Part, RowBound, packed_size
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.two_arm import TwoArm, TwoArmLaw

ATOMS = np.array([-1.0, 0.25, 0.5, 3.0])
MASSES = np.array([0.2, 0.4, 0.3, 0.1])


@dataclass(frozen=True)
class LogPartition(AbstractNormaliser):
    """A(eps) = log sum_i p_i e^(-eps D_i)."""

    masses: Array
    eif: Array

    def _tilted(self, eps: Array) -> Array:
        p = self.masses * np.exp(-eps[0] * self.eif)
        return p / p.sum()

    def value(self, eps: Array) -> float:
        return float(np.log(self.masses @ np.exp(-eps[0] * self.eif)))

    def gradient(self, eps: Array) -> Array:
        return np.array([-self._tilted(eps) @ self.eif])

    def hessian(self, eps: Array) -> Array:
        p = self._tilted(eps)
        return np.array([[p @ self.eif**2 - (p @ self.eif) ** 2]])

    def curvature_ceiling(self, C: Array) -> float:
        return float((C[0, 0] * np.ptp(self.eif)) ** 2 / 4)


@dataclass(frozen=True)
class TiltLaw:
    """The masses of the four atoms, and the accepted fluctuations."""

    masses: Array
    history: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Tilt(AbstractProblem[TiltLaw, IntArray], PoolableRows[IntArray]):
    """The paper's exponential tilt, p(eps) = p e^(-eps D) / Z, of four atoms' masses; Psi is the mean."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("mean",)

    def read(self, rows: object) -> IntArray:
        try:
            atoms = np.asarray(rows, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            raise DataError("expected one column of atoms") from None
        if atoms.ndim != 1 or not np.isin(atoms, range(4)).all():
            raise DataError("expected one column of atoms, numbered from 0 to 3")
        return atoms

    def concatenate(self, parts):
        return np.concatenate(parts)

    def count(self, rows: IntArray) -> int:
        return len(rows)

    def submodel(self, law: TiltLaw, rows: IntArray) -> AbstractSubmodel:
        eif = self.eif(law, rows, self._psi(law))
        return GeneralisedLinear(
            family=Family.LINEAR, X=np.ascontiguousarray(eif.T), bound=self.row_bound(law)
        )

    def losses(self, law: TiltLaw, rows: IntArray) -> Array:
        return -np.log(law.masses[rows])

    def eif(self, law: TiltLaw, rows: IntArray, psi: Array) -> Array:  # noqa: ARG002
        return (ATOMS[rows] - psi[0])[:, None]

    def moments(self, law: TiltLaw, rows: IntArray) -> Sums:
        return second_moments(self.eif(law, rows, self._psi(law)).T, (3,))

    def move(self, law: TiltLaw, eps: Array) -> TiltLaw:
        if not self.admits(law, eps):
            raise NumericalError("eps: expected a number below 8")
        p = law.masses * np.exp(-eps[0] * (ATOMS - self._psi(law)[0]))
        return TiltLaw(p / p.sum(), (*law.history, (float(eps[0]),)))

    def path(self, law: TiltLaw) -> tuple[tuple[float, ...], ...]:
        return law.history

    def admits(self, law: TiltLaw, eps: Array) -> bool:  # noqa: ARG002
        return bool(abs(eps[0]) < 8)

    def normaliser(self, law: TiltLaw) -> AbstractNormaliser:
        return LogPartition(law.masses, ATOMS - self._psi(law)[0])

    def row_bound(self, law: TiltLaw) -> RowBound:  # noqa: ARG002
        return RowBound(gradient=3, curvature=0)

    def moment_shifts(self, law: TiltLaw) -> tuple[int, ...]:  # noqa: ARG002
        return second_moment_shifts((3,))

    def finish(self, law: TiltLaw, pooled: Sums, n: int) -> Estimate:
        return Estimate(psi=self._psi(law), covariance=mean_and_covariance(pooled, 1, n)[1])

    def curvature(self, law: TiltLaw) -> Array:
        return self.normaliser(law).hessian(np.zeros(1))

    def accuracy(self, law: TiltLaw) -> float:  # noqa: ARG002
        return 1e-15

    @property
    def curvature_is_fixed(self) -> bool:
        return False

    @staticmethod
    def _psi(law: TiltLaw) -> Array:
        return np.array([law.masses @ ATOMS])


ROWS = np.random.default_rng(0).integers(0, 4, 60)
FINITE = FiniteLaw(
    support=np.arange(4), masses=MASSES, law=TiltLaw(MASSES), psi=lambda masses: np.array([masses @ ATOMS])
)
LAW = TiltLaw(np.array([0.3, 0.3, 0.2, 0.2]))


def check_tilt(problem: Tilt) -> CheckReport:
    return check_problem(problem, LAW, ROWS, finite=FINITE)


def two_arm_rows(n: int = 40) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        "outcome": rng.random(n),
        "treatment": (rng.random(n) < 0.5).astype(float),
        "Q1": rng.uniform(0.2, 0.8, n),
        "Q0": rng.uniform(0.2, 0.8, n),
        "g": rng.uniform(0.3, 0.7, n),
    }


def check_two_arm(problem: TwoArm) -> CheckReport:
    return check_problem(problem, TwoArmLaw(history=((0.1, -0.2),)), two_arm_rows())


def failed(report: CheckReport) -> set[str]:
    return {check.name for check in report.failures}


def outcome(report: CheckReport, name: str) -> Outcome:
    (check,) = [check for check in report.checks if check.name == name]
    return check.outcome


def unchecked(report: CheckReport) -> set[str]:
    return {check.name for check in report.checks if check.outcome is Outcome.NOT_CHECKED}


FINITE_LAW = {"psi is Psi", "D is centred", "D is the derivative of Psi"}
FINER = {"accuracy bounds the error"}


def test_a_conforming_problem_with_a_normaliser_passes_every_check():
    report = check_problem(Tilt(), LAW, ROWS, finite=FINITE, finer=(Tilt(), LAW))
    report.raise_if_failed()
    assert unchecked(report) == {"displacement of laws", "fixed curvature ceilings"}  # it has neither


def test_a_conforming_regression_passes_and_says_what_was_not_checked():
    report = check_two_arm(TwoArm(weight_ceiling=8.0))
    report.raise_if_failed()
    assert unchecked(report) == FINITE_LAW | FINER | {"curvature = -dPsi/deps"}
    assert "pooled mean is zero" in str(report)


def test_the_report_is_a_table_of_at_most_80_columns():
    for report in (check_tilt(Tilt()), check_tilt(Uncentred()), check_tilt(TightBound())):
        assert max(map(len, str(report).splitlines())) <= 80
        assert all(check.name in str(report) for check in report.checks)


def test_psi_of_one_coordinate_may_be_a_number():
    number = replace(FINITE, psi=lambda masses: float(masses @ ATOMS))
    check_problem(Tilt(), LAW, ROWS, finite=number).raise_if_failed()


def test_psi_of_another_shape_is_blamed_and_not_the_eif():
    wrong = replace(FINITE, psi=lambda masses: np.full(2, masses @ ATOMS))
    report = check_problem(Tilt(), LAW, ROWS, finite=wrong)
    assert failed(report) == FINITE_LAW
    said = "psi of the FiniteLaw: return an array of shape (1,), not (2,)"
    assert all(said in check.note for check in report.failures)


def test_failures_raise_a_typed_error_that_lists_them():
    with pytest.raises(CheckFailedError, match="D is centred") as caught:
        check_tilt(Uncentred()).raise_if_failed()
    assert isinstance(caught.value, FedTMLEError)
    assert "sums add up" not in str(caught.value)


def test_other_seeds_and_few_rows_pass_too():
    for seed in range(5):
        check_problem(Tilt(), LAW, ROWS, finite=FINITE, seed=seed).raise_if_failed()
        check_problem(Tilt(), LAW, [0, 3, 1], seed=seed).raise_if_failed()


# Broken problems: each names the checks that must catch it.


@dataclass(frozen=True)
class Doctored(AbstractSubmodel):
    """A submodel whose exact sums pass through ``change`` (units, parts)."""

    inner: AbstractSubmodel
    change: Callable[[int, Part, bool], int]
    dim: int
    is_whole: bool = True

    @property
    def n_rows(self) -> int:
        return self.inner.n_rows

    def take(self, rows: IntArray) -> Doctored:
        return replace(self, inner=self.inner.take(rows), is_whole=False)

    def sums(self, eps: Array, parts: Part) -> Sums:
        sums = self.inner.sums(eps, parts)
        labels = [Part.LOSS] * (Part.LOSS in parts)
        labels += [Part.GRADIENT] * self.dim * (Part.GRADIENT in parts)
        labels += [Part.HESSIAN] * packed_size(self.dim) * (Part.HESSIAN in parts)
        units = [self.change(u, label, self.is_whole) for u, label in zip(sums.units, labels, strict=True)]
        return Sums(tuple(units), sums.shifts)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        return self.inner.disclosed_rows(eps, part)

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        return self.inner.look(eps, part, enough=enough, space=space)

    def column_people(self, enough: int | None = None) -> IntArray:
        return self.inner.column_people(enough)

    def curvature_ceiling(self) -> Array:
        return self.inner.curvature_ceiling()


# TwoArm is final; a test may break it.
AnyTwoArm: Any = TwoArm


class WrongSign(AnyTwoArm):
    def submodel(self, law, rows):
        inner = super().submodel(law, rows)
        return dataclasses.replace(inner, X=-inner.X)


class WrongScale(AnyTwoArm):
    def submodel(self, law, rows):
        inner = super().submodel(law, rows)
        return dataclasses.replace(inner, X=(1 + 1e-6) * inner.X)


class WrongOffset(AnyTwoArm):
    def submodel(self, law, rows):
        inner = super().submodel(law, rows)
        return dataclasses.replace(inner, offset=inner.offset + 1e-6)


class WrongGradient(AnyTwoArm):
    def submodel(self, law, rows):
        return Doctored(
            super().submodel(law, rows), lambda u, part, _: u + (u >> 20) * (part is Part.GRADIENT), 2
        )


class WrongHessian(AnyTwoArm):
    def submodel(self, law, rows):
        return Doctored(
            super().submodel(law, rows), lambda u, part, _: u + (u >> 20) * (part is Part.HESSIAN), 2
        )


class LossAtZero(AnyTwoArm):
    def submodel(self, law, rows):
        return Doctored(super().submodel(law, rows), lambda u, part, _: u + (part is Part.LOSS), 2)


class NotAdditive(AnyTwoArm):
    def submodel(self, law, rows):
        return Doctored(super().submodel(law, rows), lambda u, _, whole: u + whole, 2)


class LowCeiling(AnyTwoArm):
    def submodel(self, law, rows):
        @dataclass(frozen=True)
        class Low(Doctored):
            def curvature_ceiling(self):
                return 0.8 * self.inner.curvature_ceiling()

        return Low(super().submodel(law, rows), lambda u, _part, _whole: u, 2)


class OtherGrid(AnyTwoArm):
    def row_bound(self, law):  # noqa: ARG002
        return RowBound(gradient=3, curvature=4)

    def submodel(self, law, rows):
        return dataclasses.replace(super().submodel(law, rows), bound=RowBound(gradient=5, curvature=8))


class DoesNotMove(AnyTwoArm):
    def move(self, law, eps):  # noqa: ARG002
        return law


class DriftsAtZero(AnyTwoArm):
    def move(self, law, eps):
        return super().move(law, eps + 1e-9)


class ForgetsARow(AnyTwoArm):
    def concatenate(self, parts):
        whole = super().concatenate(parts)
        return dataclasses.replace(
            whole, **{f.name: getattr(whole, f.name)[..., :-1] for f in dataclasses.fields(whole)}
        )


class ForgetsTheCovariates(AnyTwoArm):
    """D without its second term: the score still agrees, the covariance does not."""

    def eif(self, law, rows, psi):
        return super().eif(law, rows, psi) - (self._regression(law, rows) - psi[:, None]).T


class WrongMomentGrid(AnyTwoArm):
    def moment_shifts(self, law):
        return tuple(shift + 1 for shift in super().moment_shifts(law))


class Raises(AnyTwoArm):
    def losses(self, law, rows):  # noqa: ARG002
        raise IndexError("boom")


class Mutant(AnyTwoArm):
    """Honest, and of a class that can be changed."""


def mutated(method: str, change: Callable[..., Any], honest: type = Mutant) -> type:
    """Return a class like ``honest`` but for one method, now ``change(honest method, self, *arguments)``."""
    original = getattr(honest, method)
    call = original.fget if isinstance(original, property) else original

    def lie(self, *arguments):
        return change(call, self, *arguments)

    lies = property(lie) if isinstance(original, property) else lie
    return type(f"Lies_{method}", (honest,), {method: lies})


def scaled_psi(factor: float, shift: float = 0.0) -> Callable[..., Estimate]:
    def finish(honest, self, *arguments):
        estimate = honest(self, *arguments)
        return dataclasses.replace(estimate, psi=factor * estimate.psi + shift)

    return finish


def always(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def quoting(message: Callable[[Any, Exception], str]) -> Callable[..., Any]:
    """A `read` whose errors say what ``message`` makes of the rows and the honest error."""

    def read(honest, self, rows):
        try:
            return honest(self, rows)
        except DataError as error:
            raise DataError(message(rows, error)) from None

    return read


def shows_numpy(honest, self, rows):
    np.asarray(rows["outcome"], dtype=np.float64)  # numpy's message quotes what is no number
    return honest(self, rows)


def shows_cause(honest, self, rows):
    """The message is harmless, but the error that it is raised from quotes a value."""
    try:
        return honest(self, rows)
    except DataError as error:
        raise error from ValueError(f"{np.ravel(rows['outcome'])[0]}")


SCORE = {"score = D, pooled", "score = D, row by row"}
ROW_SCORE = {"score = D, row by row"}
MOVES = {"loss of moves = loss of the submodel"}
GRADIENT, HESSIAN = {"gradient of the rows' loss"}, {"Hessian of the rows' loss"}
BASE, ADD, POOL = {"base point p(0) = p"}, {"sums add up over rows"}, {"rows pool"}
CEILINGS, ADMITS, PATH = (
    {"fixed curvature ceilings"},
    {"admitted fluctuations"},
    {"path of accepted fluctuations"},
)
CURVATURE, ACCURACY, DISPLACEMENT = (
    {"curvature = -dPsi/deps"},
    {"accuracy is stated"},
    {"displacement of laws"},
)
READ, PSI = {"read quotes no value"}, {"psi is Psi"}

BROKEN_TWO_ARM = [
    (WrongSign, SCORE | MOVES | DISPLACEMENT),
    (WrongScale, SCORE | MOVES | DISPLACEMENT),
    (WrongOffset, SCORE | MOVES),
    (WrongGradient, SCORE | GRADIENT | HESSIAN | ADD | POOL),
    (WrongHessian, HESSIAN | ADD | POOL),
    (LossAtZero, BASE | ADD | POOL),
    (NotAdditive, BASE | ADD | POOL),
    (LowCeiling, {"curvature ceiling of the rows"}),
    (OtherGrid, {"row bound"}),
    (DoesNotMove, MOVES | PATH | ADMITS),
    (DriftsAtZero, BASE | MOVES | PATH),
    (ForgetsARow, POOL),
    (ForgetsTheCovariates, ROW_SCORE | {"closing message gives the covariance"}),
    (WrongMomentGrid, POOL),
    (Raises, BASE | MOVES | ADMITS),
    (mutated("finish", scaled_psi(2.0)), SCORE),
    (mutated("finish", scaled_psi(1.0, 1e-6)), SCORE),
    (mutated("displacement", lambda honest, *at: 2 * honest(*at)), DISPLACEMENT),
    (mutated("displacement", lambda honest, *at: -honest(*at)), DISPLACEMENT),
    (mutated("displacement", always(np.zeros(2))), DISPLACEMENT),
    (mutated("displacement", lambda honest, *at: honest(*at)[:1]), DISPLACEMENT),
    (mutated("path", always(())), PATH),
    (mutated("path", lambda honest, *at: honest(*at)[-1:]), PATH),
    (mutated("admits", always(True)), ADMITS),
    (mutated("admits", lambda _honest, _self, _law, eps: bool(np.isfinite(eps).all())), ADMITS),
    (mutated("admits", lambda _honest, _self, _law, eps: not eps.any()), ADMITS),
    (mutated("read", quoting(lambda rows, _: f"outcome {np.ravel(rows['outcome'])[-1]}")), READ),
    (mutated("read", quoting(lambda rows, _: f"g: {np.ravel(rows['g'])[-1]:.3g} is no probability")), READ),
    (mutated("read", quoting(lambda rows, error: f"{error}: {rows}")), READ),
    (mutated("read", shows_numpy), READ),
    (mutated("read", shows_cause), READ),
]


@pytest.mark.parametrize(("broken", "caught"), BROKEN_TWO_ARM)
def test_a_broken_regression_is_caught(broken, caught):
    assert failed(check_two_arm(broken(weight_ceiling=8.0))) == caught


class Uncentred(Tilt):
    def eif(self, law, rows, psi):
        return super().eif(law, rows, psi) + 1e-6


class WrongEif(Tilt):
    """Centred, and the score of its submodel, but not the derivative of Psi."""

    def eif(self, law, rows, psi):
        return 1.001 * super().eif(law, rows, psi)


class TightBound(Tilt):
    def row_bound(self, law):  # noqa: ARG002
        return RowBound(gradient=0, curvature=0)


class NoPartition(Tilt):
    def normaliser(self, law):  # noqa: ARG002
        return NoNormaliser(1)


class WrongPsi(Tilt):
    def finish(self, law, pooled, n):
        estimate = super().finish(law, pooled, n)
        return dataclasses.replace(estimate, psi=estimate.psi + 1e-6)


class WrongCovariance(Tilt):
    def finish(self, law, pooled, n):
        estimate = super().finish(law, pooled, n)
        return dataclasses.replace(estimate, covariance=estimate.covariance * (n - 1) / n)


def doctored_partition(method: str, change: Callable[[Any], Any]) -> type[Tilt]:
    """A tilt whose normaliser has one method changed."""

    class Partition(LogPartition):
        pass

    def changed(self, *args):
        return change(getattr(LogPartition, method)(self, *args))

    setattr(Partition, method, changed)

    class Broken(Tilt):
        def normaliser(self, law):
            return Partition(law.masses, ATOMS - self._psi(law)[0])

    return Broken


A_GRADIENT, A_HESSIAN = {"gradient of the normaliser"}, {"Hessian of the normaliser"}

BROKEN_TILT = [
    (Uncentred, MOVES | {"D is centred"}),
    (WrongEif, MOVES | {"D is the derivative of Psi"}),
    (TightBound, SCORE | MOVES | GRADIENT | HESSIAN | ADD | POOL | {"row bound"}),
    (NoPartition, MOVES | CURVATURE),
    (WrongPsi, SCORE | PSI),
    (mutated("finish", scaled_psi(2.0), Tilt), SCORE | PSI | CURVATURE),
    (mutated("curvature", lambda honest, *at: 100 * honest(*at), Tilt), CURVATURE),
    (mutated("curvature", lambda honest, *at: 1.001 * honest(*at), Tilt), CURVATURE),
    (mutated("accuracy", always(0.0), Tilt), ACCURACY),
    (WrongCovariance, {"closing message gives the covariance"}),
    (doctored_partition("value", lambda a: a + 1e-9), BASE),
    (doctored_partition("value", lambda a: (1 + 1e-7) * a), MOVES | A_GRADIENT),
    (doctored_partition("gradient", lambda g: (1 + 1e-7) * g), A_GRADIENT | A_HESSIAN),
    (doctored_partition("hessian", lambda h: (1 + 1e-7) * h), A_HESSIAN | CURVATURE),
    (doctored_partition("curvature_ceiling", lambda c: 0.1 * c), {"curvature ceiling of the normaliser"}),
]


@pytest.mark.parametrize(("broken", "caught"), BROKEN_TILT)
def test_a_broken_density_is_caught(broken, caught):
    assert failed(check_tilt(broken())) == caught


@pytest.mark.parametrize("eta", [np.nan, np.inf, -1e-9])
def test_an_accuracy_that_is_no_bound_is_caught(eta):
    assert failed(check_tilt(mutated("accuracy", always(eta), Tilt)())) >= ACCURACY


def transport_rows(n: int = 80) -> Array:
    return np.random.default_rng(7).normal(size=(n, 1))


def transport(problem: type[OptimalTransport] = OptimalTransport, **options: Any) -> OptimalTransport:
    return problem(destinations=[[-1.0], [1.5]], capacities=[0.4, 0.6], **options)


FLUCTUATIONS = [LogisticFluctuation(), ExponentialTilt()]

BROKEN_TRANSPORT = [
    (mutated("finish", scaled_psi(2.0), OptimalTransport), CURVATURE),
    (mutated("curvature", lambda honest, *at: 100 * honest(*at), OptimalTransport), CURVATURE),
    (mutated("curvature_is_fixed", always(True), OptimalTransport), CEILINGS),
    (mutated("accuracy", always(0.0), OptimalTransport), ACCURACY),
    (mutated("admits", always(True), OptimalTransport), ADMITS),
    (mutated("displacement", always(np.zeros(1)), OptimalTransport), DISPLACEMENT),
    (mutated("path", always(()), OptimalTransport), PATH),
]


@pytest.mark.parametrize("fluctuation", FLUCTUATIONS, ids=["logistic", "tilt"])
@pytest.mark.parametrize(("broken", "caught"), [(OptimalTransport, set()), *BROKEN_TRANSPORT])
def test_a_broken_transport_is_caught(broken, caught, fluctuation):
    problem = transport(broken, fluctuation=fluctuation)
    report = check_problem(problem, problem.start(transport_rows(40)[::-1]), transport_rows())
    assert failed(report) == caught


@pytest.mark.parametrize("fluctuation", FLUCTUATIONS, ids=["logistic", "tilt"])
def test_an_accuracy_below_the_error_of_the_quadrature_is_caught(fluctuation):
    pilot = transport_rows(40)[::-1]

    def check(problem: OptimalTransport) -> CheckReport:
        finer = transport(fluctuation=fluctuation, spacing=problem.spacing / 4)
        return check_problem(
            problem, problem.start(pilot), transport_rows(), finer=(finer, finer.start(pilot))
        )

    for spacing in (0.15, 0.4):
        report = check(transport(fluctuation=fluctuation, spacing=spacing))
        report.raise_if_failed()
        assert outcome(report, "accuracy bounds the error") is Outcome.PASSED
    liar = mutated("accuracy", lambda honest, *at: 1e-6 * honest(*at), OptimalTransport)
    assert failed(check(transport(liar, fluctuation=fluctuation, spacing=0.4))) >= FINER


def test_a_wrong_eif_that_is_its_own_score_needs_the_finite_law():
    report = check_problem(WrongEif(), LAW, ROWS)
    assert outcome(report, "score = D, row by row") is Outcome.PASSED
    assert outcome(check_tilt(WrongEif()), "D is centred") is Outcome.PASSED


def test_a_loss_without_a_ceiling_is_not_checked_for_one():
    class Counts(Tilt):
        def submodel(self, law, rows):
            inner: Any = super().submodel(law, rows)
            return dataclasses.replace(inner, family=Family.POISSON)

    report = check_tilt(Counts())
    assert outcome(report, "curvature ceiling of the rows") is Outcome.NOT_CHECKED


def test_differences_too_coarse_to_tell_anything_are_not_called_a_success():
    class Coarse(AnyTwoArm):
        def row_bound(self, law):  # noqa: ARG002
            return RowBound(gradient=40, curvature=45)

    assert outcome(check_two_arm(Coarse()), "gradient of the rows' loss") is Outcome.NOT_CHECKED
