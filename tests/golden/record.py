"""Record the golden runs, or compare them with what was recorded.

    python -m tests.golden.record              record every run
    python -m tests.golden.record NAME ...     record the named runs again, and leave the others as they are
    python -m tests.golden.record --check      print which runs differ, and in what; ends with 1 if any does
    python -m tests.golden.record --print      write what was seen as JSON; the tests read it

Each of them runs in an environment that makes processors alike (`tests.golden.pinned`). Only the same
versions of numpy and scikit-learn promise the same bits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.errors import FedTMLEError
from tests.golden import pinned
from tests.golden.runs import RUNS
from tests.golden.tap import (
    USED_BY,
    Tap,
    message_digest,
    numbers,
    plain,
    tapped,
    value_digest,
    values_of,
)
from tests.kinds import concrete

GOLDEN = Path(__file__).with_name("golden.json")
DIGESTS = ("messages", "results", "document")


@cache
def perform(name: str) -> tuple[dict[str, Any], Tap]:
    """Return what is recorded of one run, and what was seen on its wire."""
    with tempfile.TemporaryDirectory() as folder, tapped() as tap:
        try:
            result = RUNS[name](Path(folder))
        except FedTMLEError:
            result = None
    return _entry(result, tap), tap


def _entry(result: Any, tap: Tap) -> dict[str, Any]:
    values: Any = result
    document: Any = result
    if isinstance(result, ft.StudyResult):
        values, document = values_of(result.run), result.to_dict()
    elif isinstance(result, ft.Result):
        values, document = values_of(result), result.to_dict()
    shown = values if isinstance(values, dict) else {}
    psi = shown.get("psi")
    account = shown.get("account", {})
    refused = "; ".join(f"{silo}: {reason} [{key}]" for silo, reason, key in tap.refusals)
    return {
        "messages": message_digest(tap.in_order()),
        "results": value_digest({"values": values, "refusals": tap.refusals}),
        "document": value_digest(numbers(document)),
        "exchanged": len(tap.messages),
        "rounds": sum(account.get("rounds", {}).values()),
        "bits": sum(
            sum(by.values()) for way in ("bits_up", "bits_down") for by in account.get(way, {}).values()
        ),
        "psi": None if psi is None else [repr(value) for value in np.asarray(psi).tolist()],
        "ended": refused or ("failed" if result is None else plain(shown.get("status", "done"))),
    }


def load() -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text(encoding="utf-8")))


def seen() -> dict[str, Any]:
    """Return all that the tests ask of the runs: their entries, refusals, and the classes that none uses."""
    performed = {name: perform(name) for name in RUNS}
    used = {kind for _, tap in performed.values() for kind in tap.used}
    return {
        "arithmetic": pinned.arithmetic(),
        "runs": {name: entry for name, (entry, _) in performed.items()},
        "refusals": sorted({refusal for _, tap in performed.values() for refusal in tap.refusals}),
        "classes": {base.__name__: len(concrete(base)) for base in USED_BY},
        "unused": {
            base.__name__: sorted(kind.__name__ for kind in concrete(base) - used) for base in USED_BY
        },
    }


def save(runs: dict[str, dict[str, Any]]) -> None:
    document = {
        "made by": "python -m tests.golden.record",
        "digests": {
            "messages": "SHA-256 of every message: silo, request, reply (tests/golden/tap.py)",
            "results": "SHA-256 of psi, covariance, history, trajectory, account, status and refusals",
            "document": "SHA-256 of every number of the result as plain data",
        },
        "arithmetic": pinned.arithmetic(),
        "runs": dict(sorted(runs.items())),
    }
    GOLDEN.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def differences(recorded: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """Return the fields that differ: the digests by name, readable fields with both values."""
    return [
        field if field in DIGESTS else f"{field} {recorded.get(field)} -> {entry.get(field)}"
        for field in entry
        if recorded.get(field) != entry[field]
    ]


def check() -> int:
    recorded = load()["runs"]
    lines = [f"{name}: is recorded, but no run is called that" for name in recorded.keys() - RUNS.keys()]
    for name in RUNS:
        found = differences(recorded.get(name, {}), perform(name)[0])
        if found:
            lines.append(f"{name}: {'; '.join(found) if name in recorded else 'is not recorded'}")
    sys.stdout.write("".join(f"{line}\n" for line in sorted(lines)))
    sys.stdout.write(f"{len(lines)} of {len(RUNS)} runs differ\n")
    return 1 if lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the runs to record; all if none is named")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--print", action="store_true", help="write what was seen as JSON to standard output")
    arguments = parser.parse_args()
    if not pinned.is_pinned():
        process = pinned.python("tests.golden.record", *sys.argv[1:], check=False)
        sys.stdout.write(process.stdout)
        return process.returncode
    if arguments.print:
        json.dump(seen(), sys.stdout)
        return 0
    if arguments.check:
        return check()
    unknown = [name for name in arguments.names if name not in RUNS]
    if unknown:
        parser.error(f"no run is called {', '.join(unknown)}")
    kept = {name: entry for name, entry in load()["runs"].items() if name in RUNS} if arguments.names else {}
    save(kept | {name: perform(name)[0] for name in arguments.names or RUNS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
