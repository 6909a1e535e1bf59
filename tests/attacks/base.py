"""A corrupted server that speaks to one silo in bytes, and what an attack by it is."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.silo import Silo
from fedtmle_core.journal import MemoryJournal
from tests.attacks.settings import KEYS, SESSION, MaskedServer, Server, Setting

START = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


class Victim:
    """A silo as a server meets it: bytes in, bytes out, and it can be made to crash.

    ``others`` are honest silos of the same study, if the server has to meet them as well.
    """

    def __init__(self, make: Callable[[], Silo], others: Mapping[str, Silo] | None = None) -> None:
        self._make = make
        self._silo = make()
        self.others = others or {}

    @property
    def refused_by(self) -> str:
        """The key of the policy by which the silo refused."""
        return self._silo.refused_by

    def step(self, request: bytes) -> bytes:
        return self._silo.step(request)

    def restart(self) -> None:
        """The process dies and is started again, with whatever it keeps on disk."""
        self._silo = self._make()


class AbstractAttack(ABC):
    """One attack: its docstring's first sentence is what the server does, ``yields`` what it gets.

    ``keys`` are the keys of the policy, each of which stops it alone; where there are none, a check
    of the protocol does, which `disarm` takes away. ``strict`` is a policy stricter than the default,
    where that makes the attack short or the default leaves the key open. With neither keys nor a check,
    nothing stops it.
    """

    yields: str
    reason: Reason
    keys: tuple[str, ...] = ()
    hidden_by: tuple[str, ...] = ()  # keys that hide what it is after, and the study goes on
    check: str = ""  # what stops it where that is no key
    strict: dict[str, Any] = {}  # noqa: RUF012 - read only
    setting = Setting.OPEN
    only_masked = False  # whether it needs what is asked under masks only
    in_open = "not asked"  # why it does, in the table
    has_settings = True  # whether it can be tried under masks; else it is an attack on masks already

    @abstractmethod
    def plan(self) -> Plan: ...

    @property
    def members(self) -> tuple[Member, ...]:
        """The roster of the plan."""
        return self.setting.members

    def crowd(self, silo: str) -> Any:  # noqa: ARG002 - most have the same
        """The rows of another silo: people like those of the victim, but for the one who stands out."""
        return self.rows()

    def connect(self, victim: Victim, session: bytes = SESSION) -> Server:
        """A server that meets the victim, and under masks the other silos."""
        if self.setting is Setting.OPEN:
            return Server(self.plan(), victim.step, session)
        others = {name: silo.step for name, silo in victim.others.items()}
        return MaskedServer(self.plan(), victim.step, others, session, lies=self.setting is Setting.COLLUDING)

    @abstractmethod
    def rows(self) -> Any:
        """The victim's rows, as the plan's subject reads them."""

    @abstractmethod
    def run(self, victim: Victim) -> Any:
        """What was learned, by `Victim.step` alone."""

    @abstractmethod
    def works(self, learned: Any) -> bool:
        """Whether that is so."""

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: B027 - most need none
        """Take away the check of the protocol that stops the attack."""

    def guarded(self) -> Policy:
        return replace(Policy(), allow_targets=None, **self.strict)

    def without(self, *keys: str) -> Policy:
        """The guarded policy with some keys off."""
        off = UNGUARDED
        return replace(self.guarded(), **{key: getattr(off, key) for key in keys})

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        return replace(
            self.bare_keeper(),
            policy=policy,
            journal=MemoryJournal(),
            ledger=None if ledger is None else Ledger(ledger, sync=False),
        )

    def open_keeper(self) -> Keeper:
        """A silo that nobody guards."""
        return self.bare_keeper()

    def bare_keeper(self) -> Keeper:
        """The clock, and under masks the keys."""
        keeper = Keeper(clock=self.clock)
        return keeper if self.setting is Setting.OPEN else keyed(keeper, "a")

    def disarmed_keeper(self) -> Keeper:
        """A guarded silo but for what `disarm` took away."""
        return self.keeper(self.guarded())

    def clock(self) -> datetime.datetime:
        return START

    def victim(self, keeper: Keeper) -> Victim:
        plan, rows = self.plan(), self.rows()
        return Victim(lambda: Silo("a", plan, rows, keeper=keeper), self.others(plan))

    def others(self, plan: Plan) -> dict[str, Silo]:
        """The silos beside the victim, which nobody guards."""
        return {
            name: Silo(name, plan, self.crowd(name), keeper=keyed(Keeper(clock=self.clock), name))
            for name in self.setting.others
        }


def keyed(keeper: Keeper, silo: str) -> Keeper:
    """The same, with the silo's keys for signatures and masks."""
    return replace(keeper, key=KEYS[silo], mask_key=KEYS[silo].mask_key)
