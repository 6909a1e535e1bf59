"""The certificate of a run: what was realised, beside what the theorems allow.

Without the rows the server knows R, B, S, K, H_K and the certified residual, but not Delta or kappa, so
most bounds stay open. With the rows at hand (`solve` or `run` with ``observe=True``) all are evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.outcome import Certificate, Query, Smoothness
from fedtmle.algorithms.personalized import Personalized
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.coded import RoundedGradientQuery
from fedtmle.protocol.fits import FitQuery, Weighting
from fedtmle.protocol.lattice import Lattice
from fedtmle.protocol.messages import Answered
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import Link, Phase, Problem
from fedtmle.runtime.markup import element, table, text
from fedtmle.runtime.session import Finished
from fedtmle.runtime.transcript import Transcript
from fedtmle.theory.averaging import Averaging, averaging_rounds, personal_checks, personal_constants
from fedtmle.theory.checks import (
    LOSS_ROUNDING,
    Check,
    Cost,
    check,
    coded_checks,
    open_checks,
    run_constants,
)
from fedtmle.theory.constants import SMOOTHNESS_BASIS, Basis, Constant
from fedtmle.theory.fits import FitRound, Uploaded, follow_fits
from fedtmle.theory.path import follow

WIDTH = 80
OPEN = "Delta and kappa are open: observe the run, or count two loss messages"
DISPROVED = "beta: a step decreased the loss by less than beta implies; no bound is proved"
NOISE_RULE = "the noise rule retires silos with a gap above zero: outside the theorem"


@dataclass(frozen=True, kw_only=True)
class RunCertificate:
    """What was proved about a run, what it rests on, and how far the run stayed below its bounds.

    The first fields are the algorithm's own statement; None for `Personalized`, where no party knows
    a pooled residual. ``descent`` is the pooled loss change of each update, where observed.
    """

    tolerance: float | None = None
    residual_bound: float | None = None
    arithmetic: float | None = None
    smoothness: Smoothness | None = None
    spacing: float | None = None
    coordinates: str = "raw"
    history_bits: int | None = None
    assumptions: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    constants: tuple[Constant, ...] = ()
    descent: tuple[float, ...] | None = None
    averaging: tuple[Averaging, ...] | None = None

    def __str__(self) -> str:
        """A table of at most 80 columns."""
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
        """What a notebook shows: what is proved, what it rests on, and what stays open."""
        parts = []
        if self.residual_bound is not None and self.tolerance is not None:
            said = f"Residual at most {self.residual_bound:.2g} (asked: {self.tolerance:.2g})."
            parts.append(text("p", said))
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
    problem: Problem,
    law: Any,
    algorithm: AbstractAlgorithm,
    finished: Finished,
    *,
    rows: Mapping[str, Any] | None = None,
    loss: Sequence[float] | None = None,
    plan: Plan | None = None,
) -> RunCertificate | None:
    """The certificate of a session that began at ``law``; ``rows`` by silo and ``loss`` if observed.

    ``plan`` is the session's where more than the algorithm was run in it: a whole study.
    """
    own = finished.outcome.certificate
    if isinstance(algorithm, Coded) and own is not None:
        return _coded(problem, law, algorithm, finished, own, rows, plan)
    if isinstance(algorithm, Personalized):
        return None if rows is None else _personalized(problem, law, algorithm, finished, rows)
    if own is None:
        return None
    outcome = finished.outcome
    asked = own.tolerance if outcome.status.is_converged else None  # no theorem says that it is reached
    return replace(
        _stated(own),
        checks=tuple(check("residual r^K", outcome.residual, asked, "eq:eif-equation", Basis.BOUND)),
        descent=None if loss is None else tuple(b - a for a, b in itertools.pairwise(loss)),
    )


def _stated(own: Certificate) -> RunCertificate:
    """The algorithm's own statement, with nothing beside it yet."""
    return RunCertificate(
        tolerance=own.tolerance,
        residual_bound=own.residual_bound,
        arithmetic=own.arithmetic,
        smoothness=own.smoothness,
        spacing=own.spacing,
        coordinates=own.coordinates,
        history_bits=own.history_bits,
        assumptions=own.assumptions,
    )


def _coded(
    problem: Problem,
    law: Any,
    algorithm: Coded,
    finished: Finished,
    own: Certificate,
    rows: Mapping[str, Any] | None,
    plan: Plan | None,
) -> RunCertificate:
    outcome = finished.outcome
    if own.smoothness is None or own.history_bits is None:
        raise AssertionError("a coded run states its smoothness and history")
    cost = Cost(
        M=len(finished.sizes),
        d=problem.dim,
        R=finished.account.rounds[Phase.TARGETING],
        bits=finished.account.bits(Phase.TARGETING),
        S=outcome.steps,
        K=outcome.updates,
        history_bits=own.history_bits,
        tolerance=own.tolerance,
        residual_bound=own.residual_bound,
        fixed_width=algorithm.fixed_width,
        one_step=algorithm.inner == "step",
    )
    if rows is None:
        return replace(_stated(own), checks=open_checks(cost), assumptions=(*own.assumptions, OPEN))
    transcript, sizes = finished.transcript, finished.sizes
    lattice = (
        heard_lattice(problem, law, algorithm, transcript, sizes)
        if plan is None
        else heard_lattice(plan.subject, plan.law, plan.algorithm, transcript, sizes)
    )
    path = follow(problem, law, rows, outcome.trajectory, outcome.accepted, lattice)
    beta = Constant(name="beta", value=own.smoothness.value, basis=SMOOTHNESS_BASIS[own.smoothness.basis])
    known = run_constants(path, lattice, beta)
    fits = zip(path.origins(), path.endpoints(), strict=False)
    return replace(
        _stated(own),
        assumptions=own.assumptions if known.descends else (*own.assumptions, DISPROVED),
        checks=coded_checks(path, lattice, cost, known),
        constants=tuple(known),
        descent=tuple(float(path.loss[end] - path.loss[origin]) for origin, end in fits),
    )


def _personalized(
    problem: Problem, law: Any, algorithm: Personalized, finished: Finished, rows: Mapping[str, Any]
) -> RunCertificate:
    updates = finished.outcome.updates
    followed = personal_rounds(problem, law, algorithm, finished.transcript, rows, updates)
    exact = algorithm.lattice is None and algorithm.noise is None
    rounds = averaging_rounds(followed, lattice=algorithm.lattice, exact=exact)
    return RunCertificate(
        checks=personal_checks(followed, rounds, lattice=algorithm.lattice, covered=algorithm.noise is None),
        constants=personal_constants(followed),
        averaging=rounds,
        assumptions=() if algorithm.noise is None else (NOISE_RULE,),
    )


def personal_rounds(
    problem: Problem,
    law: Any,
    algorithm: Personalized,
    transcript: Transcript,
    rows: Mapping[str, Any],
    updates: int,
) -> tuple[FitRound, ...]:
    """Every round that made an update, followed on the rows."""
    sizes = {silo: problem.count(own) for silo, own in rows.items()}
    uploads = [
        Uploaded(fits={silo: answer.eps for silo, answer in answers.items()}, update=pooled.eps)
        for query, answers, pooled in heard(problem, law, algorithm, transcript, sizes)
        if isinstance(query, FitQuery)
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


def heard(
    problem: Problem,
    law: Any,
    algorithm: AbstractAlgorithm,
    transcript: Transcript,
    sizes: Mapping[str, int],
) -> Iterator[tuple[Query, dict[str, Any], Any]]:
    """The run again as the server heard it: each query, the decoded answers, and what was pooled."""
    links = {silo: Link() for silo in sizes}
    flow = algorithm.flow(problem, law, sum(sizes.values()))
    query = next(flow)
    for exchange in transcript.exchanges:
        replies = {silo: messages.decode_reply(reply) for silo, reply in exchange.replies.items()}
        answers = {
            silo: query.read_answer(BitReader(reply.payload.bits()), links[silo])
            for silo, reply in replies.items()
            if isinstance(reply, Answered)
        }
        if not answers:  # the greeting, or the close
            continue
        out = BitWriter()
        query.write_pooled(query.pool(answers, {silo: sizes[silo] for silo in answers}), out)
        pooled = query.read_pooled(BitReader(out.finish()))
        yield query, answers, pooled
        try:
            query = flow.send(pooled)
        except StopIteration:
            return


def heard_lattice(
    problem: Problem, law: Any, algorithm: AbstractAlgorithm, transcript: Transcript, sizes: Mapping[str, int]
) -> Lattice:
    """The lattice (h, beta, C) that the parties settled on."""
    for query, _, _ in heard(problem, law, algorithm, transcript, sizes):
        if isinstance(query, RoundedGradientQuery):
            return query.lattice
    raise AssertionError("a coded run has at least one rounded gradient")
