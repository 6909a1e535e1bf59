"""One real answer of every kind of query, from small studies on invented records."""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import ArrayLike, NDArray

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.initial.glm import FittedGLM
from fedtmle.protocol.bins import BinTotal
from fedtmle.protocol.clusters import Clusters
from fedtmle.protocol.coded import SiloCurvature
from fedtmle.protocol.codes import encode
from fedtmle.protocol.fits import FitAnswer, FitOutcome, SwitchAnswer
from fedtmle.protocol.masked import AbstractLook, GainsQuery, ShownQuery
from fedtmle.protocol.plan import Follower, Member, roster
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import AbstractQuery, Query
from fedtmle.protocol.sites import OwnEstimate
from fedtmle.runtime import silo
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.exact import Sums
from fedtmle_core.signing import MaskKey

SILO = "north"
SHOWN_NUMBERS = 6
VARIABLES = ft.Variables(
    {
        "y": {"kind": "binary"},
        "a": {"kind": "binary"},
        "x": {"kind": "number", "range": (-9, 9)},
        "clinic": {"kind": "category", "levels": ["A", "B", "C"]},
        "family": {"kind": "identifier"},
    }
)


def classes(base: type[Query] = AbstractQuery) -> list[type[Query]]:
    """Return every concrete kind of query, in the order of their modules."""
    kinds: list[type[Query]] = []
    for kind in base.__subclasses__():
        kinds += classes(kind)
        if not inspect.isabstract(kind):
            kinds.append(kind)
    return sorted(kinds, key=lambda kind: (kind.__module__, kind.__name__))


@dataclass(frozen=True)
class Example:
    """Every query of one kind that was asked; what silo north answered to the first that it answered."""

    queries: list[Query]
    answer: object

    @property
    def query(self) -> Query:
        return self.queries[0]


def examples() -> dict[str, Example]:
    """Return an example of every kind of query that these studies ask, by the query's name."""
    by_kind: dict[str, Example] = {}
    glm = ft.GLM("C(a) + x + C(clinic)")
    learned = ft.SuperLearner((ft.GLM("x"), ft.GLM("C(clinic)")), folds=2)
    whole, lacking = (VARIABLES, _silos()), (_LACKING, _silos(lacking=True))
    private = ft.Privacy(epsilon=1.0, server="trusted")
    public = random.Random(7)  # noqa: S311 - the noise of an example is the same every time

    def drawn(variance: Fraction, _below: object) -> int:
        return round(public.gauss(0.0, math.sqrt(variance)))

    studies: list[tuple[ft.Study, dict[str, dict[str, NDArray[Any]]]]] = []
    for treatment, algorithm, cluster, (variables, silos) in (
        (ft.GLM("x"), ft.OneStep(), None, whole),  # with privacy
        (ft.GLM("x"), ft.Coded(), None, whole),
        (learned, ft.Gradient(optimizer=ft.Newton()), None, whole),
        (ft.Pilot(ft.GLM("x"), at=SILO), ft.LocalAverage(max_updates=2), None, whole),
        (ft.GLM("x"), ft.Coded(), "family", whole),
        (ft.GLM("x"), ft.Coded(), None, lacking),
        (ft.GLM("x"), ft.Adaptive(), None, whole),
        (ft.GLM("x"), ft.Personalized(min_active=2, max_updates=1), None, whole),
    ):
        study = ft.Study(
            target=ft.ATE(outcome="y", treatment="a"),
            outcome_model=glm,
            treatment_model=treatment,
            algorithm=algorithm,
            cluster=cluster,
            cluster_scope="spanning",
            variables=variables,
            privacy=private if isinstance(algorithm, ft.OneStep) else None,
        )
        studies.append((study, silos))
    for study, silos in (*studies, _times()):
        with patch.object(silo, "discrete_gaussian", drawn):
            result = ft.run(study, silos)
        if result.run is None:
            raise AssertionError("a fresh result has its run")
        plan = study_plan(study, roster(list(result.run.sizes)))
        for heard in heard_rounds(plan, result.run.transcript, result.run.sizes):
            query, sent = heard.query, heard.answers[SILO]
            for part, answer in [(query, sent), *zip(query.members, query.split(sent), strict=True)]:
                name = type(part).__name__
                before = by_kind.get(name, Example([], None))
                if before.answer is None:  # an answer that says something is the better example
                    by_kind[name] = Example([part, *before.queries], answer)
                else:
                    before.queries.append(part)
    return by_kind | _looks()


def _times() -> tuple[ft.Study, dict[str, dict[str, NDArray[Any]]]]:
    """Return a study of time to an event, whose hazards are counted, and its records."""
    declared = {**VARIABLES, "time": ft.Variable(kind="number", range=(0, 3))}
    study = ft.Study(
        target=ft.Risk(outcome="y", time="time", treatment="a", periods=3, period_length=1.0),
        treatment_model=ft.GLM("1"),
        algorithm=ft.Gradient(optimizer=ft.Newton()),
        variables=ft.Variables(declared),
    )
    rng = np.random.default_rng(8)
    return study, {name: {**rows, "time": rng.uniform(0.1, 3.0, 60)} for name, rows in _silos().items()}


def _looks() -> dict[str, Example]:
    """Return the first rounds in which silos of masked studies look, one with few people to a column."""
    everyone, south = _silos().values()
    few = {
        name: {column: values[:9] for column, values in own.items()}
        for name, own in zip((SILO, "south", "west", "east"), (everyone, south) * 2, strict=True)
    }
    three = dict(zip((SILO, "south", "west"), (everyone, south, everyone), strict=True))
    return _looks_at(few, GainsQuery) | _looks_at(three, ShownQuery)


def _looks_at(silos: dict[str, dict[str, NDArray[Any]]], last: type[AbstractLook]) -> dict[str, Example]:
    """Return the first look of each kind, up to the ``last``."""
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("C(a) + x"),
        treatment_model=ft.GLM("x"),
        variables=VARIABLES,
    )
    members = tuple(Member(name=name, mask_key=MaskKey(name.encode().ljust(32)).public) for name in silos)
    plan = study_plan(study, members)
    tables = dict(load_all(silos, schema_of(study)))
    sizes = {name: len(own["y"]) for name, own in silos.items()}
    local = {name: LocalRows(name, plan.program.at(name, tables[name]), n) for name, n in sizes.items()}
    follower = Follower(plan, sum(sizes.values()))
    found: dict[str, Example] = {}
    few = Policy().min_cell
    while last.__name__ not in found:
        query = follower.query
        answers = {name: query.suppress(query.answer(rows), lambda _: few) for name, rows in local.items()}
        if isinstance(query, AbstractLook):
            found.setdefault(type(query).__name__, Example([query], answers[SILO]))
        follower.hear(follower.pool(answers, sizes))
    return found


_LACKING = ft.Variables(
    {
        **VARIABLES,
        "x": {"kind": "number", "range": (-9, 9), "missing": "impute"},
        "a": {"kind": "binary", "missing": "omit"},
    }
)


def _silos(*, lacking: bool = False) -> dict[str, dict[str, NDArray[Any]]]:
    rng = np.random.default_rng(7)
    silos = {}
    for name, clinics in (("north", ["A", "B"]), ("south", ["B", "C"])):
        x = rng.normal(size=60).round(2)
        a = rng.binomial(1, 0.5, size=60)
        y = rng.binomial(1, 1 / (1 + np.exp(-(x + a - 0.5)))).astype(float)
        clinic = np.array(clinics)[rng.binomial(1, 0.5, size=60)]
        family = np.repeat(["shared", *(f"{name} {k}" for k in range(5))], 10)
        if lacking:
            x, a = np.where(np.arange(60) % 7, x, np.nan), np.where(np.arange(60) % 10, a, np.nan)
        silos[name] = {"x": x, "a": a, "y": y, "clinic": clinic, "family": family}
    return silos


def size(query: Query, answer: object) -> int:
    """Return the bits of an answer, as a first message on its link."""
    return encode(query.answer_code, answer).length


def shown(answer: object) -> str:  # noqa: PLR0911 - one return per kind of answer
    """An answer as a person reads it, shortened."""
    match answer:
        case Sums():
            return f"sums {_numbers(answer.values())}"
        case SiloCurvature():
            return f"entries {_numbers(answer.entries)} in units of 2^{answer.exponent}"
        case SwitchAnswer():
            fit = "no fit" if answer.steps is None else f"fit {_numbers(answer.steps)}"
            return f"integers {_numbers(answer.z)}, {fit}"
        case FitOutcome():
            return answer.name.lower()
        case FitAnswer():
            sums = "" if answer.origin is None else f", sums {_numbers(answer.origin.values())}"
            return f"{answer.outcome.name.lower()}, fit {_numbers(answer.eps)}{sums}"
        case tuple() if answer and all(isinstance(part, int) for part in answer):
            return f"integers {_numbers(answer)}"
        case (FittedGLM() as model, *others):
            return f"{1 + len(others)} model(s); the first: coefficients {_numbers(model.coefficients)}"
        case OwnEstimate():
            return (
                f"no number: {answer.status.reason}" if answer.psi is None else f"psi {_numbers(answer.psi)}"
            )
        case Clusters():
            return f"{len(answer.digests)} digests; the first: {answer.digests[0].hex()}"
        case None:
            return "nothing; to answer at all is consent"
        case ((None | BinTotal(), *_) as group, *_):
            counts = [str(cell.count) if isinstance(cell, BinTotal) else "hidden" for cell in group]
            return f"counts by bin of the first group: {', '.join(counts)}"
        case tuple():
            return "; then ".join(shown(part) for part in answer[:2] if part is not None)
    raise AssertionError(f"an example of a {type(answer).__name__} has no text")


def _numbers(values: ArrayLike) -> str:
    every = [f"{float(value):.3g}" for value in np.asarray(values, dtype=float).ravel()]
    rest = f", ... ({len(every)} in all)" if len(every) > SHOWN_NUMBERS else ""
    return ", ".join(every[:SHOWN_NUMBERS]) + rest
