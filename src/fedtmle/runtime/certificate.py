"""The certificate of a run, the realised costs and residual beside the bounds; and the replay that it
rests on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.local import Adaptive, Personalized
from fedtmle.errors import DecodeError, InputError, ProtocolError
from fedtmle.protocol import messages
from fedtmle.protocol.codes import Uplink
from fedtmle.protocol.fits import FitAverage, Weighting
from fedtmle.protocol.guard import declined, is_void, left_out, suppressed
from fedtmle.protocol.lattice import Lattice, floating
from fedtmle.protocol.messages import Answered, Ask, Begin, Close, Open
from fedtmle.protocol.outcome import Certificate, Described, Personalised, Status, Targeted
from fedtmle.protocol.plan import Follower, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import AnsweredQuery, Local, Phase, Problem, Query
from fedtmle.runtime.ledger import SELF, Transcript
from fedtmle.runtime.records import Keeper, Position
from fedtmle.runtime.result import BoundCheck, RunCertificate
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.session import Finished, run_embedded
from fedtmle.runtime.silo import MaskedLink, Silo
from fedtmle.theory import communication, personalized, statistical
from fedtmle.theory.averaging import (
    Averaging,
    FitRound,
    Uploaded,
    averaging_rounds,
    follow_fits,
    gaps,
    personal_loss_budget,
    smoothness_basis,
)
from fedtmle.theory.path import (
    LOSS_ROUNDING,
    SMOOTHNESS_BASIS,
    Basis,
    Constant,
    TargetingPath,
    first_gradient,
    follow,
    loss_budget,
    realised_smoothness,
    recentering,
    step_decreases_hold,
    weakest,
)
from fedtmle.theory.statistical import (
    Distance,
    Remainder,
    distance_to_convergence,
    history_of_doubles,
    remainder,
)
from fedtmle_core.signing import MaskKey
from fedtmle_core.types import IntArray

# Follow a recorded run again: the answers that the server received, or one silo's queries and answers.

_OTHER_ROWS = "silo '{}': its rows do not give the recorded answers"


@dataclass(frozen=True, kw_only=True)
class HeardRound:
    """One round at the server: the query, the decoded answers, and what was pooled.

    Under masks there are no answers of single silos.
    """

    query: Query
    answers: Mapping[str, Any]
    pooled: Any


def heard_rounds(plan: Plan, transcript: Transcript, sizes: Mapping[str, int | None]) -> Iterator[HeardRound]:
    """Follow a finished run again from its transcript, as the server did; the plan's silos are ``sizes``."""
    uplinks = {silo: Uplink() for silo in sizes}
    follower = Follower(plan, _pooled_rows(transcript))
    for exchange in transcript.exchanges:
        replies = {silo: messages.decode_reply(reply) for silo, reply in exchange.replies.items()}
        payloads = {s: reply.payload.bits() for s, reply in replies.items() if isinstance(reply, Answered)}
        if not payloads:  # the greeting, or the close
            continue
        query = follower.query
        if plan.is_masked:
            pooled = follower.hear(follower.pool_masked(payloads))
            yield HeardRound(query=query, answers={}, pooled=pooled)
            continue
        answers = {silo: uplinks[silo].decode(query.answer_code, bits) for silo, bits in payloads.items()}
        pooled = follower.hear(follower.pool(answers, {silo: sizes[silo] or 0 for silo in answers}))
        yield HeardRound(query=query, answers=answers, pooled=pooled)


def _pooled_rows(transcript: Transcript) -> int:
    """Return n, as the request of the first round says it."""
    requests = (messages.decode_request(data) for e in transcript.exchanges for data in e.requests.values())
    n = next((request.n for request in requests if isinstance(request, Begin)), None)
    if n is None:
        raise DecodeError("transcript: it has no first round")
    return n


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The queries in order, the silo's answers, and its rows as queries see them."""

    answered: tuple[AnsweredQuery, ...]
    local: LocalRows
    n: int  # rows over all silos


def replay(
    plan: Plan,
    rows: object,
    transcript: Transcript,
    silo: str,
    *,
    index: IntArray | None = None,
    policy: Policy | None = None,
    mask_key: MaskKey | None = None,
) -> Replayed:
    """Derive each query from the recorded broadcasts, as the silo did, and compute its answer again.

    Rows, or a study, that do not give the recorded answers are refused. The plan's digest is not compared:
    keys and dates in it change no answer. Masked answers are compared with the silo's ``mask_key`` only.
    """
    try:
        plan = _joined(plan, transcript, silo)
        read = plan.program.at(silo, rows)
        local = LocalRows(silo, read, plan.program.count(read), index)
        masks = _Masks(plan, silo, mask_key)
        answered, n = _follow(plan, transcript, silo, local, policy or UNGUARDED, masks)
    except ProtocolError:
        raise InputError("transcript: it does not follow from this study; was the study changed?") from None
    return Replayed(answered=answered, local=local, n=n)


def overhear(plan: Plan, transcript: Transcript, silo: str) -> tuple[AnsweredQuery, ...]:
    """Return the queries and one silo's answers, read from the transcript alone, as the server can."""
    joined = _joined(plan, transcript, silo)
    return _follow(joined, transcript, silo, None, UNGUARDED, _Masks(joined, silo))[0]


def _joined(plan: Plan, transcript: Transcript, silo: str) -> Plan:
    """Return the plan of the silos that took part in the recorded run."""
    absent = [request.absent for request, _ in _exchanges(transcript, silo) if isinstance(request, Begin)]
    if not absent or not plan.may_lack(absent[0]):
        return plan
    return plan.without(absent[0])


def rehearse(plan: Plan, rows: object, silo: str, *, policy: Policy | None = None) -> Replayed:
    """Return the queries that the plan would ask if this silo were the only one; nothing is sent."""
    alone = plan.alone(silo)
    keeper = Keeper() if policy is None else Keeper(policy=policy)
    finished = run_embedded(alone, [Silo(silo, alone, rows, keeper=keeper)])
    return replay(alone, rows, finished.transcript, silo, policy=policy)


class _Masks:
    """The masks of a recorded session, made again with the silo's key; without it, nothing is compared."""

    def __init__(self, plan: Plan, silo: str, mask_key: MaskKey | None = None) -> None:
        self._plan, self._position = plan, Position()
        self._link: MaskedLink | None = None
        if mask_key is not None and plan.is_masked:
            self._link = MaskedLink(plan, silo, self._position, mask_key=mask_key, key=None)

    def hear(self, request: messages.Request) -> None:
        """Hear a request as the silo did."""
        position = self._position
        if isinstance(request, Open):
            position.session = request.session
            if self._link is not None and request.plan != self._plan.digest:
                raise InputError("transcript: it is of another plan, so that its masks cannot be made again")
        elif isinstance(request, Begin):
            position.n = request.n
            position.heard.update(messages.encode(msgspec.structs.replace(request, first_row=0)))
        elif isinstance(request, Ask | Close):
            position.heard.update(messages.encode(request))

    def compare(
        self, follower: Follower, answer: object, local: LocalRows, reply: Answered, *, is_void: bool
    ) -> None:
        """Raise unless ``answer`` under its masks is what was sent; noise cannot be drawn again."""
        self._position.follower = follower
        if self._link is not None and follower.query.noise is None:
            again = self._link.answered(follower.masked_form, answer, local.n_rows, is_void=is_void)
            if again.payload != reply.payload:
                raise InputError(_OTHER_ROWS.format(local.name))


def _follow(
    plan: Plan,
    transcript: Transcript,
    silo: str,
    local: LocalRows | None,
    policy: Policy,
    masks: _Masks,
) -> tuple[tuple[AnsweredQuery, ...], int]:
    """Return one silo's answers, and n; if ``local`` rows are given, the answers must be theirs.

    Masked answers are computed from the rows again, and compared if the silo's ``masks`` can be made. Without
    rows there are none: nobody else can read them.
    """
    follower: Follower | None = None
    n, answered, answers = 0, [], _Answers(plan, local, policy, masks)
    for request, reply in _exchanges(transcript, silo):
        masks.hear(request)
        if isinstance(request, Begin):
            if local is not None:
                local.place(plan.first_row(silo, request.first_row))
            n, follower = request.n, Follower(plan, request.n)
        elif isinstance(request, Ask | Close):
            if follower is None:
                raise DecodeError("transcript: a round comes before the first")
            follower.hear(request.pooled.bits())
            if follower.outcome is not None:
                break
        if isinstance(reply, Answered):
            if follower is None:
                raise DecodeError("transcript: an answer comes before its question")
            answered += answers.read(follower, reply)
    return tuple(answered), n


class _Answers:
    """Reads the answers of one silo in their order, and compares them with its rows."""

    def __init__(self, plan: Plan, local: LocalRows | None, policy: Policy, masks: _Masks) -> None:
        self._is_masked = plan.is_masked
        self._local, self._policy, self._masks = local, policy, masks
        self._uplink, self._has_retired = Uplink(), False

    def read(self, follower: Follower, reply: Answered) -> list[AnsweredQuery]:
        """Return the answer of a round; none if nobody can read it, or if it was noise.

        There is none of a silo that has retired either: it is the same for all rows, and discloses nothing.
        """
        query, void = follower.query, False
        retired = query.retired_answer() if self._has_retired else None
        if not self._is_masked:
            answer = self._open(query, retired, reply)
        elif self._local is None:
            return []
        else:
            answer = _released(query, self._local, self._policy) if retired is None else retired
            void = follower.masked_form.may_be_void and is_void(query, self._local, self._policy)
            self._masks.compare(follower, answer, self._local, reply, is_void=void)
        self._has_retired = self._has_retired or query.retirement(answer) is not None
        return [AnsweredQuery(query=query, answer=answer)] if retired is None and not void else []

    def _open(self, query: Query, retired: object | None, reply: Answered) -> object:
        bits, before = reply.payload.bits(), replace(self._uplink)
        answer = self._uplink.decode(query.answer_code, bits)  # first: another study's cannot be decoded
        if self._local is not None:
            rest = declined(query, answer)
            again = _released(query, self._local, self._policy, rest) if retired is None else retired
            if before.encode(query.answer_code, again) != bits:
                raise InputError(_OTHER_ROWS.format(self._local.name))
        return answer


def _released(query: Query, local: Local, policy: Policy, declined: frozenset[int] = frozenset()) -> object:
    """Return the answer to a query as it leaves a silo under ``policy``, without the members ``declined``."""
    return suppressed(query, query.answer(local), policy, left_out(query, local, policy) | declined)


def _exchanges(transcript: Transcript, silo: str) -> Iterator[tuple[messages.Request, messages.Reply]]:
    # A transcript made from a silo's own ledger has no name for it.
    key = silo if any(silo in exchange.requests for exchange in transcript.exchanges) else SELF
    exchanges = [exchange for exchange in transcript.exchanges if key in exchange.requests]
    if not exchanges:
        raise InputError(f"transcript: it holds no message to silo '{silo}'")
    for exchange in exchanges:
        yield messages.decode_request(exchange.requests[key]), messages.decode_reply(exchange.replies[key])


# The certificate of a run: the realised costs and residual beside the bounds of the theorems.
#
# Without the rows the server knows R, B, S, K, H_K and the certified residual, but not Delta or kappa, so
# most bounds stay open. With the rows at hand (`solve` or `run` with ``observe=True``) all are evaluated.

OPEN = "Delta and kappa are open: observe the run, or count two loss messages"
DISPROVED = "beta: a step decreased the loss by less than beta implies; no bound is proved"
SECANT = "no theorem bounds the number of steps whose direction earlier gradients correct"
NOISE_RULE = "a silo left by the noise rule where its loss is not convex: its gap has no bound"


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
    if isinstance(algorithm, Adaptive):
        certificate = _adaptive(outcome, law, finished, rows)
    elif isinstance(algorithm, Coded):
        certificate = _coded(outcome, law, algorithm, finished, rows)
    else:
        stated = outcome.certificate
        asked = stated.tolerance if outcome.status.is_converged else None  # no theorem says it is reached
        checks = _check("residual r^K", outcome.residual, asked, "eq:eif-equation", Basis.BOUND)
        descent = None if loss is None else tuple(b - a for a, b in itertools.pairwise(loss))
        certificate = replace(_stated(stated), checks=tuple(checks), descent=descent)
    return replace(certificate, distance=_distance(outcome), remainder=_remainder(outcome, finished))


def _distance(outcome: Targeted) -> Distance | None:
    """Return how far psi may be from its value at convergence; None if nothing was targeted."""
    stated, problem = outcome.certificate, outcome.problem
    if outcome.status in (Status.ONE_STEP, Status.PRIVATE):
        return None
    residuals = stated.residual_bounds or (stated.residual_bound,) * problem.dim
    return distance_to_convergence(residuals, problem.convergence_bounds(outcome.law))


def _remainder(outcome: Targeted, finished: Finished) -> Remainder | None:
    """Return the terms of thm:statistical; None if the covariance is not finite, or has noise in it.

    Every party derives p^0, C and beta from the broadcasts, so that those to one silo are a prefix-free
    code of them: H_init is their length.
    """
    problem, covariance = outcome.problem, outcome.estimate.covariance
    if outcome.status is Status.PRIVATE or not np.isfinite(covariance).all():
        return None
    phases, down = (Phase.NUISANCE, Phase.CALIBRATION), finished.account.bits_down
    stated = outcome.certificate
    return remainder(
        n=finished.n,
        dim=problem.dim,
        initial_bits=max(sum(down[phase, silo] for phase in phases) for silo in finished.sizes),
        history_bits=(
            history_of_doubles(outcome.updates, problem.dim)
            if stated.history_bits is None
            else stated.history_bits
        ),
        residual=stated.residual_bound,
        std_error=math.sqrt(float(np.trace(covariance))),
        envelope=problem.envelope(outcome.law),
    )


def _stated(stated: Certificate) -> RunCertificate:
    """Return the algorithm's own statement, without any bound of a theorem."""
    return RunCertificate(
        tolerance=stated.tolerance,
        residual_bound=stated.residual_bound,
        arithmetic=stated.arithmetic,
        residual_bounds=stated.residual_bounds,
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
        one_step=not algorithm.is_adaptive(problem, law),
    )
    is_secant = algorithm.is_secant(problem, law)
    if rows is None or is_secant:
        unknown = SECANT if is_secant else OPEN
        return replace(_stated(stated), checks=_open_checks(cost), assumptions=(*stated.assumptions, unknown))
    path = follow(
        problem, law, rows, outcome.trajectory, outcome.accepted, lattice, stated.smoothness.by_step
    )
    basis = SMOOTHNESS_BASIS[stated.smoothness.basis]
    known = _run_constants(path, lattice, Constant(name="beta", value=stated.smoothness.value, basis=basis))
    fits = zip(path.origins(), path.endpoints(), strict=False)
    return replace(
        _stated(stated),
        assumptions=stated.assumptions if known.descends else (*stated.assumptions, DISPROVED),
        checks=coded_checks(path, lattice, cost, known),
        constants=tuple(known),
        descent=tuple(float(path.loss[end] - path.loss[origin]) for origin, end in fits),
    )


def _adaptive(
    outcome: Targeted, law: object, finished: Finished, rows: Mapping[str, object] | None
) -> RunCertificate:
    """Return the residual, and R beside the bound for one step per update, since every round descends."""
    stated = outcome.certificate
    if stated.smoothness is None or stated.lattice is None:
        raise AssertionError("an adaptive run states its smoothness and lattice")
    basis = SMOOTHNESS_BASIS[stated.smoothness.basis]
    R = float(finished.account.rounds[Phase.TARGETING])
    residual = _check(
        "residual r^K", stated.residual_bound, stated.tolerance, "eq:rounding-guarantee", Basis.BOUND
    )
    if rows is None:
        rounds = _check("rounds R", R, None, "future work, adaptive switching", basis)
        return replace(_stated(stated), checks=(*residual, *rounds), assumptions=(*stated.assumptions, OPEN))
    path = follow(outcome.problem, law, rows, outcome.trajectory, outcome.accepted, stated.lattice)
    delta = communication.scaled_tolerance(stated.lattice)
    bound = communication.one_step_round_bound(stated.smoothness.value, loss_budget(path).value, delta)
    fits = zip(path.origins(), path.endpoints(), strict=False)
    return replace(
        _stated(stated),
        checks=(*residual, *_check("rounds R", R, bound, "future work, adaptive switching", basis)),
        constants=(
            Constant(name="beta", value=stated.smoothness.value, basis=basis),
            loss_budget(path),
        ),
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
    rounds = averaging_rounds(followed, lattice=algorithm.lattice)
    open_gap = any(not math.isfinite(r.retired_bound) for r in followed)
    return RunCertificate(
        checks=personal_checks(followed, rounds),
        constants=_personal_constants(followed),
        averaging=rounds,
        assumptions=(NOISE_RULE,) if open_gap else (),
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
    uploads = list(_uploads(plan, transcript, rows, sizes))
    n, M = sum(sizes.values()), len(sizes)
    by_size = algorithm.weights == Weighting.SIZE
    return follow_fits(
        problem,
        law,
        rows,
        uploads[:updates],
        {silo: N / n if by_size else 1 / M for silo, N in sizes.items()},
        rule=algorithm.rule,
        solver=algorithm.solver,
        radius=algorithm.radius,
        exhaustive=algorithm.exhaustive,
    )


def _uploads(
    plan: Plan, transcript: Transcript, rows: Mapping[str, object], sizes: Mapping[str, int]
) -> Iterator[Uploaded]:
    """Yield each round of fits, of the silos that had not retired before it.

    Under masks no fit can be read, and each is computed again from the rows.
    """
    local = {silo: LocalRows(silo, table, sizes[silo]) for silo, table in rows.items()}
    fitting = dict.fromkeys(rows)
    for heard in heard_rounds(plan, transcript, sizes):
        if isinstance(heard.pooled, FitAverage):
            sent = heard.answers or {silo: heard.query.answer(local[silo]) for silo in fitting}
            fits = {silo: sent[silo].eps for silo in fitting}
            yield Uploaded(fits=fits, update=heard.pooled.eps)
            fitting = {silo: None for silo, fit in fits.items() if fit.any()}


# Realised quantities beside their bounds: of a coded run, then of a personalised one.


def _check(
    name: str, realised: float | None, bound: float | None, statement: str, basis: Basis
) -> Iterator[BoundCheck]:
    """Yield one check, or none if nothing was realised."""
    if realised is None or not np.isfinite(realised):
        return
    yield BoundCheck(
        name=name,
        realised=float(realised),
        bound=bound,
        slack=bound / realised if bound is not None and realised > 0 else None,
        statement=statement,
        basis=None if bound is None else basis,
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a coded run cost and certified, as every party knows it."""

    M: int
    d: int
    R: int
    bits: int
    S: int
    K: int
    history_bits: int
    tolerance: float
    residual_bound: float
    fixed_width: int | None  # J, where absolute integers were sent
    one_step: bool  # whether every step was an update at once


def _open_checks(cost: Cost) -> tuple[BoundCheck, ...]:
    """Return the checks of a run without its rows: Delta and kappa are unknown, so most bounds stay open."""
    return (
        *_check("residual bound", cost.residual_bound, cost.tolerance, "thm:communication", Basis.BOUND),
        *_check("rounds R", cost.R, None, "eq:main-communication", Basis.BOUND),
        *_check("steps S", cost.S, None, "eq:proof-energy-and-steps", Basis.BOUND),
        *_check("updates K", cost.K, cost.S, "eq:proof-rounds", Basis.BOUND),
        *_check("bits B", cost.bits, None, "eq:pathwise-bit-bound", Basis.BOUND),
        *_check("history bits H_K", cost.history_bits, None, "eq:history-length", Basis.BOUND),
    )


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of thm:communication for one run, in its coordinates."""

    beta: Constant  # the run's own
    realised: Constant
    kappa: Constant
    Delta: Constant
    G: Constant
    delta: float  # the tolerance in the run's coordinates
    descends: bool  # whether every step decreased the loss as a valid beta implies
    spread: float = 1.0  # the largest beta of a step over the smallest

    @property
    def effective_kappa(self) -> float:
        """kappa + 2 (beta_m - beta)^+, beta_m the realised slope of a silo's own gradient.

        Descent needs only the pooled smoothness. Where a silo's is larger, its variation is at most
        beta_m/beta times each step and (kappa + beta_m)/beta times each update, that is
        (2 + kappa'/beta) sqrt(6 beta Delta S) with this kappa'.

        Where the steps settle beta, those of a smaller one are longer: the sum of ||g~_r||/beta_r is at most
        sqrt(6 Delta S/min beta_r), and the variation (kappa + 2 beta_m) times that.
        """
        plain = self.kappa.value + 2 * max(0.0, self.realised.value - self.beta.value)
        whole = self.kappa.value + 2 * self.realised.value
        return max(plain, whole * math.sqrt(self.spread) - 2 * self.beta.value)

    def __iter__(self) -> Iterator[Constant]:
        scaled = Constant(
            name="delta/b", value=self.delta, basis=Basis.BOUND, note="in the run's coordinates"
        )
        yield from (self.beta, self.realised, self.kappa, self.Delta, self.G, scaled)


def _run_constants(path: TargetingPath, lattice: Lattice, beta: Constant) -> Constants:
    """Return the constants of a followed run; a beta that a step disproves is only assumed."""
    descends = step_decreases_hold(path, beta.value, LOSS_ROUNDING)
    return Constants(
        beta=beta if descends else replace(beta, basis=Basis.ASSUMED, note="disproved by a step"),
        realised=realised_smoothness(path),
        kappa=recentering(path),
        Delta=loss_budget(path),
        G=first_gradient(path),
        delta=communication.scaled_tolerance(lattice),
        descends=descends,
        spread=max(path.by_step, default=1.0) / min(path.by_step, default=1.0),
    )


def coded_checks(
    path: TargetingPath, lattice: Lattice, cost: Cost, known: Constants
) -> tuple[BoundCheck, ...]:
    """Check thm:communication and the code length of thm:statistical on a followed run."""
    beta, kappa, Delta, delta = known.beta.value, known.effective_kappa, known.Delta.value, known.delta
    basis, with_kappa = weakest(known.beta, known.Delta), weakest(known.beta, known.Delta, known.kappa)
    ends_at_origin = path.step[-1] == 0
    residual = float(np.linalg.norm(floating(lattice.B) @ path.pooled[-1])) if ends_at_origin else None
    rounds = communication.one_step_round_bound if cost.one_step else communication.round_bound
    R_bound, S_bound = (f(beta, Delta, delta) for f in (rounds, communication.step_bound))
    energy = float((path.rounded_norms(beta) ** 2).sum())
    variation = communication.variation_bound(beta, kappa, Delta, cost.S)
    H_bound = statistical.history_bits_ceiling(cost.K, cost.d, beta, Delta, delta)
    return (
        *_check("residual r^K", residual, cost.residual_bound, "thm:communication", Basis.BOUND),
        *_check("residual bound", cost.residual_bound, cost.tolerance, "thm:communication", Basis.BOUND),
        *_check("rounds R", cost.R, R_bound, "eq:main-communication", basis),
        *_check("steps S", cost.S, S_bound, "eq:proof-energy-and-steps", basis),
        *_check("updates K", cost.K, cost.S, "eq:proof-rounds", Basis.BOUND),
        *_bit_checks(cost, known, with_kappa),
        *_check("history bits H_K", cost.history_bits, H_bound, "eq:history-length", basis),
        *_check("energy", energy, communication.energy_bound(beta, Delta), "eq:variation-summary", basis),
        *_check(
            "largest variation", float(path.variation().max()), variation, "eq:variation-summary", with_kappa
        ),
    )


def _bit_checks(cost: Cost, known: Constants, basis: Basis) -> Iterator[BoundCheck]:
    M, d, R = cost.M, cost.d, cost.R
    if cost.fixed_width is not None:
        width = communication.fixed_width_bits(cost.fixed_width, 1.0)
        price = communication.fixed_width_cost(M, d, width, R)
        yield from _check("bits B, fixed width", cost.bits, price, "thm:communication", Basis.BOUND)
        return
    constants = (known.beta.value, known.effective_kappa, known.Delta.value, known.G.value, known.delta)
    pathwise = communication.pathwise_bit_bound(M, d, R, cost.S, *constants)
    universal = communication.universal_bit_bound(M, d, *constants)
    yield from _check("bits B, this path", cost.bits, pathwise, "eq:pathwise-bit-bound", basis)
    yield from _check("bits B, any path", cost.bits, universal, "eq:main-communication", basis)


def _personal_constants(followed: Sequence[FitRound]) -> tuple[Constant, ...]:
    """Return beta, G_1, zeta and beta_4, each the largest over the rounds."""
    if not followed:
        return ()
    return (
        Constant(name="beta", value=max(r.smoothness for r in followed), basis=smoothness_basis(followed)),
        Constant(name="G_1", value=max(r.gradient_scale for r in followed), basis=Basis.PATH),
        Constant(
            name="zeta",
            value=max(r.zeta for r in followed),
            basis=Basis.PATH,
            note="the least that the derivatives seen allow; no covering number is assumed",
        ),
        Constant(name="beta_4", value=max(r.fourth for r in followed), basis=Basis.PATH),
    )


def personal_checks(followed: Sequence[FitRound], rounds: Sequence[Averaging]) -> tuple[BoundCheck, ...]:
    """Check the round nearest to its quadratic bound, and eq:personalized-convergence-bound over all."""
    if not followed:
        return ()
    basis = smoothness_basis(followed)
    tightest = max(rounds, key=lambda r: r.error / r.quadratic_bound if r.quadratic_bound else 0.0)
    label = f"averaging, round {tightest.update}"
    fourth = "eq:local-fourth-order-error"
    K = len(followed)
    gap = math.fsum(gaps(followed)) / K
    floor = math.fsum(
        a * personalized.gap_floor(r.smoothness, float(score))
        for r in followed
        for a, score in zip(r.alpha, r.score_norm, strict=True)
    )
    retired = math.fsum(itertools.accumulate(r.retired_bound for r in followed))
    forfeited = [personalized.averaging_bound(r.quadratic_bound, r.fourth_order_bound) for r in rounds]
    bound = personalized.convergence_bound(personal_loss_budget(followed), forfeited, retired)
    finite = bound if math.isfinite(bound) else None  # a silo may retire by noise where its loss is flat
    return (
        *_check(label, tightest.error, tightest.quadratic_bound, "lem:local-fourth-order", basis),
        *_check(f"{label}, 4th", tightest.error, tightest.fourth_order_bound, fourth, Basis.PATH),
        *_check("EIF means squared/2beta", floor / K, gap, "eq:proof-retire-gap-score", basis),
        *_check("average gap", gap, finite, "eq:personalized-convergence-bound", basis),
    )
