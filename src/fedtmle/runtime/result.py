"""A result: the estimate, its trajectory and its certificate; complete, immutable, plain data on request.

Of a run that failed, `how_far` says how far it got.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedtmle.algorithms.base import arithmetic_error
from fedtmle.errors import InputError, Reached
from fedtmle.layout import element, table, text
from fedtmle.protocol.outcome import ActiveSilos, SiteTest, Smoothness, Status, Visit
from fedtmle.protocol.query import KnownLaw, Phase, Query
from fedtmle.runtime.ledger import Transcript
from fedtmle.runtime.rows import LocalOutcome
from fedtmle.runtime.session import Account
from fedtmle.theory.averaging import Averaging
from fedtmle.theory.path import LOSS_ROUNDING, Basis, Constant
from fedtmle.theory.statistical import Distance, Remainder, distance_to_convergence
from fedtmle_core.journal import Document
from fedtmle_core.types import Array

WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The course of the run, query by query, and the updates it accepted.

    ``residual`` and ``loss`` hold one number per update k = 0..K. ``residual`` is what the parties learned
    (for `Coded` the rounded norm, within a quarter of the tolerance; None where they learned nothing). If the
    run was observed (`solve(..., observe=True)`), it is the exact one, and the pooled loss is there too, by
    update and by round.
    """

    points: tuple[Visit, ...]
    accepted: tuple[tuple[float, ...], ...]
    residual: tuple[float | None, ...]
    loss: tuple[float, ...] | None = None
    loss_by_round: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class BoundCheck:
    """One realised quantity beside its bound; ``slack`` is bound over realised, None if either is unknown."""

    name: str
    realised: float
    bound: float | None
    slack: float | None
    statement: str  # the paper's label
    basis: Basis | None


@dataclass(frozen=True, kw_only=True)
class RunCertificate:
    """The statements proved about a run, the assumptions behind them, and the slack of each bound.

    The fields up to ``assumptions`` are the algorithm's statement. They are None for `Personalized`, where
    no party knows a pooled residual. ``descent`` has the pooled loss change of each update, if observed.
    ``distance`` is that of psi from its value at convergence, and ``remainder`` has the terms of
    thm:statistical.
    """

    tolerance: float | None = None
    residual_bound: float | None = None
    arithmetic: float | None = None
    residual_bounds: tuple[float, ...] | None = None
    smoothness: Smoothness | None = None
    spacing: float | None = None
    coordinates: str = "raw"
    history_bits: int | None = None
    assumptions: tuple[str, ...] = ()
    checks: tuple[BoundCheck, ...] = ()
    constants: tuple[Constant, ...] = ()
    descent: tuple[float, ...] | None = None
    averaging: tuple[Averaging, ...] | None = None
    distance: Distance | None = None
    remainder: Remainder | None = None

    def __str__(self) -> str:
        """Return a table of at most 80 columns."""
        lines = [f"{'':23} {'realised':>10} {'bound':>10} {'slack':>9}  rests on"] if self.checks else []
        for line in self.checks:
            bound = "open" if line.bound is None else f"{line.bound:.4g}"
            slack = "" if line.slack is None else f"{line.slack:.3g}x"
            basis = line.basis or ""
            lines.append(f"{line.name:23} {line.realised:>10.5g} {bound:>10} {slack:>9}  {basis}".rstrip())
        if self.descent:
            rises = sum(change > LOSS_ROUNDING for change in self.descent)
            lines.append(f"the pooled loss rose in {rises} of {len(self.descent)} update(s)")
        lines += [f"{c.name} = {c.value:.4g} ({c.basis})" for c in self.constants]
        lines += self.assumptions
        return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the bounds, their basis, and the assumptions."""
        parts = []
        if self.residual_bound is not None and self.tolerance is not None:
            statement = f"Residual at most {self.residual_bound:.2g} (asked: {self.tolerance:.2g})."
            parts.append(text("p", statement))
        if self.smoothness is not None:
            parts.append(text("p", f"Smoothness {self.smoothness.value:.4g} ({self.smoothness.basis})."))
        if self.checks:
            rows = [
                [
                    line.name,
                    f"{line.realised:.5g}",
                    "open" if line.bound is None else f"{line.bound:.4g}",
                    line.basis or "",
                    line.statement,
                ]
                for line in self.checks
            ]
            parts.append(table(["", "realised", "bound", "rests on", "statement"], rows))
        parts += [text("p", f"{c.name} = {c.value:.4g} ({c.basis})") for c in self.constants]
        if self.assumptions:
            parts.append(element("ul", "".join(text("li", line) for line in self.assumptions)))
        return element("div", "".join(parts))


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of an algorithm: the estimate, how exactly it was computed, and its cost.

    `rounds` and `bits` are the paper's R and B and count targeting alone; ``account`` has calibration and
    closing as well.

    Parameters
    ----------
    names
        The names of psi's coordinates.
    psi
        The estimate, shape (d,). None for `Personalized`, whose estimates are in ``silos``.
    covariance
        Its covariance, shape (d, d).
    residual
        The norm of the pooled EIF mean at ``law``.
    residual_kind
        Whether the residual was computed or is a certified bound.
    status
        How the run ended.
    law
        The last law.
    n
        The number of records.
    sizes
        The records of each silo, None where masks hide them.
    steps
        Gradient steps.
    updates
        Accepted updates.
    trajectory
        Where the run went.
    certificate
        What was proved about the run.
    account
        Rounds, bits and bytes.
    transcript
        Every message.
    retired_at
        The update at which each silo retired; empty under masks, where nobody knows who did.
    silos
        Each silo's own outcome.
    active
        For each update of `Personalized`, how many silos still fitted.
    populations
        Whether the silos look like draws from one population, if that was asked.

    Examples
    --------
    >>> result.run.status.name
    'CONVERGED'
    """

    names: tuple[str, ...]
    psi: Array | None
    covariance: Array | None
    residual: float | None
    residual_kind: str
    status: Status
    law: Any
    n: int
    sizes: Mapping[str, int | None]  # None under masks, where nobody knows them
    steps: int
    updates: int
    trajectory: Trajectory
    certificate: RunCertificate | None
    account: Account
    transcript: Transcript
    retired_at: Mapping[str, int | None]  # tau_m in an open personalised run, None if the silo never left
    silos: Mapping[str, LocalOutcome]  # each silo's own estimate in a personalised run in this process
    active: tuple[ActiveSilos, ...] = ()  # A_k of each update of a personalised run
    populations: SiteTest | None = None  # whether the silos come from one population, if it was asked

    @property
    def rounds(self) -> int:
        """R: upload-broadcast rounds of targeting."""
        return self.account.rounds[Phase.TARGETING]

    @property
    def bits(self) -> int:
        """B: bits of all numerical messages and control flags of targeting, over all links."""
        return self.account.bits(Phase.TARGETING)

    @property
    def std_error(self) -> Array | None:
        """Standard errors of psi, shape (d,)."""
        return None if self.covariance is None else np.sqrt(np.diag(self.covariance))

    def __repr__(self) -> str:
        """The estimates, the ending and the cost, on a few lines."""
        lines = [f"{self.status.value} ({self.status.name})"]
        if self.psi is not None and self.std_error is not None:
            lines += [
                f"  {name} = {value:.6g} (SE {error:.3g})"
                for name, value, error in zip(self.names, self.psi, self.std_error, strict=True)
            ]
        for name, local in self.silos.items():
            when = "unfinished" if local.retired_at is None else f"retired at update {local.retired_at}"
            lines.append(f"  {name}: {when}, psi = {np.array2string(local.estimate.psi, precision=6)}")
        if self.residual is not None:
            lines.append(f"  residual {self.residual:.3g} ({self.residual_kind})")
        if self.populations is not None:
            tested = self.populations
            test = f"chi2 = {tested.statistic:.3g}, df = {tested.df}, p = {tested.p_value:.3g}"
            lines.append(f"  one population of all silos: {test}")
        lines.append(f"  n = {self.n}, {len(self.sizes)} silo(s), {self.rounds} rounds, {self.bits:,} bits")
        if self.certificate is not None and self.certificate.constants:  # the run was observed
            lines += ["", str(self.certificate)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the estimates, the ending, the cost and the certificate."""
        parts = []
        if self.psi is not None and self.std_error is not None:
            numbers = zip(self.names, self.psi, self.std_error, strict=True)
            rows = [[name, f"{value:.6g}", f"{error:.3g}"] for name, value, error in numbers]
            parts.append(table(["", "estimate", "std. error"], rows))
        if self.silos:
            rows = [
                [name, "-" if local.retired_at is None else str(local.retired_at)]
                for name, local in self.silos.items()
            ]
            parts.append(table(["silo", "retired at update"], rows))
        parts.append(text("p", self.status.value))
        cost = f"n = {self.n:,}, {len(self.sizes)} silo(s), {self.rounds} rounds, {self.bits:,} bits"
        parts.append(text("p", cost))
        if self.certificate is not None:
            parts.append(self.certificate._repr_html_())
        return element("div", "".join(parts))

    def contrast(self, weights: Sequence[float]) -> tuple[float, float]:
        """Return the estimate and standard error of a linear combination of psi's coordinates."""
        if self.psi is None or self.covariance is None:
            raise InputError("contrast: a personalised run has no pooled estimate; see result.silos")
        w = np.asarray(weights, dtype=np.float64)
        if w.shape != self.psi.shape:
            raise InputError(f"weights: expected {len(self.names)} numbers, one per {self.names}")
        return float(w @ self.psi), math.sqrt(float(w @ self.covariance @ w))

    def to_dict(self) -> Document:
        """Return plain data for JSON, without the law, the transcript and the silos' own estimates."""
        return {
            "names": list(self.names),
            "psi": _plain(self.psi),
            "covariance": _plain(self.covariance),
            "std_error": _plain(self.std_error),
            "residual": _plain(self.residual),
            "residual_kind": self.residual_kind,
            "status": self.status.name.lower(),
            "status_text": self.status.value,
            "converged": self.status.is_converged,
            "n": self.n,
            "sizes": dict(self.sizes),
            "rounds": self.rounds,
            "bits": self.bits,
            "steps": self.steps,
            "updates": self.updates,
            "account": self.account.to_dict(),
            "transcript": self.transcript.digest(),
            "certificate": None if self.certificate is None else _plain(asdict(self.certificate)),
            "trajectory": _plain(asdict(self.trajectory)),
            "retired_at": dict(self.retired_at),
            **({"active": [asdict(each) for each in self.active]} if self.active else {}),
        }


def _plain(value: object) -> object:
    """Return ``value`` with arrays and tuples as lists, and infinities and NaN as None."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# How far a failed run got: the last pooled estimate, and its distance from convergence.

NOT_BEGUN = "targeting had not begun"
NO_RESIDUAL = "the residual of its law was not pooled"

Heard = tuple[Query, object]  # a query and what was pooled for it


def how_far(heard: Sequence[Heard], phases: Sequence[Phase]) -> Reached:
    """Return how far a run got, whose completed rounds had these phases.

    ``heard`` has the rounds in which a law was moved or closed. The residual at a law bounds the distance of
    psi there from its value at convergence (`theory.statistical`).
    """
    phase = phases[-1].value if phases else ""
    parts = [each for query, pooled in heard for each in zip(query.members, query.split(pooled), strict=True)]
    known = [law for query, pooled in parts if (law := query.known_law(pooled)) is not None]
    last = next((each for each in reversed(known) if each.estimate is not None), known[-1] if known else None)
    if last is None:
        begun = any(query.phase is Phase.TARGETING for query, _ in parts)
        return Reached(rounds=len(phases), phase=phase, reason=NO_RESIDUAL if begun else NOT_BEGUN)
    distance, estimate = _distance(last, known), last.estimate
    return Reached(
        rounds=len(phases),
        phase=phase,
        names=last.problem.names,
        is_initial=last.is_initial,
        estimate=None if estimate is None else tuple(estimate.psi.tolist()),
        covariance=() if estimate is None else tuple(map(tuple, estimate.covariance.tolist())),
        bounds=distance.bounds,
        reason=distance.reason or "",
    )


def _distance(at: KnownLaw, known: Sequence[KnownLaw]) -> Distance:
    """Return how far psi at a law may be from its value at convergence, by the residual pooled there."""
    residuals = next((each.residuals for each in known if each.residuals and each.law is at.law), None)
    if residuals is None:
        return Distance(reason=NO_RESIDUAL)
    arithmetic = arithmetic_error(at.problem, at.law)
    bounds = at.problem.convergence_bounds(at.law)
    return distance_to_convergence([each + arithmetic for each in residuals], bounds)
