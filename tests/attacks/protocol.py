"""Attacks on the order, the wording and the plan of a session."""

from __future__ import annotations

import datetime
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol import messages
from fedtmle.protocol.coded import Action, Rounded, RoundedCode
from fedtmle.protocol.codes import BitReader, BitWriter, fixed_width
from fedtmle.protocol.messages import Answered, Ask, Payload, Reason
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.silo import Silo
from fedtmle_core.exact import Sums
from tests.attacks.base import START, AbstractAttack, Victim
from tests.attacks.batches import PROBLEM, Y
from tests.attacks.settings import RefusedBySiloError, Server
from tests.attacks.steering import TREATED, AbstractSteering, N


class Forgetful(Victim):
    """A silo that answers any round anew, from where it stood then."""

    def __init__(self, make: Callable[[], Silo], others: Mapping[str, Silo]) -> None:
        super().__init__(make, others)
        self._heard: list[bytes] = []

    def step(self, request: bytes) -> bytes:
        message = messages.decode_request(request)
        if isinstance(message, Ask) and message.round <= len(self._heard) - 1:
            self._heard = self._heard[: message.round]  # open, begin, and the rounds before this one
            self.restart()
            for heard in self._heard:
                super().step(heard)
        self._heard.append(request)
        return super().step(request)


class RepeatedRound(AbstractSteering):
    """Asks the same round again with another broadcast, to have the gradient at two eps."""

    yields = "the number of treated rows, exactly"
    reason = Reason.OUT_OF_ORDER
    check = "a round is answered once; its repeat brings the recorded bytes"
    step = 16.0
    forgetful = False

    def run(self, victim: Victim) -> float:
        sums = []
        server = self.connect(victim)
        server.begin(server.open())
        shifts = server.query.shifts
        for eps in (-30.0, 30.0):
            units = (round(-eps / self.step * N * 2 ** shifts[0]), 0)
            reply = server.send(Ask(server.session, 2, server.broadcast(Sums(units, shifts))))
            assert isinstance(reply, Answered)
            sums.append(server.read(reply).values()[0])
        return self.count_treated(*sums)

    def works(self, learned: float) -> bool:
        return abs(learned - TREATED.sum()) < 1e-9

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self, "forgetful", True, raising=False)

    def disarmed_keeper(self) -> Keeper:
        return Keeper(policy=self.guarded())

    def victim(self, keeper: Keeper) -> Victim:
        plan, rows = self.plan(), self.rows()
        kind = Forgetful if self.forgetful else Victim
        return kind(lambda: Silo("a", plan, rows, keeper=keeper), self.others(plan))


class SecondSession(AbstractSteering):
    """Makes the silo crash and opens the same plan again, to have the gradient at two eps."""

    yields = "the number of treated rows, exactly"
    reason = Reason.OUT_OF_ORDER
    check = "the journal: one session of a plan, whatever happens to the process"
    step = 16.0

    def run(self, victim: Victim) -> float:
        sums = []
        for eps in (-30.0, 30.0):
            server = self.connect(victim, session=str(eps).encode())
            server.begin(server.open())
            sums.append(self.move(server, eps))
            victim.restart()
        return self.count_treated(*sums)

    def works(self, learned: float) -> bool:
        return abs(learned - TREATED.sum()) < 1e-9

    def disarmed_keeper(self) -> Keeper:
        return replace(self.keeper(self.guarded()), journal=None)


class OldSession(AbstractSteering):
    """Replays the messages of another session of the plan, recorded at another silo."""

    yields = "an answer at a point that nobody in this session derived"
    reason = Reason.OUT_OF_ORDER
    check = "every request names its session"
    step = 16.0

    def run(self, victim: Victim) -> float:
        recorded: list[bytes] = []
        other = self.victim(self.bare_keeper())

        def record(request: bytes) -> bytes:
            recorded.append(request)
            return Victim.step(other, request)

        other.step = record  # type: ignore[method-assign]  # overheard
        old = self.connect(other, b"an old session")
        old.begin(old.open())
        self.move(old, -30.0)
        server = self.connect(victim)
        server.begin(server.open())
        reply = server.send(messages.decode_request(recorded[-1]))
        assert isinstance(reply, Answered)
        return float(server.read(reply).values()[0])

    def works(self, learned: float) -> bool:
        return abs(learned + 2.0 * (1 - self.columns()["outcome"][TREATED]).sum()) < 1e-9

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Silo, "_out_of_order", lambda *_: None)


class ForgedAction(AbstractAttack):
    """Broadcasts a small gradient with the order to go on, and walks by single steps of the grid."""

    yields = "the silo's mean to a sixteenth of the grid that its answers are rounded to"
    reason = Reason.NOT_DERIVABLE
    check = "the action must follow from the broadcast gradient"
    beta = 1.3

    def plan(self) -> Plan:
        algorithm = ft.Coded(tolerance=1.0, coordinates="raw", smoothness=self.beta)
        return Plan(
            program=TargetingProgram(problem=PROBLEM, law=PROBLEM.start(10.0), algorithm=algorithm),
            roster=self.members,
        )

    def rows(self) -> np.ndarray:
        return Y

    def run(self, victim: Victim) -> tuple[float, float]:
        server = self.connect(victim)
        (z,) = _units(server.begin(server.open()))
        lattice = server.query.lattice
        h, low, high = float(lattice.h), -np.inf, np.inf
        for k in range(60):
            # The answer is within h/2 of the mean less 10, moved by k steps of h/beta.
            centre = h * z + k * h / float(lattice.beta)
            low, high = max(low, centre - h / 2), min(high, centre + h / 2)
            (z,) = _units(server.tell(Rounded(q=(1,), action=Action.STEP)))
        return 10.0 + (low + high) / 2, (high - low) / h

    def works(self, learned: tuple[float, float]) -> bool:
        mean, resolution = learned
        return abs(mean - Y.mean()) < 0.25 / 16 and resolution < 1 / 16

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def trusting(code: RoundedCode, bits: BitReader) -> Rounded:
            return Rounded(q=code._q.read(bits), action=Action(bits.uint(2)))

        monkeypatch.setattr(RoundedCode, "read", trusting)


def _units(answer: Any) -> tuple[int, ...]:
    """A mean in units of the grid, as a silo or all silos together tell it."""
    return answer.q if isinstance(answer, Rounded) else answer


class OversizedCodeword(AbstractSteering):
    """Broadcasts a sum that no rows within the declared bounds can have, to go further in one step."""

    yields = "in one round the treated arm's sum of 1 - y to 1e-8; the largest codeword allowed gives 1e-3"
    reason = Reason.NOT_DERIVABLE
    check = "a codeword must lie in the range that the plan gives it"
    step = 1.25
    n = 65  # so that the width of a codeword leaves room for nearly three times the largest
    oversized = True

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        server.open()
        server.begin(self.n)
        largest = server.query.largest[0]
        room = (1 << fixed_width(largest)) - 1 - largest
        return self.step_by(server, room if self.oversized else largest) / -2.0

    def step_by(self, server: Server, units: int) -> float:
        largest = server.query.largest[0]
        out = BitWriter()
        for value in (units, 0):
            out.uint(value + largest, fixed_width(largest))
        bits = out.finish()
        return float(server.tell_bits(Payload(bits.length, bits.data)).values()[0])

    def works(self, learned: float) -> bool:
        return abs(learned - (1 - self.columns()["outcome"][TREATED]).sum()) < 1e-8

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def trusting(bits: BitReader, largest: Any) -> tuple[int, ...]:
            return tuple(bits.uint(fixed_width(reach)) - reach for reach in largest)

        monkeypatch.setattr(BitReader, "fixed", trusting)


class AbstractWording(AbstractSteering):
    """An honest message in other words: an ``Ask`` whose bytes another silo would not have got."""

    yields = "an answer to bytes that no other silo can compare with its own"
    step = 16.0

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        server.begin(server.open())
        shifts = server.query.shifts
        pooled = Sums((round(30.0 / self.step * N * 2 ** shifts[0]), 0), shifts)
        reply = messages.decode_reply(victim.step(self.worded(server, server.broadcast(pooled))))
        if isinstance(reply, messages.Refused):
            raise RefusedBySiloError(reply.reason)
        assert isinstance(reply, Answered)
        return float(server.read(reply).values()[0])

    @abstractmethod
    def worded(self, server: Server, payload: Payload) -> bytes:
        """The ``Ask`` with this payload, as the attack words it."""

    def works(self, learned: float) -> bool:
        return abs(learned + 2.0 * (1 - self.columns()["outcome"][TREATED]).sum()) < 1e-9


class SecondWording(AbstractWording):
    """Words a message in another order of its fields."""

    reason = Reason.MALFORMED
    check = "a message has one form"

    def worded(self, server: Server, payload: Payload) -> bytes:
        fields = msgspec.msgpack.decode(messages.encode(Ask(server.session, 2, payload)))
        return msgspec.msgpack.encode(dict(reversed(fields.items())))

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(messages, "_decode", lambda data, decoder: decoder.decode(data))


class TrailingBits(AbstractWording):
    """Adds bits after the last codeword of a broadcast."""

    reason = Reason.NOT_DERIVABLE
    check = "a broadcast ends with its last codeword"

    def worded(self, server: Server, payload: Payload) -> bytes:
        longer = Payload(8 * len(payload.data) + 8, payload.data + b"\0")
        return messages.encode(Ask(server.session, 2, longer))

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(BitReader, "finish", lambda _: None)


class AbstractStanding(AbstractSteering):
    """An honest first round that the owner does not, or no longer, allow."""

    yields = "the silo's answers, against its owner's will"

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        answer = server.begin(server.open())
        self.later()
        server.tell(answer)
        return float(answer.values()[0])

    def later(self) -> None:
        """What happens after the first round."""

    def works(self, learned: float) -> bool:
        return np.isfinite(learned)


class UnapprovedPlan(AbstractStanding):
    """Starts a plan that the owner has not approved: another seed, roster or target than the one approved."""

    reason = Reason.NOT_APPROVED
    check = "approval of one digest"

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        approved = replace(self.plan(), roster=roster(["a", "b", "c"])).digest
        return replace(super().keeper(policy, ledger), approves=lambda digest: digest == approved)

    def disarmed_keeper(self) -> Keeper:
        return replace(self.keeper(self.guarded()), approves=None)


class RevokedPlan(AbstractStanding):
    """Goes on with a plan after its owner has revoked the approval."""

    reason = Reason.NOT_APPROVED
    check = "approval is asked for at every round"

    def later(self) -> None:
        self.revoked = True

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        self.revoked = False
        return replace(super().keeper(policy, ledger), approves=lambda _: not self.revoked)

    def disarmed_keeper(self) -> Keeper:
        return replace(self.keeper(self.guarded()), approves=None)


class ExpiredPlan(AbstractStanding):
    """Goes on with a plan after its last day."""

    reason = Reason.EXPIRED
    check = "the plan's expiry"
    days = 0.0
    patched = False

    def plan(self) -> Plan:
        return replace(super().plan(), expires=None if self.patched else START.date())

    def clock(self) -> datetime.datetime:
        return START + datetime.timedelta(days=self.days)

    def later(self) -> None:
        self.days = 2.0

    def victim(self, keeper: Keeper) -> Victim:
        self.days = 0.0
        return super().victim(keeper)

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self, "patched", True, raising=False)


class LongStudy(ExpiredPlan):
    """Draws a study out for longer than the owner allows any."""

    keys = ("lifetime_days",)
    strict = {"lifetime_days": 1.0}  # noqa: RUF012 - read only
    patched = True


class Flood(AbstractStanding):
    """Sends a thousand stray requests, each of which the ledger would keep."""

    yields = "the owner's disk and attention"
    reason = Reason.OUT_OF_ORDER
    keys = ("max_refusals",)
    strict = {"max_refusals": 50}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> float:
        for k in range(1000):
            victim.step(b"stray %d" % k)
        return super().run(victim)


ATTACKS: tuple[AbstractAttack, ...] = (
    RepeatedRound(),
    SecondSession(),
    OldSession(),
    ForgedAction(),
    OversizedCodeword(),
    SecondWording(),
    TrailingBits(),
    UnapprovedPlan(),
    RevokedPlan(),
    ExpiredPlan(),
    LongStudy(),
    Flood(),
)
