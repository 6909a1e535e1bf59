"""The bare engine: a Collab job that echoes 50 bytes, to compare a round of ours with."""

from __future__ import annotations

import json
import time
from pathlib import Path

from nvflare.collab import collab

ROUNDS = 60


class EchoServer:
    """Calls all silos, round by round, and writes down how long each round took."""

    def __init__(self, out: str) -> None:
        self.out = out

    @collab.main
    def main(self) -> None:
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            answers = list(collab.clients(timeout=60.0).step(bytes(50)))
            seconds.append(time.perf_counter() - began)
            if len(answers) != len(collab.clients):
                raise RuntimeError("a silo did not answer")
        Path(self.out).write_text(json.dumps(seconds))


class EchoSilo:
    """Says what it hears."""

    @collab.publish
    def step(self, frame: bytes) -> bytes:
        return frame
