"""The certificate of a run: the realised costs and residual beside the bounds of the theorems.

Without the rows the server knows R, B, S, K, H_K and the certified residual, but not Delta or kappa, so
most bounds stay open. With the rows at hand (`solve` or `run` with ``observe=True``) all are evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.local import Personalized
from fedtmle.protocol.fits import Weighting
from fedtmle.protocol.outcome import Certificate, Described, Personalised, Smoothness, Targeted
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import Phase, Problem
from fedtmle.runtime.markup import element, table, text
from fedtmle.runtime.replay import heard_rounds
from fedtmle.runtime.session import Finished
from fedtmle.runtime.transcript import Transcript
from fedtmle.theory.averaging import (
    Averaging,
    FitRound,
    Uploaded,
    averaging_rounds,
    follow_fits,
    personal_checks,
    personal_constants,
)
from fedtmle.theory.checks import (
    LOSS_ROUNDING,
    BoundCheck,
    Cost,
    check,
    coded_checks,
    open_checks,
    run_constants,
)
from fedtmle.theory.path import SMOOTHNESS_BASIS, Basis, Constant, follow

WIDTH = 80
OPEN = "Delta and kappa are open: observe the run, or count two loss messages"
DISPROVED = "beta: a step decreased the loss by less than beta implies; no bound is proved"
NOISE_RULE = "the noise rule retires silos with a gap above zero: outside the theorem"


@dataclass(frozen=True, kw_only=True)
class RunCertificate:
    """The statements proved about a run, the assumptions behind them, and the slack of each bound.

    The fields up to ``assumptions`` are the algorithm's statement. They are None for `Personalized`, where
    no party knows a pooled residual. ``descent`` has the pooled loss change of each update, if observed.
    """

    tolerance: float | None = None
    residual_bound: float | None = None
    arithmetic: float | None = None
    smoothness: Smoothness | None = None
    spacing: float | None = None
    coordinates: str = "raw"
    history_bits: int | None = None
    assumptions: tuple[str, ...] = ()
    checks: tuple[BoundCheck, ...] = ()
    constants: tuple[Constant, ...] = ()
    descent: tuple[float, ...] | None = None
    averaging: tuple[Averaging, ...] | None = None

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


def certify(
    plan: Plan,
    law: object,
    algorithm: AbstractAlgorithm,
    finished: Finished,
    *,
    rows: Mapping[str, object] | None = None,
    loss: Sequence[float] | None = None,
) -> RunCertificate | None:
    """Return the certificate of a session whose targeting by ``algorithm`` began at ``law``.

    ``rows`` by silo and ``loss`` are there if the run was observed.
    """
    outcome = finished.outcome
    if isinstance(outcome, Described):
        return None
    if isinstance(outcome, Personalised):
        if rows is None or not isinstance(algorithm, Personalized):
            return None
        return _personalized(plan, outcome, law, algorithm, finished, rows)
    if isinstance(algorithm, Coded):
        return _coded(outcome, law, algorithm, finished, rows)
    stated = outcome.certificate
    asked = stated.tolerance if outcome.status.is_converged else None  # no theorem says that it is reached
    return replace(
        _stated(stated),
        checks=tuple(check("residual r^K", outcome.residual, asked, "eq:eif-equation", Basis.BOUND)),
        descent=None if loss is None else tuple(b - a for a, b in itertools.pairwise(loss)),
    )


def _stated(stated: Certificate) -> RunCertificate:
    """Return the algorithm's own statement, without any bound of a theorem."""
    return RunCertificate(
        tolerance=stated.tolerance,
        residual_bound=stated.residual_bound,
        arithmetic=stated.arithmetic,
        smoothness=stated.smoothness,
        spacing=None if stated.lattice is None else float(stated.lattice.h),
        coordinates=stated.coordinates,
        history_bits=stated.history_bits,
        assumptions=stated.assumptions,
    )


def _coded(
    outcome: Targeted, law: object, algorithm: Coded, finished: Finished, rows: Mapping[str, object] | None
) -> RunCertificate:
    problem, stated = outcome.problem, outcome.certificate
    lattice = stated.lattice
    if stated.smoothness is None or stated.history_bits is None or lattice is None:
        raise AssertionError("a coded run states its smoothness, lattice and history")
    cost = Cost(
        M=len(finished.sizes),
        d=problem.dim,
        R=finished.account.rounds[Phase.TARGETING],
        bits=finished.account.bits(Phase.TARGETING),
        S=outcome.steps,
        K=outcome.updates,
        history_bits=stated.history_bits,
        tolerance=stated.tolerance,
        residual_bound=stated.residual_bound,
        fixed_width=algorithm.fixed_width,
        one_step=algorithm.inner == "step",
    )
    if rows is None:
        return replace(_stated(stated), checks=open_checks(cost), assumptions=(*stated.assumptions, OPEN))
    path = follow(problem, law, rows, outcome.trajectory, outcome.accepted, lattice)
    basis = SMOOTHNESS_BASIS[stated.smoothness.basis]
    known = run_constants(path, lattice, Constant(name="beta", value=stated.smoothness.value, basis=basis))
    fits = zip(path.origins(), path.endpoints(), strict=False)
    return replace(
        _stated(stated),
        assumptions=stated.assumptions if known.descends else (*stated.assumptions, DISPROVED),
        checks=coded_checks(path, lattice, cost, known),
        constants=tuple(known),
        descent=tuple(float(path.loss[end] - path.loss[origin]) for origin, end in fits),
    )


def _personalized(
    plan: Plan,
    outcome: Personalised,
    law: object,
    algorithm: Personalized,
    finished: Finished,
    rows: Mapping[str, object],
) -> RunCertificate:
    followed = personal_rounds(
        plan, outcome.problem, law, algorithm, finished.transcript, rows, outcome.updates
    )
    exact = algorithm.lattice is None and algorithm.noise is None
    rounds = averaging_rounds(followed, lattice=algorithm.lattice, exact=exact)
    return RunCertificate(
        checks=personal_checks(followed, rounds, lattice=algorithm.lattice, covered=algorithm.noise is None),
        constants=personal_constants(followed),
        averaging=rounds,
        assumptions=() if algorithm.noise is None else (NOISE_RULE,),
    )


def personal_rounds(
    plan: Plan,
    problem: Problem,
    law: object,
    algorithm: Personalized,
    transcript: Transcript,
    rows: Mapping[str, object],
    updates: int,
) -> tuple[FitRound, ...]:
    """Return every round that made an update, followed on the rows."""
    sizes = {silo: problem.count(table) for silo, table in rows.items()}
    uploads = [
        Uploaded(fits={silo: answer.eps for silo, answer in heard.answers.items()}, update=heard.pooled.eps)
        for heard in heard_rounds(plan, transcript, sizes)
        if heard.query.phase is Phase.TARGETING
    ]
    n, M = sum(sizes.values()), len(sizes)
    by_size = algorithm.weights == Weighting.SIZE
    return follow_fits(
        problem,
        law,
        rows,
        uploads[:updates],
        {silo: N / n if by_size else 1 / M for silo, N in sizes.items()},
        exact=algorithm.lattice is None and algorithm.noise is None,
        radius=algorithm.radius,
        exhaustive=algorithm.exhaustive,
    )
