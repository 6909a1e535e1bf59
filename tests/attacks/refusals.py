"""How many honest studies silos refuse: ``python -m tests.attacks.refusals`` writes docs/honest.md.

    python -m tests.attacks.refusals [--studies 2000] [--processes 2] [--log FILE] [--known] [--show]

Each study is run twice under the default policy. In the open run nothing stops at a refusal: it is noted, and
the rows behind every answer are also judged by the former rule and by stricter floors. The masked run is one
in earnest, with the keys of an embedded run.
"""

from __future__ import annotations

import argparse
import itertools
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
from fedtmle.model.submodel import AbstractRowsSubmodel
from fedtmle.privacy.charts import row_terms
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.plan import Member, Plan, roster
from fedtmle.protocol.query import Local, Query
from fedtmle.solver import embedded_keys
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.types import Array, Part
from tests.attacks.honest import FLOORS as FLOORS_OF_SILOS
from tests.attacks.honest import honest, run_honest
from tests.attacks.truth import Truth, truth_of
from tests.declare import declare

PAGE = Path(__file__).parents[2] / "docs" / "honest.md"
SEED = 2026
FLOORS = (1.2, 2.0, 3.0, 5.0)
ENOUGH = 10  # people over all silos behind every column
Rng = np.random.Generator
Study = tuple[Plan, dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """How a study ended.

    ``open`` and ``masked`` are the key that refused, "" if none did, "failed" if the study has no answer, and
    "never" if it cannot be masked. ``least`` counts the people over all silos behind the rarest column of any
    model. ``own`` and ``pooled`` are the largest leverages by a silo's own rows and by all silos' rows.
    ``advised`` says whether every owner who refused under masks read the name of a column and a remedy.
    ``truth`` is what the rows of all silos say of the masked study, None if it cannot be masked.
    """

    open: str
    masked: str
    former: bool
    least: int
    own: float
    pooled: float
    advised: bool
    truth: Truth | None


@dataclass
class Judge:
    """Stands in for the guard's examination in an open run, and notes what it finds."""

    examine: Callable[..., None]
    key: str = ""
    former: bool = False
    rows: dict[tuple[int, int, int], list[Array]] = field(default_factory=dict)
    people: dict[tuple[int, int, int], Array] = field(default_factory=dict)
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


def judged(given: Study) -> Verdict:
    """How a study ends in both settings, and what other rules say of its rows."""
    judge = Judge(Guard.examine)

    def examine(*arguments: Any) -> None:  # a function becomes a method
        judge(*arguments)

    with mock.patch.object(Guard, "examine", examine):
        ended, why = run_honest(*given)
    plan, rows = given
    truth: Truth | None
    try:
        truth, (*under, advice) = truth_of(masked(plan), rows)
    except InputError:
        truth, under, advice = None, ["never", ""], ()
    return Verdict(
        open=judge.key or _key(ended, why),
        masked="never" if under == ["failed", "InputError"] else _key(*under),
        former=judge.former,
        least=judge.least,
        own=judge.own,
        pooled=judge.pooled,
        advised=all(map(names_column, advice)),
        truth=truth,
    )


def names_column(advice: str) -> bool:
    """Whether an owner reads which column is behind a refusal, and what to do."""
    return bool(re.search(r"columns? '", advice) and re.search(r"merge|log\(|[Ll]eave", advice))


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


def over_time(formula: str, hazard: float, rng: Rng) -> Study:
    """Time to an event in eight periods, of which each silo of 200 has ``hazard`` in a period."""
    data = {}
    for m in range(5):
        w, a = rng.standard_normal(200).clip(-4, 4), rng.permutation(np.arange(200) % 2)
        event, left = (rng.geometric(np.clip(rate * np.exp(0.3 * w), 0, 1)) for rate in (hazard, 0.03))
        time = np.minimum(np.minimum(event, left), 8)
        happened = (event <= left) & (event <= 8)
        data[f"silo {m}"] = {"time": time - 0.5, "event": happened * 1.0, "a": a.astype(float), "w": w}
    study = ft.Study(
        target=ft.Risk(outcome="event", time="time", treatment="a", periods=8, period_length=1.0),
        hazard_model=ft.GLM(formula),
        censoring_model=ft.GLM("a + w"),
        treatment_model=ft.GLM("1"),
        variables=declare(event="binary", time=(0, 8), a="binary", w=(-4, 4)),
    )
    return study_plan(study, roster(list(data))), dict(load_all(data, schema_of(study)))


def rare_outcome(rate: float, rng: Rng) -> Study:
    """A binary outcome that few people have, in five silos of 200."""
    data = {}
    for m in range(5):
        w, z = rng.standard_normal((2, 200)).clip(-4, 4)
        a = rng.permutation(np.arange(200) % 2)
        y = rng.random(200) < rate * np.exp(0.3 * w)
        data[f"silo {m}"] = {"y": y * 1.0, "a": a.astype(float), "w": w, "z": z}
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + w + z"),
        treatment_model=ft.GLM("w + z"),
        variables=declare(y="binary", a="binary", w=(-4, 4), z=(-4, 4)),
    )
    return study_plan(study, roster(list(data))), dict(load_all(data, schema_of(study)))


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
    "40 covariates, 5 silos of 100": (partial(many, 5), 0.025),
    "8 silos of 20 to 60": (small, 0.05),
    "IHDP, 8 hospitals, 20 columns": (ihdp, 0.0),
    "40 covariates, 20 silos of 100": (partial(many, 20), 0.025),
}
FEW_EVENTS: dict[str, tuple[Callable[[Rng], Study], float]] = {
    "an outcome that 2 % have, 5 silos of 200": (partial(rare_outcome, 0.02), 0.05),
    "an outcome that 10 % have, 5 silos of 200": (partial(rare_outcome, 0.1), 0.05),
    **{
        f"8 periods, hazard {hazard:.1%}, {what}, 5 silos of 200".replace("%", " %"): (
            partial(over_time, formula, hazard),
            0.05,
        )
        for what, formula in (("by period", "a + w + C(period)"), ("and w by period", "a + C(period)*w"))
        for hazard in (0.005, 0.03)
    },
}
KINDS |= FEW_EVENTS
KINDS["40 covariates, 10 silos of 100"] = partial(many, 10), 0.025


def study(name: str, number: int) -> Study:
    """A study of one kind."""
    return KINDS[name][0](np.random.default_rng([SEED, list(KINDS).index(name), number]))


def verdict(task: tuple[str, int]) -> tuple[tuple[str, int], Verdict]:
    """The verdict of one study, by its kind and number."""
    return task, judged(study(*task))


def verdicts(
    studies: int, processes: int, log: Path | None = None, *, known_only: bool = False
) -> dict[str, list[Verdict]]:
    """The verdicts by kind. Those in ``log`` are read from there, and new ones are added to it.

    If only those that are ``known`` are wanted, each kind has those up to the first that is not.
    """
    known: dict[tuple[str, int], Verdict] = {}
    for line in log.read_text().splitlines() if log is not None and log.exists() else ():
        (name, number), values = json.loads(line)
        truth = values.pop("truth")
        known[name, number] = Verdict(**values, truth=None if truth is None else Truth(*truth))
    counts = {name: max(1, round(share * studies)) for name, (_, share) in KINDS.items()}
    if known_only:
        counts = {name: next(k for k in itertools.count() if (name, k) not in known) for name in KINDS}
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


def is_violated(verdict: Verdict) -> bool:
    """Whether the rows of all silos violate the rule of the default policy."""
    return verdict.truth is not None and verdict.truth.violates(FLOORS_OF_SILOS)


def refusals(found: dict[str, list[Verdict]]) -> Iterator[str]:
    """Lines of the table of refusals, by kind of study, and the total."""
    titles = (
        "studies",
        "number",
        "open, before",
        "open",
        "masked",
        "rightly",
        "wrongly",
        "10 people",
        "10 people, wrongly",
        "answered, violated",
        "keys, masked",
    )
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for name, each in (*found.items(), ("all", [v for own in found.values() for v in own])):
        under = [v for v in each if v.masked not in ("never", "failed")]
        refused = [v for v in under if is_refusal(v.masked)]
        wrongly = [v for v in refused if not is_violated(v)]
        enough = [v for v in under if v.least >= ENOUGH]
        keys = Counter(v.masked for v in refused)
        cells = (
            name,
            str(len(each)),
            share([v for v in each if v.former], each),
            share([v for v in each if is_refusal(v.open)], each),
            share(refused, under),
            str(len(refused) - len(wrongly)),
            str(len(wrongly)),
            share([v for v in enough if is_refusal(v.masked)], enough),
            str(sum(v.least >= ENOUGH for v in wrongly)),
            str(sum(is_violated(v) and not is_refusal(v.masked) for v in under)),
            ", ".join(f"`{key}` {count}" for key, count in sorted(keys.items())) or "-",
        )
        yield f"| {' | '.join(cells)} |"


def shares(found: dict[str, list[Verdict]]) -> str:
    """The sentences that state which share of the masked studies with enough people is refused."""
    under = [(name, v) for name, each in found.items() for v in each if v.masked not in ("never", "failed")]
    refused = [v for _, v in under if is_refusal(v.masked)]
    answered = [v for _, v in under if is_violated(v) and not is_refusal(v.masked)]
    said = []
    first = next(iter(KINDS))  # the random studies
    for what, is_in in (
        ("random studies", first.__eq__),
        ("studies of the other kinds", lambda name: name != first and name not in FEW_EVENTS),
        ("studies with few events", FEW_EVENTS.__contains__),
    ):
        enough = [v for name, v in under if is_in(name) and v.least >= ENOUGH]
        among = [v for v in enough if is_refusal(v.masked)]
        wrongly = [v for v in among if not is_violated(v)]
        said.append(
            f"Of the {len(enough)} {what} under masks that have ten people behind every column, "
            f"{len(among)} are refused:\n{len(among) - len(wrongly)} rightly, and {len(wrongly)} "
            f"({100 * len(wrongly) / len(enough):.1f} %) wrongly, because a silo cannot prove that the rule "
            "holds."
        )
    return (
        f"{by_default(found)}\n{said[0]}\n{said[1]}\n{said[2]}\n"
        f"Of all {len(under)} studies under masks, {len(answered)} are answered although the rule is "
        "violated.\n"
        f"In {sum(v.advised for v in refused)} of the {len(refused)} studies that are refused under masks, "
        "every owner who refuses reads which column is behind it\nand what to do. Studies without a fitted "
        "model have no column to name.\n"
    )


def by_default(found: dict[str, list[Verdict]]) -> str:
    """The sentence that states how many studies are refused as they run by default."""
    common = [v for name, each in found.items() if name not in FEW_EVENTS for v in each]
    enough = [v for v in common if v.least >= ENOUGH and v.masked != "failed"]
    refused = sum(is_refusal(v.open if v.masked == "never" else v.masked) for v in enough)
    return (
        "By default a study runs under masks if it can be masked, and open otherwise. Of the "
        f"{len(enough)} studies (but those with\nfew events) that have ten people behind every column, "
        f"{refused} ({100 * refused / len(enough):.1f} %) are then refused. The goal is 2 %."
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


RULES = {"events": "events", "no events": "others", "people": "people", "responses": "responses"}


def rules_on_responses(found: dict[str, list[Verdict]]) -> Iterator[str]:
    """Lines of the table of what rules on the responses would refuse."""
    yield f"| studies | masked | {' | '.join(RULES)} |"
    yield f"|---|---|{'---|' * len(RULES)}"
    least, few = (1 + 1e-9) / FLOORS_OF_SILOS.min_people, (1 + 1e-9) / FLOORS_OF_SILOS.min_pooled
    for name, each in found.items():
        signed = [v.truth.signed for v in each if v.truth is not None and v.masked != "never"]
        cells = []
        for rule in RULES.values():
            judged = [leverages[rule] for leverages in signed if rule in leverages]
            together = sum(pooled > few or rest > least for _, pooled, rest in judged)
            cells.append(f"{together} ({sum(own > least for own, *_ in judged)})")
        yield f"| {name} | {len(signed)} | {' | '.join(cells)} |"


TEXT = """\
# Honest studies that a policy refuses

Studies with nothing to hide were run under the default policy, open and with masks. Counted are studies in
which at least one silo refused at least one answer.

* **open, before**: each sum judged by itself, the rule before `min_people` (five people in each column, no
  one with a share above 0.65, two effective rows);
* **open**: the default policy, each silo by its own rows;
* **masked**: the default policy under masks, of those studies that can be masked (three silos or more, and
  an algorithm that asks for totals) and that have an answer;
* **rightly**: those of them in which the rows of all silos violate the rule that the policy states. For
  this count every study also runs to its end without a guard, with everybody's rows in view. The rule is
  violated if one person has more than 1/`min_pooled` (a half) of some combination of a model's sums over
  all silos, or more than 1/`min_people` (83 %) of some combination of any sums after one other silo has
  subtracted its own rows, or if a column or level is that of fewer than `min_support` (5) people of all
  silos;
* **wrongly**: the others. No rule asks for these refusals; a silo sees too little to know that;
* **10 people**: refusals under masks, of those studies in which at least ten people over all silos are in
  every column of every model; **10 people, wrongly**: those of them that are wrong;
* **answered, violated**: studies that violate the rule and yet were answered, which would be mistakes of
  the guard.

"""
MIDDLE = """
Why studies are refused wrongly:

* **Silos leave out whole groups.** With six silos or more, one of them may lie, and a silo does not know
  which. It counts the rows without one group of three or more, not without one silo.
* **Few silos know little of each other.** With three to five silos, a silo knows the smallest share of
  every combination that each other silo leaves if it subtracts its rows, and must assume that its own
  person is in the worst one. Where there are fewer than ten people to a column, and for sums over periods,
  four or five silos also add up squares of their shares, which bound what remains in every direction. Before,
  17 of the 100 studies with a hazard of 3 % and w by period were refused. With 40 covariates in five silos
  of 100 the bound is 1.4 times the largest share over all silos, where shares alone prove 2.4 to 2.8 times,
  and the truth is 1.15 times. Before that was done, all 25 of these studies were refused. Three silos cannot
  add up squares: one of them would learn the matrices of the other two, up to signs.
* **Looks are rounded**, by up to a person's share in small studies. If 2 % have the outcome, a silo of 200
  often has one event in an arm, and that person is nearly all of an arm's residuals there. A look shows that
  all silos together have enough, unless there are only some four or five events in an arm.

With 40 covariates, 500 people are few: some person with a large residual has up to 0.59 of a combination of
all silos' sums. With 10 silos of 100 nobody has more than 0.4 of a combination, and no study is refused. In
raw costs one person has up to 88 % of the column's sum of squares: at the start of the treatment's model the
sum nearly states that person's arm. A logarithm of the costs helps, and so the advice says. With 8 periods
and a hazard of 0.5 %, some 40 people have an event, five a period, and each period has an intercept of its
own: mostly some period has so few events that one person has more than half of a combination.

The studies before were counted with other generators as well: 262 of 431 simulated studies were refused,
IHDP by 6 of its 8 hospitals, and ACTG175 cut into 10 silos always. These three figures cannot be run again
here.

## Other floors

The same studies, with the rows behind every answer of the open run judged by other floors. A cell is the
share of studies in which at least one answer of at least one silo would have been refused:

* **own rows**: [combinations](threats.md#what-a-combination-may-be-made-of) of an answer's numbers by each
  silo's own rows, with `min_people` = 1.2 (the default), 2, 3 and 5, without the floor `min_support`;
* **all rows**: the same with the rows of all silos together, without any credit for rounding.

"""
SIGNED = """
Sums that are seen silo by silo cannot promise three people to small silos with many columns: most honest
studies would be refused. Added up over the silos, the same sums often can.

## Rules on responses

At the start of a fit the gradient of a binary response is the sum of (1/2 - y) x. Four rules on these rows
were tried on the same studies. A cell is the number of masked studies that the rule would refuse by the
rows of all silos (`min_pooled`, and `min_people` after one silo subtracted its own); in brackets, by the
own rows of a silo, as in an open study:

* **events**: the rows with y = 1 by themselves; **no events**: those with y = 0;
* **people**: a person's rows in all periods added up with their signs. This rule is in force, for hazard
  models;
* **responses**: the same for the columns of all models together. It would refuse outcomes that nearly
  repeat the treatment ([discordant responses](threats.md#what-cannot-be-prevented-or-detected)).

"""
END = """
The rules on events would refuse studies with few events, and the demonstration (IHDP), without need: a sum
over the events alone follows from no single answer. The rule on all responses costs nearly nothing, but
silos could only apply it together if looks pooled the products of the signs of outcome and treatment, by
pairs of columns: for a cell with one person that discloses whether outcome and treatment agree. So it is
not applied.

Written by `python -m tests.attacks.refusals{how}, with seed {seed}.
"""


def _written(studies: int, found: dict[str, list[Verdict]], *, known_only: bool) -> str:
    if not known_only:
        return f" --studies {studies}`"
    return f"` from the first {sum(map(len, found.values()))} studies that it ran"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--studies", type=int, default=2000)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--log", type=Path, help="keep each verdict in this file, to go on later")
    options.add_argument("--known", action="store_true", help="run no study that is not in the log")
    options.add_argument("--show", action="store_true", help="print the page and do not write it")
    asked = options.parse_args()
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    found = verdicts(asked.studies, asked.processes, asked.log, known_only=asked.known)
    lines = refusals(found), floors(found), rules_on_responses(found)
    first, second, third = ("\n".join(each) + "\n" for each in lines)
    end = END.format(how=_written(asked.studies, found, known_only=asked.known), seed=SEED)
    page = TEXT + first + "\n" + shares(found) + MIDDLE + second + SIGNED + third + end
    if asked.show:
        print(page)  # noqa: T201
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
