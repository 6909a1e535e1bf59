"""The live view in a browser: while a run goes on, at its end, and when a silo or the run dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedtmle.studies.progress import EventLog
from tests.browser import gated_run
from tests.browser.conftest import Page
from tests.watch.sessions import run_with_ledger
from tests.watch.test_events import START, round_report

GATED = Path(__file__).with_name("gated_run.py")
PATIENCE = 60.0  # seconds; only a broken view needs them


def eventually(happens: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if happens():
            return True
        time.sleep(0.1)
    return False


@contextmanager
def watching(events: Path, *options: str) -> Iterator[str]:
    """`fedtmle watch` as a user starts it; its address is what it prints."""
    command = [sys.executable, "-m", "fedtmle", "watch", str(events), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            yield next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        finally:
            server.terminate()
        assert server.wait(PATIENCE) == 0


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    run = subprocess.Popen([sys.executable, str(GATED), *map(str, arguments)])  # noqa: S603 - our own
    try:
        yield run
    finally:
        run.kill()
        run.wait(PATIENCE)


@contextmanager
def running_here(study: Path, events: Path, *gates: int) -> Iterator[None]:
    """The same run in a thread: a process more would compile the kernels again."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(gated_run.main, str(study), str(events), ",".join(map(str, gates)))
        try:
            yield
        finally:
            for gate in gates:  # nobody waits for a test that failed
                pass_gate(events, gate)
        run.result(PATIENCE)


def pass_gate(events: Path, at: int) -> None:
    Path(f"{events}.{at}").touch()


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_the_view_follows_a_run_to_its_end(page: Page, toy: Path, tmp_path: Path, width: int) -> None:
    events = tmp_path / "run.jsonl"
    with watching(events) as url:
        page.open(url, width=width, dark=width == 768)
        assert eventually(lambda: "no run has started" in page.text("#status"))
        with running_here(toy, events, 5, 13):
            assert eventually(lambda: page.text("#round") == "5")
            assert page.text("#status") == "running"
            assert page.text("#left") == "not known yet"
            pass_gate(events, 5)
            assert eventually(lambda: page.text("#round") == "13")  # it moves while the run goes on
            assert page.text("#phase") == "targeting"
            label = page.ask("return document.querySelector('#chart svg').getAttribute('aria-label')")
            assert "Residual by round on a log axis" in str(label)
            assert "tolerance" in str(label)
            assert "tolerance" in page.text("#chart")
            assert page.ask("return document.querySelector('#chart .curve').getTotalLength() > 50")
            assert page.text("#left").endswith(" s")  # the time left is estimated by now
            pass_gate(events, 13)
        assert eventually(lambda: page.text("#status").startswith("finished"))
        assert page.text("#silos").count("done") == 2
        assert "holds to the tolerance" in page.text("#events")
        assert not page.overflows()
        time.sleep(1.2)  # it goes on asking, and nothing breaks
        assert page.text("#status").startswith("finished")
        assert page.complaints() == []


def test_the_view_survives_a_silos_death(page: Page, toy: Path, tmp_path: Path) -> None:
    events = tmp_path / "run.jsonl"
    with watching(events) as url:
        page.open(url, width=768)
        with running(toy, events, "", "south", 12) as run:
            assert run.wait(PATIENCE) == 3
        assert eventually(lambda: page.text("#status").startswith("failed"))
        rows = {line.split("\t")[0]: line for line in page.text("#silos").splitlines()}
        assert "refused: the silo could not compute its answer" in rows["south"]
        assert "stopped" in rows["north"]
        assert page.complaints() == []
        with running_here(toy, events):  # the next run, appended to the same file
            pass
        assert eventually(lambda: page.text("#status").startswith("finished"))
        assert page.complaints() == []


def test_the_view_says_when_a_run_was_killed(page: Page, toy: Path, tmp_path: Path) -> None:
    """Nobody writes a last line: the view says that there is no news."""
    events = tmp_path / "run.jsonl"
    with watching(events, "--silence", "1") as url:
        page.open(url, width=768)
        with running(toy, events, "5") as run:
            assert eventually(lambda: page.text("#round") == "5")
            run.kill()
        assert eventually(lambda: page.text("#status").startswith("no news for"))
        assert page.complaints() == []


def test_the_page_outlives_its_server(page: Page, tmp_path: Path) -> None:
    with watching(tmp_path / "run.jsonl") as url:
        page.open(url, width=360)
        assert eventually(lambda: "no run has started" in page.text("#status"))
    assert eventually(lambda: "does not answer" in page.text("#status"))
    page.complaints()  # a refused connection is logged by the browser itself


def test_a_residual_of_zero_lies_at_the_foot_of_the_chart(page: Page, tmp_path: Path) -> None:
    events = tmp_path / "run.jsonl"
    log = EventLog(events)
    log.start(**START)
    for number, norm in enumerate((0.2, 1e-4, 0.0, 0.0), start=1):
        log.round(round_report(number, norm))
    log.close()
    with watching(events) as url:
        page.open(url, width=768)
        assert eventually(lambda: page.text("#residual") == "0")
        marks = page.ask("return [...document.querySelectorAll('#chart path.dot')].map(m => m.getBBox().y)")
        line = page.ask("return document.querySelector('#chart .tolerance').getBBox().y")
        assert isinstance(marks, list)
        assert isinstance(line, float | int)
        assert len(marks) == 2
        assert min(marks) > line
        assert page.complaints() == []


def test_a_silos_owner_sees_what_was_sent(page: Page, tmp_path: Path) -> None:
    book = tmp_path / "ledger.jsonl"
    finished = run_with_ledger(book)
    with watching(book, "--ledger") as url:
        page.open(url, width=360)
        assert eventually(lambda: page.text("#status").startswith("finished"))
        assert page.text("#question") == "What has this silo sent so far?"
        sent = sum(bits for (_, silo), bits in finished.account.bits_up.items() if silo == "a")
        cells = page.ask("return [...document.querySelectorAll('#sent td:last-child')].map(c => c.innerText)")
        assert isinstance(cells, list)
        assert sum(int(cell.replace(",", "")) for cell in cells) == sent
        shown = page.text("#sent")
        assert "the mean gradient over the rows, rounded to the public grid" in shown
        assert "Query" not in shown  # in words, not by the names of classes
        assert not page.overflows()
        assert page.complaints() == []
