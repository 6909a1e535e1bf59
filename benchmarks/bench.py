"""Every comparison in one run: `make bench`, or `python -m benchmarks.bench --quick`.

--quick        smaller sizes, a few minutes; prints and writes nothing
--only NAME    one suite or program, several times if wanted
--page FILE    the page whose sections are written anew (docs/benchmarks.md)

Each suite and program has a section of the page, between two marks. The rest is written by hand.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.table import Row

HERE = Path(__file__).parent
SUITES = ("startup", "kernels", "protocol", "coded", "peers", "streaming", "survival")
PROGRAMS = ("audit", "communication", "flare_round", "guard", "masks", "validation")
PACKAGES = (
    *("fedtmle", "numpy", "numba", "scipy", "scikit-learn", "pandas", "duckdb", "nvflare"),
    *("zepid", "causallib", "DoubleML", "econml", "cleverly", "lifelines"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", default=[], choices=(*SUITES, *PROGRAMS))
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    options = parser.parse_args()
    for suite in (name for name in SUITES if not options.only or name in options.only):
        rows = _suite(suite, quick=options.quick)
        if rows and not options.quick:
            _write(options.page, suite, [_when(), *_tables(rows)])
    for name in PROGRAMS:
        if name in options.only or not (options.only or options.quick):
            print(f"{name} ...", flush=True)
            output = _program(name)
            print(output, flush=True)
            if output:
                shown = [output] if output.startswith("|") else ["```", output, "```"]
                _write(options.page, name, [f"## {name}.py", "", _when(), "", *shown])
    if not options.quick:
        _write(options.page, "versions", [_versions()])


def _suite(name: str, *, quick: bool) -> list[Row]:
    """Return what a suite measured, none if it failed: one suite's failure must not cost the others."""
    rows = []
    try:
        for row in importlib.import_module(f"benchmarks.suites.{name}").rows(quick):
            rows.append(row)
            print(_line(row), flush=True)
    except Exception as error:
        print(f"{name} did not run: {type(error).__name__}: {error}", file=sys.stderr)
        return []
    return rows


def _program(name: str) -> str:
    """Return what a program printed, "" if it failed on the way; a limit that is exceeded is no failure."""
    done = subprocess.run(  # noqa: S603 - a script of this folder
        [sys.executable, "-m", f"benchmarks.{name}"], capture_output=True, text=True, check=False
    )
    if not done.stdout or "Traceback" in done.stderr:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{name} did not run: {reason}", file=sys.stderr)
        return ""
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


def _write(page: Path, name: str, lines: Sequence[str]) -> None:
    """Write a section in the place of the former one, or at the end of the page."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    section = first + "\n".join(lines) + "\n" + last
    text = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    before, found, rest = text.partition(first)
    if found:
        text = before + section + rest.partition(last)[2]
    else:
        text += "\n" + section
    page.write_text(text, encoding="utf-8")


def _tables(rows: Sequence[Row]) -> list[str]:
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"## {group[:1].upper()}{group[1:]}", ""]
        lines += ["| what | ours | beside | theirs | ratio | goal | |", "|---|---:|---|---:|---:|---|---|"]
        for row in (row for row in rows if row.group == group):
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}" + (" faster" if row.faster else "")
            told = "; ".join(filter(None, (_verdict(row), row.note)))
            cells = (row.what, f"{_number(row.ours)} {row.unit}", row.against, _number(row.theirs), ratio)
            lines.append("| " + " | ".join((*cells, row.goal, told)) + " |")
    return lines


def _when() -> str:
    """Return when and where a section was measured."""
    return (
        f"*{datetime.date.today():%d %B %Y}, {_processor()}, {os.cpu_count()} cores; "
        f"{os.getloadavg()[0]:.1f} processes were running or waiting for a core at the end.*"
    )


def _processor() -> str:
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        described = []
    names = [line.split(":", 1)[1].strip() for line in described if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> str:
    versions = [f"{platform.system()}, Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"The last run was with {', '.join(versions)}."


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
