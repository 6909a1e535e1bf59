"""Every comparison in one run: `make bench`, or `python -m benchmarks.bench --quick`.

--quick        smaller sizes, a few minutes
--only NAME    one suite or program, several times if wanted
--out FOLDER   where benchmarks.csv and benchmarks.md go (docs)
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.table import Row

HERE = Path(__file__).parent
SUITES = ("startup", "kernels", "protocol", "coded", "peers", "streaming", "survival")
PARTS = {"__init__.py", "bench.py", "native.py", "table.py", "versions.py"}
PACKAGES = ("fedtmle", "numpy", "numba", "scipy", "scikit-learn", "pandas", "duckdb", "zepid", "causallib")
PACKAGES += ("DoubleML", "econml", "cleverly", "lifelines")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs")
    options = parser.parse_args()
    rows: list[Row] = []
    for suite in (name for name in SUITES if not options.only or name in options.only):
        for row in _suite(suite, quick=options.quick):
            rows.append(row)
            print(_line(row), flush=True)
            _write(rows, {}, options)
    outputs = {}
    for name in programs():
        if name in options.only or not (options.only or options.quick):
            print(f"{name} ...", flush=True)
            outputs[name] = _program(name)
            _write(rows, outputs, options)


def programs() -> list[str]:
    """The scripts beside this one: each prints its own report."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.name not in PARTS)


def _suite(name: str, *, quick: bool) -> Iterator[Row]:
    try:
        yield from importlib.import_module(f"benchmarks.suites.{name}").rows(quick)
    except Exception as error:  # one suite's failure must not cost the others
        told = f"did not run: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        yield Row(group=name, what="", against="", unit="", note=told)


def _program(name: str) -> str:
    done = subprocess.run(  # noqa: S603 - a script of this folder
        [sys.executable, "-m", f"benchmarks.{name}"], capture_output=True, text=True, check=False
    )
    if done.returncode and not done.stdout:
        return f"did not run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return done.stdout.rstrip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _verdict(row: Row) -> str:
    return {True: "holds", False: "does not hold", None: ""}[row.holds]


def _line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}{'x faster' if row.faster else 'x'} {row.goal}"
    against = f" | {row.against} {_number(row.theirs)}" if row.against else ""
    measured = f"{row.group}: {row.what}: {_number(row.ours)} {row.unit}{against}"
    return f"{measured} | {ratio} {_verdict(row)} {row.note}"


def _write(rows: Sequence[Row], outputs: dict[str, str], options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    names = ("group", "what", "unit", "ours", "against", "theirs", "ratio", "faster", "goal", "holds", "note")
    with (options.out / "benchmarks.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in rows)
    (options.out / "benchmarks.md").write_text(
        _page(rows, outputs, quick=options.quick, only=options.only), encoding="utf-8"
    )


def _page(rows: Sequence[Row], outputs: dict[str, str], *, quick: bool, only: Sequence[str]) -> str:
    given = " ".join([*(["--quick"] if quick else []), *(f"--only {name}" for name in only)])
    how = f"`make bench BENCH='{given}'`" if given else "`make bench`"
    lines = [
        "# Benchmarks",
        "",
        f"Made by {how} on {datetime.date.today():%d %B %Y}. {_machine()}",
        "",
        "Compared things take turns in one run, so that a busy machine disturbs both alike. Of kernels,",
        "start-up and a silo's round the least of several times counts; a whole TMLE of ours is the mean of",
        "a run before and one after the peer's single run. Time is by the clock, or where a row says CPU the",
        'processor\'s. A ratio is ours over theirs, or with "faster" theirs over ours (of bits: fewer).',
    ]
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"## {group[:1].upper()}{group[1:]}", ""]
        lines += ["| what | ours | beside | theirs | ratio | goal | |", "|---|---:|---|---:|---:|---|---|"]
        for row in (row for row in rows if row.group == group):
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}" + (" faster" if row.faster else "")
            told = "; ".join(filter(None, (_verdict(row), row.note)))
            cells = (row.what, f"{_number(row.ours)} {row.unit}", row.against, _number(row.theirs), ratio)
            lines.append("| " + " | ".join((*cells, row.goal, told)) + " |")
    for name, output in outputs.items():
        lines += ["", f"## {name}.py", "", "```", output, "```"]
    return "\n".join(lines) + "\n"


def _machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        model = found[0].split(":", 1)[1].strip() if found else model
    except OSError:
        pass
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} not installed")
    load = os.getloadavg()[0]
    return (
        f"Machine: {model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
        f"{load:.1f} processes were waiting for a core at the end. {', '.join(versions)}."
    )


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
