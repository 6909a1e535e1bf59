"""The plan of a study, as a core reads it: its dictionary, the models that it fits, and its limits.

It follows from the study and from the consortium's list alone, so that every hospital derives the same bytes.
A regression asks for sums of its columns times its weight, and times its weight and response: these products
are judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fedtmle.estimation.components import rule
from fedtmle.estimation.diagnostics.covariates import measured, model_covariates
from fedtmle.estimation.fit import left_out
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import regressions, study_folds, supplied_terms
from fedtmle.estimation.people import People, known
from fedtmle.estimation.regression import Regression
from fedtmle.estimation.timeplan import time_models
from fedtmle.initial.glm import Supplied
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle_core.factors import INDICATORS
from fedtmle_core.graph import ordered
from fedtmle_core.leaves import Level
from fedtmle_core.plan import Member, Model, Plan
from fedtmle_core.terms import ONE, ZERO, Constant, Term, product


def plan_of(
    declared: Declared,
    members: Sequence[Member],
    *,
    study: bytes,
    author: str,
    floor: int = 5,
    min_hospitals: int = 3,
    people: int = 1 << 20,
) -> Plan:
    """Return the plan of a study; ``study`` is the digest of the study's own document."""
    declared = declared.with_indicators() if declared.indicators else declared
    everybody = People.of(declared.study, declared.dictionary)
    if declared.study.missingness_model is None:
        everybody = everybody.completely_observed()
    return Plan(
        dictionary=declared.dictionary,
        models=tuple(_models(declared, everybody)),
        members=tuple(members),
        study=study,
        author=author,
        min_hospitals=min_hospitals,
        floor=floor,
        people=people,
    )


def _models(declared: Declared, people: People) -> Iterator[Model]:
    """Yield what is judged: who is counted, missing values, diagnostics, and each regression."""
    is_followed = isinstance(declared.study.target, AbstractTimeEffect)
    yield from (time_models if is_followed else _of_effect)(declared, people)
    missing = tuple(1.0 - known(declared.dictionary, name) for name in declared.declared.may_be_missing)
    if missing:
        yield Model(columns=missing, responses=(ONE, *missing))
    if declared.study.diagnostics and (shown := _only_shown(declared, people)):
        yield Model(columns=(ONE, *shown))


def _of_effect(declared: Declared, people: People) -> Iterator[Model]:
    """Yield who is counted, supplied predictions, and each regression's columns with weight and response."""
    arms = (ONE, *people.taken)
    everyone = (*arms, *(product(arm, people.observed) for arm in arms))
    counted = [product(weight, each) for weight in (ONE, people.relative) for each in everyone]
    folds = study_folds(declared.study)
    yield Model(columns=(ONE, *people.strata, *folds), responses=tuple(dict.fromkeys(counted)))
    # Outcomes and thresholds, which the end of a study adds up, are judged with all that comes before it.
    components = declared.study.target.components(people.strata_levels)
    rules = [rule(each.regime, people.arms, declared.dictionary) for each in components]
    cuts = dict.fromkeys(part for each in rules for part in each if not isinstance(part, Constant))
    seen = product(people.observed, people.y)
    outcomes = [product(people.relative, each) for each in (ONE, seen) if each != ZERO]
    yield Model(columns=(ONE, *cuts), responses=tuple(outcomes))
    for role, model in declared.study.models.items():
        if isinstance(model, Supplied):
            yield Model(columns=supplied_terms(declared, role), responses=(people.relative,))
    for regression in _fitted(declared, people):
        responses: dict[Term, None] = {}
        groups: dict[Term, None] = {}
        for record in regression.records:
            w = ONE if record.w is None else record.w
            responses |= dict.fromkeys([w, *(product(w, y) for y in record.ys)])
            groups |= dict.fromkeys(product(w, 1.0 - y) for y in record.ys if isinstance(y, INDICATORS))
        yield Model(columns=regression.design.columns, responses=tuple(responses), groups=tuple(groups))


def _fitted(declared: Declared, people: People) -> Iterator[Regression]:
    """Yield each regression, or with folds each of its parts."""
    folds = study_folds(declared.study)
    for regression in regressions(declared, people).values():
        yield from (left_out(regression, folds) if folds else (regression,))


def _only_shown(declared: Declared, people: People) -> tuple[Term, ...]:
    """Return the covariates that tables show and of which formulas have other functions alone.

    Tables of the others are of parts of what is judged, and read coarsely.
    """
    designs = (each.design.columns for each in regressions(declared, people).values())
    columns = [column for design in designs for column in design]
    levels = {column.name for column in columns if isinstance(column, Level)}
    study = declared.declared
    shown = [measured(study, declared.dictionary, each).x for each in model_covariates(study)]
    return tuple(x for x in shown if not all(_is_read(part, columns, levels) for part in ordered([x])))


def _is_read(term: Term, columns: Sequence[Term], levels: Collection[str]) -> bool:
    """Return whether a part of a term needs no column of its own beside these."""
    is_level = isinstance(term, Level) and term.name in levels
    return is_level or bool(term.parts) or isinstance(term, Constant) or term in columns
