"""Effects over questions are the effects of the package: the same estimates and standard errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from tests.declare import declare
from tests.effects.studies import NEWTON, VARIABLES, Columns, change, cut, population
from tests.effects.test_nhefs import REFERENCE, nhefs
from tests.effects.test_nhefs import study as nhefs_study
from tests.effects.test_pooled import OPTIONS, TARGETS, partitions, people, study_of
from tests.estimation.over_questions import assert_same, run_over_questions

ALGORITHMS = {"newton": NEWTON, "coded": ft.Coded(), "one step": ft.OneStep()}
FURTHER: dict[str, dict[str, Any]] = {
    "folds": {"folds": 3},
    "weight": {"clever": "weight"},
    "contrast": {"submodel": "contrast"},
    "linear": {"link": "linear"},
    "a bound": {"g_bounds": 0.1},
    "no bound": {"g_bounds": None},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_every_effect_is_that_of_the_package(name: str, option: str, algorithm: str) -> None:
    study = change(study_of(TARGETS[name], **OPTIONS[option]), algorithm=ALGORITHMS[algorithm])
    data = people(study, 400, seed=5 + len(name))
    assert_same(study, cut(data, partitions(data, 3)["random"]), 1e-8 if algorithm == "newton" else 1e-5)


@pytest.mark.parametrize("option", FURTHER)
def test_options_are_those_of_the_package(option: str) -> None:
    study = change(study_of(TARGETS["ATE"], **OPTIONS["missing"]), **FURTHER[option])
    data = people(study, 400, seed=5)
    assert_same(study, cut(data, partitions(data, 3)["random"]), 1e-8)


def made(seed: int, n: int = 400) -> dict[str, Columns]:
    """Return two silos with a dose, arms in words, a count, predictions, and covariates to transform."""
    rng = np.random.default_rng(seed)
    data = population(n, seed, missing=True)
    data["dose"] = np.array([0.0, 0.5, 2.0])[rng.integers(0, 3, n)]
    data["drug"] = np.array(["none", "some"])[data["a"]]
    data["visits"] = rng.poisson(1.0 + 0.5 * data["a"]).clip(0, 9)
    data["size"] = rng.uniform(1.0, 3.0, n)
    data["g"] = rng.uniform(0.3, 0.7, n)
    data["q0"], data["q1"] = rng.uniform(1.0, 9.0, (2, n))
    data["complete"] = np.where(np.isnan(data["y"]), 5.0, data["y"])
    here = rng.random(n) < 0.4
    return cut(data, [np.flatnonzero(here), np.flatnonzero(~here)])


MADE = declare(
    VARIABLES,
    dose=(0, 2),
    drug=["none", "some"],
    visits=("count", 10),
    size=(1, 4),
    complete=(0, 10),
)
STUDIES: dict[str, dict[str, Any]] = {
    "doses, as a factor": {
        "target": ft.TSM(outcome="complete", treatment="dose", arms=("0", "0.5", "2")),
        "outcome_model": ft.GLM("C(dose) + w"),
        "treatment_model": ft.GLM("w"),
    },
    "doses, as a number": {
        "target": ft.TSM(outcome="complete", treatment="dose", arms=("0", "0.5", "2")),
        "outcome_model": ft.GLM("dose + poly(w, 2) + dose:w"),
        "treatment_model": ft.GLM("w"),
    },
    "arms in words, the other way round": {
        "target": ft.ATE(outcome="complete", treatment="drug", arms=("some", "none")),
        "outcome_model": ft.GLM("C(drug) + w"),
        "treatment_model": ft.GLM("w + C(site, ref='west')"),
    },
    "a binary treatment as a number": {
        "target": ft.ATE(outcome="complete", treatment="a"),
        "outcome_model": ft.GLM("a*w + C(old)"),
        "treatment_model": ft.GLM("w + old"),
    },
    "a count": {
        "target": ft.ATE(outcome="visits", treatment="a"),
        "outcome_model": ft.GLM("a + w"),
        "treatment_model": ft.GLM("w"),
    },
    "a ridge": {
        "target": ft.ATE(outcome="event", treatment="a"),
        "outcome_model": ft.GLM("a + w", ridge=0.01),
        "treatment_model": ft.GLM("w", ridge=0.01),
        "missingness_model": ft.GLM("a + w"),
    },
    "transformed covariates": {
        "target": ft.ATE(outcome="complete", treatment="a"),
        "outcome_model": ft.GLM("a + I(w/size) + log(size) + spline(w, knots=[-1, 0, 1])"),
        "treatment_model": ft.GLM("I((w + 1)**2 - size) + sqrt(size)"),
    },
    "supplied": {
        "target": ft.ATE(outcome="complete", treatment="a"),
        "outcome_model": ft.Supplied("q0", "q1"),
        "treatment_model": ft.Supplied("g"),
    },
    "supplied, with missing outcomes": {
        "target": ft.TSM(outcome="y", treatment="a"),
        "outcome_model": ft.Supplied("q0", "q1"),
        "treatment_model": ft.Supplied("g"),
        "missingness_model": ft.Supplied("g"),
    },
    "a threshold": {
        "target": ft.PolicyMeans(
            outcome="complete",
            treatment="dose",
            arms=("0", "0.5", "2"),
            rules=(ft.Threshold("w", -0.25, arm="2", otherwise="0.5"), ft.Stochastic((0.2, 0.5, 0.3))),
        ),
        "outcome_model": ft.GLM("C(dose) + w"),
        "treatment_model": ft.GLM("w"),
        "folds": 2,
    },
    "families in folds, with weights": {
        "target": ft.ATE(outcome="y", treatment="a", strata="site"),
        "outcome_model": ft.GLM("a + w"),
        "treatment_model": ft.GLM("w"),
        "missingness_model": ft.GLM("a + w"),
        "weights": "weight",
        "cluster": "family",
        "cluster_scope": "silo",
        "folds": 3,
    },
}


@pytest.mark.parametrize("algorithm", ["newton", "coded"])
@pytest.mark.parametrize("name", STUDIES)
def test_studies_are_those_of_the_package(name: str, algorithm: str) -> None:
    study = ft.Study(variables=MADE, algorithm=ALGORITHMS[algorithm], **STUDIES[name])
    assert_same(study, made(len(name)), 1e-8 if algorithm == "newton" else 1e-5)


def holes(silos: dict[str, Columns]) -> dict[str, Columns]:
    """Return the silos with some values of covariates left out, of two in the same records."""
    rng, found = np.random.default_rng(8), {}
    for silo, data in silos.items():
        n = len(data["w"])
        lost, others = rng.random(n) < 0.15, rng.random(n) < 0.1
        site = np.where(others, None, data["site"].astype(object))
        old = np.where(others, np.nan, data["old"].astype(float))
        found[silo] = {**data, "size": np.where(lost, np.nan, data["size"]), "site": site, "old": old}
    return found


def may_be_missing(name: str) -> dict[str, Any]:
    """Return a covariate's declaration, with an indicator where its values are missing."""
    return {**vars(MADE[name]), "missing": "indicator"}


def study_with_holes(**options: Any) -> ft.Study:
    return ft.Study(
        target=ft.ATE(outcome="complete", treatment="a"),
        outcome_model=ft.GLM("a + w + log(size) + poly(size, 2) + C(site) + C(old)"),
        treatment_model=ft.GLM("w + I(w/size) + size:w + C(site):old"),
        variables=ft.Variables({**MADE, **{n: may_be_missing(n) for n in ("size", "site", "old", "z")}}),
        **options,
    )


@pytest.mark.parametrize("algorithm", ["newton", "coded"])
def test_missing_covariates_have_indicators(algorithm: str) -> None:
    study = study_with_holes(algorithm=ALGORITHMS[algorithm])
    assert_same(study, holes(made(3)), 1e-8 if algorithm == "newton" else 1e-5)
    assert_same(study, made(3), 1e-8 if algorithm == "newton" else 1e-5)


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("silos", [1, 10])
def test_the_reference_effects_of_nhefs(name: str, silos: int) -> None:
    options, effect = REFERENCE[name]
    data = nhefs()
    parts = np.array_split(np.random.default_rng(0).permutation(len(data["qsmk"])), silos)
    own = nhefs_study(data, **options)
    estimate = run_over_questions(own, cut(data, parts)).result.estimate
    difference = own.target.summarise(estimate.psi, "")[0].value if not options.get("submodel") else None
    assert (estimate.psi[0] if difference is None else difference) == pytest.approx(effect, abs=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_demonstration(algorithm: str) -> None:
    assert_same(replace(IHDP, algorithm=ALGORITHMS[algorithm]), ihdp_silos(), 1e-6)
