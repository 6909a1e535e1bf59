"""Attacks on silos that retire: on what the last ones tell, on the count of them, and on who is said to have.

Six silos fit a mean from the start 10. Silo a alone has another mean, so that all others retire at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import ProtocolError, RefusedError
from fedtmle.protocol import messages
from fedtmle.protocol.codes import Bits, encode
from fedtmle.protocol.fits import FitAverage, FitCountQuery, FitCounts, FitCountsCode, FitOutcome, FitQuery
from fedtmle.protocol.messages import Answered, Ask, Close, Compare, Payload, Reason
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import Query
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo
from tests.attacks.threats import PAGE
from tests.runtime.faults import key_of

PROBLEM = ft.Mean(bounds=(0.0, 20.0))
START = 10.0
NAMES = "abcdef"
ROWS = {name: START + np.linspace(-6.0, 6.0, 31) + (2.7 if name == "a" else 0.0) for name in NAMES}
TRUSTING = replace(UNGUARDED, colluders=1)
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())


def plan_of(*, names: str = NAMES, masked: bool = True, **options: Any) -> Plan:
    program = TargetingProgram(
        problem=PROBLEM,
        law=PROBLEM.start(START),
        algorithm=ft.Personalized(lattice=2.0**-10, max_updates=1, **options),
    )
    members = tuple(
        Member(name=n, key=key_of(n).public, mask_key=key_of(n).mask_key.public if masked else b"")
        for n in names
    )
    return Plan(program=program, roster=members)


def party(name: str, plan: Plan, policy: Policy = TRUSTING, kind: type[Silo] = Silo) -> Silo:
    key = key_of(name)
    keeper = Keeper(policy=policy, key=key, mask_key=key.mask_key if plan.is_masked else None)
    return kind(name, plan, read_rows(PROBLEM, name, ROWS[name]), keeper=keeper)


def found(plan: Plan, finished: Finished) -> list[float]:
    """The mean that the first average of fits discloses, if there was one."""
    heard = heard_rounds(plan, finished.transcript, finished.sizes)
    return [START - float(r.pooled.eps[0]) for r in heard if isinstance(r.pooled, FitAverage)][:1]


def test_the_last_silo_alone_is_not_asked_for_its_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule the total of all fits is the fit of silo a."""
    plan = plan_of()
    finished = Session(plan, InProcess([party(name, plan) for name in NAMES])).run()
    outcome: Any = finished.outcome
    assert outcome.status is ft.Status.FEW_ACTIVE
    assert found(plan, finished) == []
    assert [each.silos for each in outcome.active] == [1]
    with monkeypatch.context() as patched:
        patched.setattr(Plan, "fewest_active", property(lambda plan: plan.program.fewest_active))
        with pytest.raises(RefusedError, match="fewer silos"):  # the silos see what the plan would disclose
            Session(plan, InProcess([party(name, plan) for name in NAMES])).run()
        patched.setattr("fedtmle.protocol.guard.too_few_silos", lambda *_: "")
        without = Session(plan, InProcess([party(name, plan) for name in NAMES])).run()
        assert found(plan, without) == [pytest.approx(ROWS["a"].mean(), abs=2.0**-10)]


def test_a_silo_asks_for_more_silos_than_the_plan_keeps() -> None:
    """Its policy counts on two colluders, and the plan on one."""
    plan = plan_of()
    silos = [party(name, plan, replace(TRUSTING, colluders=2 if name == "a" else 1)) for name in NAMES]
    with pytest.raises(RefusedError, match="fewer silos"):
        Session(plan, InProcess(silos)).run()
    assert silos[0].refused_by == "colluders"


class Counting(Silo):
    """Says in a count that two more silos still fit."""

    def _written(self, query: Query, answer: object) -> Answered:
        if not isinstance(query, FitCountQuery) or self._link is None:
            return super()._written(query, answer)
        link = self._link
        bits = self._follower.masked_form.write(
            answer,
            self.n_rows,
            lambda packing, values, groups: link._masked(packing, (values[0] + 2, *values[1:]), groups),
        )
        return Answered(self._follower.round, Payload(bits.length, bits.data), link._signed(bits))


def test_a_silo_that_lies_in_the_count_reads_the_last_fit() -> None:
    """It works, and the page says so, unless the owner does not believe other silos (`trust_looks`)."""
    plan = plan_of()
    silos = [party(name, plan, kind=Counting if name == "f" else Silo) for name in NAMES]
    error = abs(found(plan, Session(plan, InProcess(silos)).run())[0] - ROWS["a"].mean())
    assert error <= 2.0**-10
    assert "the mean of the last silo to 0.001" in TEXT
    doubting = replace(TRUSTING, trust_looks=False)
    silos = [
        party(n, plan, doubting if n == "a" else TRUSTING, Counting if n == "f" else Silo) for n in NAMES
    ]
    with pytest.raises(RefusedError, match="fewer silos"):
        Session(plan, InProcess(silos)).run()
    assert silos[0].refused_by == "trust_looks"


class Lying(InProcess):
    """Tells the silos another count than theirs."""

    counts = (3, 3, 0, 0)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        told = {silo: self._changed(messages.decode_request(data)) for silo, data in requests.items()}
        return super().exchange({silo: messages.encode(message) for silo, message in told.items()})

    def _changed(self, message: messages.Request) -> messages.Request:
        if not isinstance(message, Ask | Close) or message.round != 2:
            return message
        bits: Bits = encode(FitCountsCode(), FitCounts(dict(zip(FitOutcome, self.counts, strict=True))))
        told = Payload(bits.length, bits.data)
        return Ask(message.session, message.round, told, message.relayed)


def test_a_server_that_makes_up_the_count_is_refused() -> None:
    """Every silo adds up the relayed answers itself, and nobody sends a fit."""
    plan = plan_of()
    silos = [party(name, plan) for name in NAMES]
    with pytest.raises(RefusedError) as refused:
        Session(plan, Lying(silos)).run()
    assert Reason.RELAY.value in str(refused.value)
    assert {silo.refused_by for silo in silos} == {"relay"}
    assert not any(isinstance(silo._position.query, FitQuery) for silo in silos)


def test_a_silo_said_to_have_retired_is_missed() -> None:
    """The server sends silo c another average, and tells the others that it retired.

    All silos answer to the end, so that each expects a signed digest of every other.
    """
    plan = plan_of(names="abc", masked=False)
    silos = [party(name, plan) for name in "abc"]

    class Omitting(InProcess):
        def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
            told = {silo: self._changed(silo, messages.decode_request(r)) for silo, r in requests.items()}
            return super().exchange({silo: messages.encode(message) for silo, message in told.items()})

        def _changed(self, silo: str, message: messages.Request) -> messages.Request:
            if silo == "c" and isinstance(message, Ask | Close):
                data = bytearray(message.pooled.data)
                data[-1] ^= 1 << (-message.pooled.length % 8)
                return msgspec.structs.replace(message, pooled=Payload(message.pooled.length, bytes(data)))
            if isinstance(message, Compare):
                heard = ("c",) if silo == "c" else ("a", "b")
                return Compare(message.session, tuple(c for c in message.closings if c.silo in heard))
            return message

    with pytest.raises(ProtocolError, match="different broadcasts"):
        Session(plan, Omitting(silos)).run()
    assert [silo.disagreement for silo in silos] == [True, True, True]
