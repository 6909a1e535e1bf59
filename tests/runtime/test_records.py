"""Journals and ledgers on disk: torn anywhere, changed anywhere, full disks, and a crash between the two."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedtmle as ft
from fedtmle.errors import JournalError, RefusedError
from fedtmle.protocol import messages
from fedtmle.protocol.guard import RefusalError
from fedtmle.protocol.messages import Reason, Refused
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.runtime import ledger as ledgers
from fedtmle.runtime.ledger import Entry, Ledger
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Journalled, Session
from fedtmle.runtime.silo import Silo
from fedtmle_core.journal import MAGIC, FileJournal, MemoryJournal, frame
from tests.premise import Premise
from tests.runtime.faults import NOON, encoded, reference

PAYLOADS = [b"identity", b"", bytes(9), b"a record"]
CASE = "mean, coded"


def journal_at(path: Path, payloads: list[bytes] = PAYLOADS) -> bytes:
    with closing(FileJournal(path, sync=False)) as journal:
        for payload in payloads:
            journal.append(payload)
    return path.read_bytes()


def records_of(path: Path) -> list[bytes]:
    with closing(FileJournal(path, sync=False)) as journal:
        return journal.records


def entry(k: int, **changes: Any) -> Entry:
    return Entry(time="2026-01-01", session="ab", request="ask", round=k, **changes)


def ledger_at(path: Path) -> bytes:
    with closing(Ledger(path, sync=False)) as ledger:
        for k in range(2):
            ledger.add(entry(k, key="é\u001f", asked=b"\x00\xff", replied=b"\x00"))
    return path.read_bytes()


def test_a_journal_cut_at_any_byte_is_a_prefix_and_can_be_written_on(tmp_path: Path) -> None:
    whole = journal_at(tmp_path / "whole")
    lengths = set()
    for cut in range(len(whole) + 1):
        path = tmp_path / "cut"
        path.write_bytes(whole[:cut])
        with closing(FileJournal(path, sync=False)) as journal:
            kept = list(journal.records)
            assert kept == PAYLOADS[: len(kept)]
            journal.append(b"next")
        assert records_of(path) == [*kept, b"next"]
        lengths.add(len(kept))
    assert lengths == set(range(len(PAYLOADS) + 1))


is_cut = Premise("some records are kept and others are cut off", at_least=0.15)


@is_cut
@given(st.lists(st.binary(max_size=40), min_size=2, max_size=6), st.data())
@settings(max_examples=30, deadline=None)
def test_any_journal_cut_anywhere_is_a_prefix(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    whole = journal_at(folder / "whole", payloads)
    cut = data.draw(st.integers(0, len(whole)))
    (folder / "cut").write_bytes(whole[:cut])
    kept = records_of(folder / "cut")
    is_cut.holds(0 < len(kept) < len(payloads))
    assert kept == payloads[: len(kept)]
    shutil.rmtree(folder)


def test_every_changed_byte_of_a_journal_is_noticed(tmp_path: Path) -> None:
    whole = journal_at(tmp_path / "whole")
    for at in range(len(whole)):
        for change in (1, 0xFF):
            data = bytearray(whole)
            data[at] ^= change
            (tmp_path / "changed").write_bytes(data)
            with pytest.raises(JournalError, match="changed"):
                records_of(tmp_path / "changed")


def test_records_dropped_put_in_or_exchanged_are_noticed(tmp_path: Path) -> None:
    whole = journal_at(tmp_path / "whole")
    ends = [len(MAGIC)]
    for payload in PAYLOADS:
        ends.append(ends[-1] + len(frame(payload, bytes(32))[0]))
    pieces = [whole[a:b] for a, b in itertools.pairwise(ends)]
    for order in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (1, 0, 2, 3), (0, 0, 1, 2, 3)):
        (tmp_path / "other").write_bytes(MAGIC + b"".join(pieces[k] for k in order))
        with pytest.raises(JournalError, match="changed"):
            records_of(tmp_path / "other")


def test_every_changed_byte_of_a_ledger_is_noticed(tmp_path: Path) -> None:
    whole = ledger_at(tmp_path / "whole")
    path = tmp_path / "changed"
    for at in range(len(whole)):
        for change in (1, 0x20) if whole[at] != ord("\n") else (1, ord("\n") ^ ord("\r")):
            data = bytearray(whole)
            data[at] ^= change
            path.write_bytes(data)
            with pytest.raises(JournalError):
                list(ledgers.read(path))
            with pytest.raises(JournalError, match="changed"):
                Ledger(path)
            assert path.read_bytes() == data


def test_a_ledger_cut_at_any_byte_keeps_its_whole_lines(tmp_path: Path) -> None:
    whole = ledger_at(tmp_path / "whole")
    for cut in range(len(whole) + 1):
        path = tmp_path / "cut"
        path.write_bytes(whole[:cut])
        with closing(Ledger(path, sync=False)) as ledger:
            assert ledger.count == whole[:cut].count(b"\n")
            ledger.add(entry(9))
        assert [line["line"] for line in ledgers.read(path)] == list(range(1, ledger.count + 1))


def test_two_studies_may_add_to_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with closing(Ledger(path, sync=False)) as one, closing(Ledger(path, sync=False)) as other:
        for k in range(4):
            (one if k % 2 else other).add(entry(k))
    assert [line["round"] for line in ledgers.read(path)] == [0, 1, 2, 3]


def test_a_ledger_that_is_cut_short_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with closing(Ledger(path, sync=False)) as ledger:
        ledger.add(entry(0))
        os.truncate(path, 0)
        with pytest.raises(JournalError, match="cut short"):
            ledger.add(entry(1))


def test_one_process_at_a_time_has_a_journal(tmp_path: Path) -> None:
    with closing(FileJournal(tmp_path / "j")), pytest.raises(JournalError, match="another process"):
        FileJournal(tmp_path / "j")
    FileJournal(tmp_path / "j").close()


# Silos and servers whose records fail.


@contextmanager
def silos(
    folder: Path, case: str = CASE, *, policy: Policy | None = None, journal: type = FileJournal
) -> Iterator[list[Silo]]:
    expected = reference(case)
    with ExitStack() as opened:
        parties = []
        for name in expected.plan.silos:
            keeper = Keeper(
                journal=opened.enter_context(closing(journal(folder / f"{name}.journal", sync=False))),
                ledger=opened.enter_context(closing(Ledger(folder / f"{name}.ledger", sync=False))),
                policy=policy or UNGUARDED,
                clock=lambda: NOON,
            )
            parties.append(Silo(name, expected.plan, expected.rows[name], keeper=keeper))
        yield parties


def answered(path: Path) -> list[tuple[str, str]]:
    return [(line["asked"], line["replied"]) for line in ledgers.read(path) if line["decision"] == "answered"]


class Full(io.FileIO):
    """A file on a disk that has room for ``room`` bytes more."""

    room = 0

    def write(self, data: Any, /) -> int:
        size = min(len(data), Full.room)
        Full.room -= size
        if size < len(data) and not size:
            raise OSError(28, "No space left on device")
        return super().write(bytes(data[:size]))


@pytest.mark.parametrize("which", ["journal", "ledger"])
@pytest.mark.parametrize("room", [0, 1, 40, 300, 700])
def test_a_full_disk_is_a_refusal_and_a_restart_mends_it(tmp_path: Path, which: str, room: int) -> None:
    expected = reference(CASE)
    server = MemoryJournal()
    with silos(tmp_path) as parties:
        victim = parties[1]._keeper
        record: Any = victim.journal if which == "journal" else victim.ledger
        record._file.close()
        record._file = Full(record.path, "a+b")
        Full.room = room
        with pytest.raises(RefusedError, match="could not record") as refused:
            Session(expected.plan, Journalled(InProcess(parties), server, plan=expected.plan)).run()
        assert refused.value.silo == parties[1].name
        assert isinstance(parties[1].error, JournalError)
        again = parties[1].step(b"anything else")
        assert messages.decode_reply(again) == Refused(Reason.CANNOT_RECORD)
        Full.room = 1 << 20  # room alone does not help: the state may be ahead of the record
        waiting = Session(expected.plan, Journalled(InProcess(parties), server, plan=expected.plan))
        with pytest.raises(RefusedError, match="could not record"):
            waiting.run()
    with silos(tmp_path) as parties:
        resumed = Session(expected.plan, Journalled(InProcess(parties), server, plan=expected.plan)).run()
    assert encoded(resumed) == encoded(expected.finished)
    for name in expected.plan.silos:
        lines = answered(tmp_path / f"{name}.ledger")
        assert [bytes_of(reply) for _, reply in lines] == [reply for _, reply in expected.records[name]]


def bytes_of(text: str) -> bytes:
    import base64

    return base64.b64decode(text)


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    """The operating system's own refusal, in a process of its own."""
    script = (
        "import resource, sys; from fedtmle.errors import JournalError\n"
        "from fedtmle_core.journal import FileJournal\n"
        "journal = FileJournal(sys.argv[1]); journal.append(b'kept')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        "try:\n    journal.append(b'x' * 500)\n"
        "except JournalError as error:\n    print('full' if 'disk full' in str(error) else error)\n"
        "journal.append(b'small')\n"
    )
    path = tmp_path / "journal"
    run = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "full\n"
    assert records_of(path) == [b"kept", b"small"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for kind in (FileJournal, Ledger):
        with pytest.raises(JournalError, match="cannot be opened"):
            kind(tmp_path / "no such folder" / "file")


def run_to_the_end(folder: Path) -> None:
    expected = reference(CASE)
    with silos(folder) as parties:
        Session(expected.plan, InProcess(parties)).run()


def test_a_line_that_a_crash_kept_from_the_ledger_is_added_at_the_restart(tmp_path: Path) -> None:
    run_to_the_end(tmp_path)
    name = reference(CASE).plan.silos[0]
    path = tmp_path / f"{name}.ledger"
    whole = list(ledgers.read(path))
    last = path.read_bytes().splitlines(keepends=True)[-1]
    os.truncate(path, path.stat().st_size - len(last))
    with silos(tmp_path):
        pass
    lines = list(ledgers.read(path))
    assert lines[:-1] == whole[:-1]
    assert lines[-1]["recovered"]
    assert not any(line["recovered"] for line in whole)
    same = {"recovered", "hash"}
    assert {k: v for k, v in lines[-1].items() if k not in same} == {
        k: v for k, v in whole[-1].items() if k not in same
    }
    with silos(tmp_path):
        pass
    assert list(ledgers.read(path)) == lines  # once


def test_a_journal_that_lost_answers_which_the_ledger_has_is_refused(tmp_path: Path) -> None:
    """Rolled back, the silo would answer the same round again, to another broadcast."""
    run_to_the_end(tmp_path)
    name = reference(CASE).plan.silos[0]
    path = tmp_path / f"{name}.journal"
    kept = records_of(path)
    path.unlink()
    journal_at(path, kept[:-2])
    with pytest.raises(JournalError, match="the journal has lost"), silos(tmp_path):
        pass


def test_answered_requests_of_any_length_are_known_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "LARGEST_NOTED", 8)  # below any request: a wide study's are above 4 KiB
    run_to_the_end(tmp_path)
    name = reference(CASE).plan.silos[0]
    whole = list(ledgers.read(tmp_path / f"{name}.ledger"))
    asked = [bytes_of(line["asked"]) for line in whole if line["decision"] == "answered"]
    assert asked == [request for request, _ in reference(CASE).records[name]]
    with silos(tmp_path):
        pass
    assert list(ledgers.read(tmp_path / f"{name}.ledger")) == whole


def test_the_partition_into_batches_is_known_after_a_restart(tmp_path: Path) -> None:
    policy = dataclasses.replace(UNGUARDED, min_batch=1)
    expected = reference("mean, sgd")
    with silos(tmp_path, "mean, sgd", policy=policy) as parties:
        Session(expected.plan, InProcess(parties)).run()
        known = [silo._guard._batch_of for silo in parties]
    with silos(tmp_path, "mean, sgd", policy=policy) as parties:
        for silo, before in zip(parties, known, strict=True):
            np.testing.assert_array_equal(silo._guard._batch_of, before)
            assert before is not None
            assert np.any(before >= 0)
            with pytest.raises(RefusalError):  # all rows but one, after all rows
                silo._guard._follow_batch(np.arange(silo.n_rows - 1), silo.n_rows)


def test_the_servers_journal_is_of_one_plan_and_session(tmp_path: Path) -> None:
    expected, other = reference(CASE), reference("mean, gradient")
    journal = MemoryJournal()
    with silos(tmp_path) as parties:
        Session(expected.plan, Journalled(InProcess(parties), journal, plan=expected.plan)).run()
        with pytest.raises(JournalError, match="another plan"):
            Journalled(InProcess(parties), journal, plan=other.plan)
        with pytest.raises(JournalError, match="another plan or session"):
            Journalled(InProcess(parties), journal, plan=expected.plan, session=b"other")
        journalled = Journalled(InProcess(parties), journal, plan=expected.plan)
        replayed = Session(expected.plan, journalled, session=b"x")
    with pytest.raises(JournalError, match="another request"):
        replayed.run()
    journal.records[1] = b"\xc1"
    with pytest.raises(JournalError, match="a record that is no exchange"):
        Journalled(InProcess([]), journal, plan=expected.plan)


def test_a_finished_run_is_replayed_from_the_servers_journal_alone(tmp_path: Path) -> None:
    expected = reference(CASE)
    journal = MemoryJournal()
    with silos(tmp_path) as parties:
        Session(expected.plan, Journalled(InProcess(parties), journal, plan=expected.plan)).run()

    class Gone:
        silos = expected.plan.silos

        def exchange(self, _: Any, /) -> Any:
            raise AssertionError("nobody is to be asked")

    again = Session(expected.plan, Journalled(Gone(), journal, plan=expected.plan)).run()
    assert encoded(again) == encoded(expected.finished)
    assert isinstance(again.outcome, Targeted)
    assert ft.Transcript.decode(again.transcript.encode()) == again.transcript
