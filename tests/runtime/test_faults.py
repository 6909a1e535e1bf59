"""Seeded faults: a run that was interrupted is the run that was not; and the suite can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fedtmle.errors import DeadlineError
from fedtmle.protocol.codes import Uplink
from fedtmle.runtime.records import Records
from fedtmle.runtime.session import Journalled
from fedtmle.runtime.silo import Silo
from fedtmle_core.journal import Journal
from tests.premise import Premise
from tests.runtime.faults import NAMES, TURNS, differences, encoded, keeper_without_ledger, reference
from tests.runtime.simulator import Faults, Kind, SimulatedJournal, run_until_done


@pytest.mark.timeout(1800)  # a minute of CPU for 2,000; a busy machine may need many
@pytest.mark.parametrize("schedules", [250, pytest.param(2_000, marks=pytest.mark.slow)])
def test_no_schedule_diverges_and_every_kind_of_fault_occurs(schedules: int) -> None:
    befell: Counter[str] = Counter()
    found = {}
    for seed in range(schedules):
        changes, counts = differences(seed)
        befell += counts
        if changes:
            found[seed] = changes
    assert not found
    assert [kind for kind in Kind if not befell[kind]] == []
    assert befell["resumed by the server"] > schedules / 10
    ended = befell["ended at the deadline, a silo being dead"]
    assert 0 < ended < schedules / 10


def test_a_schedule_is_a_function_of_its_seed() -> None:
    for seed in (3, 8, 11):
        assert differences(seed) == differences(seed)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.DEATH, Kind.MISSED)])
def test_each_kind_alone_changes_nothing(kind: Kind) -> None:
    """At a rate that strikes in most runs; `MISSED` and `REORDERING` follow from others."""
    chances = {kind: 0.15}
    if kind is Kind.REORDERING:
        chances |= {Kind.DUPLICATION: 0.15, Kind.STRAGGLING: 0.15}
    with Premise(f"{kind} occurs", at_least=0.5) as occurs:
        for seed in range(len(NAMES)):
            changes, counts = differences(seed, Faults(chances=chances))
            occurs.holds(counts[str(kind)])
            assert changes == []


def test_a_dead_silo_is_named_within_the_deadline() -> None:
    expected = reference("mean, gradient")
    faults = Faults(chances={Kind.CRASH_ON_RECEIPT: 0.4, Kind.DEATH: 1.0}, patience=5.0)
    run = run_until_done(expected.plan, expected.rows, 1, faults=faults, keeper=keeper_without_ledger)
    assert run.finished is None
    assert isinstance(run.error, DeadlineError)
    assert set(run.error.silos) == run.network.dead
    assert "within 5 s" in str(run.error)
    assert run.network.now < 5.0 * len(expected.finished.transcript.exchanges)  # seconds of the virtual clock


def test_a_straggler_is_waited_for_and_a_late_run_resumed() -> None:
    expected = reference("mean, coded")
    faults = Faults(chances={Kind.STRAGGLING: 0.5}, delay=0.5, patience=20.0)
    run = run_until_done(expected.plan, expected.rows, 5, faults=faults, keeper=keeper_without_ledger)
    assert run.finished is not None
    assert run.sessions > 1  # some exchange passed its deadline
    assert encoded(run.finished) == encoded(expected.finished)


# Each safeguard taken away in turn: the schedules notice.


class Late:
    """A journal that writes each record only when the next one comes: after the reply has gone."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pending: list[bytes] = []

    @property
    def records(self) -> list[bytes]:
        return [*self._journal.records, *self._pending]

    def append(self, payload: bytes, /) -> None:
        for pending in self._pending:
            self._journal.append(pending)
        self._pending = [payload]

    def close(self) -> None:
        self._journal.close()


def silo_writes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Silo.__init__

    def init(self: Silo, *args: Any, keeper: Any, **options: Any) -> None:
        object.__setattr__(keeper, "journal", Late(keeper.journal))
        plain(self, *args, keeper=keeper, **options)

    monkeypatch.setattr(Silo, "__init__", init)


def server_writes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = Journalled.__init__
    monkeypatch.setattr(
        Journalled,
        "__init__",
        lambda self, federation, journal, **options: plain(self, federation, Late(journal), **options),
    )


def forgets_the_code_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Silo.__init__

    def start(self: Silo, *given: Any, **options: Any) -> None:
        plain(self, *given, **options)
        self._position.uplink = Uplink()

    monkeypatch.setattr(Silo, "__init__", start)


def forgets_the_last_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Records.resume

    def resume(self: Records, *given: Any) -> None:
        plain(self, *given)
        self._position.last = None

    monkeypatch.setattr(Records, "resume", resume)


def leaves_the_ledger_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Records, "_reconcile", lambda *_: None)


def keeps_a_torn_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimulatedJournal.__init__

    def init(self: SimulatedJournal, medium: bytearray, fate: Any) -> None:
        whole = bytes(medium)
        plain(self, medium, fate)
        medium += whole[len(medium) :]

    monkeypatch.setattr(SimulatedJournal, "__init__", init)


@pytest.mark.parametrize(
    "mutate",
    [
        silo_writes_late,
        server_writes_late,
        forgets_the_code_memory,
        forgets_the_last_reply,
        leaves_the_ledger_behind,
        keeps_a_torn_tail,
    ],
)
def test_a_safeguard_taken_away_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    for name in NAMES:
        reference(name)
    mutate(monkeypatch)
    assert any(_goes_wrong(seed) for seed in range(2 * len(TURNS)))


def _goes_wrong(seed: int) -> bool:
    from fedtmle.errors import FedTMLEError

    try:
        return bool(differences(seed)[0])
    except FedTMLEError:  # a journal or ledger that its own checks refuse
        return True


def test_the_long_mode_prints_what_befell(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from tests.runtime import faults

    monkeypatch.setattr("sys.argv", ["faults", "--schedules", "5", "--first", "77"])
    assert faults.main() == 0
    printed = capsys.readouterr().out
    assert "5 schedules, 0 divergent" in printed
    assert all(str(kind) in printed for kind in Kind)
