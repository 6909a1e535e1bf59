"""The covariates of a study as tables and balance show them, as terms."""

from __future__ import annotations

from fedtmle.estimation.diagnostics.balance import Measured
from fedtmle.estimation.people import known, levels, number
from fedtmle.initial.superlearner import formulas
from fedtmle.programs.study import Study
from fedtmle.targets.diagnostics import Covariate
from fedtmle_core.dictionary import Dictionary
from fedtmle_core.terms import ONE, product


def model_covariates(study: Study) -> tuple[Covariate, ...]:
    """Return the covariates of the study's formulas: numbers, then the levels of categories, each once.

    Of two levels the second one is shown.
    """
    variables, treatment = study.variables, study.target.treatment
    used = [formula for model in study.models.values() for formula in formulas(model)]
    numbers = dict.fromkeys(name for formula in used for name in formula.numeric_names)
    factors = dict.fromkeys(name for formula in used for name in formula.factor_names)
    covariates = [number_of(study, name) for name in numbers if name in variables and name != treatment]
    for name in factors:
        if name in variables and name != treatment:
            codes = variables[name].codes
            shown = codes[1:] if len(codes) == 2 else codes
            covariates += [Covariate(name=name, level=level, levels=codes) for level in shown]
    return tuple(covariate for covariate in covariates if covariate.high > covariate.low)


def number_of(study: Study, name: str) -> Covariate:
    """Return a number with its declared range; a binary variable is one from 0 to 1."""
    low, high = study.variables.ranges[name]
    return Covariate(name=name, low=low, high=high, is_binary=study.variables[name].kind == "binary")


def measured(study: Study, dictionary: Dictionary, covariate: Covariate) -> Measured:
    """Return a covariate on the unit scale of its range, as a term."""
    name = covariate.name
    there = known(dictionary, name) if name in study.may_be_missing else ONE
    if covariate.level is not None:
        place = covariate.levels.index(covariate.level)
        return Measured(covariate=covariate, x=levels(dictionary, name, covariate.levels)[place], known=there)
    width = covariate.high - covariate.low
    x = number(dictionary, name) * (1.0 / width)
    if covariate.low:
        x = product(there, x - covariate.low / width)
    return Measured(covariate=covariate, x=x, known=there)
