"""What the server's engine wrote about itself: whether it runs, and which silos are connected."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtmle.engine.alive import Process
from fedtmle.engine.runs import full_disk
from fedtmle.runtime.documents import read_document

STALE = 15.0  # seconds without a sign of life


@dataclass(frozen=True, kw_only=True)
class Presence:
    """The last sign of life of a server's engine."""

    alive: bool
    age: float  # seconds
    sites: Mapping[str, Mapping[str, Any]]  # the connected silos: when heard, which version


def presence(server: Path) -> Presence | None:
    """Return the sign of life in a server's kit, judged against the machine; None if there is none."""
    try:
        document = read_document(server / "fedtmle" / "server.json")
        process, written = Process(**document["process"]), float(document["time"])
        sites: Mapping[str, Mapping[str, Any]] = document["sites"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    age = max(time.time() - written, 0.0)
    is_alive = process.find() is not None and age < STALE
    return Presence(alive=is_alive, age=age, sites=sites if is_alive else {})


def server_trouble(server: Path) -> str:
    """Return what is wrong with the server, an empty string if it runs.

    A server whose disk is full cannot give a sign of life.
    """
    for folder in (server / "runs", server):
        full = full_disk(folder)
        if full:
            return full
    seen = presence(server)
    if seen is None or not seen.alive:
        return f"the server is not running; start it with `fedtmle server start {server}`"
    return ""
