"""Federated equals pooled, for every target and any partition; pooled equals plain numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle_core.types import matrix
from tests.declare import declare
from tests.effects.longhand import Longhand, irls, least_squares, softmax, tmle
from tests.effects.studies import CENTRAL, NEWTON, VARIABLES, Columns, change, cut, expit, finish, population
from tests.narrow import targeted

Q_FORMULA, G_FORMULA, MISSING_FORMULA = "C(a) + w + z + C(site)", "w + C(site)", "C(a) + w"
RULES = (ft.Threshold("w", 0.2, arm="1", otherwise="0"), ft.Stochastic((0.25, 0.75)))
TARGETS = {
    "TSM": ft.TSM(outcome="y", treatment="a"),
    "three arms": ft.TSM(outcome="y", treatment="a", arms=("0", "1", "2")),
    "ATE": ft.ATE(outcome="y", treatment="a"),
    "RR": ft.RR(outcome="event", treatment="a"),
    "OR": ft.OR(outcome="event", treatment="a"),
    "ATT": ft.ATT(outcome="y", treatment="a"),
    "ATC": ft.ATC(outcome="event", treatment="a"),
    "ATT, three arms": ft.ATT(outcome="y", treatment="a", arms=("0", "1", "2")),
    "ATC, three arms": ft.ATC(outcome="y", treatment="a", arms=("0", "1", "2")),
    "ATO": ft.ATO(outcome="y", treatment="a"),
    "ATO, three arms": ft.ATO(outcome="y", treatment="a", arms=("0", "1", "2")),
    "strata": ft.ATE(outcome="y", treatment="a", strata="old"),
    "rules": ft.PolicyMeans(outcome="y", treatment="a", rules=RULES),
    "mean": ft.OutcomeMean(outcome="y"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "missing": {"missingness_model": ft.GLM(MISSING_FORMULA)},
    "weights, clusters": {"weights": "weight", "cluster": "family"},
    "all": {"missingness_model": ft.GLM(MISSING_FORMULA), "weights": "weight", "cluster": "family"},
}


def test_every_estimand_is_a_target_here() -> None:
    assert {type(target) for target in TARGETS.values()} == set(ft.ESTIMANDS)


def study_of(target: ft.AbstractEffect, **options: Any) -> ft.Study:
    variables = declare(VARIABLES, a=list(target.arms)) if len(target.arms) > 2 else VARIABLES
    options = {"variables": variables, **options}
    if target.treatment is None:
        options["missingness_model"] = ft.GLM("w")
        return ft.Study(target=target, outcome_model=ft.GLM("w + z + C(site)"), algorithm=NEWTON, **options)
    return ft.Study(
        target=target,
        outcome_model=ft.GLM(Q_FORMULA),
        treatment_model=ft.GLM(G_FORMULA),
        algorithm=NEWTON,
        **options,
    )


def people(study: ft.Study, n: int, seed: int) -> Columns:
    missing = study.missingness_model is not None
    return population(n, seed, arms=max(2, len(study.target.arms)), missing=missing)


def partitions(data: Columns, seed: int) -> dict[str, list[np.ndarray]]:
    """Random cuts, one silo per arm, one per site, and a silo of one family; families stay together."""
    rng = np.random.default_rng(seed)
    family = data["family"]
    names = {"random": rng.integers(0, 3, size=family.max() + 1)[family], "lone": (family == 3).astype(int)}
    names["arms"], names["sites"] = data["a"], np.unique(data["site"], return_inverse=True)[1]
    return {name: [np.flatnonzero(label == m) for m in np.unique(label)] for name, label in names.items()}


def numbers(result: ft.StudyResult) -> np.ndarray:
    return result.table()[["estimate", "std_error", "conf_low", "conf_high"]].to_numpy(dtype=float)


@pytest.mark.parametrize(
    ("option", "cuttings"),
    [("missing", ("arms", "sites")), ("all", ("random", "lone"))],
    ids=["rows", "families"],
)
@pytest.mark.parametrize("name", TARGETS)
def test_federated_is_pooled(name: str, option: str, cuttings: tuple[str, ...]) -> None:
    """Not one bit differs. Clusters stay within silos; without them rows are cut at will."""
    study = study_of(TARGETS[name], **OPTIONS[option])
    data = people(study, 120, seed=len(name) + 7 * len(option))
    pooled = ft.run(study, {"pooled": data})
    assert pooled.run.status.is_converged
    for cutting in cuttings:
        silos = cut(data, partitions(data, seed=3)[cutting])
        assert numbers(ft.run(study, silos)).tobytes() == numbers(pooled).tobytes(), cutting
    central = ft.run(change(study, algorithm=CENTRAL), silos)
    assert numbers(central).tobytes() == numbers(pooled).tobytes()


@pytest.mark.parametrize("name", TARGETS)
def test_coded_is_within_its_certificate(name: str) -> None:
    study = study_of(TARGETS[name])
    data = people(study, 300, seed=5)
    exact = ft.run(study, {"pooled": data}).run
    for cutting in ("random", "arms"):
        coded = ft.run(change(study, algorithm=ft.Coded()), cut(data, partitions(data, 1)[cutting])).run
        reach = coded.certificate.residual_bound + exact.certificate.residual_bound
        assert np.linalg.norm(coded.psi - exact.psi) <= 1.01 * reach
        np.testing.assert_allclose(coded.covariance, exact.covariance, rtol=1e-5, atol=1e-12)


def design(data: Columns, arm: np.ndarray | None, *columns: str) -> np.ndarray:
    """Intercept, arms but the reference, numeric columns, sites but the first."""
    found = [np.ones(len(data["w"]))]
    if arm is not None:
        found += [(arm == level).astype(float) for level in range(1, data["a"].max() + 1)]
    for name in columns:
        if name == "site":
            found += [(data["site"] == level).astype(float) for level in np.unique(data["site"])[1:]]
        else:
            found.append(data[name])
    return np.column_stack(found)


def oracle(study: ft.Study, data: Columns) -> Longhand:
    """The whole study longhand."""
    target, n = study.target, len(data["w"])
    low, high = study.outcome_bounds
    raw = data[target.outcome]
    observed = ~np.isnan(raw)
    y = np.where(observed, (raw - low) / (high - low), 0.0)
    w = data["weight"] if study.weights else np.ones(n)
    treated = target.treatment is not None
    arm = data["a"] if treated else np.zeros(n, dtype=int)
    arms = len(target.arms)
    every = [np.full(n, a) for a in range(arms)] if treated else [None]
    X = design(data, arm if treated else None, "w", "z", "site")
    fit = irls if study.response == "binary" else least_squares
    beta = fit(X, y, w * observed)
    q = np.stack([design(data, a, "w", "z", "site") @ beta for a in every])
    q = np.clip(expit(q) if study.response == "binary" else q, 1e-6, 1 - 1e-6)
    g = np.ones((arms, n))
    if treated:
        g = softmax(design(data, None, "w", "site"), arm, w, arms)
    pi = np.ones((arms, n))
    if study.missingness_model is not None:
        beta = irls(design(data, arm if treated else None, "w"), observed.astype(float), w)
        pi = np.stack([expit(design(data, a, "w") @ beta) for a in every])
    regimes = [np.eye(arms)[a][:, None] * np.ones(n) for a in range(arms)]
    if isinstance(target, ft.PolicyMeans):
        above = (data["w"] >= 0.2).astype(float)
        regimes = [np.stack([1 - above, above]), np.array([[0.25], [0.75]]) * np.ones(n)]
    bound = 5 / np.sqrt(observed.sum()) / np.log(observed.sum())
    groups: list[tuple[np.ndarray, np.ndarray, tuple[int, ...]]]
    groups = [(np.ones(n), np.ones(n), ())]  # v, its expectation, and the arms whose g cancels
    if isinstance(target, ft.ATT | ft.ATC):
        groups = [
            ((arm == code).astype(float), np.maximum(g[code], bound), (code,))
            for code in (range(1, arms) if isinstance(target, ft.ATT) else (0,))
        ]
    elif isinstance(target, ft.ATO):
        h = 1 / (1 / g).sum(axis=0)
        groups = [((h / g[arm, np.arange(n)]) ** 2, h, tuple(range(arms)))]
    elif target.strata:
        members = [(data["old"] == s).astype(float) for s in (0, 1)]
        groups += [(member, member, ()) for member in members]
    parts = [(group, regime) for group in groups for regime in regimes]
    if isinstance(target, ft.ATT):  # each arm among its own, and the reference
        parts = [(group, regimes[code]) for group in groups for code in (0, *group[2])]
    own = np.array([[a in cancels for a in range(arms)] for (_, _, cancels), _ in parts])
    # In the arm whose g cancels the ratio is E[v | W] / g, without a bound.
    expected = np.stack([v_bar for (_, v_bar, _), _ in parts])
    for r, ((_, _, cancels), regime) in enumerate(parts):
        if isinstance(target, ft.ATT | ft.ATC) and any(regime[a].any() for a in cancels):
            expected[r] = g[cancels[0]]
    return tmle(
        y=y,
        observed=observed,
        arm=arm,
        q=q,
        g=g,
        pi=pi,
        d=np.stack([regime for _, regime in parts]),
        v=np.stack([v for (v, _, _), _ in parts]),
        expected=expected,
        w=w,
        cluster=data["family"] if study.cluster else None,
        floor=bound,
        own=own,
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_the_study_is_the_longhand_one(name: str, option: str) -> None:
    study = study_of(TARGETS[name], **OPTIONS[option])
    data = people(study, 400, seed=21 + len(name))
    result = ft.run(study, cut(data, partitions(data, 8)["random"]))
    assert result.document["truncated"] == [0] * len(study.target.arms)
    low, high = study.outcome_bounds
    expected = oracle(study, data)
    np.testing.assert_allclose(result.run.psi, low + (high - low) * expected.psi, atol=1e-8)
    np.testing.assert_allclose(
        result.run.covariance, (high - low) ** 2 * expected.covariance, rtol=1e-7, atol=1e-12
    )


@pytest.mark.parametrize("factor", [2.0**-9, 4.0, 2.0**40])
def test_the_unit_of_the_weights_changes_nothing(factor: float) -> None:
    study = study_of(TARGETS["ATE"], weights="weight")
    data = people(study, 160, seed=1)
    scaled = {**data, "weight": factor * data["weight"]}
    other = change(study, variables=declare(VARIABLES, weight=(0, 4 * factor)))
    assert numbers(ft.run(other, {"s": scaled})).tobytes() == numbers(ft.run(study, {"s": data})).tobytes()


def test_weights_of_any_unit_agree() -> None:
    study = study_of(TARGETS["RR"], weights="weight")
    data = people(study, 160, seed=1)
    scaled = {**data, "weight": 1e7 / 3 * data["weight"]}
    other = change(study, variables=declare(VARIABLES, weight=(0, 1e8)))
    np.testing.assert_allclose(
        numbers(ft.run(other, {"s": scaled})), numbers(ft.run(study, {"s": data})), rtol=1e-10
    )


def test_equal_weights_are_no_weights() -> None:
    study = study_of(TARGETS["ATE"])
    data = {**people(study, 160, seed=1), "weight": np.full(160, 3.0)}
    weighted = ft.run(change(study, weights="weight"), {"s": data})
    np.testing.assert_allclose(numbers(weighted), numbers(ft.run(study, {"s": data})), rtol=1e-11)


def test_a_whole_weight_is_so_many_copies_of_the_estimate() -> None:
    """Integer weights replicate rows: the same estimate, and the same EIF mean by mean."""
    study = study_of(TARGETS["ATE"], g_bounds=0.01)
    data = people(study, 120, seed=4)
    times = np.random.default_rng(0).integers(1, 4, size=120)
    copies = {name: np.repeat(column, times) for name, column in data.items()}
    weighted = ft.run(change(study, weights="weight"), {"s": {**data, "weight": times.astype(float)}})
    clustered = {**copies, "family": np.repeat(np.arange(120), times)}
    copied = ft.run(change(study, cluster="family"), {"s": clustered})
    np.testing.assert_allclose(numbers(weighted), numbers(copied), rtol=1e-9)


def test_clusters_and_folds_stay_within_silos_when_rows_are_pooled() -> None:
    """Hospitals number their families alike; the centralised comparator must not merge them."""
    study = study_of(TARGETS["ATE"], cluster="family", cluster_scope="silo", folds=3)
    data = people(study, 160, seed=6)
    parts = np.array_split(np.arange(160), [60, 100])
    silos = {name: {**own, "family": np.arange(len(own["w"])) // 2} for name, own in cut(data, parts).items()}
    federated, central = ft.run(study, silos), ft.run(change(study, algorithm=CENTRAL), silos)
    assert numbers(federated).tobytes() == numbers(central).tobytes()
    distinct = ft.run(study, cut(data, parts))
    assert numbers(federated).tobytes() == numbers(distinct).tobytes()


@pytest.mark.parametrize("option", ["missing", "all"])
def test_the_size_of_blocks_changes_no_bit(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(TARGETS["ATT"], **OPTIONS[option])
    data = people(study, 160, seed=11)
    whole = ft.run(study, {"s": data})
    monkeypatch.setattr("fedtmle_core.parallel.BLOCK", 13)
    assert numbers(ft.run(study, {"s": data})).tobytes() == numbers(whole).tobytes()


def test_a_submodel_keeps_its_covariates_from_law_to_law() -> None:
    finished, tables = finish(study_of(TARGETS["ATE"]), cut(population(400, 3), [np.arange(400)]))
    effect, law, (table,) = targeted(finished).problem, targeted(finished).law, tables.values()
    start, end = effect.submodel(effect.start(), table), effect.submodel(law, table)
    assert all(a is b for a, b in zip(end.X.columns, start.X.columns, strict=True))
    assert end.offset.tobytes() != start.offset.tobytes()
    anew = dataclasses.replace(effect).submodel(law, table)
    assert (matrix(anew.X).tobytes(), anew.offset.tobytes()) == (
        matrix(end.X).tobytes(),
        end.offset.tobytes(),
    )
    one = dataclasses.replace(effect, combination=effect.combination[1:]).submodel(law, table)
    assert matrix(one.X).tobytes() == matrix(end.X)[1:].tobytes()
