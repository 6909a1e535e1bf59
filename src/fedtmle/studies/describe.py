"""A study as plain data, so that a saved result holds the question and the method."""

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
from fedtmle.targets.effects.estimands import AbstractEffect

_EVERY_EFFECT = {field.name for field in fields(AbstractEffect)}


def describe(study: Study) -> dict[str, Any]:
    """Return the study as plain data: target, models, algorithm and options."""
    target = study.target
    further = [field.name for field in fields(target) if field.name not in _EVERY_EFFECT]
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
            **{name: _plain(getattr(target, name)) for name in further},
            "regimes": [regime.label for regime in target.regimes()],
            "assumptions": list(target.assumptions()),
        },
        "models": {
            role: model_text(model, target.response if role == "outcome" else "binary")
            for role, model in study.models.items()
        },
        "algorithm": {"kind": type(study.algorithm).__name__, **_settings(study.algorithm)},
        "options": settings,
    }


def model_text(model: object, response: Response) -> str:
    """Return a nuisance model in words; ``response`` decides a GLM's family where it is "auto"."""
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
            family = next(name for name, known in FAMILIES.items() if known is model.family)
            text = f"{model.formula} ({family})"
        case TreeEnsemble():
            text = f"{model.formula} ({len(model.sizes)} trees)"
        case Pilot(inner, at):
            text = f"{model_text(inner, response)}, {f'fitted at {at}' if at else 'public'}"
        case PerSilo(inner):
            text = f"{model_text(inner, response)}, fitted at each silo"
        case SuperLearner(learners, folds):
            texts = [f"{k}. {model_text(each, response)}" for k, each in enumerate(learners, start=1)]
            text = f"super learner over {folds} folds: {'; '.join(texts)}"
        case _:
            text = repr(model)
    return text


def _settings(value: object) -> dict[str, Any]:
    """Return the fields of a dataclass as plain data, an empty dict for anything else."""
    if not is_dataclass(value):
        return {}
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: object) -> Any:
    """Return a setting as plain data; an object becomes the text that makes it."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    arguments = ", ".join(f"{name}={item!r}" for name, item in _settings(value).items())
    return f"{type(value).__name__}({arguments})"
