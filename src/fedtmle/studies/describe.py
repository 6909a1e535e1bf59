"""A study in plain data and in words, so that a saved result says what was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fedtmle.algorithms.study import Study
from fedtmle.initial.glm import FAMILIES, GLM, FittedGLM, Supplied
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.superlearner import PerSilo, SuperLearner
from fedtmle.initial.trees import GradientBoostedTrees, TreeEnsemble
from fedtmle.model.families import Response


def describe(study: Study) -> dict[str, Any]:
    """What the study asks and how, as plain data."""
    target = study.target
    settings = {
        field.name: getattr(study, field.name)
        for field in fields(study)
        if field.name not in ("target", "algorithm") and not field.name.endswith("_model")
    }
    return {
        "target": {
            "kind": type(target).__name__,
            "outcome": target.outcome,
            "outcome_bounds": list(target.outcome_bounds),
            "outcome_type": target.outcome_type,
            "response": target.response,
            "treatment": target.treatment,
            "arms": list(target.arms),
            "strata": target.strata,
            "regimes": [regime.label for regime in target.regimes()],
        },
        "models": {
            role: model_text(model, target.response if role == "outcome" else "binary")
            for role, model in study.models.items()
        },
        "algorithm": {"kind": type(study.algorithm).__name__, **_settings(study.algorithm)},
        "options": settings,
    }


def model_text(model: object, response: Response) -> str:
    """A nuisance model in words."""
    match model:
        case Supplied():
            text = f"predictions supplied by the silos: {', '.join(model.columns)}"
        case GLM():
            ridge = f", ridge {model.ridge:g}" if model.ridge else ""
            text = f"{model.formula} ({model.family_for(response)}{ridge})"
        case GradientBoostedTrees():
            columns = model.formula if isinstance(model.formula, str) else " + ".join(model.formula)
            text = f"{columns} ({model.rounds} trees of depth {model.depth})"
        case FittedGLM():
            family = next(name for name, own in FAMILIES.items() if own is model.family)
            text = f"{model.formula} ({family})"
        case TreeEnsemble():
            text = f"{model.formula} ({len(model.sizes)} trees)"
        case Pilot(inner, at):
            text = f"{model_text(inner, response)}, {f'fitted at {at}' if at else 'public'}"
        case PerSilo(inner):
            text = f"{model_text(inner, response)}, fitted at each silo"
        case SuperLearner(learners, folds):
            each = "; ".join(f"{k}. {model_text(own, response)}" for k, own in enumerate(learners, start=1))
            text = f"super learner over {folds} folds: {each}"
        case _:
            text = repr(model)
    return text


def _settings(algorithm: object) -> dict[str, Any]:
    """The algorithm's own settings; one that is itself an object by its text."""
    if not is_dataclass(algorithm):
        return {}
    values = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    plain = (str, int, float, bool, type(None))
    return {
        name: dict(value)
        if isinstance(value, Mapping)
        else value
        if isinstance(value, plain)
        else _named(value)
        for name, value in values.items()
    }


def _named(value: object) -> str:
    """`Estimated(factor=1.05)` as the class and what differs from nothing: enough to read."""
    inner = _settings(value)
    return f"{type(value).__name__}({', '.join(f'{name}={item!r}' for name, item in inner.items())})"


def in_words(target: Mapping[str, Any]) -> str:
    """The question that a described target asks."""
    outcome, treatment, arms = target["outcome"], target["treatment"], target["arms"]
    against = f"{treatment} ({' or '.join(arms[1:])} against {arms[0]})"
    among = f"among those in arm {arms[-1]}" if target["kind"] == "ATT" else f"among those in arm {arms[0]}"
    asked = {
        "ATE": f"How much does {against} change the mean of {outcome}",
        "RR": f"By what factor does {against} change the mean of {outcome}",
        "OR": f"By what factor does {against} change the odds of {outcome}",
        "ATT": f"How much does {against} change the mean of {outcome} {among}",
        "ATC": f"How much does {against} change the mean of {outcome} {among}",
        "TSM": f"What would the mean of {outcome} be in each arm of {treatment} ({', '.join(arms)})",
        "PolicyMeans": f"What would the mean of {outcome} be under each rule for {treatment}",
        "OutcomeMean": f"What is the mean of {outcome}, its missing values accounted for",
    }
    strata = f", overall and by {target['strata']}" if target["strata"] else ""
    return f"{asked[target['kind']]}{strata}?"
