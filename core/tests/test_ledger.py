"""The ledger: what an owner reads of a run, and every change of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hospitals import NAMES, RUN, identity
from runs import Server, Site, codes, rows, sites

from fedtmle_core import messages
from fedtmle_core.errors import JournalError
from fedtmle_core.journal import FileJournal, MemoryJournal
from fedtmle_core.ledger import Head, Ledger, Line, verify
from fedtmle_core.messages import Code, Refused

LINE = Line(time="now", plan="a", run="b", step=1, heard="open", said="opened", sent="c")
KEY = identity("north")


def ledger(path: Path) -> Ledger:
    return Ledger(path / "ledger", KEY)


def write(path: Path, count: int = 3) -> Path:
    book = ledger(path)
    for step in range(1, count + 1):
        book.add(msgspec.structs.replace(LINE, step=step))
    book.close()
    return path / "ledger"


def test_lines_are_read_back(tmp_path: Path) -> None:
    path = write(tmp_path)
    lines = verify(path, KEY.signing)
    assert [(line.line, line.step) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    book = ledger(tmp_path)
    assert book.sent("a", "b", 2) == "c"
    assert book.sent("a", "b", 4) is None
    book.add(msgspec.structs.replace(LINE, step=4))
    assert len(verify(path, KEY.signing)) == 4
    book.close()


def test_two_studies_write_one_ledger(tmp_path: Path) -> None:
    one, two = ledger(tmp_path), ledger(tmp_path)
    for step in range(1, 4):
        one.add(msgspec.structs.replace(LINE, step=step))
        two.add(msgspec.structs.replace(LINE, run="c", step=step))
    assert len(verify(tmp_path / "ledger", KEY.signing)) == 6
    one.add(msgspec.structs.replace(LINE, step=4))
    assert one.sent("a", "c", 3) == "c"
    one.close()
    two.close()


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole + whole.splitlines()[0][:cut])
        assert len(verify(path, KEY.signing)) == 3
        ledger(tmp_path).close()
        assert path.read_bytes() == whole


def test_every_change_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    changed = [b"".join(lines[:2]), b"".join(lines[1:]), b"".join([lines[1], lines[0], lines[2]]), b""]
    changed += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    changed += [whole.replace(b'"said":"opened"', b'"said": "opened"'), whole.replace(b"\n", b"\nx\n", 1)]
    for data in changed:
        path.write_bytes(data)
        with pytest.raises(JournalError):
            ledger(tmp_path)
        with pytest.raises(JournalError):
            verify(path, KEY.signing)


def test_a_ledger_that_was_written_anew_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    head = (tmp_path / "ledger.head").read_bytes()
    path.unlink()
    (tmp_path / "ledger.head").unlink()
    book = ledger(tmp_path)
    for step in range(1, 4):
        book.add(msgspec.structs.replace(LINE, step=step, time="later"))
    book.close()
    (tmp_path / "ledger.head").write_bytes(head)
    with pytest.raises(JournalError, match="anew"):
        ledger(tmp_path)


def test_the_head_is_signed_and_needed(tmp_path: Path) -> None:
    path = write(tmp_path)
    place = tmp_path / "ledger.head"
    data = place.read_bytes()
    signed = msgspec.json.decode(data, type=Head)
    for other in (
        b"",
        b"{}",
        msgspec.json.encode(msgspec.structs.replace(signed, count=2)),
        msgspec.json.encode(msgspec.structs.replace(signed, signature="zz")),
        msgspec.json.encode(msgspec.structs.replace(signed, signature="00" * 64)),
    ):
        place.write_bytes(other)
        with pytest.raises(JournalError):
            verify(path, KEY.signing)
    place.write_bytes(data)
    with pytest.raises(JournalError, match="did not sign"):
        verify(path, identity("south").signing)
    place.unlink()
    with pytest.raises(JournalError, match="head of the ledger is gone"):
        ledger(tmp_path)


def test_a_head_that_is_one_line_behind_catches_up(tmp_path: Path) -> None:
    """A crash between a line and its head, twice in a row."""
    path, place = write(tmp_path, 1), tmp_path / "ledger.head"
    place.unlink()
    for step in (2, 3):
        book = ledger(tmp_path)
        head = place.read_bytes()
        book.add(msgspec.structs.replace(LINE, step=step))
        book.close()
        place.write_bytes(head)
    ledger(tmp_path).close()
    assert msgspec.json.decode(place.read_bytes(), type=Head).count == 3
    assert len(verify(path, KEY.signing)) == 3


def test_a_ledger_that_was_cut_while_open(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    book.add(LINE)
    (tmp_path / "ledger").write_bytes(b"")
    with pytest.raises(JournalError, match="cut off"):
        book.add(LINE)
    book.close()


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        Ledger(tmp_path / "no folder" / "ledger", KEY)
    book = ledger(tmp_path)
    book.add(LINE)

    def full(_handle: int) -> None:
        raise OSError

    monkeypatch.setattr("fedtmle_core.ledger.os.fsync", full)
    with pytest.raises(JournalError, match="disk full"):
        book.add(LINE)
    monkeypatch.undo()
    book.add(msgspec.structs.replace(LINE, step=2))
    assert [line.step for line in verify(tmp_path / "ledger", KEY.signing)] == [1, 2]
    book.close()


# ---- In a run ----


def kept(tmp_path: Path, **changed: object) -> Server:
    books = {name: Ledger(tmp_path / name, identity(name)) for name in NAMES}
    return Server(sites(ledger=books, **changed))


def close(server: Server) -> None:
    for site in server.sites:
        assert site.ledger is not None
        site.ledger.close()


def test_an_owner_reads_every_step(tmp_path: Path) -> None:
    server = kept(tmp_path)
    server.sites[0].step(b"nonsense")
    assert codes(server.go()) == {"Closed"}
    lines = verify(tmp_path / "east", identity("east").signing)
    assert [line.said for line in lines] == [
        "malformed",
        "opened",
        "settled",
        *["answered"] * 6,
        "finished",
        "closed",
    ]
    assert [line.heard for line in lines] == ["", "open", "settle", "keys", *["ask"] * 6, "close"]
    assert [line.step for line in lines] == list(range(11))
    assert lines[4].asked == "products of judged columns, rounded coarsely"
    assert lines[5].asked == "moments"
    assert [line.numbers for line in lines[5:]] == [2, 2, 2, 3, 3, 3]
    replies = [messages.decode_reply(data[0]) for _, data in server.seen]
    sizes = [8 * len(reply.sealed) for reply in replies if isinstance(reply, messages.Answered)]
    assert lines[-1].bits == sum(sizes)
    assert {line.run for line in lines[1:]} == {RUN.hex()}
    close(server)


def test_an_owner_alone_reads_why(tmp_path: Path) -> None:
    everyone = {name: rows(name) for name in NAMES}
    for name in NAMES:
        everyone[name]["x"][:] = 0.001
    everyone["south"]["x"][7] = 1.0
    server = kept(tmp_path, rows=everyone)
    assert codes(server.go()) == {"PEOPLE"}
    notes = {name: [line.note for line in verify(tmp_path / name, identity(name).signing)] for name in NAMES}
    assert "One person makes up" in "".join(notes["south"])
    assert not any(any(notes[name]) for name in NAMES if name != "south")
    assert all(b"person" not in reply for _, replies in server.seen for reply in replies)
    close(server)


def test_a_line_that_a_crash_kept_out_is_added_once(tmp_path: Path) -> None:
    server = kept(tmp_path)
    assert codes(server.go()) == {"Closed"}
    site = server.sites[1]
    before = verify(tmp_path / "north", identity("north").signing)
    site.restart()
    assert verify(tmp_path / "north", identity("north").signing) == before
    other = Ledger(tmp_path / "other", identity("north"))
    Site("north", journal=site.journal, ledger=other)
    after = verify(tmp_path / "other", identity("north").signing)
    assert [(line.step, line.said, line.sent, line.bits) for line in after] == [
        (line.step, line.said, line.sent, line.bits) for line in before
    ]
    other.close()
    close(server)


def test_other_bytes_after_a_lost_journal_do_not_leave(tmp_path: Path) -> None:
    """As if another processor computed another sum: the ledger knows what was sent under this mask."""
    server = kept(tmp_path)
    assert codes(server.go()) == {"Closed"}
    site = server.sites[2]
    again = Site("south", ledger=site.ledger)
    for data, replies in server.seen[:4]:
        assert again.step(data[2]) == replies[2]
    answer = again.table.workspace.answer
    again.table.workspace.answer = lambda question, plan: [1 + x for x in answer(question, plan)]  # type: ignore[method-assign]
    assert messages.decode_reply(again.step(server.seen[4][0][2])) == Refused(Code.FAILED)
    assert "another reply" in str(again.core.error)
    close(server)


def test_a_flood_of_refusals_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle_core.recorder.MOST_STRAYS", 5)
    book = Ledger(tmp_path / "east", identity("east"))
    site = Site("east", ledger=book)
    for _ in range(20):
        assert messages.decode_reply(site.step(b"nonsense")) == Refused(Code.MALFORMED)
    assert len(verify(tmp_path / "east", identity("east").signing)) == 5
    book.close()


def test_a_ledger_that_cannot_be_written_stops_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Ledger(tmp_path / "east", identity("east"))
    site = Site("east", ledger=book)

    def full(_handle: int) -> None:
        raise OSError

    monkeypatch.setattr("fedtmle_core.ledger.os.fsync", full)
    assert messages.decode_reply(site.step(b"nonsense")) == Refused(Code.FAILED)
    assert messages.decode_reply(site.step(b"nonsense")) == Refused(Code.FAILED)
    book.close()


def test_journals_on_disk_serve_as_well(tmp_path: Path) -> None:
    journals = {name: FileJournal(tmp_path / f"{name}.journal", sync=False) for name in NAMES}
    server = Server(sites(journal=journals))
    plain = Server(sites())
    assert codes(server.go()) == {"Closed"}
    plain.go()
    assert server.seen == plain.seen
    for journal in journals.values():
        journal.close()
    again = FileJournal(tmp_path / "west.journal")
    site = Site("west", journal=again)
    assert site.step(server.seen[-1][0][3]) == server.seen[-1][1][3]
    again.close()


def test_a_journal_of_something_else() -> None:
    server = Server(sites())
    server.go()
    journal = MemoryJournal()
    journal.append(server.sites[0].journal.records[0])
    journal.append(b"nonsense")
    with pytest.raises(JournalError, match="did not write"):
        Site("east", journal=journal)
