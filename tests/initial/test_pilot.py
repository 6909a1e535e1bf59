"""Pilots: what one silo's fit ships, and public models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import DecodeError, InputError, ProtocolError
from fedtmle.initial.crossfit import Folds
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import GradientBoostedTrees, Pilot, SuperLearner, TreeEnsemble
from fedtmle.model.table import Table
from fedtmle.protocol.codes import BitWriter, decode, encode
from fedtmle.protocol.learners import AbstractLocalFit, GLMFormat, ModelsQuery
from fedtmle.protocol.query import Local, Phase
from fedtmle.runtime.session import RoundReport
from fedtmle.studies.run import pool_tables
from fedtmle_core.types import Family
from tests.initial.silos import LEVELS, pooled_table, run, split, trial
from tests.narrow import targeted

SILOS = split(pooled_table(360, 2), 3)


def columns(table: Table) -> np.ndarray:
    return np.column_stack([np.ones(table.n_rows), table.numeric["a"], table.numeric["x"]])


def least_squares(table: Table, weight: np.ndarray | float = 1.0) -> np.ndarray:
    root = np.sqrt(np.broadcast_to(weight, table.n_rows))
    y = (table.numeric["y"] + 8) / 16  # on the unit scale of the bounds
    return np.linalg.lstsq(columns(table) * root[:, None], y * root, rcond=None)[0]


def outcome_model(finished: Any) -> Any:
    return finished.outcome.details.nuisances["outcome"][0]


def test_a_pilot_is_the_fit_at_its_silo_and_costs_one_round() -> None:
    rounds: list[RoundReport] = []
    study = trial(Pilot(GLM("a + x"), at="s1"), treatment_model=Pilot(GLM("x"), at="s2"))
    finished = run(study, SILOS, rounds.append)
    np.testing.assert_allclose(outcome_model(finished).coefficients, least_squares(SILOS["s1"]), atol=1e-10)
    (propensity,) = targeted(finished).details.nuisances["treatment"]
    X, a = columns(SILOS["s2"])[:, [0, 2]], SILOS["s2"].numeric["a"]
    score = X.T @ (a - 1 / (1 + np.exp(-X @ np.array(propensity.coefficients))))
    np.testing.assert_allclose(score, 0, atol=1e-9)
    assert finished.account.rounds[Phase.NUISANCE] == 3  # counts, both models in one, overlap
    up = rounds[1].up
    coefficients, length = 8 * 8, 11  # a length of 16 or 24 bytes takes 11 bits
    for silo, count in {"s1": 3, "s2": 2}.items():
        assert up[silo] - up["s0"] == count * coefficients + length


def test_cross_fitting_ships_one_model_per_fold_in_one_round() -> None:
    finished = run(trial(Pilot(GLM("a + x"), at="s1"), folds=3, seed=5), SILOS)
    models = outcome_model(finished).models
    table = SILOS["s1"]
    fold = Folds(count=3, seed=5).of(table)
    for v, model in enumerate(models):
        expected = least_squares(table, (fold != v).astype(float))
        np.testing.assert_allclose(model.coefficients, expected, atol=1e-10)
    without = run(trial(Pilot(GLM("a + x"), at="s1")), SILOS)
    more = finished.account.rounds[Phase.NUISANCE] - without.account.rounds[Phase.NUISANCE]
    assert abs(more) <= 2  # the treatment model is fitted to all folds in the same rounds


def test_trees_of_a_pilot_are_those_of_its_silo() -> None:
    spec = GradientBoostedTrees("a + x + C(site)", rounds=8)
    shipped = outcome_model(run(trial(Pilot(spec, at="s2")), SILOS))
    assert isinstance(shipped, TreeEnsemble)
    table = SILOS["s2"]
    y = (table.numeric["y"] + 8) / 16
    own = spec.fit(table, LEVELS, y, np.ones(table.n_rows), binary=False)
    np.testing.assert_array_equal(shipped.predict(SILOS["s0"]), own.predict(SILOS["s0"]))


def test_public_coefficients_are_on_the_outcomes_own_scale_and_cost_nothing() -> None:
    pilot = Pilot.from_coefficients("a + x + C(site)", LEVELS, "gaussian", (0.5, 1.0, 2.0, 0.25, -0.25))
    finished = run(trial(pilot), SILOS)
    table = SILOS["s0"]
    site = table.factors["site"].codes
    own = columns(table) @ [0.5, 1.0, 2.0] + 0.25 * (site == 1) - 0.25 * (site == 2)
    np.testing.assert_allclose(outcome_model(finished).predict(table), (own + 8) / 16, rtol=1e-14)
    fitted = run(trial(Pilot(GLM("a + x"), at="s1")), SILOS)
    # The treatment model's rounds carry the fitted pilot, so the public one saves bits and no round.
    assert finished.account.rounds[Phase.NUISANCE] == fitted.account.rounds[Phase.NUISANCE]
    assert finished.account.bits_up[Phase.NUISANCE, "s1"] < fitted.account.bits_up[Phase.NUISANCE, "s1"]


def test_a_pilot_at_nobody_stops_the_run_before_its_first_round() -> None:
    with pytest.raises(
        InputError, match="silo 's9', which is to fit a model, is not in this run; name another"
    ):
        run(trial(Pilot(GLM("a + x"), at="s9")), SILOS)
    others = {name: table for name, table in SILOS.items() if name != "s1"}
    learner = SuperLearner((GLM("x"), Pilot(GLM("a + x"), at="s1")))
    with pytest.raises(InputError, match="silo 's1', which is to fit a model, is not in this run"):
        run(trial(learner), others)


@pytest.mark.parametrize("folds", [None, 3])
def test_pooled_rows_still_know_whose_fit_the_pilot_is(folds: int | None) -> None:
    spec = GradientBoostedTrees("a + x", rounds=5)
    for model in (Pilot(GLM("a + x"), at="s1"), SuperLearner((Pilot(spec, at="s2"), GLM("x")), folds=3)):
        study = trial(model, treatment_model=Pilot(GLM("x"), at="s2"), folds=folds)
        federated = run(study, SILOS)
        pooled = run(
            dataclasses.replace(study, algorithm=ft.Central(tolerance=1e-9, optimizer=ft.Newton())),
            {"pooled": pool_tables(SILOS)},
        )
        np.testing.assert_array_equal(targeted(pooled).estimate.psi, targeted(federated).estimate.psi)


def test_specifications_that_say_too_little_or_too_much() -> None:
    public = Pilot.from_coefficients("x", {}, "binomial", (0.0, 1.0))
    for wrong in ({"model": GLM("x")}, {"model": public.model, "at": "s1"}):
        with pytest.raises(InputError, match="at: name the silo"):
            Pilot(**wrong)
    for formula, family, coefficients in (
        ("x", "probit", (0.0, 1.0)),
        ("x", "gaussian", (0.0,)),
        ("x", "gaussian", (0.0, np.nan)),
    ):
        with pytest.raises(InputError):
            Pilot.from_coefficients(formula, {}, family, coefficients)


FORMAT = GLMFormat(formula=GLM("x").parsed, levels={}, family=Family.GAUSSIAN)


class NoFit(AbstractLocalFit):
    """A silo that fits nothing."""

    @property
    def count(self) -> int:
        return 1

    def fit(self, _local: Local) -> None:
        return None


def query(at: str | None) -> ModelsQuery:
    return ModelsQuery(local_fit=NoFit(), at=at, model_format=FORMAT)


def model(*coefficients: float) -> Any:
    return (FORMAT.unpack(np.array(coefficients).tobytes()),)


@pytest.mark.parametrize("at", ["a", None])
def test_what_was_pooled_comes_back(at: str | None) -> None:
    pooled = query(at).pool({"a": model(1.0, 2.0), "b": None}, {"a": 1, "b": 1})
    code = query(at).pooled_code
    assert decode(code, encode(code, pooled)) == pooled


@pytest.mark.parametrize("answers", [{"a": None, "b": None}, {"a": model(1.0, 2.0), "b": model(1.0, 2.0)}])
def test_only_the_named_silo_sends(answers: Mapping[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        query("a").pool(answers, dict.fromkeys(answers, 1))


def test_a_broadcast_that_is_none_is_refused() -> None:
    for silos, flag in ((0, 0), (1, 0), (2, 0)):
        out = BitWriter()
        out.gamma((silos,))
        out.uint(flag, max(silos, 1))
        with pytest.raises(DecodeError):
            decode(query("a").pooled_code, out.finish())
    for data in (b"", bytes(8), bytes(24), np.array([np.nan, 0.0]).tobytes()):
        out = BitWriter()
        out.uint(1, 1)
        out.gamma((len(data),))
        out.uint(int.from_bytes(data, "big"), 8 * len(data))
        with pytest.raises(DecodeError):
            decode(query("a").answer_code, out.finish())
    out = BitWriter()
    out.uint(1, 1)
    out.gamma((1 << 40,))
    with pytest.raises(DecodeError):
        decode(query("a").answer_code, out.finish())
