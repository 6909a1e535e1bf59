"""How many honest studies a policy refuses: ``python -m tests.attacks.refusals`` writes docs/honest.md.

Every study runs unguarded, and the rows behind each answer are judged by three rules: the one before
`min_people` (number by number), the guard's (combinations, each silo by its own rows), and the guard's with
the rows of all silos together, as sums under masks would be judged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.model.submodel import AbstractRowsSubmodel
from fedtmle.model.types import Array, Part
from fedtmle.privacy.charts import row_terms
from fedtmle.protocol.guard import Guard, Policy
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Local, Query
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.attacks.honest import honest, run_honest
from tests.declare import declare

PAGE = Path(__file__).parents[2] / "docs" / "honest.md"
FLOORS = (1.2, 2.0, 3.0, 5.0)
Rng = np.random.Generator
Study = tuple[Plan, dict[str, Any]]


@dataclass
class Judged:
    """The largest leverage over all answers of a study, and whether the former rule refused one."""

    own: float = 0.0
    pooled: float = 0.0
    was_refused: bool = False
    rows: dict[tuple[int, int, int], list[Array]] = field(default_factory=dict)

    def judge(self) -> None:
        for parts in self.rows.values():
            self.own = max(self.own, *map(largest, parts))
            self.pooled = max(self.pooled, largest(np.concatenate(parts, axis=1)))


def largest(rows: Array) -> float:
    return largest_leverage(lambda: [PersonRows(rows)])


def was_refused(terms: Array) -> bool:
    """The former rule: support below 5, a share above 0.65, or fewer than 2 effective rows in a sum."""
    size = np.abs(terms)
    total, people = size.sum(axis=1), np.count_nonzero(size, axis=1)
    told = total > 0
    few = ((people > 0) & (people < 5)).any()
    share = (size.max(axis=1)[told] / total[told]).max(initial=0.0)
    effective = (total[told] ** 2 / (size * size).sum(axis=1)[told]).min(initial=np.inf)
    return bool(few or share > 0.65 or effective < 2)


def judged(study: Study) -> Judged | None:
    """What the rules say of a study that runs to its end; None if it does not."""
    found, rounds = Judged(), dict[int, int]()
    former = Guard.examine

    def examine(guard: Guard, query: Query, local: Local, _looks: object) -> None:
        number = rounds[id(guard)] = rounds.get(id(guard), 0) + 1
        for k, member in enumerate(query.members):
            own = member.rows_of(local)
            for j, point in enumerate(member.evaluations()):
                submodel = own.submodel(point.model, point.law, point.batch)
                if not isinstance(submodel, AbstractRowsSubmodel) or point.batch is not None:
                    continue
                found.was_refused |= was_refused(row_terms(submodel, point.eps, Part.GRADIENT))
                for part in (Part.GRADIENT, Part.HESSIAN) if point.curvature else (Part.GRADIENT,):
                    seen = [piece.rows for piece in submodel.told_rows(point.eps, part)]
                    key = number, k, 2 * j + (part is Part.HESSIAN)
                    found.rows.setdefault(key, []).append(np.concatenate(seen, axis=1))
            told = None if member.is_optional else member.told_columns(local)  # left out, not refused
            if told is not None:
                rows = np.concatenate(list(told.pieces()), axis=1)
                together = len(rows) - told.alone
                for at in (slice(0, together), *(slice(j, j + 1) for j in range(together, len(rows)))):
                    found.rows.setdefault((number, k, -1 - at.start), []).append(rows[at])

    guard: Any = Guard
    guard.examine = examine  # to see the rows of every answer
    try:
        ended, _ = run_honest(*study, policy=Policy.unguarded())
    finally:
        guard.examine = former
    if ended != "finished":
        return None
    found.judge()
    return found


def cohort(rng: Rng, silos: int, size: tuple[int, int], columns: dict[str, Callable[[int], Array]]) -> Study:
    """A study with given covariates, in every silo at least ten people in each arm."""
    data = {}
    for m in range(silos):
        n = int(rng.integers(size[0], size[1] + 1))
        covariates = {name: draw(n) for name, draw in columns.items()}
        a = rng.permutation(np.arange(n) % 2)
        y = np.clip(rng.normal(5 + a, 1.5, n), 0, 10)
        data[f"silo {m}"] = {"y": y, "a": a.astype(float), **covariates}
    kinds: dict[str, Any] = {name: _declared(name) for name in columns}
    terms = " + ".join(f"C({name})" if name.startswith("f") else name for name in columns)
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(f"a + {terms}"),
        treatment_model=ft.GLM("1"),
        variables=declare(y=(0, 10), a="binary", **kinds),
    )
    return study_plan(study, roster(list(data))), dict(load_all(data, schema_of(study)))


def _declared(name: str) -> Any:
    if name.startswith("f"):
        return list("abcdef")
    return (0, 1e6) if name == "cost" else "binary" if name.startswith("rare") else (-8, 8)


def rare(share: float, silos: int) -> Callable[[Rng], Study]:
    return lambda rng: cohort(
        rng,
        silos,
        (100, 100),
        {"w": rng.standard_normal, "rare": lambda n: (rng.random(n) < share).astype(float)},
    )


def many(rng: Rng) -> Study:
    return cohort(rng, 5, (100, 100), {f"w{j}": rng.standard_normal for j in range(40)})


def levels(rng: Rng) -> Study:
    return cohort(rng, 5, (100, 100), {"f": lambda n: rng.choice(list("abcdef"), n)})


def costs(rng: Rng) -> Study:
    return cohort(rng, 5, (100, 100), {"cost": lambda n: np.minimum(1e6, rng.lognormal(8, 1.5, n))})


def small(rng: Rng) -> Study:
    return cohort(rng, 8, (20, 60), {"w": rng.standard_normal, "z": rng.standard_normal})


def ihdp(rng: Rng) -> Study:  # noqa: ARG001 - the same each time
    silos = ihdp_silos()
    return study_plan(IHDP, roster(list(silos))), dict(load_all(silos, schema_of(IHDP)))


def generated(rng: Rng) -> Study:
    return honest(int(rng.integers(2**31)))


KINDS: dict[str, tuple[Callable[[Rng], Study], float]] = {
    "random studies of the tests": (generated, 1.0),
    "a 1 % covariate, 5 silos of 100": (rare(0.01, 5), 0.1),
    "a 1 % covariate, 10 silos of 100": (rare(0.01, 10), 0.1),
    "a 2 % covariate, 10 silos of 100": (rare(0.02, 10), 0.1),
    "a 5 % covariate, 10 silos of 100": (rare(0.05, 10), 0.1),
    "a factor of six levels, 5 silos of 100": (levels, 0.1),
    "raw costs, 5 silos of 100": (costs, 0.1),
    "40 covariates, 5 silos of 100": (many, 0.05),
    "8 silos of 20 to 60": (small, 0.1),
    "IHDP, 8 hospitals, 20 columns": (ihdp, 0.0),
}


def table(studies: int) -> str:
    rules = ["by number, before", *(f"own rows, {floor:g}" for floor in FLOORS)]
    rules += [f"all rows, {floor:g}" for floor in FLOORS[1:]]
    lines = [f"| studies | number | {' | '.join(rules)} |", f"|---|---|{'---|' * len(rules)}"]
    for name, (draw, share) in KINDS.items():
        rng = np.random.default_rng([2026, len(lines)])
        found = [judged(draw(rng)) for _ in range(max(1, round(share * studies)))]
        ended = [each for each in found if each is not None]
        counts = [sum(each.was_refused for each in ended)]
        counts += [sum(each.own > (1 + 1e-9) / floor for each in ended) for floor in FLOORS]
        counts += [sum(each.pooled > (1 + 1e-9) / floor for each in ended) for floor in FLOORS[1:]]
        cells = [f"{count / len(ended):.0%}" for count in counts] if ended else ["-"] * len(rules)
        lines.append(f"| {name} | {len(ended)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TEXT = """\
# Honest studies that a policy refuses

Studies with nothing to hide were run unguarded, and the rows behind every answer were judged afterwards. A
column is the share of studies in which at least one answer of at least one silo would have been refused:

* **by number, before**: each sum by itself, the rule before `min_people` (five people in each column, no one
  with a share above 0.65, two effective rows);
* **own rows**: [combinations](threats.md#what-a-combination-may-be-made-of) of an answer's numbers by each
  silo's own rows, with `min_people` = 1.2 (the default), 2, 3 and 5, without the floor `min_support`;
* **all rows**: the same with the rows of all silos together, which is how sums that are told only after they
  were added up over the silos can be judged.

"""
END = """
Sums that are seen silo by silo cannot promise three people to small silos with many columns: most honest
studies would be refused. Added up over the silos, the same sums often can. Counted are studies that end
without an error. Written by `python -m tests.attacks.refusals`.
"""

if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    PAGE.write_text(TEXT + table(number) + END, encoding="utf-8")
