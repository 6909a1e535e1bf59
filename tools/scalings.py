"""Scale every function of the theory and of the audit, and report which test notices.

    python -m tools.scalings                    every function, by 1/2 and by 2; writes docs/scalings.csv
    python -m tools.scalings chi collision      those whose name contains a word; renews their rows
    python -m tools.scalings --named lemmas     only by tests in the files that docs/proved.md names; no rows
    python -m tools.scalings --list             names only

A function's numbers (those of arrays, tuples, mappings and dataclasses too) are multiplied; a truth value is
negated, and a member of an enumeration becomes its neighbour. The tests that `docs/proved.md` names for the
function run first. If they pass, all other tests that call it run, and the table says so. The exit status is
1 if a scaling passes both. Every scaling has a process
of its own, forked after the tests are collected, so that no cache outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

from fedtmle_paper.registry import STATEMENTS

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "scalings.csv"
FACTORS = (Fraction(1, 2), Fraction(2))
PACKAGES = ("fedtmle.theory", "fedtmle.privacy", "fedtmle_paper.privacy")
MODULES = ("fedtmle_paper.lemmas", "fedtmle_paper.history")
# The test of the table itself fails until the table is whole.
TABLE_TEST = "tests/theory/test_scalings.py::test_the_table_has_every_function_and_nothing_passes"
OPTIONS = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--deselect", TABLE_TEST)
FOLDERS = ("tests/theory", "tests/privacy")
WHOLE_RUNS = ("tests/theory/test_runs.py", "tests/theory/test_identities.py", "tests/theory/test_future.py")
# Functions without a number to scale: they check, look up or build what another function computes.
WITHOUT_NUMBERS = {
    "fedtmle.privacy.answers.single": "selects queries",
    "fedtmle.privacy.charts.held_view": "chooses a view; tests/effects/test_own.py has its intercepts",
    "fedtmle.privacy.problems.grouped": "checks a type, and returns its argument",
    "fedtmle.privacy.audit.require_at_least_zero": "returns nothing",
    "fedtmle_paper.privacy.collision.require_order": "returns nothing",
    "fedtmle_paper.history.decode_law": "returns a law, which its test compares bit by bit",
}


@dataclass(frozen=True)
class Scaling:
    """A function by its full name, and what its numbers are multiplied by."""

    name: str
    factor: Fraction

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that the registry names for the function."""
        return tuple(dict.fromkeys(t for s in STATEMENTS if self.name in s.functions for t in s.tests))

    @property
    def files(self) -> list[str]:
        """The files of these tests; those of whole runs only where there is no other."""
        files = dict.fromkeys(f"tests/{test.partition('::')[0]}" for test in self.tests)
        return [file for file in files if file not in WHOLE_RUNS] or list(files)


@dataclass(frozen=True)
class Caught:
    """Which test failed first, and whether the registry names it; no test if all passed."""

    scaling: Scaling
    test: str
    named: bool


def modules() -> Iterator[ModuleType]:
    """Yield the modules whose functions are scaled."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.iter_modules(package.__path__, name + "."):
            yield importlib.import_module(found.name)
    yield from map(importlib.import_module, MODULES)


def functions() -> list[str]:
    """Return the full names of all public functions of the modules that have numbers to scale."""
    names = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    return [name for name in names if name not in WITHOUT_NUMBERS]


def scaled(value: Any, factor: Fraction) -> Any:  # noqa: PLR0911, PLR0912 - one branch per kind of value
    """Return a value with its numbers multiplied; integers stay integers, and move by at least one."""
    if isinstance(value, bool | np.bool_):
        return not value
    if isinstance(value, enum.Enum):
        return _neighbour(value, factor)
    if isinstance(value, Fraction):
        return value * factor
    if isinstance(value, int | np.integer):
        return value * 2 if factor > 1 else (value // 2 if value else value)
    if isinstance(value, float | np.floating):
        return value * float(factor)
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "b":
            return ~value
        return (
            value * factor.numerator // factor.denominator
            if value.dtype.kind in "iu"
            else (value * float(factor) if value.dtype.kind == "f" else value)
        )
    if isinstance(value, Mapping):
        return {key: scaled(item, factor) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(scaled(item, factor) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(scaled(item, factor) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _scaled_fields(value, factor)
    if inspect.isgenerator(value):
        return (scaled(item, factor) for item in value)
    if callable(value):
        return functools.wraps(value)(lambda *a, **k: scaled(value(*a, **k), factor))
    return value


def _neighbour(value: enum.Enum, factor: Fraction) -> enum.Enum:
    members = list(type(value))
    return members[(members.index(value) + (1 if factor > 1 else -1)) % len(members)]


def _scaled_fields(value: Any, factor: Fraction) -> Any:
    changed = {
        field.name: scaled(getattr(value, field.name), factor)
        for field in dataclasses.fields(value)
        if field.init
    }
    try:
        return dataclasses.replace(value, **changed)
    except (ValueError, TypeError) as error:  # a class that refuses the scaled numbers has caught them
        raise AssertionError("the scaled numbers are refused") from error


def _replace(function: str, change: Callable[[Any], Any]) -> None:
    """Let a function return what ``change`` makes of its result, in every module that has it, tests too."""
    module, _, name = function.rpartition(".")
    original = getattr(importlib.import_module(module), name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs))

    for known in list(sys.modules.values()):
        if known is None or not getattr(known, "__name__", "").startswith(("fedtmle", "tests", "tools")):
            continue
        for attribute, value in list(vars(known).items()):
            if value is original:
                setattr(known, attribute, wrapper)
            elif isinstance(value, dict):
                _patch_table(value, original, wrapper)
            elif hasattr(
                value, "cache_clear"
            ):  # a table of functions that was built when tests were imported
                value.cache_clear()


def _patch_table(table: dict[Any, Any], original: object, wrapper: Callable[..., Any]) -> None:
    for key, value in list(table.items()):
        if value is original:
            table[key] = wrapper


@dataclass(frozen=True)
class _Profile:
    """What an unscaled run of the tests showed: how long each took, and the functions that it called."""

    seconds: dict[str, float]
    calls: dict[str, set[str]]

    def calling(self, scaling: Scaling, *, named: bool) -> list[str]:
        """Return the tests that call the function, the quickest first."""
        tests = [
            node
            for node, called in self.calls.items()
            if scaling.name in called and (_test(node) in scaling.tests) is named
        ]
        return sorted(tests, key=self.seconds.__getitem__)


def _test(node: str) -> str:
    return node.partition("[")[0].removeprefix("tests/")


class _Session:
    """A pytest plugin: after the tests are collected, each scaling runs its own in a forked process."""

    def __init__(self, scalings: Sequence[Scaling], workers: int, tell: Callable[[Caught], None]) -> None:
        self.scalings, self.workers, self.tell = scalings, workers, tell
        self.caught: list[Caught] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        names = sorted({scaling.name for scaling in self.scalings})
        process, pipe = _forked(lambda: _profiled(names, session.items))
        profile = json.loads(_answer(process, pipe))
        known = _Profile(profile["seconds"], {node: set(called) for node, called in profile["calls"].items()})
        waiting = deque(self.scalings)
        running: dict[int, tuple[int, Scaling]] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                scaling = waiting.popleft()
                chosen = [
                    [items[node] for node in known.calling(scaling, named=named)] for named in (True, False)
                ]
                process, pipe = _forked(lambda: _tried(scaling, *chosen))  # noqa: B023 - called at once
                running[process] = (pipe, scaling)
            process, _ = os.waitpid(-1, 0)
            pipe, scaling = running.pop(process)
            named, _, test = _read(pipe).partition(" ")
            self.caught.append(Caught(scaling, test, named=named == "named"))
            self.tell(self.caught[-1])
        return True


def _forked(work: Callable[[], str]) -> tuple[int, int]:
    """Do the work in a process of its own; return its number and the pipe that its answer comes through."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    with os.fdopen(writing, "w") as pipe:
        try:
            pipe.write(work())
        except BaseException as error:
            pipe.write(f"module {type(error).__name__} outside a test")
    os._exit(0)


def _read(pipe: int) -> str:
    with os.fdopen(pipe) as file:
        return file.read()


def _answer(process: int, pipe: int) -> str:
    answer = _read(pipe)  # before the wait: a long answer fills the pipe
    os.waitpid(process, 0)
    return answer


def _profiled(names: Sequence[str], items: Sequence[pytest.Item]) -> str:
    """Run all tests; return their times and calls as JSON."""
    called: set[str] = set()
    for name in names:
        _replace(name, functools.partial(_noting, called, name))
    seconds, calls = {}, {}
    for item, after in zip_longest(items, items[1:]):
        called.clear()
        began = time.perf_counter()
        reports = runtestprotocol(item, log=False, nextitem=after)
        if any(report.failed for report in reports):
            raise RuntimeError(f"{item.nodeid} fails without a scaling")
        seconds[item.nodeid] = time.perf_counter() - began
        calls[item.nodeid] = sorted(called)
    return json.dumps({"seconds": seconds, "calls": calls})


def _noting(called: set[str], name: str, result: Any) -> Any:
    called.add(name)
    return result


def _tried(scaling: Scaling, named: list[pytest.Item], others: list[pytest.Item]) -> str:
    """Scale the function; return the first test that fails, after a word that says which kind it is."""
    _replace(scaling.name, lambda result: scaled(result, scaling.factor))
    if test := _first_failure(named):
        return f"named {test}"
    test = _first_failure(others)
    return f"module {test}"


def _first_failure(items: list[pytest.Item]) -> str:
    for item, after in zip_longest(items, items[1:]):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
            return item.nodeid.removeprefix("tests/")
    return ""


def run(
    scalings: Sequence[Scaling], workers: int, tell: Callable[[Caught], None], *, named_only: bool = False
) -> list[Caught]:
    """Return which test catches each scaling, in the order of ``scalings``; ``tell`` hears each at once.

    ``named_only`` collects no more than the files that `docs/proved.md` names for these functions.
    """
    folders = () if named_only else FOLDERS
    files = sorted({file for s in scalings for file in s.files if named_only or not file.startswith(FOLDERS)})
    session = _Session(scalings, workers, tell)
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main([*OPTIONS, *folders, *files], plugins=[session])
    if status is not pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {status} before a scaling was tried")
    return sorted(session.caught, key=lambda caught: scalings.index(caught.scaling))


def chosen(patterns: Sequence[str]) -> list[Scaling]:
    """Return the scalings of the functions whose name contains one of ``patterns``; of all without any."""
    return [
        Scaling(name, factor)
        for name in functions()
        if not patterns or any(pattern in name for pattern in patterns)
        for factor in FACTORS
    ]


def row(caught: Caught) -> dict[str, str]:
    """Return a line of the table."""
    return {
        "function": caught.scaling.name,
        "factor": str(caught.scaling.factor),
        "caught_by": caught.test or "NOTHING",
        "named_in_proved": "yes" if caught.named else "no",
    }


def table() -> list[dict[str, str]]:
    """Return the rows of docs/scalings.csv."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _renew(rows: Sequence[dict[str, str]]) -> None:
    """Write the table with these rows in place of the old ones, without functions that are gone."""
    known = {(row["function"], row["factor"]): row for row in [*(table() if TABLE.exists() else []), *rows]}
    order = [(scaling.name, str(scaling.factor)) for scaling in chosen(())]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(known[key] for key in order if key in known)


def _tell(caught: Caught, out: TextIO) -> None:
    out.write(",".join(row(caught).values()) + "\n")
    out.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.scalings", description=__doc__.partition("\n")[0])
    parser.add_argument("patterns", nargs="*", help="parts of functions' full names")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--named", action="store_true", help="only tests in files that the registry names")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    scalings = chosen(options.patterns)
    if options.list:
        sys.stdout.writelines(f"{scaling.name} x {scaling.factor}\n" for scaling in scalings)
        return 0
    terminal = sys.stdout
    rows = [
        row(caught)
        for caught in run(scalings, options.workers, lambda c: _tell(c, terminal), named_only=options.named)
    ]
    if not options.named:
        _renew(rows)
    return int(any(row["caught_by"] == "NOTHING" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
