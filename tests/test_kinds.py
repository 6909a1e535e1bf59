"""Every registry of examples has one of each kind: a new subclass without an example fails here.

`tests/golden/test_golden.py` does the same for what the recorded runs use: statistics, responses, codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.optimizers import AbstractOptimizer
from fedtmle.data import source
from fedtmle.data.convert import AbstractReader
from fedtmle.data.silofile import LongTable
from fedtmle.model.problem import AbstractProblem
from fedtmle.protocol.codes import AbstractCode
from fedtmle.protocol.plan import AbstractProgram
from fedtmle.protocol.query import AbstractQuery
from fedtmle.studyfile import keys
from fedtmle.targets.effects.components import AbstractPopulation, AbstractRegime
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle_paper.density.fluctuation import AbstractFluctuation
from tests import cases
from tests.algorithms.test_gradient import OPTIMIZERS
from tests.attacks import honest
from tests.attacks.base import AbstractAttack
from tests.attacks.limits import ReleasedEstimate
from tests.attacks.test_attacks import ATTACKS, HIDDEN, SUPPRESSED, WORKING
from tests.attacks.test_differences import CrossFittedHazards, ManyInEachFold, RetiringFit
from tests.attacks.test_predictions import Alone, BesideTheArm
from tests.attacks.test_tabulated import ManyHigh, ManyLeave, Spanning, Stratified, Weighted
from tests.data_layer.asking import SERVED, SOURCES, frame, numeric, schema
from tests.effects import test_eif, test_populations
from tests.engine import lines
from tests.estimands import example
from tests.kinds import concrete, concrete_names, parts, without_example
from tests.model.test_density import FLUCTUATIONS
from tests.privacy import test_charts
from tests.queries import RUNS, examples
from tests.report import studies
from tests.studies import test_file
from tests.theory.problems import KINDS, random_case

# A study builds these; tests/effects, tests/time and tests/regimes have examples.
A_STUDY = {"EffectProblem", "TimeProblem", "RegimeProblem", "ResidualProblem", "OnColumns", "TermProblem"}
TIMED = {kind.__name__ for kind in (*ft.TIME_ESTIMANDS, *ft.REGIME_ESTIMANDS)}  # examples are there as well
OVER_TIME = {"Planned", "Onset", "Shift"}  # rules of tests/regimes/test_eif.py


def cases_of_targets() -> Iterable[object]:
    return parts([case.problem for case in cases.targets().values()])


def algorithms_of_honest_studies() -> Iterable[object]:
    for seed in range(60):
        yield from parts(honest.algorithm(np.random.default_rng(seed), [60, 80], 1e-3))


def parts_of_queries() -> Iterable[object]:
    """Return everything in the queries of tests/queries.py, their codes too."""
    for asked in examples():
        yield from parts(asked.query)
        yield from parts(asked.answer_code)
        yield from parts(asked.pooled_code)


# What the registry is for, the kinds it must have, its examples, and the kinds that it need not have.
REGISTRIES: dict[str, tuple[type[Any], Callable[[], Iterable[object]], set[str]]] = {
    "problems of tests/cases.py": (AbstractProblem, cases_of_targets, A_STUDY),
    "fluctuations of tests/cases.py": (AbstractFluctuation, cases_of_targets, set()),
    "algorithms of tests/cases.py": (
        AbstractAlgorithm,
        lambda: [make(1e-3) for make in cases.ALGORITHMS.values()],
        {"OneStep"},  # for effects alone
    ),
    "optimisers of tests/cases.py": (
        AbstractOptimizer,
        lambda: parts([make(1e-3) for make in cases.ALGORITHMS.values()]),
        set(),
    ),
    "optimisers of test_gradient": (AbstractOptimizer, OPTIMIZERS.values, set()),
    "fluctuations of test_density": (AbstractFluctuation, lambda: FLUCTUATIONS, set()),
    "problems of test_charts": (
        AbstractProblem,
        lambda: [make()[0] for make in test_charts.CASES.values()],
        A_STUDY,
    ),
    "problems of tests/theory": (
        AbstractProblem,
        lambda: [random_case(kind, 1, 0).problem for kind in KINDS],
        A_STUDY,
    ),
    "algorithms of tests/report": (AbstractAlgorithm, studies.ALGORITHMS.values, set()),
    "effects of tests/report": (AbstractEffect, studies.TARGETS.values, TIMED),
    "algorithms of honest studies": (
        AbstractAlgorithm,
        algorithms_of_honest_studies,
        {"Central", "OneStep"},  # no silo: all rows in one place; for effects alone
    ),
    "optimisers of honest studies": (AbstractOptimizer, algorithms_of_honest_studies, set()),
    "registered estimands": (
        AbstractEffect,
        lambda: (*ft.ESTIMANDS, *ft.TIME_ESTIMANDS, *ft.REGIME_ESTIMANDS),
        set(),
    ),
    "effects of test_eif": (AbstractEffect, lambda: [kind for kind, *_ in test_eif.CASES.values()], TIMED),
    "regimes of test_eif": (AbstractRegime, lambda: test_eif.RULES, OVER_TIME),
    "regimes of estimands": (
        AbstractRegime,
        lambda: parts([example(kind) for kind in ft.ESTIMANDS]),
        OVER_TIME,
    ),
    "populations": (AbstractPopulation, lambda: test_populations.SHARES, set()),
    "queries": (AbstractQuery, lambda: [asked.query for asked in examples()], set()),
    "codes": (AbstractCode, parts_of_queries, set()),
    "programs of queries": (
        AbstractProgram,
        lambda: [run()[0].program for run in RUNS.values()],
        {"PreflightProgram", "SitesProgram"},  # they ask what a study asks
    ),
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_kind_has_an_example(name: str) -> None:
    base, made, elsewhere = REGISTRIES[name]
    assert elsewhere <= concrete_names(base)  # an exception that is none is out of date
    assert without_example(base, made()) == elsewhere


def test_every_attack_is_carried_out() -> None:
    folds = (ManyInEachFold, CrossFittedHazards, RetiringFit)
    answered = (ManyHigh, ManyLeave, Spanning, Stratified, Weighted)  # honest studies of the same form
    elsewhere = (Alone, BesideTheArm, ReleasedEstimate, *folds, *answered)  # by tests of their own
    carried_out = [*(ATTACKS | SUPPRESSED | HIDDEN | WORKING).values(), *elsewhere]
    assert without_example(AbstractAttack, carried_out, package="tests") == set()


def test_a_study_file_names_every_kind() -> None:
    assert set(keys.target_kinds()) == concrete_names(AbstractEffect)
    assert set(keys.RULES) == concrete_names(AbstractRegime) - OVER_TIME
    assert set(keys.RULES_OVER_TIME) == set(test_file.RULES) == concrete_names(AbstractRegime)
    assert set(keys.ALGORITHMS) == concrete_names(AbstractAlgorithm)
    assert set(lines.ALGORITHMS) == concrete_names(AbstractAlgorithm) - {"Central", "OneStep"}  # over a line


def test_every_reader_reads_a_source(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    available = source.Columns.available

    def watched(columns: Any, reader: AbstractReader, *rest: Any) -> list[str]:
        opened.append(reader)
        return available(columns, reader, *rest)

    monkeypatch.setattr(source.Columns, "available", watched)
    for number, make in enumerate([*SOURCES, *SERVED]):
        folder = tmp_path / str(number)
        folder.mkdir()
        source.load(make(frame(x=[1.0, 2.0]), folder), schema(numeric("x")), silo="n")
    rows = frame(i=[1.0, 1.0, 2.0, 2.0], t=[1.0, 2.0, 1.0, 2.0], x=[1.0, 1.0, 2.0, 2.0])
    long = LongTable(data=rows, person="i", period="t")
    source.load(long, schema(numeric("x")), silo="n")
    assert without_example(AbstractReader, opened) == set()


class Shape:
    """A kind of thing of which the tests below have no example."""


@dataclasses.dataclass(frozen=True)
class Circle(Shape):
    inner: tuple[object, ...] = ()


class Ring(Circle):
    pass


class AbstractPolygon(Shape):
    pass


def test_a_kind_without_an_example_is_named() -> None:
    assert concrete(Shape, package="tests") == {Shape, Circle, Ring}
    assert concrete(Shape) == set()
    assert without_example(Shape, [Circle(), Shape], package="tests") == {"Ring"}
    assert without_example(Shape, parts({"a": Circle((Ring(), [Shape()]))}), package="tests") == set()
