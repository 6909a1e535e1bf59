"""The bare engine: a job that echoes 50 bytes, to compare a round of ours with.

By calls of FLARE's Collab API, and over its cells as our rounds are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from nvflare.collab import collab

from fedtmle.engine.flare import ServerCell
from fedtmle.engine.flare_silo import answer_server

ROUNDS = 60


class EchoServer:
    """Calls all silos, round by round, and writes down how long each round took."""

    def __init__(self, out: str) -> None:
        self.out = out

    @collab.main
    def main(self) -> None:
        cell = ServerCell(collab.fl_ctx, lambda: bool(collab.is_aborted))
        names = [client.name for client in collab.clients]
        found = {
            "calls": self._timed(lambda: len(list(collab.clients(timeout=60.0).step(bytes(50))))),
            "cells": self._timed(lambda: len(cell.call(dict.fromkeys(names, bytes(50)), 60.0))),
        }
        Path(self.out).write_text(json.dumps(found))

    def _timed(self, call: Callable[[], int]) -> list[float]:
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            count = call()
            seconds.append(time.perf_counter() - began)
            if count != len(collab.clients):
                raise RuntimeError("a silo did not answer")
        return seconds


class EchoSilo:
    """Says what it hears."""

    @collab.init
    def start(self) -> None:
        answer_server(collab.fl_ctx, lambda frame: frame)

    @collab.publish
    def step(self, frame: bytes) -> bytes:
        return frame
