"""Compare the speed of this working tree with that of another revision: `python -m benchmarks.versions REV`.

Each revision has a process of its own, and the two take turns, case by case, so that a busy machine disturbs
both alike. A ratio is the working tree's time over the revision's: the median over pairs, with the
interquartile range as its noise. Cases use the public API alone.

--pairs N     pairs per case (15)
--only NAME   one case, several times if wanted
--cpu         compare processor time, of all threads, where other programs keep the machine busy
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


# Cases. Each prepares its data once and returns what is timed.


def mean_coded() -> Callable[[], object]:
    """A mean by Algorithm 4 over 10 silos of 10,000 rows: rounds of less than a millisecond."""
    import numpy as np

    import fedtmle as ft

    problem = ft.Mean(bounds=(0.0, 10.0))
    silos = {str(m): np.random.default_rng(m).uniform(0, 10, 10_000) for m in range(10)}
    return lambda: ft.solve(problem, problem.start(3.0), silos, ft.Coded(tolerance=1e-6))


def many_silos() -> Callable[[], object]:
    """A mean by Algorithm 2 over 300 silos of 50 rows: the session's own cost."""
    import numpy as np

    import fedtmle as ft

    problem = ft.Mean(bounds=(0.0, 10.0))
    silos = {str(m): np.random.default_rng(m).uniform(0, 10, 50) for m in range(300)}
    return lambda: ft.solve(problem, problem.start(3.0), silos, ft.Gradient(optimizer=ft.Newton()))


def transport() -> Callable[[], object]:
    """The paper's target by Algorithm 4 over 10 silos of 2,000 rows, its kernel start included."""
    import numpy as np

    import fedtmle as ft

    try:
        from fedtmle_paper.optimal_transport import OptimalTransport
    except ImportError:  # a revision whose target is in the package itself
        from fedtmle.targets.optimal_transport import OptimalTransport

    rng = np.random.default_rng(1)
    pilot, rows = rng.normal(size=(500, 2)), rng.normal(size=(20_000, 2)) * 1.2
    silos = {str(m): rows[m::10] for m in range(10)}

    def run() -> object:
        problem = OptimalTransport()
        return ft.solve(problem, problem.start(pilot), silos, ft.Coded(tolerance=1e-3))

    return run


def effect(rows: int, silos: int, binary: bool, **options: object) -> Callable[[], object]:
    """Return a whole ATE with 10 covariates; options that the package does not know yet are left out."""
    from dataclasses import fields

    import numpy as np

    import fedtmle as ft

    rng = np.random.default_rng(1)
    names = [f"x{j}" for j in range(10)]
    X = rng.normal(size=(10, rows))
    a = rng.binomial(1, 1 / (1 + np.exp(-0.3 * X[:3].sum(axis=0))))
    score = 0.5 * a + 0.2 * X.sum(axis=0)
    y = (
        rng.binomial(1, 1 / (1 + np.exp(-score)))
        if binary
        else np.clip(score + rng.normal(size=rows), -15, 15)
    )
    columns = {**dict(zip(names, X, strict=True)), "a": a, "y": y.astype(float)}
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + " + " + ".join(names), family="binomial" if binary else "gaussian"),
        treatment_model=ft.GLM(" + ".join(names)),
        variables=ft.Variables(
            {
                "y": {"kind": "number", "range": (0, 1) if binary else (-15, 15)},
                "a": {"kind": "binary"},
                **{name: {"kind": "number", "range": (-10, 10)} for name in names},
            }
        ),
        **{field.name: options[field.name] for field in fields(ft.Study) if field.name in options},
    )
    cuts = np.array_split(np.arange(rows), silos)
    parts = {str(m): {name: column[at] for name, column in columns.items()} for m, at in enumerate(cuts)}
    return lambda: ft.run(study, parts)


def small_effect() -> Callable[[], object]:
    """A whole ATE over 8 silos of 125 rows: fixed costs."""
    return effect(1_000, 8, binary=True)


def large_effect() -> Callable[[], object]:
    """A whole ATE over 2 silos of 250,000 rows, binary outcome: the kernels."""
    return effect(500_000, 2, binary=True)


def small_undiagnosed() -> Callable[[], object]:
    """The small ATE without diagnostics: the estimate alone."""
    return effect(1_000, 8, binary=True, diagnostics=False)


def small_exact() -> Callable[[], object]:
    """The same from exact sums, which is what all fits were made of before they were coded."""
    return effect(1_000, 8, binary=True, diagnostics=False, sums="exact")


def large_undiagnosed() -> Callable[[], object]:
    """The large ATE without diagnostics: the estimate alone."""
    return effect(500_000, 2, binary=True, diagnostics=False)


def large_exact() -> Callable[[], object]:
    """The same from exact sums, which is what all fits were made of before they were coded."""
    return effect(500_000, 2, binary=True, diagnostics=False, sums="exact")


def large_continuous_effect() -> Callable[[], object]:
    """A whole ATE over 2 silos of 250,000 rows, continuous outcome."""
    return effect(500_000, 2, binary=False)


def million_effect() -> Callable[[], object]:
    """A whole ATE over 2 silos of 500,000 rows, binary outcome."""
    return effect(1_000_000, 2, binary=True)


def million_continuous_effect() -> Callable[[], object]:
    """The same with a continuous outcome."""
    return effect(1_000_000, 2, binary=False)


def million_undiagnosed() -> Callable[[], object]:
    """The ATE of a million rows without diagnostics, binary outcome."""
    return effect(1_000_000, 2, binary=True, diagnostics=False)


def million_continuous_undiagnosed() -> Callable[[], object]:
    """The same with a continuous outcome."""
    return effect(1_000_000, 2, binary=False, diagnostics=False)


def start_up() -> Callable[[], object]:
    """`import fedtmle` and the command line's help, in a new process."""
    command = [sys.executable, "-m", "fedtmle", "--help"]
    return lambda: subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own module


CASES = {
    case.__name__: case
    for case in (
        mean_coded,
        many_silos,
        transport,
        small_effect,
        small_undiagnosed,
        small_exact,
        large_effect,
        large_undiagnosed,
        large_exact,
        large_continuous_effect,
        million_effect,
        million_undiagnosed,
        million_continuous_effect,
        million_continuous_undiagnosed,
        start_up,
    )
}


# A worker times what it is told to, one line at a time.


def serve() -> None:
    """Time the case named on each line of standard input; the first time, prepare and warm it up."""
    ready: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in ready:
            ready[name] = CASES[name]()
            ready[name]()
        start, used = time.perf_counter(), _processor_time()
        ready[name]()
        print(time.perf_counter() - start, _processor_time() - used, flush=True)


def _processor_time() -> float:
    """Return the seconds of processor time that this process and those that it ran have used."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def worker(tree: Path, *, cpu: bool) -> Iterator[Callable[[str], float]]:
    """Yield a function that times a case with the package of a source tree, by the clock or by processor."""
    folders = (tree / "src", tree / "core" / "src", tree / "paper" / "src", ROOT)
    paths = os.pathsep.join(map(str, folders))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.versions", "--serve"],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tempfile.gettempdir(),  # else the revision's own folder `benchmarks` comes first
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise AssertionError("both are pipes")

        def timed(case: str) -> float:
            stdin.write(f"{case}\n")
            stdin.flush()
            answer = stdout.readline()
            if not answer:
                raise SystemExit(f"{case}: did not run with {tree}")
            return float(answer.split()[int(cpu)])

        yield timed
        stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", action="append", default=[], choices=sorted(CASES))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), options.revision], check=True)  # noqa: S603
        try:
            _compare(before, options.only or list(CASES), options.pairs, cpu=options.cpu)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)  # noqa: S603


def _compare(before: Path, cases: list[str], pairs: int, *, cpu: bool) -> None:
    print(f"{'case':26} {'before':>9} {'now':>9} {'ratio':>7} {'interquartile range':>21}", flush=True)
    with worker(before, cpu=cpu) as old, worker(ROOT, cpu=cpu) as new:
        for case in cases:
            times = []
            for k in range(pairs):  # who goes first alternates
                first, second = (old, new) if k % 2 else (new, old)
                one, two = first(case), second(case)
                times.append((one, two) if k % 2 else (two, one))
            ratios = [now / then for then, now in times]
            low, middle, high = statistics.quantiles(ratios, n=4)
            then, now = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{case:26} {then:8.4f}s {now:8.4f}s {middle:7.3f} {low:11.3f} to {high:.3f}", flush=True)


if __name__ == "__main__":
    main()
