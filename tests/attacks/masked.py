"""Attacks on sums under masks: accomplices among the silos, false totals, and questions that are no sums."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol import messages
from fedtmle.protocol.codes import BitReader, Bits, BitWriter
from fedtmle.protocol.masked import MaskedForm
from fedtmle.protocol.masks import COUNT, Masked, Masker, Packing
from fedtmle.protocol.messages import Answered, Begin, Counted, Open, Payload, Reason, SignedAnswer
from fedtmle.protocol.plan import Follower, Plan
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.signing import answer_statement
from fedtmle.runtime.silo import MaskedLink
from fedtmle.studyfile.file import study_plan
from fedtmle.targets.effects.prepare import cluster_digest
from fedtmle_core.exact import Sums
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.settings import KEYS, SESSION, Server, masked_members
from tests.attacks.small import VARIABLES, AbstractStudyAttack

PROBLEM = ft.Mean(bounds=(0.0, 20.0))
START = 10.0
Y = np.linspace(1.0, 19.0, 40) ** 1.01 % 20


class Colluding(Server):
    """A server to which some silos gave their keys: it sends what these send if they add zeros."""

    def __init__(self, plan: Plan, victim: Victim, accomplices: str = "bc") -> None:
        super().__init__(plan, victim.step)
        keys = [(member.name, member.mask_key) for member in plan.roster]
        self._heard, self._n = hashlib.sha256(), 0
        self._maskers = {
            name: Masker(KEYS[name].mask_key, keys, name, plan=plan.digest, session=SESSION)
            for name in accomplices
        }

    def zeros(self, packing: Packing) -> list[Masked]:
        """What each accomplice sends in this round if it adds nothing."""
        at: dict[str, Any] = {"n": self._n, "round": self.round, "heard": self._heard.digest()}
        return [masker.mask(packing, (0,) * len(packing.lanes), **at) for masker in self._maskers.values()]

    def open(self) -> int:
        reply = self.send(Open(messages.WIRE_FORMAT, self.session, self.plan.digest))
        assert isinstance(reply, Counted)
        return COUNT.totals([COUNT.read(BitReader(reply.payload.bits())), *self.zeros(COUNT)])[0]

    def begin(self, n: int, first_row: int = 0, absent: tuple[str, ...] = ()) -> Any:
        self._n, self._follower, self.round = n, Follower(self.plan, n), 1
        request = Begin(self.session, n, first_row, absent=absent)
        self._heard.update(messages.encode(request))
        return self.read(self.send(request))

    def read(self, reply: messages.Reply) -> Any:
        assert isinstance(reply, Answered)
        form = MaskedForm(self.query)
        masked, apart = form.read(reply.payload.bits())
        return form.packing.totals([masked, *self.zeros(form.packing)]), apart


class AbstractMaskedAttack(AbstractAttack):
    """On the mean of 40 outcomes in silo a, one of three."""

    has_settings = False

    def plan(self) -> Plan:
        program = TargetingProgram(
            problem=PROBLEM, law=PROBLEM.start(START), algorithm=ft.Gradient(tolerance=1e-6)
        )
        return Plan(program=program, roster=masked_members(signed=False, names="abc"))

    def rows(self) -> Any:
        return PROBLEM.read(Y)

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        return replace(super().keeper(policy, ledger), mask_key=KEYS["a"].mask_key)

    def open_keeper(self) -> Keeper:
        return replace(super().open_keeper(), mask_key=KEYS["a"].mask_key)


class TwoColluders(AbstractMaskedAttack):
    """Has both other silos of a masked study as accomplices, and takes their masks off."""

    yields = "the silo's own number of rows and sum of outcomes, exactly"
    reason = Reason.TOO_FEW_SILOS
    keys = ("colluders",)
    strict = {"colluders": 2}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> tuple[int, float]:
        server = Colluding(self.plan(), victim)
        n = server.open()
        (units, *_), _ = server.begin(n)
        return n, START * n + float(Sums((units,), server.query.shifts[:1]).values()[0])

    def works(self, learned: tuple[int, float]) -> bool:
        return learned[0] == len(Y) and abs(learned[1] - float(Y.sum())) < 1e-9


class DigestsUnderMasks(AbstractStudyAttack):
    """Declares clusters in a masked study, whose digests are not sums, and guesses the identifiers."""

    yields = "which of a list of identifiers the silo has"
    reason = Reason.UNMASKED
    keys = ("allow_open",)
    has_settings = False
    options = {  # noqa: RUF012 - read only
        "cluster": "family",
        "variables": ft.Variables({**VARIABLES, "family": {"kind": "identifier"}}),
    }

    def plan(self) -> Plan:
        return study_plan(self.study(), masked_members(signed=False, names="abc"))

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "family": np.array([f"family {k // 2}" for k in range(60)])}

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        return replace(super().keeper(policy, ledger), mask_key=KEYS["a"].mask_key)

    def open_keeper(self) -> Keeper:
        return replace(super().open_keeper(), mask_key=KEYS["a"].mask_key)

    def run(self, victim: Victim) -> list[str]:
        server = Colluding(self.plan(), victim)
        server.open()
        _, (clusters,) = server.begin(200)
        guesses = [f"family {k}" for k in range(100)]
        return [guess for guess in guesses if cluster_digest(guess) in clusters.digests]

    def works(self, learned: list[str]) -> bool:
        return learned == [f"family {k}" for k in range(30)]


class FalseCount(AbstractMaskedAttack):
    """Says that ten times as many rows were counted under masks as there are."""

    yields = "an answer to a study over rows that do not exist"
    reason = Reason.RELAY
    check = "every silo adds up the signed, relayed answers itself"

    def plan(self) -> Plan:
        return replace(super().plan(), roster=masked_members(signed=True, names="abc"))

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        return replace(super().keeper(policy, ledger), key=KEYS["a"])

    def open_keeper(self) -> Keeper:
        return replace(super().open_keeper(), key=KEYS["a"])

    def run(self, victim: Victim) -> bool:
        plan, heard = self.plan(), hashlib.sha256().digest()
        server = Colluding(plan, victim)
        opened = server.send(Open(messages.WIRE_FORMAT, SESSION, plan.digest))
        assert isinstance(opened, Counted)
        relayed = [SignedAnswer(opened.payload, opened.signature)]
        for name, masked in zip("bc", server.zeros(COUNT), strict=True):
            bits = _written(masked)
            statement = answer_statement(plan, SESSION, name, 0, heard, bits)
            relayed.append(SignedAnswer(Payload(bits.length, bits.data), KEYS[name].sign(statement)))
        return isinstance(server.send(Begin(SESSION, 10 * len(Y), 0, tuple(relayed))), Answered)

    def works(self, learned: bool) -> bool:
        return learned

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MaskedLink, "check", lambda *_: None)


def _written(masked: Masked) -> Bits:
    out = BitWriter()
    COUNT.write(masked, out)
    return out.finish()


ATTACKS: tuple[AbstractAttack, ...] = (
    TwoColluders(),
    DigestsUnderMasks(),
    FalseCount(),
)
