"""The nuisance models of an effect: what is regressed on what, and the fits as terms of each arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from fedtmle.errors import InputError
from fedtmle.estimation.fit import cross_fit, fit, folds_of
from fedtmle.estimation.flow import Flow
from fedtmle.estimation.loader import Declared, prediction
from fedtmle.estimation.people import People, number
from fedtmle.estimation.regression import CrossFit, Fit, Record, Regression
from fedtmle.initial.crossfit import CrossFitted, Fitted, Folds
from fedtmle.initial.design import Levels
from fedtmle.initial.glm import FAMILIES, GLM, FittedGLM, FittedMultinomial, Supplied
from fedtmle.programs.study import Study
from fedtmle_core.terms import ONE, Term, product
from fedtmle_core.types import Family

ROLES = ("treatment", "missingness", "outcome")

AnyFit: TypeAlias = Fit | CrossFit

ONE_TREATMENT = (
    "everyone it is fitted on has the same treatment; check the treatment's column and arms, or use fewer "
    "folds"
)
ABSENT_ARM = "someone in each arm is needed to fit it; check the treatment's column, or use fewer folds"
ONE_OUTCOME = (
    "every observed outcome is the same, so there is nothing to model; check the outcome's column and how it "
    "is coded"
)
ALL_OR_NONE = (
    "every outcome of those it is fitted on is observed, or every one is missing; leave the model out, or "
    "use fewer folds"
)


@final
@dataclass(frozen=True, kw_only=True)
class Nuisances:
    """Predictions of the fitted models: of g as `weights.arm_probabilities` takes them, pi and Q per arm.

    ``fitted`` are the fits by role, as results show them.
    """

    treatment: tuple[Term, ...]
    observed: tuple[Term, ...]
    outcome: tuple[Term, ...]
    fitted: Mapping[str, tuple[Fitted, ...]]


def regressions(declared: Declared, people: People) -> dict[str, Regression]:
    """Return the regression of each role whose model is to be fitted; `InputError` if one is of no GLM."""
    study, found = declared.study, {}
    weight = people.weight

    def of(role: str, y: Term | tuple[Term, ...], w: Term | None, family: Family, constant: str) -> None:
        model = study.models.get(role)
        if model is None or isinstance(model, Supplied):
            return
        if not isinstance(model, GLM):
            raise InputError(f"{role}_model: {type(model).__name__} is not available yet; give a GLM")
        found[role] = Regression(
            label=f"{role} model",
            family=family,
            design=declared.vocabulary.design(model.parsed),
            records=(Record(y=y, w=w),),
            ridge=model.ridge,
            classes=people.arms if isinstance(y, tuple) else (),
            constant=constant,
        )

    if len(people.arms) > 2:
        of("treatment", people.taken, weight, Family.LOGISTIC, ABSENT_ARM)
    elif people.treatment is not None:
        of("treatment", people.taken[1], weight, Family.LOGISTIC, ONE_TREATMENT)
    if people.observed != ONE:
        of("missingness", people.observed, weight, Family.LOGISTIC, ALL_OR_NONE)
    seen = product(people.relative, people.observed)
    outcome = study.outcome_model
    family = FAMILIES[outcome.family_for(study.response)] if isinstance(outcome, GLM) else Family.GAUSSIAN
    of("outcome", people.y, None if seen == ONE else seen, family, ONE_OUTCOME)
    return found


def study_folds(study: Study) -> tuple[Term, ...]:
    """Return the folds of cross-fitting, each 1 for its people; none if the study has none."""
    return () if study.folds is None else folds_of(study.folds, study.seed, study.cluster or "")


def fit_nuisances(declared: Declared, people: People, n: int) -> Flow[Nuisances]:
    """Fit the models of all roles in shared rounds; return their predictions."""
    study, asked = declared.study, regressions(declared, people)
    accuracy = study.fit_accuracy if study.rounds_sums else None
    fits: Sequence[AnyFit]
    folds = study_folds(study)
    if not folds:
        fits = yield from fit(list(asked.values()), n=n, accuracy=accuracy)
    else:
        fits = yield from cross_fit(list(asked.values()), folds, n=n, accuracy=accuracy)
    by_role: dict[str, AnyFit] = dict(zip(asked, fits, strict=True))
    shown = {role: (reported(each, study.levels, study.outer_folds, n),) for role, each in by_role.items()}
    supplied = {role: declared.supplied(role) for role in ROLES}
    return Nuisances(
        treatment=treatment_scores(declared, people, by_role.get("treatment")),
        observed=_observed(declared, people, by_role.get("missingness")),
        outcome=_outcome(declared, people, by_role.get("outcome")),
        fitted={role: each for role, each in (supplied | shown).items() if each},
    )


def treatment_scores(declared: Declared, people: People, fitted: AnyFit | None) -> tuple[Term, ...]:
    """Return the predictions of g, as `weights.arm_probabilities` takes them."""
    if people.treatment is None:
        return (ONE,)
    return supplied_terms(declared, "treatment") if fitted is None else fitted.means()


def _observed(declared: Declared, people: People, fitted: AnyFit | None) -> tuple[Term, ...]:
    """Return pi of each arm: 1 if nothing is missing."""
    arms = range(len(people.arms))
    if fitted is not None:
        return tuple(fitted.mean(declared.arm(a)) for a in arms)
    if people.observed == ONE:
        return (ONE,) * len(arms)
    given = supplied_terms(declared, "missingness")
    return given if len(given) > 1 else given * len(arms)


def _outcome(declared: Declared, people: People, fitted: AnyFit | None) -> tuple[Term, ...]:
    if fitted is None:
        return supplied_terms(declared, "outcome")
    return tuple(fitted.mean(declared.arm(a)) for a in range(len(people.arms)))


def supplied_terms(declared: Declared, role: str) -> tuple[Term, ...]:
    """Return the predictions that hospitals have as columns."""
    model = declared.study.models[role]
    if not isinstance(model, Supplied):
        raise AssertionError("a model is fitted or supplied")
    return tuple(number(declared.dictionary, prediction(role, name)) for name in model.columns)


def reported(fitted: AnyFit, levels: Levels, folds: Folds | None, n: int) -> Fitted:
    """Return a fit to ``n`` people as results show it."""
    if isinstance(fitted, CrossFit):
        if folds is None:
            raise AssertionError("a cross-fit has folds")
        return CrossFitted(models=tuple(reported(each, levels, None, n) for each in fitted.fits), folds=folds)
    formula = fitted.regression.design.formula
    # Results count errors of linear predictors; a rounded fit is told from an exact one by its bits.
    error, bits = fitted.error / math.sqrt(n), 0 if fitted.error else None
    if fitted.regression.classes:
        return FittedMultinomial(
            formula=formula, levels=levels, coefficients=fitted.coefficients, error=error, bits=bits
        )
    return FittedGLM(
        formula=formula,
        levels=levels,
        family=fitted.regression.family,
        coefficients=fitted.coefficients[0],
        error=error,
        bits=bits,
    )
