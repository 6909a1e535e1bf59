"""Trees: our evaluation against scikit-learn's, and arrays that are not trees."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

from fedtmle.errors import DataError, DecodeError, InputError
from fedtmle.initial import superlearner
from fedtmle.initial.design import design
from fedtmle.initial.superlearner import MAX_ROUNDS, NODE, GradientBoostedTrees, TreeEnsemble
from fedtmle.protocol.learners import TreesFormat
from fedtmle_core.types import Family
from tests.damage import damaged, flipped
from tests.initial.silos import LEVELS, pooled_table
from tests.premise import Premise

SPEC = GradientBoostedTrees("a + x + z + C(site)", rounds=12, depth=3, min_leaf=15)
CODEC = TreesFormat(trees=SPEC, levels=LEVELS, family=Family.GAUSSIAN)
LEAF = (-1, -1, -1, 0.0, 1.0)


def response(binary: bool) -> tuple[Any, np.ndarray, np.ndarray]:
    table = pooled_table(300, 3, binary=binary)
    weights = table.numeric["w"].copy()
    weights[::7] = 0.0
    return table, table.numeric["y"], weights


def fitted(binary: bool = False) -> TreeEnsemble:
    table, y, w = response(binary)
    return SPEC.fit(table, LEVELS, y, w, binary=binary)


def ensemble(
    *nodes: tuple[int, int, int, float, float], sizes: Any = None, base: float = 0.0
) -> TreeEnsemble:
    return TreeEnsemble(
        formula=SPEC.parsed,
        levels=LEVELS,
        family=Family.GAUSSIAN,
        base=base,
        sizes=np.array([len(nodes)] if sizes is None else sizes, dtype=np.int16),
        nodes=np.array(list(nodes), dtype=NODE),
    )


@pytest.mark.parametrize("binary", [False, True])
def test_predictions_equal_scikit_learns(binary: bool) -> None:
    table, y, w = response(binary)
    kept = w > 0
    site = table.factors["site"].codes
    X = np.column_stack([*(table.numeric[k] for k in "axz"), site == 0, site == 1, site == 2]).astype(float)
    kind = GradientBoostingClassifier if binary else GradientBoostingRegressor
    options = {"n_estimators": 12, "max_depth": 3, "learning_rate": 0.1, "min_samples_leaf": 15}
    theirs = kind(**options, random_state=0).fit(X[kept], y[kept], sample_weight=w[kept])
    expected = theirs.predict_proba(X)[:, 1] if binary else theirs.predict(X)
    ours = fitted(binary).predict(table)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)
    assert np.ptp(ours) > 0.1


def test_every_leaf_has_enough_rows_and_splits_keep_no_value() -> None:
    table, _, w = response(binary=False)
    model = fitted()
    rows = table.take(np.flatnonzero(w))
    X = design(model.formula, rows, LEVELS).astype(np.float32)
    for tree in model.trees:
        leaves = np.bincount(superlearner._leaves(tree, X, model.depth), minlength=len(tree))
        assert leaves[tree["feature"] < 0].min() >= SPEC.min_leaf
        assert (tree["value"][tree["feature"] >= 0] == 0).all()
    assert model.depth == 3


def test_a_value_is_compared_as_it_was_when_the_threshold_was_chosen() -> None:
    model = ensemble((1, 1, 2, 0.5, 0.0), (-1, -1, -1, 0.0, 10.0), (-1, -1, -1, 0.0, 20.0))
    x = np.array([0.5 + 1e-12, 0.5 + 1e-6, 1e300])  # in single precision: 0.5, above it, infinite
    assert model.predict(pooled_table(3, 0).with_numeric("x", x)).tolist() == [10.0, 20.0, 20.0]


def test_columns_stand_for_a_formula() -> None:
    table, y, w = response(binary=False)
    by_formula = GradientBoostedTrees("x + z", rounds=3).fit(table, {}, y, w, binary=False)
    by_columns = GradientBoostedTrees(("x", "z"), rounds=3).fit(table, {}, y, w, binary=False)
    np.testing.assert_array_equal(by_formula.predict(table), by_columns.predict(table))


def test_one_class_gives_a_constant_and_few_rows_an_error() -> None:
    table, y, w = response(binary=True)
    model = SPEC.fit(table, LEVELS, np.ones_like(y), w, binary=True)
    prior = (w.sum() + 0.5) / (w.sum() + 1)
    np.testing.assert_allclose(model.predict(table), prior, rtol=1e-12)
    few = np.where(np.arange(len(w)) < 29, 1.0, 0.0)
    with pytest.raises(DataError, match="fewer than 30 rows"):
        SPEC.fit(table, LEVELS, y, few, binary=True)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r"fedtmle\[learners\]"):
        fitted()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"rounds": 501},
        {"depth": 0},
        {"depth": 7},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"min_leaf": 9},
        {"formula": "1"},
        {"formula": "__import__('os')"},
    ],
)
def test_a_specification_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        GradientBoostedTrees(**({"formula": "x"} | wrong))


@pytest.mark.parametrize(
    "nodes",
    [
        [(0, 1, 3, 0.0, 0.0), LEAF, LEAF],  # a child out of range
        [(0, 0, 1, 0.0, 0.0), LEAF],  # its own child
        [(0, 1, 2, 0.0, 0.0), (0, 0, 3, 0.0, 0.0), LEAF, LEAF],  # a cycle
        [(0, 1, 1, 0.0, 0.0), LEAF],  # one child twice
        [LEAF, LEAF],  # an orphan
        [(6, 1, 2, 0.0, 0.0), LEAF, LEAF],  # six columns, numbered from 0
        [(-2, -1, -1, 0.0, 0.0)],
        [(0, 1, -1, 0.0, 0.0), LEAF],
        [(0, 1, 2, np.nan, 0.0), LEAF, LEAF],
        [(-1, -1, -1, 0.0, np.inf)],
        [(-1, 1, 2, 0.0, 0.0), LEAF, LEAF],  # a leaf with children
        [(0, 1, 2, 0.0, 3.0), LEAF, LEAF],  # a split with a value
        [node for k in range(7) for node in ((0, 2 * k + 1, 2 * k + 2, 0.0, 0.0), LEAF)] + [LEAF],  # too deep
    ],
)
def test_arrays_that_are_not_trees_are_refused(nodes: list[Any]) -> None:
    with pytest.raises(DecodeError):
        ensemble(*nodes)


def test_counts_out_of_range_are_refused() -> None:
    assert ensemble(LEAF).predict(pooled_table(3, 0)).tolist() == [1.0] * 3
    for wrong in ({"sizes": [2]}, {"sizes": [0, 1]}, {"sizes": [-1, 2]}, {"base": np.nan}):
        with pytest.raises(DecodeError):
            ensemble(LEAF, **wrong)
    with pytest.raises(DecodeError):
        ensemble(*[LEAF] * (MAX_ROUNDS + 1), sizes=[1] * (MAX_ROUNDS + 1))
    with pytest.raises(DecodeError, match="more or deeper"):
        CODEC.unpack(CODEC.pack(ensemble(*[LEAF] * 13, sizes=[1] * 13)))


def test_bytes_come_back_as_the_same_trees() -> None:
    table, *_ = response(binary=False)
    model = fitted()
    data = CODEC.pack(model)
    assert len(data) == 10 + 2 * 12 + 22 * len(model.nodes)
    again = CODEC.unpack(data)
    np.testing.assert_array_equal(again.predict(table), model.predict(table))
    for cut in (0, 7, 9, 11, len(data) - 1):
        with pytest.raises(DecodeError):
            CODEC.unpack(data[:cut])
    with pytest.raises(DecodeError):
        CODEC.unpack(data + bytes(22))


FITTED = CODEC.pack(fitted())
TABLE = pooled_table(20, 5)


decodes = Premise("the bytes are other trees", at_least=0.05)


@decodes
@given(st.one_of(flipped(FITTED, keep=34), damaged(FITTED)))  # the header and the categories stay
@settings(max_examples=200)
def test_changed_bytes_are_refused_or_still_trees(data: bytes) -> None:
    try:
        model = CODEC.unpack(data)
    except DecodeError:
        decodes.holds(False)
        return
    decodes.holds(data != FITTED)
    assert CODEC.pack(model) == data
    with np.errstate(over="ignore"):  # finite values may still add up to infinity
        assert not np.isnan(model.predict(TABLE)).any() or np.abs(model.nodes["value"]).max() > 1e300
