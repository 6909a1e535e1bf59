"""Measures the shape of the shipped package: `python -m tools.shape`.

Files and lines, files that one round and one small run walk through, uses of `Any`, class names used
twice, and the abstract methods of a query.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np

import fedtmle
import fedtmle as ft
from fedtmle.protocol.query import AbstractQuery, Phase
from fedtmle.runtime.session import RoundReport

PACKAGE = Path(fedtmle.__file__).parent


def files() -> list[Path]:
    """Return the modules of the shipped package."""
    return sorted(PACKAGE.rglob("*.py"))


def lines() -> int:
    """Return the lines of the shipped package."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files())


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
            if path.is_relative_to(PACKAGE):
                self.seen.add(str(path.relative_to(PACKAGE)))

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
        ("lines", lines()),
        ("files in one round of targeting", len(round_)),
        ("files in ft.solve(Mean, Coded)", len(small.seen)),
        ("uses of Any", uses_of_any()),
        ("class names used twice", f"{len(repeated)} {' '.join(repeated)}"),
        ("abstract methods of a query", len(AbstractQuery.__abstractmethods__)),
    ]
    for name, value in rows:
        sys.stdout.write(f"{name:36} {value}\n")
    if "--files" in sys.argv:
        sys.stdout.write("round: " + " ".join(sorted(round_)) + "\n")
        sys.stdout.write("solve: " + " ".join(sorted(small.seen)) + "\n")


if __name__ == "__main__":
    main()
