"""Rounds over FLARE's cells, with cells that are not connected: who is asked, and who is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.collab.api.exceptions import RunAborted
from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message

from fedtmle.engine.flare import ServerCell
from fedtmle.engine.flare_silo import answer_server

JOB = "5f0c"


class CoreCell:
    """Delivers to the callbacks of the cells in ``heard``; to others nothing gets through."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: dict[str, CoreCell] = {}
        self.callbacks: dict[tuple[str, str], Callable[[Message], Message]] = {}

    def register_request_cb(self, channel: str, topic: str, cb: Callable[[Message], Message]) -> None:
        self.callbacks[channel, topic] = cb

    def broadcast_multi_requests(
        self,
        targets: Mapping[str, TargetMessage],
        timeout: float,  # noqa: ARG002
        optional: bool,  # noqa: ARG002
    ) -> dict[str, Message]:
        replies = {}
        for name, target in targets.items():
            message = target.message
            assert message.get_header(MessageHeaderKey.DESTINATION) == name
            message.set_header(MessageHeaderKey.ORIGIN, self.name)
            key = message.get_header(MessageHeaderKey.CHANNEL), message.get_header(MessageHeaderKey.TOPIC)
            lost = Message({MessageHeaderKey.RETURN_CODE: ReturnCode.TIMEOUT}, None)
            replies[name] = self.heard[name].callbacks[key](message) if name in self.heard else lost
        return replies


def context(cell: CoreCell, *sites: str) -> Any:
    clients = [SimpleNamespace(name=site, get_fqcn=lambda site=site: site) for site in sites]
    engine = SimpleNamespace(get_cell=lambda: SimpleNamespace(core_cell=cell), get_clients=lambda: clients)
    return SimpleNamespace(get_engine=lambda: engine, get_job_id=lambda: JOB)


def linked(answer: Callable[[bytes], Any], name: str = f"server.{JOB}") -> tuple[CoreCell, ServerCell]:
    """A cell with this name that asks as the server does, and the site "north", which answers."""
    cell, north = CoreCell(name), CoreCell(f"north.{JOB}")
    answer_server(context(north), answer)
    cell.heard[north.name] = north
    return cell, ServerCell(context(cell, "north", "south"), lambda: False)


def test_sites_that_answer_are_heard_and_the_others_are_left_out() -> None:
    _, cell = linked(lambda frame: frame + b"!")
    assert cell.call({"north": b"n", "south": b"s"}, 1.0) == {"north": b"n!"}


@pytest.mark.parametrize("name", ["south.5f0c", "server", "server.other", "server.5f0c.child"])
def test_a_site_answers_the_server_of_its_job_alone(name: str) -> None:
    heard: list[bytes] = []

    def answer(frame: bytes) -> bytes:
        heard.append(frame)
        return frame

    _, cell = linked(answer, name)
    assert cell.call({"north": b"n"}, 1.0) == {}
    assert heard == []


@pytest.mark.parametrize(
    ("sent", "read"), [(bytearray(b"x"), b"x"), (memoryview(b"x"), b"x"), ({}, b""), (None, b"")]
)
def test_what_is_no_byte_string_is_read_as_nothing(sent: object, read: bytes) -> None:
    _, cell = linked(lambda _: sent)
    assert cell.call({"north": b"n"}, 1.0) == {"north": read}


def test_a_job_that_the_engine_ends_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, _ = linked(lambda frame: frame)
    release = threading.Event()
    monkeypatch.setattr(cell, "broadcast_multi_requests", lambda *_, **__: release.wait(30) and {})
    with pytest.raises(RunAborted, match="the engine ended the job"):
        ServerCell(context(cell, "north"), lambda: True).call({"north": b"n"}, 30.0)
    release.set()


def test_a_fault_of_the_engine_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, line = linked(lambda frame: frame)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no route")

    monkeypatch.setattr(cell, "broadcast_multi_requests", fails)
    with pytest.raises(RuntimeError, match="no route"):
        line.call({"north": b"n"}, 1.0)
