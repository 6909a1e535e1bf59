"""Whatever a `Study` may hold can be written in a study file: one file for every field of every class."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.initial.glm import FittedGLM
from fedtmle.initial.superlearner import TreeEnsemble
from fedtmle.model.fit import NewtonFits
from fedtmle.protocol.plan import canonical
from fedtmle.studyfile.file import StudyFileErrors, read_study
from fedtmle.studyfile.sample import fit_on_sample
from tests.declare import declare
from tests.kinds import concrete

BASE = {
    "target": """kind = "ATE"\noutcome = "y"\ntreatment = "a\"""",
    "variables": "\n".join(
        [
            *(f'{name} = {{kind = "binary"}}' for name in "yzab"),
            'x = {kind = "number", range = [-9, 9]}',
            'w = {kind = "number", range = [0, 9]}',
            's = {kind = "category", levels = ["u", "3"]}',
            'family = {kind = "identifier"}',
        ]
    ),
    "models.outcome": 'formula = "a + x"',
    "models.treatment": 'formula = "x"',
    "algorithm": 'kind = "Coded"',
    "options": "",
    "silos": 'one = "one.csv"\ntwo = "two.csv"',
}
ATE = ft.ATE(outcome="y", treatment="a")
VARIABLES = declare(**dict.fromkeys("yzab", "binary"), x=(-9, 9), w=(0, 9), s=["u", "3"], family="identifier")
STUDY = ft.Study(target=ATE, outcome_model=ft.GLM("a + x"), treatment_model=ft.GLM("x"), variables=VARIABLES)
TREES = ft.GradientBoostedTrees("a + x")


def read(folder: Path, sections: dict[str, str]) -> ft.Study:
    above = sections.get("", "")
    named = {name: body for name, body in {**BASE, **sections}.items() if name and body is not None}
    text = "\n".join([above, *(f"[{name}]\n{body}\n" for name, body in named.items())])
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return read_study(folder / "study.toml").study


def target(kind: str, more: str = "", *, treatment: str = 'treatment = "a"') -> dict[str, str]:
    return {"target": f'kind = "{kind}"\noutcome = "y"\n{treatment}\n{more}'}


def rules(body: str) -> dict[str, str]:
    return target("PolicyMeans", f"[[target.rules]]\n{body}")


def policy(rule: Any) -> dict[str, Any]:
    return {"target": ft.PolicyMeans(outcome="y", treatment="a", rules=(rule,))}


def model(body: str) -> dict[str, str]:
    return {"models.outcome": body}


def pilot(body: str) -> dict[str, str]:
    return model(f'kind = "Pilot"\n{body}')


def learners(body: str, more: str = "") -> dict[str, str]:
    return model(f'kind = "SuperLearner"\n{more}\n[[models.outcome.learners]]\n{body}')


def algorithm(kind: str, body: str) -> dict[str, str]:
    return {"algorithm": f'kind = "{kind}"\n{body}'}


def options(body: str) -> dict[str, str]:
    return {"options": body}


def trees(body: str) -> dict[str, str]:
    return pilot(f'at = "two"\ntrees = {{{body}}}')


def gradient(body: str) -> dict[str, str]:
    return algorithm("Gradient", f"optimizer = {{{body}}}")


def learned(*models: Any, **more: Any) -> dict[str, Any]:
    return {"outcome_model": ft.SuperLearner(models, **more)}


def descent(**settings: Any) -> dict[str, Any]:
    return {"algorithm": ft.Gradient(optimizer=ft.GradientDescent(**settings))}


def sgd(**settings: Any) -> dict[str, Any]:
    settings = {"batch": 8, "step": 0.5} | settings
    return {"algorithm": ft.Gradient(optimizer=ft.StochasticGradientDescent(**settings))}


def public(formula: str, levels: dict[str, tuple[str, ...]], family: str, *beta: float) -> dict[str, Any]:
    return {"outcome_model": ft.Pilot.from_coefficients(formula, levels, family, beta)}


NO_ARM = {"models.treatment": None}

# The estimands that need an outcome and a treatment, and nothing else.
PLAIN = [kind for kind in ft.ESTIMANDS if kind.has_treatment and kind is not ft.PolicyMeans]

# Class, field: what is written, and what the study then differs in.
CASES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        (kind.__name__, field): (
            target(kind.__name__, text),
            {"target": kind(outcome="y", treatment="a", **value)},
        )
        for kind in PLAIN
        for field, (text, value) in dict[str, tuple[str, dict[str, Any]]](
            {
                "arms": ('arms = ["1", 0]', {"arms": ("1", "0")}),
                "strata": ('strata = "s"', {"strata": "s"}),
            }
        ).items()
        if field != "strata" or kind.has_strata
    },
    ("ATE", "outcome"): (
        {"target": 'kind = "ATE"\noutcome = "z"\ntreatment = "a"'},
        {"target": ft.ATE(outcome="z", treatment="a")},
    ),
    ("ATE", "treatment"): (
        {"target": 'kind = "ATE"\noutcome = "y"\ntreatment = "b"'},
        {"target": ft.ATE(outcome="y", treatment="b")},
    ),
    ("OutcomeMean", "strata"): (
        {**target("OutcomeMean", 'strata = "s"', treatment=""), **model('formula = "x"'), **NO_ARM},
        {
            "target": ft.OutcomeMean(outcome="y", strata="s"),
            "outcome_model": ft.GLM("x"),
            "treatment_model": None,
        },
    ),
    ("PolicyMeans", "rules"): (rules('kind = "Static"\narm = "1"'), policy(ft.Static("1"))),
    ("Static", "arm"): (rules('kind = "Static"\narm = 0'), policy(ft.Static("0"))),
    ("Threshold", "*"): (
        rules('kind = "Threshold"\ncolumn = "x"\ncut = 1.5\narm = "1"\notherwise = "0"'),
        policy(ft.Threshold("x", 1.5, "1", "0")),
    ),
    ("Stochastic", "shares"): (
        rules('kind = "Stochastic"\nshares = [0.25, 0.75]'),
        policy(ft.Stochastic((0.25, 0.75))),
    ),
    ("GLM", "formula"): (model('formula = "a*x"'), {"outcome_model": ft.GLM("a*x")}),
    ("GLM", "family"): (
        model('formula = "x"\nfamily = "poisson"'),
        {"outcome_model": ft.GLM("x", family="poisson")},
    ),
    ("GLM", "ridge"): (model('formula = "x"\nridge = 0.5'), {"outcome_model": ft.GLM("x", ridge=0.5)}),
    ("Supplied", "columns"): (model('supplied = ["p", "q"]'), {"outcome_model": ft.Supplied("p", "q")}),
    ("Pilot", "at"): (
        pilot('at = "two"\nformula = "x"\nfamily = "gaussian"\nridge = 0.25'),
        {"outcome_model": ft.Pilot(ft.GLM("x", "gaussian", 0.25), at="two")},
    ),
    ("Pilot", "model"): (
        pilot(
            'formula = "a + C(s)"\nfamily = "binomial"\nlevels = {s = ["u", 3]}\ncoefficients = [0, 1.5, -2]'
        ),
        public("a + C(s)", {"s": ("u", "3")}, "binomial", 0.0, 1.5, -2.0),
    ),
    ("GradientBoostedTrees", "formula"): (
        trees('formula = ["x", "z"]'),
        {"outcome_model": ft.Pilot(ft.GradientBoostedTrees(("x", "z")), at="two")},
    ),
    **{
        ("GradientBoostedTrees", field): (
            trees(f'formula = "a + x", {field} = {value}'),
            {"outcome_model": ft.Pilot(dataclasses.replace(TREES, **{field: value}), at="two")},
        )
        for field, value in dict[str, Any]({"rounds": 7, "depth": 2, "rate": 0.5, "min_leaf": 33}).items()
    },
    ("PerSilo", "model"): (
        learners('kind = "PerSilo"\ntrees = {formula = "a + x"}'),
        learned(ft.PerSilo(TREES)),
    ),
    ("SuperLearner", "learners"): (
        learners('formula = "x"\n[[models.outcome.learners]]\nkind = "Pilot"\nat = "one"\nformula = "a"'),
        learned(ft.GLM("x"), ft.Pilot(ft.GLM("a"), at="one")),
    ),
    ("SuperLearner", "folds"): (learners('formula = "x"', "folds = 3"), learned(ft.GLM("x"), folds=3)),
    ("SuperLearner", "seed"): (learners('formula = "x"', "seed = 9"), learned(ft.GLM("x"), seed=9)),
    **{
        ("Coded", field): (algorithm("Coded", f"{field} = {text}"), {"algorithm": ft.Coded(**{field: value})})
        for field, (text, value) in dict[str, tuple[str, Any]](
            {
                "tolerance": ("1e-4", 1e-4),
                "coordinates": ('"raw"', "raw"),
                "smoothness": ("2.5", 2.5),
                "max_rounds": ("77", 77),
                "inner": ('"adaptive"', "adaptive"),
                "fixed_width": ("99", 99),
            }
        ).items()
    },
    **{
        ("Adaptive", field): (
            algorithm("Adaptive", f"{field} = {text}"),
            {"algorithm": ft.Adaptive(**{field: value})},
        )
        for field, (text, value) in dict[str, tuple[str, Any]](
            {
                "tolerance": ("1e-4", 1e-4),
                "coordinates": ('"raw"', "raw"),
                "smoothness": ("2.5", 2.5),
                "cost": ("2.0", 2.0),
                "max_rounds": ("77", 77),
                "radius": ("8.0", 8.0),
                "solver": ('"newton"', NewtonFits()),
            }
        ).items()
    },
    ("Certified", "*"): (
        algorithm("Coded", 'smoothness = "certified"'),
        {"algorithm": ft.Coded(smoothness=ft.Certified())},
    ),
    ("Certified", "along"): (
        algorithm("Coded", 'smoothness = {kind = "certified", along = "everywhere"}'),
        {"algorithm": ft.Coded(smoothness=ft.Certified(along="everywhere"))},
    ),
    ("Certified", "over"): (
        algorithm("Coded", 'smoothness = {kind = "certified", over = "pooled"}'),
        {"algorithm": ft.Coded(smoothness=ft.Certified(over="pooled"))},
    ),
    ("Estimated", "factor"): (
        algorithm("Coded", "smoothness = {factor = 1.5}"),
        {"algorithm": ft.Coded(smoothness=ft.Estimated(factor=1.5))},
    ),
    ("Estimated", "over"): (
        algorithm("Coded", 'smoothness = {kind = "estimated", factor = 2, over = "pooled"}'),
        {"algorithm": ft.Coded(smoothness=ft.Estimated(factor=2.0, over="pooled"))},
    ),
    ("Gradient", "tolerance"): (
        algorithm("Gradient", 'tolerance = "negligible"'),
        {"algorithm": ft.Gradient(tolerance="negligible")},
    ),
    ("Gradient", "optimizer"): (
        algorithm("Gradient", 'optimizer = "newton"'),
        {"algorithm": ft.Gradient(optimizer=ft.Newton())},
    ),
    ("Gradient", "max_updates"): (
        algorithm("Gradient", "max_updates = 3"),
        {"algorithm": ft.Gradient(max_updates=3)},
    ),
    ("Newton", "max_steps"): (
        gradient('kind = "newton", max_steps = 4'),
        {"algorithm": ft.Gradient(optimizer=ft.Newton(max_steps=4))},
    ),
    ("Newton", "stop"): (
        gradient('kind = "newton", stop = 0.2'),
        {"algorithm": ft.Gradient(optimizer=ft.Newton(stop=0.2))},
    ),
    ("GradientDescent", "step"): (gradient('kind = "descent", step = 0.3'), descent(step=0.3)),
    ("GradientDescent", "max_steps"): (gradient('kind = "descent", max_steps = 5'), descent(max_steps=5)),
    ("GradientDescent", "stop"): (gradient('kind = "descent", stop = 0.4'), descent(stop=0.4)),
    **{
        ("Backtracking", field): (
            gradient(f'kind = "descent", step = {{{field} = {value}}}'),
            descent(step=ft.Backtracking(**{field: value})),
        )
        for field, value in dict[str, Any](first=0.5, armijo=0.25, grow=3.0, max_halvings=8).items()
    },
    ("StochasticGradientDescent", "batch"): (gradient('kind = "sgd", batch = 9, step = 0.5'), sgd(batch=9)),
    ("StochasticGradientDescent", "step"): (gradient('kind = "sgd", batch = 8, step = 0.25'), sgd(step=0.25)),
    **{
        ("StochasticGradientDescent", field): (
            gradient(f'kind = "sgd", batch = 8, step = 0.5, {field} = {str(value).lower()}'),
            sgd(**{field: value}),
        )
        for field, value in {"steps": 6, "seed": 4}.items()
    },
    ("StochasticGradientDescent", "batches"): (
        gradient('kind = "sgd", batch = 8, step = 0.5, batches = "fresh"'),
        sgd(batches="fresh"),
    ),
    ("StochasticGradientDescent", "replace"): (
        gradient('kind = "sgd", batch = 8, step = 0.5, batches = "fresh", replace = true'),
        sgd(batches="fresh", replace=True),
    ),
    ("Central", "tolerance"): (
        algorithm("Central", "tolerance = 1e-9"),
        {"algorithm": ft.Central(tolerance=1e-9)},
    ),
    ("Central", "optimizer"): (
        algorithm("Central", 'optimizer = "descent"'),
        {"algorithm": ft.Central(optimizer=ft.GradientDescent())},
    ),
    ("Central", "max_updates"): (
        algorithm("Central", "max_updates = 2"),
        {"algorithm": ft.Central(max_updates=2)},
    ),
    ("Exact", "radius"): (
        algorithm("Central", 'optimizer = {kind = "exact", radius = 8}'),
        {"algorithm": ft.Central(optimizer=ft.Exact(radius=8.0))},
    ),
    ("Exact", "exhaustive"): (
        algorithm("Central", 'optimizer = {kind = "exact", exhaustive = true}'),
        {"algorithm": ft.Central(optimizer=ft.Exact(exhaustive=True))},
    ),
    **{
        (kind.__name__, field): (
            algorithm(kind.__name__, f"{field} = {text}"),
            {"algorithm": kind(**{field: value})},
        )
        for kind, own in {
            ft.LocalAverage: {
                "tolerance": ("1e-3", 1e-3),
                "weights": ("{one = 0.25, two = 0.75}", {"one": 0.25, "two": 0.75}),
                "progress_tolerance": ("1e-5", 1e-5),
            },
            ft.Personalized: {
                "weights": ('"uniform"', "uniform"),
                "lattice": ("0.5", 0.5),
                "noise": ("0.1", 0.1),
                "min_active": ("3", 3),
            },
        }.items()
        for field, (text, value) in {
            **own,
            "max_updates": ("3", 3),
            "radius": ("2.5", 2.5),
            "exhaustive": ("true", True),
        }.items()
    },
    ("Study", "g_bounds"): (options('g_bounds = "none"'), {"g_bounds": None}),
    **{
        ("Study", field): (options(f"{field} = {value!r}".replace("'", '"')), {field: value})
        for field, value in {
            "clever": "weight",
            "submodel": "contrast",
            "link": "linear",
            "weights": "w",
            "weight_ceiling": 5.0,
            "cluster": "family",
            "cluster_scope": "silo",
            "largest_cluster": 6,
            "folds": 4,
            "seed": 11,
            "confidence": 0.9,
            "imputations": 7,
            "imputation_sweeps": 3,
            "sums": "exact",
            "fit_accuracy": 1e-4,
            "aggregation": "masked",
            "on_refusal": "go on",
        }.items()
    },
    ("Study", "title"): ({"": 'title = "Home visits and IQ"'}, {"title": "Home visits and IQ"}),
    ("Study", "privacy"): (
        {"privacy": 'epsilon = 2.0\nserver = "trusted"'},
        {"privacy": ft.Privacy(epsilon=2.0, server="trusted")},
    ),
    ("Privacy", "*"): (
        {
            "privacy": "epsilon = 3.0\ndelta = 1e-7\ncolluders = 0\ngram = 0.2\ngradients = 0.2\n"
            'closing = 0.6\nserver = "trusted"'
        },
        {
            "privacy": ft.Privacy(
                epsilon=3.0,
                delta=1e-7,
                colluders=0,
                gram=0.2,
                gradients=0.2,
                closing=0.6,
                server="trusted",
            )
        },
    ),
    ("Study", "diagnostics"): (options("diagnostics = false"), {"diagnostics": False}),
    ("Study", "missingness_model"): (
        {"models.missingness": 'formula = "x"'},
        {"missingness_model": ft.GLM("x")},
    ),
    ("Study", "treatment_model"): (
        {"models.treatment": 'kind = "Pilot"\nat = "one"\nformula = "x"'},
        {"treatment_model": ft.Pilot(ft.GLM("x"), at="one")},
    ),
}


@pytest.mark.parametrize(("sections", "changes"), CASES.values(), ids=["-".join(case) for case in CASES])
def test_the_file_gives_an_equal_study(
    tmp_path: Path, sections: dict[str, Any], changes: dict[str, Any]
) -> None:
    expected = dataclasses.replace(STUDY, **changes)
    assert expected != STUDY
    found = read(tmp_path, sections)
    assert found == expected
    assert canonical(found) == canonical(expected)  # the plan that silos approve


# What no file needs: made of others above, or without a meaning of its own.
ELSEWHERE = {
    ("Study", "target"): "every target has its cases",
    ("Study", "outcome_model"): "every model has its cases",
    ("Study", "algorithm"): "every algorithm has its cases",
    ("Study", "variables"): "tests/studies/test_dictionary.py",
    ("StochasticGradientDescent", "stop"): "its number of steps is fixed, nothing is stopped",
    ("Pilot", "unit_scale"): "follows from `sample`, which has its own test",
}
# A file names the sample on which a model is fitted, not the fit.
FITTED: set[type[Any]] = {FittedGLM, TreeEnsemble}
INHERITED = {"outcome", "treatment", "arms", "strata"}


def kinds_of_a_study() -> set[type[Any]]:
    """Return every class whose values a study may hold: those in the annotations of its fields, and so on."""
    classes: set[type[Any]] = set()
    to_visit: list[Any] = [ft.Study]
    while to_visit:
        annotation = to_visit.pop()
        to_visit += typing.get_args(annotation)
        if not isinstance(annotation, type) or not annotation.__module__.startswith("fedtmle."):
            continue
        kinds: frozenset[type[Any]] = concrete(annotation)
        for kind in kinds - classes - FITTED:
            if dataclasses.is_dataclass(kind):
                classes.add(kind)
                to_visit += typing.get_type_hints(kind).values()
    return classes


# Fields that no case reads from a study file yet. Times are read in `tests/time/test_files.py`, and treatment
# over time in `tests/regimes/test_files.py`.
OF_TIME = (
    *("time", "periods", "period_length", "grid", "horizons", "causes", "censored", "entry", "beyond"),
    *("subperiods", "compare_subperiods"),
)
OVER_TIME = ("rules", "over_time", "censoring", "horizons")
WITHOUT_A_CASE = {
    ("FirstOrderFits", "gradient"),
    ("LocalAverage", "lattice"),
    ("LocalAverage", "solver"),
    ("NewtonFits", "gradient"),
    ("OneStep", "*"),
    ("Personalized", "gap"),
    ("Personalized", "solver"),
    ("PolicyRisk", "rules"),
    ("Schedule", "steps"),
    ("Study", "censoring_model"),
    ("Study", "hazard_model"),
    *((kind.__name__, name) for kind in ft.TIME_ESTIMANDS for name in OF_TIME),
    *((kind.__name__, name) for kind in ft.REGIME_ESTIMANDS for name in OVER_TIME),
    *((r.__name__, f.name) for r in (ft.Planned, ft.Onset, ft.Shift) for f in dataclasses.fields(r)),
}


def test_every_field_of_every_class_has_a_case() -> None:
    """A new field without a case fails, and so does a field of the list above that has got one."""
    gaps = set()
    for made in kinds_of_a_study():
        names = [field.name for field in dataclasses.fields(made)] or ["*"]
        for name in names:
            shared = name in INHERITED and issubclass(made, ft.AbstractEffect)
            covered = {(made.__name__, name), (made.__name__, "*")} & (CASES.keys() | ELSEWHERE.keys())
            if not (covered or shared):
                gaps.add((made.__name__, name))
    assert gaps == WITHOUT_A_CASE


def sample(n: int = 200) -> pd.DataFrame:
    rng = np.random.default_rng(4)
    x, s = rng.normal(size=n), rng.choice(["u", "v"], size=n)
    a = (rng.random(n) < 1 / (1 + np.exp(-x))).astype(int)
    y = np.clip(5 + a + x + (s == "v") + rng.normal(size=n), 0, 10)
    return pd.DataFrame({"y": np.where(rng.random(n) < 0.1, np.nan, y), "a": a, "x": x, "s": s})


WIDE = declare(VARIABLES, y=(0, 10), s=["u", "v"])
WIDE_TEXT = {
    "variables": BASE["variables"]
    .replace('y = {kind = "binary"}', 'y = {kind = "number", range = [0, 10]}')
    .replace('["u", "3"]', '["u", "v"]')
}


def test_a_pilot_on_a_public_sample_is_its_plain_regression(tmp_path: Path) -> None:
    frame = sample()
    frame.to_csv(tmp_path / "public.csv", index=False)
    study = read(
        tmp_path,
        {
            **WIDE_TEXT,
            **pilot('sample = "public.csv"\nformula = "a + x + C(s)"'),
            "models.treatment": 'kind = "Pilot"\nsample = "public.csv"\nformula = "x"',
        },
    )
    known = frame.dropna()
    X = np.column_stack([np.ones(len(known)), known.a, known.x, known.s == "v"])
    beta = np.linalg.lstsq(X, known.y.to_numpy() / 10, rcond=None)[0]
    assert isinstance(study.outcome_model, ft.Pilot)
    assert isinstance(study.outcome_model.model, FittedGLM)
    np.testing.assert_allclose(study.outcome_model.model.coefficients, beta, atol=1e-10)
    assert study == dataclasses.replace(
        STUDY,
        variables=WIDE,
        outcome_model=fit_on_sample(ATE, WIDE, "outcome", ft.GLM("a + x + C(s)"), frame),
        treatment_model=fit_on_sample(ATE, WIDE, "treatment", ft.GLM("x"), frame),
    )
    rng = np.random.default_rng(1)
    rows = {"y": rng.uniform(0, 10, 90), "a": rng.integers(0, 2, 90), "x": rng.normal(size=90)}
    result = ft.run(study, {"one": {**rows, "s": rng.choice(["u", "v"], 90)}})
    assert result.document["converged"]


def test_trees_on_a_public_sample_are_part_of_the_plan(tmp_path: Path) -> None:
    sample().to_csv(tmp_path / "public.csv", index=False)
    text = pilot('sample = "public.csv"\ntrees = {formula = "a + x + C(s)", rounds = 5}')
    found = read(tmp_path, {**WIDE_TEXT, **text})
    spec = ft.GradientBoostedTrees("a + x + C(s)", rounds=5)
    expected = dataclasses.replace(
        STUDY, variables=WIDE, outcome_model=fit_on_sample(ATE, WIDE, "outcome", spec, sample())
    )
    assert canonical(found) == canonical(expected)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (pilot('formula = "x"'), "[models.outcome]: Pilot: expected exactly one source"),
        (pilot('at = "one"'), "[models.outcome]: Pilot: expected exactly one of formula"),
        (
            pilot('at = "onne"\nformula = "x"'),
            "[models.outcome] at: no silo is called 'onne'; did you mean 'one'?",
        ),
        (pilot('at = "one"\nformula = "x"\nlevels = {s = ["u"]}'), "[models.outcome] levels: they go with"),
        (
            pilot('at = "one"\nfamily = "gaussian"\ntrees = {formula = "x"}'),
            "trees: family and ridge go with",
        ),
        (pilot('formula = "x"\ncoefficients = [1, 2]'), "family: public coefficients need one"),
        (
            pilot('formula = "x"\nfamily = "gaussian"\ncoefficients = [1]'),
            "[models.outcome] coefficients: expected 2 (1, x), not 1",
        ),
        (
            pilot('sample = "none.csv"\nformula = "x"'),
            "none.csv: silo 'public sample': the file does not exist",
        ),
        (trees('formula = "x", depth = 99'), "[models.outcome.trees] depth: expected 1 to 6, not 99"),
        (
            trees('formula = "x", deep = 2'),
            "[models.outcome.trees] deep: unknown key of GradientBoostedTrees",
        ),
        (
            learners(
                'formula = "x"\n[[models.outcome.learners]]\nkind = "Pilot"\nformula = "q q"\nat = "two"'
            ),
            "[models.outcome.learners] formula:",
        ),
        (model('kind = "SuperLearner"'), "[models.outcome] learners: is missing"),
        (learners('kind = "SuperLearner"'), "[models.outcome.learners] kind: is not known"),
        (algorithm("Gradient", 'optimizer = "sgd"'), '[algorithm] optimizer: expected "newton" or "descent"'),
        (gradient('kind = "sgd", step = 1'), "[algorithm.optimizer] batch: is missing"),
        (
            gradient('kind = "sgd", batch = 2.5, step = 1'),
            "[algorithm.optimizer] batch: expected a whole number",
        ),
        (
            gradient('kind = "descent", step = {armijo = 0.7}'),
            "[algorithm.optimizer.step] armijo: expected a number",
        ),
        (
            algorithm("LocalAverage", "weights = {one = 1.0}"),
            "[algorithm] weights: expected one weight for each",
        ),
        (
            algorithm("LocalAverage", "weights = {one = 0.5, two = 0.6}"),
            "[algorithm] weights: must sum to 1, not 1.1",
        ),
    ],
)
def test_mistakes_in_models_and_algorithms_have_their_line(
    tmp_path: Path, sections: dict[str, str], expected: str
) -> None:
    with pytest.raises(StudyFileErrors) as caught:
        read(tmp_path, sections)
    (defect,) = caught.value.defects
    assert expected in str(defect)
    assert defect.line is not None


def test_a_sample_must_have_what_the_model_needs() -> None:
    with pytest.raises(InputError, match="no column 'z'"):
        fit_on_sample(ATE, WIDE, "outcome", ft.GLM("z"), sample())
    with pytest.raises(InputError, match="sample: treatment model: column"):
        fit_on_sample(ATE, WIDE, "treatment", ft.GLM("x + I(2*x)"), sample())
    three = declare(WIDE, a=["0", "1", "2"])
    with pytest.raises(InputError, match="for two arms"):
        fit_on_sample(ATE, three, "treatment", ft.GLM("x"), sample())
    with pytest.raises(InputError, match="treatment_model: a public model"):
        dataclasses.replace(
            STUDY,
            target=ft.ATE(outcome="y", treatment="a"),
            variables=three,
            outcome_model=ft.GLM("C(a)"),
            treatment_model=ft.Pilot.from_coefficients("x", {}, "binomial", (0.0, 1.0)),
        )
