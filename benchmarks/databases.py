"""A streamed study from PostgreSQL beside the same rows in Parquet: time, and the silo's peak memory.

    python -m benchmarks.databases             10^6 rows
    python -m benchmarks.databases 10000000 1  as many as are asked for, and one turn instead of three

A PostgreSQL server is started in a temporary folder. Each measurement is a process of its own: it reads the
rows (those of PostgreSQL are first copied to Parquet, as in any streamed run) and runs the study.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS = "id, y, a, x1, x2, x3, x4, site"
QUERY = f"select {COLUMNS} from patients"  # noqa: S608 - a constant


def measure(silo: str) -> None:
    """Run the study over one silo file, and print seconds and bytes as JSON."""
    import fedtmle as ft
    from fedtmle.protocol.plan import roster
    from fedtmle.protocol.policy import UNGUARDED
    from fedtmle.runtime.records import Keeper
    from fedtmle.runtime.session import InProcess, Session
    from fedtmle.studies.home import open_party
    from fedtmle.studyfile.file import study_plan

    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + x1 + x2 + x3 + x4 + C(site)"),
        treatment_model=ft.GLM("x1 + x2 + C(site)"),
        variables=ft.Variables(
            {
                "y": {"kind": "number", "range": (0, 20)},
                "a": {"kind": "binary"},
                **{f"x{k}": {"kind": "number", "range": (-1, 1)} for k in range(1, 5)},
                "site": {"kind": "category", "levels": [f"site {k}" for k in range(5)]},
            }
        ),
    )
    plan = study_plan(study, roster(["silo"]))
    begin = time.perf_counter()
    party = open_party(plan, "silo", silo, keeper=Keeper(policy=UNGUARDED))
    opened = time.perf_counter()
    finished = Session(plan, InProcess([party])).run()
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    messages = hashlib.blake2b(repr(finished.transcript).encode()).hexdigest()
    seconds = {"read": opened - begin, "study": done - opened, "both": done - begin}
    print(json.dumps({**seconds, "peak": peak, "messages": messages}))


def write_rows(rows: int, path: Path) -> None:
    """Write the rows to a Parquet file: what looks random is a hash of the row's number."""
    import duckdb

    uniform = "hash({}, i) / 18446744073709551615.0"
    x = ", ".join(f"{uniform.format(k)} * 2 - 1 as x{k}" for k in range(1, 5))
    with duckdb.connect() as connection:
        connection.execute("SET memory_limit = '512MB'")
        connection.execute(
            f"""COPY (
              SELECT i AS id, 5 + x1 + 2 * a + x2 * x3 + {uniform.format(9)} AS y, a, x1, x2, x3, x4, site
              FROM (
                SELECT *, CAST({uniform.format(8)} < 0.5 + 0.2 * x1 AS INTEGER) AS a
                FROM (SELECT i, {x}, 'site ' || (i % 5) AS site FROM range({rows}) r(i))
              )
            ) TO '{path}'"""  # noqa: S608 - a benchmark's own text
        )


def fill(url: str, path: Path) -> None:
    """Load the Parquet file into a table of PostgreSQL."""
    import pyarrow.parquet as pq
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        file = pq.ParquetFile(path)
        for number, batch in enumerate(file.iter_batches(batch_size=500_000)):
            cursor.adbc_ingest("patients", batch, mode="create" if number == 0 else "append")
        cursor.execute("create role reader login password 'reader'")
        cursor.execute("grant select on patients to reader")
        connection.commit()
    with dbapi.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("vacuum analyze patients")


def main(rows: int, turns: int = 3) -> None:
    """Measure both in turns, and print the table."""
    from tests.databases.server import Server, missing_programs

    reason = missing_programs()
    if reason is not None:
        print(reason)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, server = Path(name), Server()
        try:
            write_rows(rows, folder / "patients.parquet")
            fill(server.url(), folder / "patients.parquet")
            silos = {
                "Parquet": 'path = "patients.parquet"',
                "PostgreSQL": f'database = {{url_env = "BENCH_DB"}}\nquery = "{QUERY}"',
            }
            url = server.url(user="reader", password="reader")  # noqa: S106 - of this server alone
            found: dict[str, list[dict[str, float]]] = {}
            for kind, data in silos.items():
                text = f'[silo]\nname = "silo"\n[data]\n{data}\nstream = true\n'
                (folder / f"{kind}.toml").write_text(text)
            for _ in range(turns):
                for kind in silos:
                    silo = str(folder / f"{kind}.toml")
                    command = [sys.executable, "-m", "benchmarks.databases", "--child", silo]
                    child = subprocess.run(  # noqa: S603 - this program
                        command, env={**os.environ, "BENCH_DB": url}, stdout=subprocess.PIPE, check=True
                    )
                    found.setdefault(kind, []).append(json.loads(child.stdout))
        finally:
            server.close()
    report(rows, found)


def report(rows: int, found: dict[str, list[dict[str, float]]]) -> None:
    """Print the best of the turns, and the ratios."""
    parts = ("read", "study", "both")
    print(f"{rows:,} rows of {COLUMNS.count(',') + 1} columns, streamed; seconds, the best turn")
    print(f"{'':12}{''.join(f'{part:>10}' for part in parts)}{'peak, MiB':>12}")
    best = {kind: [min(turn[part] for turn in turns) for part in parts] for kind, turns in found.items()}
    for kind, turns in found.items():
        peak = max(turn["peak"] for turn in turns) / 2**20
        print(f"{kind:12}{''.join(f'{value:10.2f}' for value in best[kind])}{peak:12.0f}")
    ratios = [ours / theirs for ours, theirs in zip(best["PostgreSQL"], best["Parquet"], strict=True)]
    print(f"{'ratio':12}{''.join(f'{ratio:10.2f}' for ratio in ratios)}")
    alike = len({turn["messages"] for turns in found.values() for turn in turns}) == 1
    print("the same messages, byte for byte" if alike else "THE MESSAGES DIFFER")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure(sys.argv[2])
    else:
        main(*map(int, sys.argv[1:] or ("1000000",)))
