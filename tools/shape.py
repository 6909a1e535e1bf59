"""Measures the shape of the shipped package: `python -m tools.shape`.

Files and lines, files that one round and one small run walk through, uses of `Any`, class names used
twice, and the abstract methods of a query. With `--lines` also the lines of each folder and of the modules
that serve one capability alone, by kind of line; with `--files` the files that are walked through.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import numpy as np

import fedtmle
import fedtmle as ft
import fedtmle_core
from fedtmle.protocol.query import AbstractQuery, Phase
from fedtmle.runtime.session import RoundReport

PACKAGE = Path(fedtmle.__file__).parent
CORE = Path(fedtmle_core.__file__).parent

# Modules and folders that a study needs only if it uses the capability.
CAPABILITIES = {
    "time to an event, treatment over time": (
        "targets/time targets/regimes targets/long.py programs/time.py programs/regimes.py "
        "results/over_time.py"
    ),
    "deployment across machines": "deploy engine",
    "emulated trials": "trials report/emulation.py",
    "noise for differential privacy": (
        "model/budget.py programs/noisy.py programs/noisy_fit.py targets/effects/noisy.py "
        "studies/privacy_cost.py"
    ),
    "databases": "data/drivers.py data/sql.py data/database.py data/snapshot.py data/counted.py",
    "few people behind a sum, earlier studies": (
        "protocol/subjects.py model/leverage.py studies/memory.py text/assessment.py"
    ),
    "balance, overlap and sensitivity": (
        "targets/effects/balance.py results/sensitivity.py report/clinical.py"
    ),
    "silos' own estimates, C(silo)": "programs/sites.py protocol/sites.py initial/own.py",
    "models fitted by rounded sums": "programs/coded_fit.py programs/fitting.py protocol/regression.py",
    "masks": "protocol/masks.py protocol/masked.py protocol/looks.py",
    "missing covariates and imputation": "programs/missing.py programs/imputation.py",
    "targets of other packages": "programs/target.py targets/residuals.py",
}


def files() -> list[Path]:
    """Return the modules of the shipped package."""
    return sorted(PACKAGE.rglob("*.py"))


def trusted() -> list[Path]:
    """Return the modules of the core that a hospital has to trust and read, without the kernels."""
    return sorted(path for path in CORE.rglob("*.py") if not path.is_relative_to(CORE / "kernels"))


def lines(paths: Iterable[Path]) -> Counter[str]:
    """Return how many lines of some modules are code, docstring, comment and blank."""
    kinds: Counter[str] = Counter()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        documented = {line for node in ast.walk(tree) for line in _docstring(node)}
        quoted = {line for node in ast.walk(tree) for line in _string(node)}
        for number, line in enumerate(text.splitlines(), start=1):
            bare = line.strip()
            if number in documented:
                kinds["docstring"] += 1
            elif number in quoted or (bare and not bare.startswith("#")):
                kinds["code"] += 1
            else:
                kinds["comment" if bare else "blank"] += 1
    return kinds


def _docstring(node: ast.AST) -> range:
    """Return the lines of a node's docstring."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or not ast.get_docstring(node):
        return range(0)
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def _string(node: ast.AST) -> range:
    """Return the lines of a text, which may look blank or like a comment."""
    if not isinstance(node, ast.JoinedStr | ast.Constant) or not isinstance(getattr(node, "value", ""), str):
        return range(0)
    return range(node.lineno, (node.end_lineno or 0) + 1)


def modules_of(capability: str) -> list[Path]:
    """Return the modules that serve one capability alone."""
    places = [PACKAGE / place for place in CAPABILITIES[capability].split()]
    return [path for path in files() if any(path.is_relative_to(place) for place in places)]


def _write_lines() -> None:
    """Print the lines by folder and by capability."""
    folders: dict[str, list[Path]] = {}
    for path in files():
        folders.setdefault(path.relative_to(PACKAGE).parts[0], []).append(path)
    parts = {name: paths for name, paths in folders.items() if not name.endswith(".py")}
    parts["(no folder)"] = [path for name, paths in folders.items() if name.endswith(".py") for path in paths]
    parts |= {name: modules_of(name) for name in CAPABILITIES}
    parts["all else"] = sorted({*files()} - {path for name in CAPABILITIES for path in modules_of(name)})
    parts["all"] = files()
    kinds = ("code", "docstring", "comment", "blank")
    sys.stdout.write(f"\n{'':42} files  lines{''.join(f'{kind:>10}' for kind in kinds)}\n")
    for name, paths in parts.items():
        found = lines(paths)
        cells = "".join(f"{found[kind]:>10}" for kind in kinds)
        sys.stdout.write(f"{name:42} {len(paths):5} {found.total():6}{cells}\n")


def uses_of_any() -> int:
    """Return how often `Any` is named, imports included."""
    found = 0
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found += isinstance(node, ast.Name) and node.id == "Any"
            found += isinstance(node, ast.alias) and node.name == "Any"
    return found


def repeated_class_names() -> list[str]:
    """Return the names of classes that are defined in more than one place."""
    names: Counter[str] = Counter()
    for path in files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


class Walk:
    """The modules of which a function runs while it is watched."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            path = Path(frame.f_code.co_filename)
            for folder in (PACKAGE, CORE.parent):
                if path.is_relative_to(folder):
                    self.seen.add(str(path.relative_to(folder)))
                    break

    def __enter__(self) -> Walk:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def mean_run() -> object:
    """The smallest run: `ft.solve` of a mean by Algorithm 4."""
    problem = ft.Mean(bounds=(0.0, 10.0))
    rows = np.random.default_rng(1).uniform(0.0, 10.0, size=(2, 50))
    return ft.solve(problem, problem.start(3.0), {"a": rows[0], "b": rows[1]}, ft.Coded(tolerance=1e-4))


def one_round() -> set[str]:
    """Return the modules that the third round of a study's targeting walks through, at every party.

    The tolerance is so small that more rounds follow: queries that close the study ride along with the last.
    """
    rng = np.random.default_rng(1)
    x, a = rng.normal(size=400), rng.binomial(1, 0.5, size=400)
    y = rng.binomial(1, 1 / (1 + np.exp(-(x + a)))).astype(float)
    silos = {
        name: {"x": x[rows], "a": a[rows], "y": y[rows]}
        for name, rows in (("north", slice(0, 200)), ("south", slice(200, 400)))
    }
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + x"),
        treatment_model=ft.GLM("x"),
        algorithm=ft.Coded(tolerance=1e-10),
        variables=ft.Variables(
            {"y": {"kind": "binary"}, "a": {"kind": "binary"}, "x": {"kind": "number", "range": (-9, 9)}}
        ),
    )
    walk, rounds = Walk(), 0

    def after(report: RoundReport) -> None:
        nonlocal rounds
        rounds += report.phase is Phase.TARGETING
        if rounds == 2:
            walk.__enter__()
        elif rounds == 3:
            walk.__exit__()

    ft.run(study, silos, progress=after)
    return walk.seen


def main() -> None:
    """Print the table."""
    mean_run()  # kernels are compiled before anything is counted
    with Walk() as small:
        mean_run()
    round_ = one_round()
    repeated = repeated_class_names()
    rows: list[tuple[str, object]] = [
        ("files", len(files())),
        ("lines", lines(files()).total()),
        ("trusted lines: the core, no kernels", lines(trusted()).total()),
        ("lines of the core's kernels", lines((CORE / "kernels").glob("*.py")).total()),
        ("files in one round of targeting", len(round_)),
        ("files in ft.solve(Mean, Coded)", len(small.seen)),
        ("uses of Any", uses_of_any()),
        ("class names used twice", f"{len(repeated)} {' '.join(repeated)}"),
        ("abstract methods of a query", len(AbstractQuery.__abstractmethods__)),
    ]
    for name, value in rows:
        sys.stdout.write(f"{name:36} {value}\n")
    if "--lines" in sys.argv:
        _write_lines()
    if "--files" in sys.argv:
        sys.stdout.write("round: " + " ".join(sorted(round_)) + "\n")
        sys.stdout.write("solve: " + " ".join(sorted(small.seen)) + "\n")


if __name__ == "__main__":
    main()
