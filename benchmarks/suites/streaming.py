"""A whole study over streamed Parquet files, in one process: time and memory as n grows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row

SILOS = 3  # a silo's policy refuses a study of fewer
SQL = """
COPY (
  WITH u AS (SELECT (hash(i) % 1000003) / 1000003.0 AS a1, (hash(i + 1000000007) % 1000003) / 1000003.0 AS a2,
    (hash(i + 2000000011) % 1000003) / 1000003.0 AS a3, (hash(i + 3000000019) % 1000003) / 1000003.0 AS a4
    FROM range({first}, {last}) AS t(i)),
  v AS (SELECT 2 * a1 - 1 AS w, 2 * a2 - 1 AS z, (a3 < 1 / (1 + exp(0.5 - a1)))::TINYINT AS a, a4 FROM u)
  SELECT w::FLOAT AS w, z::FLOAT AS z, a,
    (a4 < 1 / (1 + exp(0.5 - 0.5 * w - 0.3 * z - 0.4 * a)))::TINYINT AS y FROM v
) TO '{path}' (FORMAT parquet)
"""


def rows(quick: bool) -> Iterator[Row]:
    before: dict[str, float] | None = None
    for exponent in range(4, 7 if quick else 9):
        n = 10**exponent
        with tempfile.TemporaryDirectory() as folder:
            _write(n, Path(folder))
            done = subprocess.run(  # noqa: S603 - its own process, whose peak memory is asked
                [sys.executable, "-m", "benchmarks.suites.streaming", folder],
                check=True,
                capture_output=True,
                text=True,
            )
        found = json.loads(done.stdout)
        yield Row(
            group="scaling in n, streamed",
            what=f"ATE, GLMs, n = {n:.0e} from Parquet, {found['passes']} passes",
            against=f"n = {n // 10:.0e}" if before else "",
            unit="s (CPU)",
            ours=found["cpu"],
            theirs=before["cpu"] if before else None,
            most=12.0 if before and exponent >= 7 else None,
            note=f"{found['wall']:.0f} s by the clock, peak {found['mib']:.0f} MiB",
        )
        before = found


def _write(n: int, folder: Path) -> None:
    import duckdb

    with duckdb.connect(config={"threads": 2, "preserve_insertion_order": False}) as connection:
        for silo in range(SILOS):
            first, last = n * silo // SILOS, n * (silo + 1) // SILOS
            connection.execute(SQL.format(first=first, last=last, path=folder / f"{silo}.parquet"))
            (folder / f"{silo}.toml").write_text(
                f'[silo]\nname = "{silo}"\n[data]\npath = "{silo}.parquet"\nstream = true\n'
            )


def study(folder: Path) -> dict[str, float]:
    import time

    import fedtmle as ft

    asked = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + w + z"),
        treatment_model=ft.GLM("w + z"),
        algorithm=ft.Gradient(tolerance=1e-8, optimizer=ft.Newton()),
        variables=ft.Variables(
            {
                **{name: {"kind": "binary"} for name in ("y", "a")},
                **{name: {"kind": "number", "range": (-1, 1)} for name in ("w", "z")},
            }
        ),
    )
    wall, cpu = time.perf_counter(), time.process_time()
    rounds = []
    ft.run(asked, {str(silo): folder / f"{silo}.toml" for silo in range(SILOS)}, progress=rounds.append)
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "mib": _peak(),
        "passes": len(rounds) + 1,  # one to check every row first
    }


def _peak() -> float:
    """MiB at most; what `getrusage` says includes the parent at the fork."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return float(line.split()[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(study(Path(sys.argv[1]))))
