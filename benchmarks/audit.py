"""How long a silo's audit takes: a table of 100,000 records, and the answers of 300 rounds.

    python -m benchmarks.audit [rows] [rounds]

A study with steps far shorter than they need be is run once for its transcript, then `fedtmle risk` is
called on it as a silo's owner would, with all of its attackers. The audit must take less than 60 s.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LIMIT = 60.0
STUDY = """\
[target]
kind = "ATE"
outcome = "y"
treatment = "a"
[variables]
y = {{kind = "number", range = [-20, 20]}}
a = {{kind = "binary"}}
x0 = {{kind = "number", range = [-10, 10]}}
x1 = {{kind = "number", range = [-10, 10]}}
x2 = {{kind = "number", range = [-10, 10]}}
x3 = {{kind = "number", range = [-10, 10]}}
x4 = {{kind = "number", range = [-10, 10]}}
[models.outcome]
formula = "a + x0 + x1 + x2 + x3 + x4"
[models.treatment]
formula = "x0 + x1 + x2 + x3 + x4"
[algorithm]
kind = "Coded"
tolerance = 1e-6
smoothness = 1e3
max_rounds = {rounds}
[silos]
north = "north.parquet"
south = "south.parquet"
"""


def write(folder: Path, n: int, rounds: int) -> Path:
    import duckdb

    rng = np.random.default_rng(1)
    for silo in ("north", "south"):
        x = rng.normal(size=(n, 5))
        a = (rng.random(n) < 1 / (1 + np.exp(-x[:, 0] / 2))).astype(np.int64)
        y = np.clip(1.0 * a + x[:, 0] * x[:, 1] + rng.normal(size=n), -20, 20)
        table = {f"x{j}": np.ascontiguousarray(x[:, j]) for j in range(5)} | {"a": a, "y": y}
        with duckdb.connect() as base:
            base.register("made", table)
            base.sql("SELECT * FROM made").write_parquet(str(folder / f"{silo}.parquet"))
    study = folder / "study.toml"
    study.write_text(STUDY.format(rounds=rounds), encoding="utf-8")
    return study


def main() -> int:
    n, rounds = (int(word) for word in (*sys.argv[1:], *("100000", "300")[len(sys.argv) - 1 :]))
    command = [sys.executable, "-m", "fedtmle"]
    with tempfile.TemporaryDirectory() as made:
        study = write(Path(made), n, rounds)
        transcript = study.with_name("run.transcript")
        subprocess.run(  # noqa: S603 - ends with status 3: the budget of rounds is spent
            [*command, "run", str(study), "--transcript", str(transcript), "--json"],
            check=False,
            stdout=subprocess.DEVNULL,
        )
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(  # noqa: S603
            [*command, "risk", str(study), "--silo", "north", "--transcript", str(transcript), "--json"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(done.stdout)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{told['n_rows']:,} records, {told['answers']} answers of {told['numbers']:,} numbers")
    print(f"{wall:.1f} s by the clock, {cpu:.1f} s of CPU; at most {LIMIT:.0f} s are wanted")
    return 0 if wall < LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
