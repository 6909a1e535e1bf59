"""Events of a run, the view folded from them, and the server that shows it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.errors import DataError, RefusedError
from fedtmle.protocol.query import Phase
from fedtmle.runtime.session import RoundReport
from fedtmle.studies.progress import EventLog, logging_to
from fedtmle.watch import MAX_POINTS, EventTail, LedgerTail, RunView, WatchServer
from tests.report.studies import ALGORITHMS, TARGETS, VARIABLES, silos
from tests.watch.sessions import run_with_ledger

START: dict[str, Any] = {
    "title": "t",
    "question": "q?",
    "algorithm": "Coded",
    "plan": "ab",
    "silos": ["a", "b"],
}


def round_report(number: int, norm: float | None = None, **more: Any) -> RoundReport:
    bits = {"a": 10, "b": 20}
    known = {"phase": Phase.TARGETING, "silos": 2, "bits": 0, "up": bits, "down": bits, **more}
    return RoundReport(round=number, gradient_norm=norm, tolerance=1e-6, **known)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[EventLog]:
    ticking = iter(range(1000, 100_000))
    opened = EventLog(path, clock=lambda: float(next(ticking)))
    opened.start(**START)
    yield opened
    opened.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_reports_what_its_trajectory_says(algorithm: str) -> None:
    """The norms and the tolerance that are told live are those of the result, in every algorithm."""
    told: list[RoundReport] = []
    study = ft.Study(
        target=TARGETS["ATE"],
        outcome_model=ft.GLM("C(a) + x"),
        treatment_model=ft.GLM("x"),
        algorithm=ALGORITHMS[algorithm],
        variables=VARIABLES,
    )
    document = ft.run(study, silos(), progress=told.append).document
    points = [point["gradient_norm"] for point in document["trajectory"]["points"]]
    targeting = [report.gradient_norm for report in told if report.phase is Phase.TARGETING]
    if algorithm == "descent":  # a line search asks for the loss alone as well
        points, targeting = ([v for v in norms if v is not None] for norms in (points, targeting))
    assert targeting == points
    stated = (document["certificate"] or {}).get("tolerance")
    if algorithm == "one step":  # it targets nothing, so that no residual and no tolerance are told
        assert not targeting
        stated = None
    assert told[-1].tolerance == stated
    up = {silo: sum(report.up.get(silo, 0) for report in told) for silo in document["account"]["bits_up"]}
    assert up == {silo: sum(sent.values()) for silo, sent in document["account"]["bits_up"].items()}
    retired = {silo for report in told for silo in report.retired}
    assert retired == {silo for silo, at in document["retired_at"].items() if at is not None}


def test_the_view_adds_up(log: EventLog, path: Path) -> None:
    follower = EventTail(path)
    for k in range(1, 6):
        log.round(round_report(k, 10.0**-k))
    state = follower.look()
    assert state["status"] == "running"
    assert state["round"] == 5
    assert state["bits"] == {"up": 150, "down": 150}
    assert [silo["up"] for silo in state["silos"]] == [50, 100]
    assert state["norms"][-1] == (5, 1e-5)
    assert state["tolerance"] == 1e-6
    # One decade a round and one second a round: one round to the tolerance, and two to the end.
    assert state["seconds_left"] == pytest.approx(3.0)
    log.finished(text="done", converged=True)
    state = follower.look()
    assert (state["status"], state["seconds_left"]) == ("finished", None)
    assert {silo["status"] for silo in state["silos"]} == {"done"}


def test_a_residual_of_zero_is_shown(log: EventLog, path: Path) -> None:
    for k in range(1, 6):
        log.round(round_report(k, 10.0**-k if k < 5 else 0.0))
    state = EventTail(path).look()
    assert state["norms"][-1] == (5, 0.0)
    assert state["seconds_left"] == pytest.approx(2.0)  # the two rounds that close the run


def test_no_time_is_told_that_is_not_known(log: EventLog, path: Path) -> None:
    for k in range(1, 6):
        log.round(round_report(k, 10.0**k))  # it gets worse
    assert EventTail(path).look()["seconds_left"] is None


def test_retired_lost_and_refused_silos(log: EventLog, path: Path) -> None:
    log.round(round_report(1, retired=("a",)))
    log.silo("b", "lost", "no answer for 60 s")
    follower = EventTail(path)
    assert [silo["status"] for silo in follower.look()["silos"]] == ["retired", "lost"]
    log.silo("b", "back")
    assert follower.look()["silos"][1]["status"] == "answering"
    log.failed(RefusedError("b", "the silo could not compute its answer"))
    state = follower.look()
    assert state["status"] == "failed"
    assert state["silos"][1]["status"] == "refused"
    assert state["silos"][0]["status"] == "retired"


def fail(error: Exception) -> None:
    raise error


def test_an_unplanned_error_is_named_but_not_quoted(path: Path) -> None:
    """Its text may hold a record; those raised on purpose do not."""
    with pytest.raises(ValueError, match="secret"), logging_to(path):
        fail(ValueError("secret 42"))
    with pytest.raises(DataError), logging_to(path):
        fail(DataError("column 'x' is missing", silo="a"))
    text = path.read_text()
    assert "secret" not in text
    assert "stopped by ValueError" in text
    assert '"silo":"a"' in text


def test_without_a_path_nothing_is_written() -> None:
    with logging_to(None) as log:
        assert log is None


def test_half_lines_bad_lines_and_new_files(log: EventLog, path: Path) -> None:
    follower = EventTail(path)
    log.round(round_report(1))
    with path.open("ab") as file:
        file.write(b'not json\n[]\n{"event":"round"}\n{"event":"rou')
    assert follower.look()["round"] == 1
    with path.open("ab") as file:
        file.write(b'nd","time":1,"round":2,"phase":"closing","up":{"a":1},"down":{}}\n')
    assert follower.look()["round"] == 2
    path.write_bytes(b"")
    assert follower.look()["status"] == "waiting"
    assert EventTail(path.with_name("not there yet")).look()["status"] == "waiting"


def test_a_second_run_replaces_the_first(log: EventLog, path: Path) -> None:
    log.round(round_report(7))
    log.failed(RefusedError("a", "no"))
    follower = EventTail(path)
    seen = follower.look()["seen"]
    log.start(**START)
    state = follower.look()
    assert (state["status"], state["round"], state["seen"]) == ("running", 0, seen + 1)


def test_a_long_path_is_thinned_with_its_ends() -> None:
    view = RunView(norms=[(k, 1.0 / k) for k in range(1, 10_000)])
    norms = view.show()["norms"]
    assert len(norms) <= MAX_POINTS + 1
    assert (norms[0], norms[-1]) == ((1, 1.0), (9_999, 1.0 / 9_999))


@pytest.fixture
def server(log: EventLog, path: Path) -> Iterator[WatchServer]:
    log.round(round_report(3))
    made = WatchServer("127.0.0.1", 0, EventTail(path).look)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def get(server: WatchServer, where: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=10)
    try:
        connection.request("GET", where, headers=headers)
        reply = connection.getresponse()
        return reply, reply.read()
    finally:
        connection.close()


def test_the_server_shows_one_page_and_its_state(server: WatchServer) -> None:
    reply, page = get(server, "/")
    assert reply.status == 200
    policy = reply.getheader("Content-Security-Policy") or ""
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert f'nonce="{nonce}"'.encode() in page
    assert b"NONCE" not in page
    _, state = get(server, "/state")
    assert json.loads(state)["round"] == 3
    assert get(server, f"/state?seen={json.loads(state)['seen']}")[0].status == 204
    assert get(server, "/etc/passwd")[0].status == 404
    assert get(server, "/../run.jsonl")[0].status == 404


def test_the_server_is_for_this_machine(server: WatchServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/state", Host="evil.example")[0].status == 403
    assert get(server, "/state", Host="localhost:1")[0].status == 200


def test_a_taken_port_is_a_clear_error(server: WatchServer, path: Path) -> None:
    command = [sys.executable, "-m", "fedtmle", "watch", str(path), "--port", str(server.server_address[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"COLUMNS": "200"})  # noqa: S603
    assert done.returncode == 2
    assert "cannot listen" in done.stderr


def test_the_owner_sees_what_the_silo_sent(tmp_path: Path) -> None:
    """A real session with a ledger: the view's totals are those of the account."""
    book = tmp_path / "ledger.jsonl"
    follower = LedgerTail(book)
    assert follower.look()["status"] == "waiting"
    finished = run_with_ledger(book)
    state = follower.look()
    sent = sum(bits for (_, silo), bits in finished.account.bits_up.items() if silo == "a")
    assert state["bits"]["up"] == sent == sum(kind["bits"] for kind in state["sent"])
    assert state["status"] == "finished"
    # In words, not by the names of classes, and by study.
    assert all(re.match(r"study [0-9a-f]{8}: [a-zA-Z ]{20}", kind["message"]) for kind in state["sent"])
    assert not any("Query" in kind["message"] for kind in state["sent"])
    assert sum(kind["times"] for kind in state["sent"]) == sum(finished.account.rounds.values())
    lines = book.read_bytes().splitlines(keepends=True)
    book.write_bytes(b"".join([*lines[:2], lines[3]]))  # a line is taken out
    state = follower.look()
    assert state["status"] == "failed"
    assert "the ledger was changed" in state["text"]


AS_IN_A_TERMINAL = (  # a job in the background is started with Ctrl-C ignored
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('fedtmle', run_name='__main__', alter_sys=True)"
)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("log")
def test_a_signal_ends_the_view(path: Path, name: signal.Signals) -> None:
    command = [sys.executable, "-c", AS_IN_A_TERMINAL, "watch", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own
        try:
            assert server.stdout is not None
            assert "http://127.0.0.1:" in server.stdout.readline()
            server.send_signal(name)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_a_file_that_is_not_there_yet_is_said_to_be_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"
    command = [sys.executable, "-m", "fedtmle", "watch", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own
        try:
            assert server.stdout is not None
            assert "http://127.0.0.1:" in server.stdout.readline()
            assert server.stdout.readline() == f"{path} does not exist yet; the view waits for it.\n"
        finally:
            server.kill()
