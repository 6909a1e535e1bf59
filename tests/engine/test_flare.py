"""The federation over FLARE, without FLARE: which calls are made, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import pytest

from fedtmle.engine import flare, frames
from fedtmle.engine.flare import FlareFederation, ServerCell
from fedtmle.engine.frames import Answer, Declined, Reply, Waiting
from fedtmle.engine.site import Endpoint
from fedtmle.errors import DeadlineError, ProtocolError, RefusedError

SITES = {"north": "north", "south": "south"}


class Site(ServerCell):
    """Answers for all sites, except those that are ``lost``."""

    def __init__(self, lost: tuple[str, ...] = ()) -> None:
        self.lost = lost
        self.asked: list[dict[str, bytes]] = []

    def call(self, asked: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        assert timeout > 0
        self.asked.append(dict(asked))
        return {site: b"<" + frame for site, frame in asked.items() if site not in self.lost}


class Lossy(FlareFederation):
    """A call to the silos in ``lost`` never returns, as when its connection is cut; it takes all its time."""

    def __init__(self, *, lost: dict[str, int], deadline: float = 5.0) -> None:
        super().__init__(SITES, Site(), deadline=deadline)
        self.lost = lost
        self.calls: list[tuple[tuple[str, ...], float]] = []

    def ask(self, asked: Mapping[str, bytes], *, timeout: float) -> dict[str, Answer]:
        self.calls.append((tuple(asked), timeout))
        answers: dict[str, Answer] = {}
        for silo, frame in asked.items():
            if self.lost.get(silo, 0) > 0:
                self.lost[silo] -= 1
            else:
                answers[silo] = Reply(frame[1:] + silo.encode())
        if len(answers) < len(asked):
            time.sleep(timeout)
        return answers


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flare, "ASK_AGAIN", 0.2)
    monkeypatch.setattr(flare, "RETRY_PAUSE", 0.01)


def test_a_lost_call_is_repeated_within_the_deadline_to_the_silo_that_did_not_answer() -> None:
    line = Lossy(lost={"south": 3})
    began = time.monotonic()
    assert line.exchange({"north": b"n", "south": b"s"}) == {"north": b"nnorth", "south": b"ssouth"}
    assert time.monotonic() - began < 2.0  # far from the deadline of 5 s
    assert [silos for silos, _ in line.calls] == [("north", "south"), *[("south",)] * 3]
    assert all(timeout <= 0.2 for _, timeout in line.calls)


def test_calls_end_with_the_deadline() -> None:
    line = Lossy(lost={"south": 100}, deadline=0.5)
    with pytest.raises(DeadlineError, match=r"no answer from 'south' within 0.5 s"):
        line.exchange({"north": b"n", "south": b"s"})
    assert 3 <= len(line.calls) <= 5
    assert line.calls[-1][1] < 0.2  # the last call has what is left


@pytest.mark.parametrize("times", [1, 4])
def test_a_silo_that_is_computing_is_asked_again(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Lossy(lost={})
    busy: list[Answer] = [Waiting.ANSWER] * times
    monkeypatch.setattr(line, "ask", lambda *_, **__: {"north": (busy or [Reply(b"x")]).pop()})
    assert line.exchange({"north": b"n"}) == {"north": b"x"}
    assert not busy


def test_a_silo_that_declines_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Lossy(lost={})
    monkeypatch.setattr(line, "ask", lambda *_, **__: {"north": Declined.DATA})
    with pytest.raises(RefusedError, match="'north' refused: its data cannot be used"):
        line.exchange({"north": b"n"})


def test_a_request_that_is_repeated_while_it_is_computed_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.engine.site.BUSY_AFTER", 0.1)
    release = threading.Event()

    class Slow:
        error, local, steps = None, None, 0

        def step(self, _: bytes) -> bytes:
            self.steps += 1
            release.wait(10)
            return b"done"

    slow = Slow()
    end = Endpoint(lambda: None, lambda: slow)  # type: ignore[arg-type,return-value]
    assert frames.read_answer(end.step(frames.HELLO)) == frames.Ready()
    first = threading.Thread(target=end.step, args=(frames.request(b"r"),))
    first.start()
    assert frames.read_answer(end.step(frames.request(b"r"))) is Waiting.ANSWER
    release.set()
    first.join()
    assert slow.steps == 1  # the repetition did not start the computation again
    assert frames.read_answer(end.step(frames.request(b"r"))) == Reply(b"done")


def test_each_frame_is_signed_once_and_goes_to_its_site() -> None:
    site, signed = Site(lost=("s3",)), []

    def seal(frame: bytes) -> bytes:
        signed.append(frame)
        return b"+" + frame

    line = FlareFederation({"a": "s1", "b": "s2", "c": "s3"}, site, deadline=5.0, seal=seal)
    asked = {"a": b"x", "b": b"x", "c": b"y"}
    assert line.ask(asked, timeout=1.0) == {"a": Reply(b"+x"), "b": Reply(b"+x")}
    assert sorted(signed) == [b"x", b"y"]
    assert site.asked == [{"s1": b"+x", "s2": b"+x", "s3": b"+y"}]


def test_what_is_no_frame_names_its_silo() -> None:
    class Strange(Site):
        def call(self, asked: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:  # noqa: ARG002
            return dict.fromkeys(asked, b"")

    with pytest.raises(ProtocolError, match="silo 'north' sent bytes that are not a frame"):
        FlareFederation(SITES, Strange(), deadline=5.0).exchange({"north": b"n"})
