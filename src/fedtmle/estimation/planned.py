"""The plan of a study, as a core reads it: its dictionary, the models that it fits, and its limits.

It follows from the study and from the consortium's list alone, so that every hospital derives the same bytes.
A regression asks for sums of its columns times its weight, and times its weight and response: these products
are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedtmle.estimation.diagnostics.covariates import measured, model_covariates
from fedtmle.estimation.fit import left_out
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import regressions, study_folds, supplied_terms
from fedtmle.estimation.people import People, known
from fedtmle.estimation.regression import Regression
from fedtmle.initial.glm import Supplied
from fedtmle_core.factors import INDICATORS
from fedtmle_core.plan import Member, Model, Plan
from fedtmle_core.terms import ONE, Term, product


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
    """Return the plan of a study of an effect; ``study`` is the digest of the study's own document."""
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
    """Yield what is judged: who is counted, and each regression's columns with its weight and response."""
    arms = (ONE, *people.taken)
    everyone = (*arms, *(product(arm, people.observed) for arm in arms))
    counted = [product(weight, each) for weight in (ONE, people.relative) for each in everyone]
    folds = study_folds(declared.study)
    yield Model(columns=(ONE, *people.strata, *folds), responses=tuple(dict.fromkeys(counted)))
    for role, model in declared.study.models.items():
        if isinstance(model, Supplied):
            yield Model(columns=supplied_terms(declared, role), responses=(people.relative,))
    missing = tuple(1.0 - known(declared.dictionary, name) for name in declared.declared.may_be_missing)
    if missing:
        yield Model(columns=missing, responses=(ONE, *missing))
    if declared.study.diagnostics:
        yield Model(columns=_shown(declared))
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


def _shown(declared: Declared) -> tuple[Term, ...]:
    """Return the covariates that tables show, of which formulas may have other functions alone."""
    study = declared.declared
    shown = (measured(study, declared.dictionary, each).x for each in model_covariates(study))
    return (ONE, *shown)
