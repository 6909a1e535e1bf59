"""The golden runs by name: what each of them does, through the public API wherever that is possible.

A run is a function of an empty folder that returns a result, or plain values. Its name starts with its kind.
"""

from __future__ import annotations

import datetime
import json
import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.runtime import silo as silo_module
from fedtmle.studies.preflight import preflight
from fedtmle.studyfile.file import read_study
from fedtmle.studyfile.template import write_template
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.two_arm import TwoArm
from tests.golden import wire
from tests.golden.data import SIZES, VARIABLES, Columns, cohort, mixture, people, silo_file
from tests.golden.targets import PlainMean, TwoResponses
from tests.regimes import law as regimes
from tests.runtime.faults import CROWDED, crowded
from tests.time import studies as time_studies

Run = Callable[[Path], Any]
RUNS: dict[str, Run] = {}


def add(name: str, run: Run) -> None:
    if name in RUNS:
        raise AssertionError(f"two golden runs are called {name!r}")
    RUNS[name] = run


# Problems: a target with its initial law, solved by each algorithm.


def _three(columns: Any) -> dict[str, Any]:
    """Cut an array, or each of some columns, into three silos."""
    cuts = np.cumsum(SIZES)[:-1]
    if isinstance(columns, dict):
        parts = {name: np.split(column, cuts) for name, column in columns.items()}
        return {silo: {name: parts[name][m] for name in columns} for m, silo in enumerate("abc")}
    return dict(zip("abc", np.split(columns, cuts), strict=True))


def mean() -> tuple[Any, Any, dict[str, Any]]:
    y = np.random.default_rng(11).gamma(2.0, 1.0, size=sum(SIZES)).clip(0, 20)
    problem = ft.Mean(bounds=(0.0, 20.0))
    return problem, problem.start(3.0), _three(y)


def two_arms() -> tuple[Any, Any, dict[str, Any]]:
    data = people(sum(SIZES), 12)
    columns = {"outcome": data["y"], "treatment": data["arm"].astype(float)}
    columns |= {"Q1": data["q1"], "Q0": data["q0"], "g": data["g"]}
    problem = TwoArm(outcome_bounds=(0.0, 10.0), weight_ceiling=64.0)
    return problem, problem.start(), _three(columns)


def transport(fluctuation: Any) -> tuple[Any, Any, dict[str, Any]]:
    problem = OptimalTransport(fluctuation=fluctuation, spacing=0.25)
    return problem, problem.start(mixture(150, 1)), _three(mixture(sum(SIZES), 2))


def solved(make: Callable[[], tuple[Any, Any, Any]], how: AbstractAlgorithm, _: Path, **options: Any) -> Any:
    problem, law, silos = make()
    return ft.solve(problem, law, silos, how, **options)


PROBLEMS: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], float]] = {
    "mean": (mean, 1e-6),
    "two arms": (two_arms, 1e-5),
    "transport, logistic": (partial(transport, LogisticFluctuation()), 3e-2),
    "transport, tilt": (partial(transport, ExponentialTilt()), 3e-2),
}


def _sgd(**options: Any) -> ft.StochasticGradientDescent:
    return ft.StochasticGradientDescent(batch=64, step=0.01, steps=4, seed=3, **options)


GIVEN = {"a": 0.5, "b": 0.3, "c": 0.2}
ALGORITHMS: dict[str, Callable[[float], AbstractAlgorithm]] = {
    "central exact": lambda tol: ft.Central(tolerance=tol),
    "central newton": lambda tol: ft.Central(tolerance=tol, optimizer=ft.Newton()),
    "gradient backtracking": lambda tol: ft.Gradient(tolerance=tol, max_updates=5),
    "gradient newton": lambda tol: ft.Gradient(tolerance=tol, optimizer=ft.Newton()),
    "gradient sgd": lambda tol: ft.Gradient(tolerance=tol, optimizer=_sgd(), max_updates=2),
    "local size": lambda tol: ft.LocalAverage(tolerance=tol, max_updates=3),
    "coded raw": lambda tol: ft.Coded(tolerance=tol, coordinates="raw", max_rounds=30),
    "coded whitened": lambda tol: ft.Coded(tolerance=tol),
    "coded certified": lambda tol: ft.Coded(tolerance=tol, smoothness=ft.Certified(), max_rounds=30),
    "personalized lattice": lambda _: ft.Personalized(lattice=0.02, max_updates=4),
    "personalized noise": lambda _: ft.Personalized(noise=0.5, weights="uniform", max_updates=4),
}
MORE_ALGORITHMS: dict[str, Callable[[float], AbstractAlgorithm]] = {
    "central exhaustive": lambda tol: ft.Central(tolerance=tol, optimizer=ft.Exact(exhaustive=True)),
    "central descent": lambda tol: ft.Central(tolerance=tol, optimizer=ft.GradientDescent(max_steps=20)),
    "gradient fixed step": lambda tol: ft.Gradient(
        tolerance=tol, optimizer=ft.GradientDescent(step=0.2, max_steps=8), max_updates=3
    ),
    "gradient first step": lambda tol: ft.Gradient(
        tolerance=tol, optimizer=ft.GradientDescent(step=ft.Backtracking(first=8.0, grow=1.5), stop=0.01)
    ),
    "gradient practical": lambda _: ft.Gradient(tolerance="practical", optimizer=ft.Newton()),
    "gradient budget": lambda tol: ft.Gradient(tolerance=tol, max_updates=0),
    "gradient sgd fresh": lambda tol: ft.Gradient(
        tolerance=tol, optimizer=_sgd(batches="fresh"), max_updates=2
    ),
    "gradient sgd replace": lambda tol: ft.Gradient(
        tolerance=tol, optimizer=_sgd(batches="fresh", replace=True), max_updates=2
    ),
    "local uniform": lambda tol: ft.LocalAverage(tolerance=tol, weights="uniform", max_updates=3),
    "local given": lambda tol: ft.LocalAverage(tolerance=tol, weights=GIVEN, max_updates=3),
    "local exhaustive": lambda tol: ft.LocalAverage(tolerance=tol, exhaustive=True, max_updates=2),
    "local progress": lambda tol: ft.LocalAverage(tolerance=tol, progress_tolerance=0.05),
    "local boundary": lambda tol: ft.LocalAverage(tolerance=tol, radius=1e-3),
    "coded adaptive": lambda tol: ft.Coded(tolerance=tol, inner="adaptive"),
    "coded pooled": lambda tol: ft.Coded(tolerance=tol, smoothness=ft.Estimated(factor=1.2, over="pooled")),
    "coded given": lambda tol: ft.Coded(tolerance=tol, smoothness=2.0, max_rounds=30),
    "coded raw given": lambda tol: ft.Coded(
        tolerance=tol, coordinates="raw", smoothness=2.0, inner="adaptive", max_rounds=30
    ),
    "coded fixed width": lambda tol: ft.Coded(tolerance=tol, fixed_width=1 << 40),
    "coded practical": lambda _: ft.Coded(),
    "coded negligible": lambda _: ft.Coded(tolerance="negligible"),
    "coded budget": lambda tol: ft.Coded(tolerance=tol, max_rounds=3),
    "switching": lambda tol: ft.Adaptive(tolerance=tol),
    "personalized exact": lambda _: ft.Personalized(max_updates=3),
    "personalized exhaustive": lambda _: ft.Personalized(lattice=0.05, exhaustive=True, max_updates=3),
    "personalized counted": lambda _: ft.Personalized(lattice=0.002, min_active=2, max_updates=3),
    "personalized both": lambda _: ft.Personalized(lattice=0.01, noise=0.2, max_updates=4),
}
for _problem, (_make, _tolerance) in PROBLEMS.items():
    for _name, _algorithm in (ALGORITHMS | (MORE_ALGORITHMS if _problem == "two arms" else {})).items():
        add(f"solve/{_problem}/{_name}", partial(solved, _make, _algorithm(_tolerance)))
for _name in ("coded adaptive", "coded given", "coded practical", "local given"):
    _make, _tolerance = PROBLEMS["transport, logistic"]
    add(f"solve/transport, logistic/{_name}", partial(solved, _make, MORE_ALGORITHMS[_name](_tolerance)))
add("solve/two arms/observed", partial(solved, two_arms, ft.Coded(tolerance=1e-4), observe=True))
add("solve/two arms/two threads", partial(solved, two_arms, ft.Coded(tolerance=1e-4), threads=2))


def retiring(fewest: int, _: Path) -> Any:
    """Silo a is at its own minimum at the start and retires in the first round."""
    problem = ft.Mean(bounds=(0.0, 20.0))
    silos = {"a": [4.0, 8.0, 6.0, 6.0], "b": [1.0, 2.0, 3.5], "c": [9.0, 11.0]}
    return ft.solve(
        problem, problem.start(6.0), silos, ft.Personalized(lattice=1.0, max_updates=6, min_active=fewest)
    )


def cancelling(how: AbstractAlgorithm, _: Path) -> Any:
    """The fits of two silos of unequal sizes cancel: there is no update, and the residual is not zero."""
    problem = ft.Mean(bounds=(0.0, 20.0))
    silos = {"a": [4.0, 4.0, 4.0], "b": [8.0]}
    return ft.solve(problem, problem.start(6.0), silos, how)


add("solve/mean/retires at once", partial(retiring, 1))
add("solve/mean/too few left by who retires", partial(retiring, 3))
add("solve/mean/local cancels", partial(cancelling, ft.LocalAverage(weights="uniform")))
add("solve/mean/personalized cancels", partial(cancelling, ft.Personalized(weights="uniform", lattice=0.5)))


# Studies of time to an event.


def timed(
    study: ft.Study, records: Callable[[], Any], _: Path, silos: int = 3, policy: ft.Policy | None = None
) -> Any:
    return ft.run(study, time_studies.split(records(), silos), policy=policy)


for _kind in ft.TIME_ESTIMANDS:
    _timed = time_studies.rossi_study(_kind, horizons=(6, 13), algorithm=ft.Coded())
    add(f"study/time/{_kind.__name__}", partial(timed, _timed, time_studies.rossi))
_MODELS: dict[str, Any] = {
    "hazard_model": ft.GLM("C(period) + C(rx) + age"),
    "censoring_model": ft.GLM("period + C(rx) + age"),
    "treatment_model": ft.GLM("age + node4"),
    "horizons": (3, 10),
}
CENSORED = time_studies.colon_study(**_MODELS)
_curve = time_studies.colon_study(
    horizons=tuple(range(1, 11)),
    hazard_model=ft.GLM("C(period)*C(rx) + age + node4"),
    treatment_model=ft.GLM("age + node4"),
    algorithm=ft.Study.algorithm,
)
add("study/time/curve", partial(timed, _curve, time_studies.colon, silos=6))
_compared = time_studies.colon_study(compare_subperiods=2, **_MODELS)
add("study/time/finer grid", partial(timed, _compared, time_studies.colon))
add("study/time/Kaplan-Meier", partial(timed, time_studies.colon_study(), time_studies.colon))
_MINDS = ft.Policy(min_events=1000)
add("refusal/min_events", partial(timed, time_studies.colon_study(), time_studies.colon, policy=_MINDS))
add("study/time/censoring", partial(timed, CENSORED, time_studies.colon))


# Studies of treatment over time.


def over_time(study: ft.Study, data: dict[str, Any], _: Path) -> Any:
    records = regimes.draw(400, 2, 7, **data)
    return ft.run(study, {"a": records[:150], "b": records[150:]})


_PLANS = (*regimes.RULES, ft.Planned(("1", "0")))
_DOSE: dict[str, Any] = {"dose": True}
REGIMES: dict[str, tuple[ft.Study, dict[str, Any]]] = {
    "RegimeMean": (regimes.study(periods=2, rules=_PLANS, diagnostics=True), {}),
    "RegimeDifference": (
        regimes.study(ft.RegimeDifference, periods=2, algorithm=ft.Coded(), diagnostics=True),
        {},
    ),
    "RegimeRatio": (
        regimes.study(ft.RegimeRatio, periods=2, survival=True, horizons=(1, 2), algorithm=ft.Coded()),
        {"survival": True},
    ),
    "shift": (
        regimes.study(periods=2, rules=(ft.Shift(), ft.Shift(by=0.5, most=5.0)), outcome="y", **_DOSE),
        _DOSE,
    ),
    "own coefficients": (
        regimes.study(
            periods=2,
            rules=(ft.Static("0"), ft.Static("1")),
            outcome_model=ft.GLM("w + l + lag1_a + a*C(silo)"),
            treatment_model=ft.GLM("w + l + C(silo)"),
        ),
        {},
    ),
}
for _name, (_study, _data) in REGIMES.items():
    add(f"study/regimes/{_name}", partial(over_time, _study, _data))


# Studies: effects with their nuisance models.

Y: dict[str, Any] = {"outcome": "y"}
EVENT: dict[str, Any] = {"outcome": "event"}
ARM: dict[str, Any] = {"treatment": "arm"}
ATE = ft.ATE(**Y, **ARM)
RULES = (
    ft.Static("1"),
    ft.Threshold("w", 0.2, arm="1", otherwise="0"),
    ft.Stochastic((0.25, 0.75)),
)
EFFECTS = {
    "ATE": ATE,
    "ATE three arms": ft.ATE(**Y, **ARM, arms=("0", "1", "2")),
    "ATE strata": ft.ATE(**Y, **ARM, strata="old"),
    "ATE binary": ft.ATE(**EVENT, **ARM),
    "ATE count": ft.ATE(outcome="visits", **ARM),
    "TSM": ft.TSM(**Y, **ARM),
    "TSM three arms": ft.TSM(**Y, **ARM, arms=("0", "1", "2")),
    "TSM reversed arms": ft.TSM(**Y, **ARM, arms=("1", "0")),
    "RR": ft.RR(**EVENT, **ARM),
    "RR strata": ft.RR(**EVENT, **ARM, strata="site"),
    "OR": ft.OR(**EVENT, **ARM),
    "OR three arms": ft.OR(**EVENT, **ARM, arms=("0", "1", "2")),
    "ATT": ft.ATT(**Y, **ARM),
    "ATC": ft.ATC(**EVENT, **ARM),
    "ATO": ft.ATO(**Y, **ARM),
    "OutcomeMean": ft.OutcomeMean(**Y),
    "OutcomeMean strata": ft.OutcomeMean(**EVENT, strata="old"),
    "PolicyMeans": ft.PolicyMeans(**Y, **ARM, rules=RULES),
    "PolicyMeans strata": ft.PolicyMeans(**Y, **ARM, rules=RULES[1:], strata="old"),
}
NEWTON = ft.Gradient(tolerance=1e-8, optimizer=ft.Newton())
Q, G, MISSING = ft.GLM("C(arm) + w + z"), ft.GLM("w"), ft.GLM("C(arm) + w")
FACTORS = {"outcome_model": ft.GLM("C(arm) + w + C(site)"), "treatment_model": ft.GLM("w + C(site)")}


def _plain(variable: ft.Variable) -> dict[str, Any]:
    """Return the fields of a variable, to change one of them."""
    return {field.name: getattr(variable, field.name) for field in fields(variable)}


def study_of(target: Any = ATE, **options: Any) -> ft.Study:
    settings: dict[str, Any] = {"outcome_model": Q, "treatment_model": G, "algorithm": NEWTON}
    if target.treatment is None:
        settings = {"outcome_model": ft.GLM("w + z"), "missingness_model": ft.GLM("w"), "algorithm": NEWTON}
    variables = VARIABLES
    if len(target.arms) > 2:
        variables = ft.Variables({**VARIABLES, "arm": {"kind": "category", "levels": target.arms}})
    return ft.Study(target=target, **(settings | {"variables": variables} | options))


def studied(study: ft.Study, _: Path, **options: Any) -> Any:
    """Run a study over the three silos of the cohort that suits it."""
    silos = cohort(arms=max(2, len(study.target.arms)), missing=study.missingness_model is not None)
    return ft.run(study, silos, **options)


def add_study(name: str, study: ft.Study, **options: Any) -> None:
    add(f"study/{name}", partial(studied, study, **options))


for _name, _target in EFFECTS.items():
    add_study(_name, study_of(_target, algorithm=ft.Coded()))
for _name in ("ATE three arms", "RR", "ATT", "PolicyMeans"):
    _options = {"missingness_model": MISSING, "weights": "weight", **FACTORS}
    add_study(f"{_name}, missing, weights, factors", study_of(EFFECTS[_name], **_options))

CLUSTERS = {"cluster": "family"}
SPANNING = {"cluster": "clinic", "cluster_scope": "spanning"}
TREES = ft.GradientBoostedTrees("w + z + arm", rounds=5, min_leaf=10)
LEARNERS = (Q, ft.GLM("C(arm)"), ft.GLM("C(arm)*w + C(site)", ridge=0.01))
GIVEN_PILOT = ft.Pilot.from_coefficients("C(arm) + w", {"arm": ("0", "1")}, "gaussian", (5.0, 1.0, 0.8))
SUPPLIED = {"outcome_model": ft.Supplied("q0", "q1"), "treatment_model": ft.Supplied("g")}
OPTIONS: dict[str, dict[str, Any]] = {
    "newton": {},
    "central": {"algorithm": ft.Central(tolerance=1e-8)},
    "local": {"algorithm": ft.LocalAverage(max_updates=3, weights=GIVEN)},
    "sgd": {"algorithm": ft.Gradient(tolerance=1e-3, optimizer=_sgd(), max_updates=2)},
    "coded adaptive": {"algorithm": ft.Coded(inner="adaptive")},
    "coded raw": {"algorithm": ft.Coded(tolerance=1e-3, coordinates="raw", max_rounds=40)},
    "coded certified": {"algorithm": ft.Coded(smoothness=ft.Certified(), max_rounds=40)},
    "coded pooled": {"algorithm": ft.Coded(smoothness=ft.Estimated(over="pooled"))},
    "one step": {"algorithm": ft.OneStep()},
    "personalized lattice": {"algorithm": ft.Personalized(lattice=0.01, max_updates=5)},
    "personalized noise": {"algorithm": ft.Personalized(noise=0.3, weights="uniform", max_updates=5)},
    "factors": FACTORS,
    "formula": {
        "outcome_model": ft.GLM("C(arm)*spline(w, knots=[-1, 0, 1]) + I(z**2) + log(weight)"),
        "treatment_model": ft.GLM("w + bs(z, knots=[0], low=-1, high=1)"),
    },
    "ridge": {"outcome_model": ft.GLM("C(arm) + w + z", ridge=0.1), "treatment_model": ft.GLM("w", ridge=1)},
    "weights": {"weights": "weight"},
    "missing": {"missingness_model": MISSING},
    "nothing missing": {"missingness_model": ft.Supplied("pi"), "target": ATE},
    "clusters, shared": CLUSTERS,
    "clusters, silo": {"cluster": "clinic", "cluster_scope": "silo"},
    "clusters, spanning": SPANNING,
    "clusters, spanning, coded": {**SPANNING, "algorithm": ft.Coded(), "weights": "weight"},
    "folds": {"folds": 3},
    "folds, clusters": {**CLUSTERS, "folds": 3, "seed": 5},
    "folds, spanning": {**SPANNING, "folds": 2, "weights": "weight"},
    "folds, missing, strata": {"target": EFFECTS["ATE strata"], "folds": 2, "missingness_model": MISSING},
    "clever weight": {"clever": "weight"},
    "clever weight, coded": {"clever": "weight", "algorithm": ft.Coded(), "weights": "weight"},
    "contrast": {"submodel": "contrast"},
    "contrast, coded": {"submodel": "contrast", "algorithm": ft.Coded(), "target": EFFECTS["ATT"]},
    "linear": {"link": "linear"},
    "linear, coded": {"link": "linear", "algorithm": ft.Coded()},
    "no diagnostics": {"diagnostics": False},
    "bounded": {"g_bounds": 0.4, "confidence": 0.9},
    "unbounded": {"g_bounds": None},
    "supplied": SUPPLIED,
    "supplied, missing": {**SUPPLIED, "missingness_model": ft.Supplied("pi"), "algorithm": ft.Coded()},
    "pilot at a silo": {"outcome_model": ft.Pilot(ft.GLM("C(arm) + w"), at="b")},
    "pilot trees": {"outcome_model": ft.Pilot(TREES, at="a"), "treatment_model": ft.Pilot(G, at="c")},
    "pilot, folds": {"outcome_model": ft.Pilot(TREES, at="a"), "folds": 2},
    "pilot given": {"outcome_model": GIVEN_PILOT},
    "super learner": {"outcome_model": ft.SuperLearner(LEARNERS, folds=3)},
    "super learner, trees": {
        "outcome_model": ft.SuperLearner(
            (Q, ft.Pilot(TREES, at="a"), ft.PerSilo(TREES), GIVEN_PILOT), folds=2
        ),
        "treatment_model": ft.SuperLearner((G, ft.GLM("w + z")), folds=2, seed=4),
    },
    "super learner, folds": {
        "outcome_model": ft.SuperLearner((Q, ft.PerSilo(TREES)), folds=2),
        "folds": 2,
        **CLUSTERS,
    },
    "super learner, missing": {
        "missingness_model": ft.SuperLearner((MISSING, ft.GLM("1")), folds=2),
        "algorithm": ft.Coded(),
    },
}
for _name, _options in OPTIONS.items():
    add_study(_name, study_of(**_options))
add_study("central, pilot trees", study_of(**{**OPTIONS["pilot trees"], **OPTIONS["central"]}))
add_study("released", study_of(algorithm=ft.Coded()), release=("a", "b"))
add_study("released, spanning", study_of(**SPANNING), release=("a", "c"))
add_study("released, personalized", study_of(**OPTIONS["personalized lattice"]), release=("a", "b", "c"))
add_study("observed", study_of(algorithm=ft.Coded()), observe=True)
add_study("two threads", study_of(**FACTORS, algorithm=ft.Coded()), threads=2)


def holed(study: ft.Study, _: Path) -> Any:
    """Run a study whose covariates and treatment are missing for some."""
    silos = cohort()
    for columns in silos.values():
        for name, every in (("w", 7), ("z", 9), ("arm", 31)):
            columns[name] = columns[name].astype(float)
            columns[name][::every] = np.nan
    return ft.run(study, silos)


for _name, _missing in (("imputed", "impute"), ("indicator", "indicator")):
    _holed = {name: {**_plain(VARIABLES[name]), "missing": _missing} for name in ("w", "z")}
    _arm = {**_plain(VARIABLES["arm"]), "missing": "omit"}
    add(
        f"study/{_name}",
        partial(
            holed,
            study_of(algorithm=ft.Coded(), variables=ft.Variables({**VARIABLES, **_holed, "arm": _arm})),
        ),
    )


def private(study: ft.Study, _: Path) -> Any:
    """Run a study with privacy; its noise is the same every time."""
    public = random.Random(7)  # noqa: S311 - no secret

    def drawn(variance: Fraction, _below: object) -> int:
        return round(public.gauss(0.0, math.sqrt(variance)))

    with patch.object(silo_module, "discrete_gaussian", drawn):
        return ft.run(study, cohort())


_PRIVACY = ft.Privacy(epsilon=20.0, delta=1e-3, server="trusted")
add("study/private", partial(private, study_of(ATE, algorithm=ft.OneStep(), privacy=_PRIVACY)))
_BY_STRATUM = {"outcome_model": ft.GLM("arm + w + C(site)"), "algorithm": ft.OneStep(), "privacy": _PRIVACY}
add("study/private, strata", partial(private, study_of(EFFECTS["RR strata"], **_BY_STRATUM)))


# Silo files: streams, policies, and names of columns.


def streamed(study: ft.Study, folder: Path, *, scale: float = 1.0) -> Any:
    """Silo a streams its table; beyond 65,536 rows in more than one batch."""
    silos: dict[str, Any] = cohort(missing=study.missingness_model is not None)
    large = people(int(scale * SIZES[0]), 0, missing=study.missingness_model is not None)
    return ft.run(study, silos | {"a": silo_file(folder, "a", large, stream=True)})


add("file/streamed", partial(streamed, study_of(**FACTORS, weights="weight", missingness_model=MISSING)))
add("file/streamed, coded", partial(streamed, study_of(EFFECTS["RR"], algorithm=ft.Coded())))
add("file/streamed in batches", partial(streamed, study_of(**SUPPLIED, algorithm=ft.Coded()), scale=600))


def with_files(
    study: ft.Study,
    folder: Path,
    *,
    change: Callable[[Columns], Columns] = dict,
    extra: str = "",
    **policy: Any,
) -> Any:
    """Silo b has a silo file with a policy; ``change`` alters its table."""
    silos: dict[str, Any] = cohort(missing=study.missingness_model is not None)
    pd.DataFrame(people(60, 9)).to_csv(folder / "public.csv", index=False)
    b = change(silos["b"])
    files = silos | {"b": silo_file(folder, "b", b, policy=policy, extra=extra)}
    return ft.run(study, files, colluders=policy.get("colluders", 1))


DISCLOSURE = (
    '[disclosure]\ncentre = "public.csv"\ncolumn = "y"\nattributes = ["{}"]\n'
    "min_uncertainty = {}\nradius = 5.0"
)
KEYED = '[columns]\nfamily = {column = "family", secret = "three words here"}'
add("file/default policy", partial(with_files, study_of(**FACTORS)))
add("file/release", partial(with_files, study_of(algorithm=ft.Coded()), release=True))
add("file/larger cells", partial(with_files, study_of(), min_cell=30))
add("file/truncated hidden", partial(with_files, study_of(g_bounds=0.4), min_truncated=40))
add(
    "file/disclosure allows",  # with diagnostics, answers would determine a record of so few
    partial(with_files, study_of(diagnostics=False), extra=DISCLOSURE.format("record", 1e-9)),
)


def keyed(folder: Path) -> Any:
    """Every silo keys its cluster identifiers with one secret."""
    silos = {name: silo_file(folder, name, own, extra=KEYED) for name, own in cohort().items()}
    return ft.run(study_of(**CLUSTERS), silos)


add("file/keyed clusters", keyed)

_BATCHES = {"algorithm": ft.Gradient(tolerance=1e-3, optimizer=replace(_sgd(), batch=30), max_updates=2)}
_FRESH = {"algorithm": ft.Gradient(tolerance=1e-3, optimizer=_sgd(batches="fresh"), max_updates=2)}


def _without_treated(columns: Columns) -> Columns:
    kept = columns["arm"] == 0
    return {name: column[kept] for name, column in columns.items()}


def _rare_site(columns: Columns) -> Columns:
    usual = np.where(columns["site"] == "south", "east", columns["site"])
    return {**columns, "site": np.where(np.arange(len(columns["w"])) < 3, "south", usual)}


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "min_silos": ({}, {"min_silos": 4}),
    "min_rows": ({}, {"min_rows": 1000}),
    "min_fold": ({"folds": 3}, {"min_fold": 60}),
    "min_fold of a learner": ({"outcome_model": ft.SuperLearner(LEARNERS[:2], folds=3)}, {"min_fold": 60}),
    "max_queries": ({}, {"max_queries": 6}),
    "max_functionals": ({}, {"max_functionals": 60}),
    "max_functionals of models": ({"outcome_model": ft.Pilot(TREES, at="b")}, {"max_functionals": 30}),
    "max_coefficient": ({}, {"max_coefficient": 1e-3}),
    "max_eps": ({}, {"max_eps": 1e-9}),
    "max_path": ({"algorithm": ft.Coded()}, {"max_path": 1e-6}),
    "min_batch": (_BATCHES, {"min_batch": 25}),
    "min_batch, fresh": (_FRESH, {"min_support": 5}),
    "allow_models": ({"outcome_model": ft.Pilot(Q, at="b")}, {"allow_models": False}),
    "allow_models of each": (OPTIONS["super learner, trees"], {"allow_models": False}),
    "a rare level": (FACTORS, {"change": _rare_site}),
    "allow_curvature": ({**FACTORS, "sums": "exact"}, {"allow_curvature": False}),
    "min_support": ({}, {"min_support": 1000}),
    "min_support of targeting": (SUPPLIED, {"min_support": 60}),
    "min_people": ({}, {"min_people": 500.0}),
    "min_pooled": ({"aggregation": "masked", "algorithm": ft.Coded()}, {"min_pooled": 500.0, "colluders": 0}),
    "min_people of targeting": ({**SUPPLIED, "algorithm": ft.Coded()}, {"min_people": 100.0}),
    "min_people of overlap": (SUPPLIED, {"min_people": 70.0}),
    "min_arm_rows": ({}, {"min_arm_rows": 70}),
    "min_arm_rows of strata": ({"target": EFFECTS["ATE strata"]}, {"min_arm_rows": 38}),
    "min_missing": ({"missingness_model": MISSING}, {"min_missing": 60}),
    "allow_one_arm": ({}, {"allow_one_arm": False, "change": _without_treated}),
    "min_cell of spanning clusters": (SPANNING, {"min_cell": 60}),
    "disclosure": ({}, {"extra": DISCLOSURE.format("mean", 1.0)}),
}
for _name, (_options, _policy) in REFUSALS.items():
    add(f"refusal/{_name}", partial(with_files, study_of(**_options), **_policy))
add("study/own coefficients", partial(studied, study_of(outcome_model=ft.GLM("C(arm) + w + C(silo)"))))


def own_columns(_: Path) -> Any:
    """Each hospital alone fills its level of a factor, and the owners mind."""
    return ft.run(
        replace(IHDP, aggregation="masked"), ihdp_silos(), policy=ft.Policy(allow_own_columns=False)
    )


add("refusal/allow_own_columns", own_columns)
add("study/masked", partial(studied, study_of(aggregation="masked", algorithm=ft.Coded()), colluders=0))
add("study/masked, shares", partial(studied, study_of(aggregation="masked", algorithm=ft.Coded())))
add_study("masked, folds", study_of(aggregation="masked", algorithm=ft.Coded(), folds=3))


def gains(_: Path) -> Any:
    """Four silos with few people to a column, under masks."""
    return ft.run(replace(CROWDED, aggregation="masked"), crowded(), policy=ft.Policy(min_people=1.0))


add("study/masked, gains", gains)
add("refusal/heavy weights", partial(studied, study_of(weights="weight", weight_ceiling=1.0)))
add("refusal/clusters in two silos", partial(studied, study_of(cluster="clinic")))
add(
    "refusal/no overlap",
    partial(studied, study_of(EFFECTS["ATE three arms"], g_bounds=0.45)),
)


# Targets with problems of their own, which a silo's policy may not allow.
_BROUGHT: dict[str, Any] = {"outcome_model": None, "missingness_model": None}
_ALLOWED: dict[str, Any] = {"allow_targets": ["tests.golden.targets"]}
add("target/mean", partial(with_files, study_of(PlainMean(outcome="y"), **_BROUGHT), **_ALLOWED))
add("target/two residuals", partial(studied, study_of(TwoResponses(outcome="y", other="z"), **_BROUGHT)))
add("refusal/allow_targets", partial(with_files, study_of(PlainMean(outcome="y"), **_BROUGHT)))
add(
    "refusal/failed target",
    partial(with_files, study_of(PlainMean(outcome="y", lies=True), **_BROUGHT), **_ALLOWED),
)


# Study files: the template, a public sample, and the look at the cohort before a study.


def template(folder: Path, *, old: str = "", new: str = "") -> Any:
    """Write the example of `fedtmle init`, with one change, and read its study."""
    write_template(folder, force=True)
    text = (folder / "study.toml").read_text(encoding="utf-8")
    if old not in text:
        raise AssertionError(f"the template has no {old!r}")
    (folder / "study.toml").write_text(text.replace(old, new) if old else text, encoding="utf-8")
    return read_study(folder / "study.toml")


def from_file(folder: Path, **changes: str) -> Any:
    file = template(folder, **changes)
    return ft.run(file.study, file.silos)


def looked_at(folder: Path, *, silo: str | None = None) -> Any:
    """Return the numbers of a preflight."""
    file = template(folder)
    return json.loads(json.dumps(preflight(file.study, file.silos, silo=silo).to_dict()))


_OUTCOME = 'formula = "C(programme) + sbp_0 + age + C(sex) + smoker"\n# family'
_SAMPLE = 'kind = "Pilot"\nsample = "public.csv"\n'
add("study file/template", from_file)
add(
    "study file/public pilot",
    partial(from_file, old=_OUTCOME, new=_SAMPLE + 'formula = "C(programme) + sbp_0"\n# family'),
)
add(
    "study file/public trees",
    partial(
        from_file,
        old=_OUTCOME,
        new=_SAMPLE + 'trees = {formula = "C(programme) + sbp_0", rounds = 6, min_leaf = 10}\n# family',
    ),
)
add("study file/strata", partial(from_file, old='# strata = "sex"', new='strata = "sex"'))
add("preflight/all silos", looked_at)
add("preflight/one silo", partial(looked_at, silo="north"))


# The wire itself: keys, clocks, restarts, strays.

_DATE = datetime.date(2026, 1, 1)
add("wire/signed", wire.signed)
add("wire/restarted", wire.restarted)
add("wire/not approved", partial(wire.guarded, approves=lambda _: False))
add("wire/expired", partial(wire.guarded, expires=_DATE))
add("wire/lifetime", partial(wire.guarded, days_per_look=9.0))
add("wire/other plan", partial(wire.guarded, other_plan=True))
add("wire/changed broadcast", partial(wire.lying, bit=5, to="abc"))
add("wire/different broadcasts", partial(wire.lying, bit=-1, to="b", how=ft.Gradient(tolerance=1e-9)))
add("wire/cannot record", wire.unrecorded)
add("wire/strays", wire.strays)
add("wire/colluders", partial(wire.masked, signed=False, colluders=2))
add("wire/no relay", partial(wire.masked, signed=True))
add("wire/digests without a mask", partial(wire.unmasked, study_of(**CLUSTERS), cohort()["a"]))
