"""How many honest studies silos refuse: ``python -m tests.attacks.refusals`` writes docs/honest.md.

    python -m tests.attacks.refusals [--studies 2000] [--processes 2] [--log FILE] [--show]

Each study is run twice under the default policy. In the open run nothing stops at a refusal: it is noted, and
the rows behind every answer are also judged by the former rule and by stricter floors. The masked run is one
in earnest, with the keys of an embedded run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.errors import InputError
from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.model.submodel import AbstractRowsSubmodel, GeneralisedLinear
from fedtmle.model.types import Array, Part, matrix
from fedtmle.privacy.charts import row_terms
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.plan import Member, Plan, roster
from fedtmle.protocol.query import Local, Query
from fedtmle.solver import embedded_keys
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.attacks.honest import honest, run_advised, run_honest
from tests.declare import declare

PAGE = Path(__file__).parents[2] / "docs" / "honest.md"
SEED = 2026
FLOORS = (1.2, 2.0, 3.0, 5.0)
ENOUGH = 10  # people over all silos behind every column
TOO_MANY = "40 covariates, 5 silos of 100"
Rng = np.random.Generator
Study = tuple[Plan, dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """How a study ended.

    ``open`` and ``masked`` are the key that refused, "" if none did, "failed" if the study has no answer, and
    "never" if it cannot be masked. ``least`` counts the people over all silos behind the rarest column of any
    model, and ``fewest`` in effect: one over the largest share of a column's sum of squares. ``own`` and
    ``pooled`` are the largest leverages by a silo's own rows and by all silos' rows. ``advised`` says whether
    every owner who refused under masks read the name of a column and a remedy.
    """

    open: str
    masked: str
    former: bool
    least: int
    fewest: float
    own: float
    pooled: float
    advised: bool


@dataclass
class Judge:
    """Stands in for the guard's examination in an open run, and notes what it finds."""

    examine: Callable[..., None]
    key: str = ""
    former: bool = False
    rows: dict[tuple[int, int, int], list[Array]] = field(default_factory=dict)
    people: dict[tuple[int, int, int], Array] = field(default_factory=dict)
    squares: dict[tuple[int, int, int], list[Array]] = field(default_factory=dict)
    rounds: Counter[int] = field(default_factory=Counter)

    def __call__(self, guard: Guard, query: Query, local: Local, *more: object) -> None:
        self.rounds[id(guard)] += 1
        number = self.rounds[id(guard)]
        for k, member in enumerate(query.members):
            self._see(member, member.rows_of(local), (number, k))
            told = None if member.is_optional else member.disclosed_columns(local)  # left out, not refused
            if told is not None:
                rows = np.concatenate(list(told.pieces()), axis=1)
                together = len(rows) - told.alone
                for at in (slice(0, together), *(slice(j, j + 1) for j in range(together, len(rows)))):
                    self.rows.setdefault((number, k, -1 - at.start), []).append(rows[at])
        try:
            self.examine(guard, query, local, *more)
        except RefusalError as refusal:
            self.key = self.key or refusal.key

    def _see(self, member: Query, local: Local, at: tuple[int, int]) -> None:
        for j, point in enumerate(member.evaluations()):
            submodel = local.submodel(point.model, point.law, point.batch)
            if not isinstance(submodel, AbstractRowsSubmodel) or point.batch is not None:
                continue
            self.former |= was_refused(row_terms(submodel, point.eps, Part.GRADIENT))
            key = (*at, 2 * j)
            self.people[key] = self.people.get(key, 0) + submodel.column_people().astype(np.float64)
            if isinstance(submodel, GeneralisedLinear):
                self.squares.setdefault(key, []).append(matrix(submodel.X) ** 2)
            for part in (Part.GRADIENT, Part.HESSIAN) if point.curvature else (Part.GRADIENT,):
                seen = [piece.rows for piece in submodel.disclosed_rows(point.eps, part)]
                key = (*at, 2 * j + (part is Part.HESSIAN))
                self.rows.setdefault(key, []).append(np.concatenate(seen, axis=1))

    @property
    def own(self) -> float:
        return max((largest(rows) for parts in self.rows.values() for rows in parts), default=0.0)

    @property
    def pooled(self) -> float:
        together = (np.concatenate(parts, axis=1) for parts in self.rows.values())
        return max(map(largest, together), default=0.0)

    @property
    def fewest(self) -> float:
        """People in effect behind a column: one over the largest share of its sum of squares."""
        found = np.inf
        for parts in self.squares.values():
            squares = np.concatenate(parts, axis=1)
            told = squares[squares.any(axis=1)]
            found = min(found, float((told.sum(axis=1) / told.max(axis=1)).min(initial=np.inf)))
        return found

    @property
    def least(self) -> int:
        """People behind the rarest column that anybody is in."""
        counts = np.concatenate([np.empty(0), *self.people.values()])
        return int(counts[counts > 0].min(initial=sys.maxsize))


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


def masked(plan: Plan) -> Plan:
    keys = embedded_keys(plan.silos)
    return replace(plan, roster=tuple(Member(name=name, mask_key=keys[name].public) for name in plan.silos))


def judged(study: Study) -> Verdict:
    """How a study ends in both settings, and what other rules say of its rows."""
    judge = Judge(Guard.examine)

    def examine(*arguments: Any) -> None:  # a function becomes a method
        judge(*arguments)

    with mock.patch.object(Guard, "examine", examine):
        ended, why = run_honest(*study)
    plan, rows = study
    try:
        *under, advice = run_advised(masked(plan), rows)
    except InputError:
        under, advice = ["never", ""], ()
    return Verdict(
        open=judge.key or _key(ended, why),
        masked="never" if under == ["failed", "InputError"] else _key(*under),
        former=judge.former,
        least=judge.least,
        fewest=judge.fewest,
        own=judge.own,
        pooled=judge.pooled,
        advised=all(map(names_column, advice)),
    )


def names_column(advice: str) -> bool:
    """Whether an owner reads which column is behind a refusal, and what to do."""
    return bool(re.search(r"columns? '", advice) and re.search(r"merge|log\(|leave", advice))


def _key(ended: str, why: str) -> str:
    return {"finished": "", "refused": why}.get(ended, ended)


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


def rare(share: float, silos: int, rng: Rng) -> Study:
    covariates: dict[str, Callable[[int], Array]] = {
        "w": rng.standard_normal,
        "rare": lambda n: np.asarray(rng.random(n) < share, dtype=np.float64),
    }
    return cohort(rng, silos, (100, 100), covariates)


def many(silos: int, rng: Rng) -> Study:
    return cohort(rng, silos, (100, 100), {f"w{j}": rng.standard_normal for j in range(40)})


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
    **{
        f"a {share:.0%} covariate, {silos} silos of 100".replace("%", " %"): (
            partial(rare, share, silos),
            0.05,
        )
        for share in (0.01, 0.02, 0.05)
        for silos in (5, 10)
    },
    "a factor of six levels, 5 silos of 100": (levels, 0.05),
    "raw costs, 5 silos of 100": (costs, 0.05),
    TOO_MANY: (partial(many, 5), 0.025),
    "8 silos of 20 to 60": (small, 0.05),
    "IHDP, 8 hospitals, 20 columns": (ihdp, 0.0),
    "40 covariates, 20 silos of 100": (partial(many, 20), 0.025),
}


def verdict(task: tuple[str, int]) -> tuple[tuple[str, int], Verdict]:
    """The verdict of one study, by its kind and number."""
    name, number = task
    rng = np.random.default_rng([SEED, list(KINDS).index(name), number])
    return task, judged(KINDS[name][0](rng))


def verdicts(studies: int, processes: int, log: Path | None = None) -> dict[str, list[Verdict]]:
    """The verdicts by kind. Those in ``log`` are read from there, and new ones are added to it."""
    known: dict[tuple[str, int], Verdict] = {}
    for line in log.read_text().splitlines() if log is not None and log.exists() else ():
        (name, number), values = json.loads(line)
        known[name, number] = Verdict(**values)
    counts = {name: max(1, round(share * studies)) for name, (_, share) in KINDS.items()}
    tasks = sorted((k / counts[name], name, k) for name in KINDS for k in range(counts[name]))  # in turn
    left = [(name, k) for _, name, k in tasks if (name, k) not in known]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for task, each in pool.imap_unordered(verdict, left, chunksize=2):
            known[task] = each
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps([task, asdict(each)]) + "\n")
    return {name: [known[name, k] for k in range(counts[name])] for name in KINDS}


def share(part: Sequence[Verdict], whole: Sequence[Verdict]) -> str:
    return f"{len(part)} of {len(whole)}" if whole else "-"


def is_refusal(key: str) -> bool:
    return key not in ("", "failed", "never")


def refusals(found: dict[str, list[Verdict]]) -> Iterator[str]:
    """Lines of the table of refusals, by kind of study, and the total."""
    titles = (
        "studies",
        "number",
        "open, before",
        "open",
        "masked",
        "10 people",
        "10 in effect",
        "keys, masked",
    )
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for name, each in (*found.items(), ("all", [v for own in found.values() for v in own])):
        under = [v for v in each if v.masked not in ("never", "failed")]
        enough = [v for v in under if v.least >= ENOUGH]
        heavy = [v for v in enough if v.fewest >= ENOUGH]
        keys = Counter(v.masked for v in under if is_refusal(v.masked))
        cells = (
            name,
            str(len(each)),
            share([v for v in each if v.former], each),
            share([v for v in each if is_refusal(v.open)], each),
            share([v for v in under if is_refusal(v.masked)], under),
            share([v for v in enough if is_refusal(v.masked)], enough),
            share([v for v in heavy if is_refusal(v.masked)], heavy),
            ", ".join(f"`{key}` {count}" for key, count in sorted(keys.items())) or "-",
        )
        yield f"| {' | '.join(cells)} |"


def shares(found: dict[str, list[Verdict]]) -> str:
    """The sentences that state which share of the masked studies with enough people is refused."""
    ended = ((name, v) for name, each in found.items() for v in each if v.masked not in ("never", "failed"))
    under = list(ended)
    enough = [(name, v) for name, v in under if v.least >= ENOUGH]
    heavy = [(name, v) for name, v in enough if v.fewest >= ENOUGH]
    others = [(name, v) for name, v in heavy if name != TOO_MANY]
    parts = [100 * np.mean([is_refusal(v.masked) for _, v in some]) for some in (enough, heavy, others)]
    refused = [v for _, v in under if is_refusal(v.masked)]
    return (
        f"Refused under masks are {parts[0]:.1f} % of the studies with ten people behind every column, and "
        f"{parts[1]:.1f} % of those\nwith ten in effect; {parts[2]:.1f} % without the studies with 40 "
        "covariates in five silos. The goal is 2 %.\n"
        f"In {sum(v.advised for v in refused)} of the {len(refused)} studies that are refused under masks, "
        "every owner who refuses reads which column is behind it\nand what to do. Studies without a fitted "
        "model have no column to name.\n"
    )


def floors(found: dict[str, list[Verdict]]) -> Iterator[str]:
    """Lines of the table of what other floors would refuse."""
    rules = [*(f"own rows, {floor:g}" for floor in FLOORS), *(f"all rows, {floor:g}" for floor in FLOORS[1:])]
    yield f"| studies | {' | '.join(rules)} |"
    yield f"|---|{'---|' * len(rules)}"
    for name, each in found.items():
        counts = [sum(v.own > (1 + 1e-9) / floor for v in each) for floor in FLOORS]
        counts += [sum(v.pooled > (1 + 1e-9) / floor for v in each) for floor in FLOORS[1:]]
        yield f"| {name} | {' | '.join(f'{count / len(each):.0%}' for count in counts)} |"


TEXT = """\
# Honest studies that a policy refuses

Studies with nothing to hide were run under the default policy, open and with masks. Counted are studies in
which at least one silo refused at least one answer.

* **open, before**: each sum judged by itself, the rule before `min_people` (five people in each column, no
  one with a share above 0.65, two effective rows);
* **open**: the default policy, each silo by its own rows;
* **masked**: the default policy under masks, of those studies that can be masked (three silos or more, and
  an algorithm that asks for totals) and that have an answer;
* **10 people**: the same, of those studies in which at least ten people over all silos are in every column of
  every model;
* **10 in effect**: of those, the ones in which no person has more than a tenth of a column's sum of squares.

"""
MIDDLE = """
With 40 covariates, 500 people are too few. In most such studies one person with a large residual has
more than half of some combination of all silos' sums (*all rows, 2* below). So `min_pooled` refuses even if
all owners trust each other (`colluders = 0`: 19 of the first 20 studies, some because looks are rounded).
If one of the five silos subtracts its own rows, a person has 0.55 to 0.77 of what remains. `min_people`
allows 0.83, but no silo can see that. It knows only that each other silo leaves at least some share of every
combination, here 0.25 to 0.4, and must assume that its own person is in the worst of these: about
three times the truth. To know better it would need the other silo's sums of products, over 100 people in 42
columns. With [three to five silos](threats.md#a-silo-that-lies) a silo then tries its own rows, which is why
the key is `min_people`: leave covariates out or have more people. With 20 silos one person has at most 0.3 of
a combination, and no study is refused.
In raw costs one person has up to 86 % of the column's sum of squares, and a logarithm helps.

Studies with a rare covariate that ten people or more have are refused where one of them has a large residual
and with it more than half of a combination of all silos' sums. Of the first 100 studies of each kind these
are 8 of 59 (1 % in 10 silos; 2 more are refused because looks are rounded), 4 of 54 (2 % in 5 silos) and
1 of 100 (2 % in 10 silos). Before silos could omit sums of predictions, and looked again sooner at rare
columns, 30, 17 and 26 were refused.

The studies before were counted with other generators as well: 262 of 431 simulated studies were refused, IHDP
by 6 of its 8 hospitals, and ACTG175 cut into 10 silos always. These three figures cannot be run again here.

## Other floors

The same studies, with the rows behind every answer of the open run judged by other floors. A cell is the
share of studies in which at least one answer of at least one silo would have been refused:

* **own rows**: [combinations](threats.md#what-a-combination-may-be-made-of) of an answer's numbers by each
  silo's own rows, with `min_people` = 1.2 (the default), 2, 3 and 5, without the floor `min_support`;
* **all rows**: the same with the rows of all silos together, without any credit for rounding.

"""
END = """
Sums that are seen silo by silo cannot promise three people to small silos with many columns: most honest
studies would be refused. Added up over the silos, the same sums often can.

Written by `python -m tests.attacks.refusals --studies {studies}`, with seed {seed}.
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--studies", type=int, default=2000)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--log", type=Path, help="keep each verdict in this file, to go on later")
    options.add_argument("--show", action="store_true", help="print the page and do not write it")
    asked = options.parse_args()
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    found = verdicts(asked.studies, asked.processes, asked.log)
    tables = ["\n".join(lines) + "\n" for lines in (refusals(found), floors(found))]
    tables[0] += "\n" + shares(found)
    page = TEXT + tables[0] + MIDDLE + tables[1] + END.format(studies=asked.studies, seed=SEED)
    if asked.show:
        print(page)  # noqa: T201
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
