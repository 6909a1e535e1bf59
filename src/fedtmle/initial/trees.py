"""Gradient-boosted trees: fitted at a silo by scikit-learn, kept and shipped as plain arrays.

The arrays are checked before anything is computed from them and evaluated here, so that no
library's own file, and no pickle, ever crosses a silo's border.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from fedtmle.errors import DataError, DecodeError, InputError
from fedtmle.initial.design import column_names, design
from fedtmle.initial.formula import parse_formula
from fedtmle.initial.glm import Levels
from fedtmle.initial.syntax import Formula, Name
from fedtmle.model import kernels
from fedtmle.model.families import Family
from fedtmle.model.table import Table
from fedtmle.model.types import Array

MAX_ROUNDS = 500
MAX_DEPTH = 6
SMALLEST_LEAF = 10  # rows: a leaf's value is a mean over them
SMALLEST_PRIOR = float(np.finfo(np.float32).eps)  # scikit-learn's bound of the initial probability

NODE = np.dtype(
    [
        ("feature", "<i2"),  # -1 at a leaf
        ("left", "<i2"),  # numbered within the tree, -1 at a leaf; taken where x <= threshold
        ("right", "<i2"),
        ("threshold", "<f8"),  # 0 at a leaf
        ("value", "<f8"),  # 0 at a split
    ]
)
Nodes = NDArray[np.void]


@final
@dataclass(frozen=True)
class GradientBoostedTrees:
    """Boosted regression trees, fitted at one silo. A binary response is boosted on the log-odds.

    Parameters
    ----------
    formula
        A formula, or the names of numeric columns.
    rounds
        The number of trees.
    depth
        The most splits on a path.
    rate
        The weight with which each tree enters.
    min_leaf
        The fewest records in a leaf.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.GradientBoostedTrees("age + C(sex)", rounds=20).depth
    3
    """

    formula: str | tuple[str, ...]
    rounds: int = 50
    depth: int = 3
    rate: float = 0.1
    min_leaf: int = 20

    def __post_init__(self) -> None:
        if not self.parsed.terms:
            raise InputError("formula: trees need at least one column")
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise InputError(f"rounds: expected 1 to {MAX_ROUNDS}, not {self.rounds}")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise InputError(f"depth: expected 1 to {MAX_DEPTH}, not {self.depth}")
        if not 0 < self.rate <= 1:
            raise InputError(f"rate: expected a number in (0, 1], not {self.rate}")
        if not self.min_leaf >= SMALLEST_LEAF:
            raise InputError(
                f"min_leaf: expected at least {SMALLEST_LEAF} rows, since a leaf's value leaves the silo, "
                f"not {self.min_leaf}"
            )

    @property
    def parsed(self) -> Formula:
        names = self.formula
        text = names if isinstance(names, str) else " + ".join(str(Name(name)) for name in names)
        return replace(parse_formula(text), intercept=False)  # a constant column is never split

    def enough(self, w: Array) -> bool:
        """Return whether there are enough rows with a positive weight for one split."""
        return int(np.count_nonzero(w)) >= 2 * self.min_leaf

    def fit(self, table: Table, levels: Levels, y: Array, w: Array, *, binary: bool) -> TreeEnsemble:
        """Return the trees fitted to this silo's rows; rows of weight zero are left out."""
        if not self.enough(w):
            raise DataError(f"trees: fewer than {2 * self.min_leaf} rows to fit (twice min_leaf)")
        used = w > 0
        y, w = y[used], w[used]
        family = Family.LOGISTIC if binary else Family.GAUSSIAN
        if binary and (y == y[0]).all():  # boosting needs both classes; half a row of each keeps it finite
            prior = (float((w * y).sum()) + 0.5) / (float(w.sum()) + 1.0)
            return self._ensemble(levels, family, math.log(prior / (1.0 - prior)), [])
        X = design(self.parsed, table, levels).T[used]
        booster = _booster(binary)(
            n_estimators=self.rounds,
            max_depth=self.depth,
            learning_rate=self.rate,
            min_samples_leaf=self.min_leaf,
            random_state=0,
        ).fit(X, y.astype(np.int64) if binary else y, sample_weight=w)
        if binary:
            prior = float(np.clip(booster.init_.class_prior_[1], SMALLEST_PRIOR, 1 - SMALLEST_PRIOR))
            base = math.log(prior / (1.0 - prior))
        else:
            base = float(booster.init_.constant_.item())
        trees = [_nodes(stage[0].tree_, self.rate) for stage in booster.estimators_]
        return self._ensemble(levels, family, base, trees)

    def _ensemble(self, levels: Levels, family: Family, base: float, trees: list[Nodes]) -> TreeEnsemble:
        return TreeEnsemble(
            formula=self.parsed,
            levels=levels,
            family=family,
            base=base,
            sizes=np.array([len(tree) for tree in trees], dtype=np.int16),
            nodes=np.concatenate([np.empty(0, NODE), *trees]),
        )

    def admit(self, ensemble: TreeEnsemble) -> None:
        """Raise `DecodeError` if there are more trees, or deeper ones, than this specification allows."""
        if len(ensemble.sizes) > self.rounds or ensemble.depth > self.depth:
            raise DecodeError("trees: more or deeper ones than the study asks for")


def _booster(binary: bool) -> Any:
    try:
        from sklearn import ensemble
    except ImportError:
        raise InputError(
            "GradientBoostedTrees: fitting needs scikit-learn: pip install 'fedtmle[learners]'"
        ) from None
    return ensemble.GradientBoostingClassifier if binary else ensemble.GradientBoostingRegressor


def _nodes(tree: Any, rate: float) -> Nodes:
    """Return a scikit-learn tree as plain arrays, without its statistics of the rows in each node."""
    leaf = tree.children_left < 0
    nodes = np.zeros(tree.node_count, NODE)
    nodes["feature"] = np.where(leaf, -1, tree.feature)
    nodes["left"] = tree.children_left
    nodes["right"] = tree.children_right
    nodes["threshold"] = np.where(leaf, 0.0, tree.threshold)
    nodes["value"] = np.where(leaf, rate * tree.value[:, 0, 0], 0.0)
    return nodes


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TreeEnsemble:
    """Fitted trees: base + the sum of the leaves' values, through the inverse link of ``family``.

    ``nodes`` has the type `NODE` and holds the trees one after the other, ``sizes`` their numbers
    of nodes. Arrays that are not trees are a `DecodeError`.
    """

    formula: Formula
    levels: Levels
    family: Family
    base: float
    sizes: NDArray[np.int16]
    nodes: Nodes

    def __post_init__(self) -> None:
        sizes = self.sizes.astype(np.int64)
        if self.family not in (Family.LOGISTIC, Family.GAUSSIAN) or self.nodes.dtype != NODE:
            raise DecodeError("trees: not of a kind that is known")
        if len(sizes) > MAX_ROUNDS or not ((sizes >= 1) & (sizes < 2 ** (MAX_DEPTH + 1))).all():
            raise DecodeError("trees: too many, or of a size out of range")
        if sizes.sum() != len(self.nodes):
            raise DecodeError("trees: their sizes do not add up to the nodes")
        finite = np.isfinite(self.nodes["threshold"]) & np.isfinite(self.nodes["value"])
        if not (math.isfinite(self.base) and finite.all()):
            raise DecodeError("trees: a number is not finite")
        _check_fields(self.nodes, len(column_names(self.formula, self.levels)))
        if self.depth > MAX_DEPTH:
            raise DecodeError(f"trees: deeper than {MAX_DEPTH}")

    @property
    def trees(self) -> list[Nodes]:
        return np.split(self.nodes, np.cumsum(self.sizes.astype(np.int64))[:-1]) if len(self.sizes) else []

    @cached_property
    def depth(self) -> int:
        """The most splits on a path; walking the trees checks that they are trees."""
        return max((_depth(tree) for tree in self.trees), default=0)

    def predict(self, table: Table) -> Array:
        """Return the mean of the response, shape (N,)."""
        # Thresholds were chosen between values in single precision: compare as they were chosen.
        with np.errstate(over="ignore"):
            X = design(self.formula, table, self.levels).astype(np.float32)
        total = np.full(table.n_rows, self.base)
        for tree in self.trees:
            total += tree["value"][_leaves(tree, X, self.depth)]
        return kernels.expit(total) if self.family is Family.LOGISTIC else total


def _leaves(tree: Nodes, X: NDArray[np.float32], depth: int) -> NDArray[np.intp]:
    """Return the leaf of each column of X, shape (p, N), as node numbers, shape (N,)."""
    leaf = tree["feature"] < 0
    itself = np.arange(len(tree))  # a leaf leads to itself, so that all rows take ``depth`` steps
    feature = np.where(leaf, 0, tree["feature"]).astype(np.intp)
    left, right = np.where(leaf, itself, tree["left"]), np.where(leaf, itself, tree["right"])
    threshold = np.ascontiguousarray(tree["threshold"])
    rows, at = np.arange(X.shape[1]), np.zeros(X.shape[1], dtype=np.intp)
    for _ in range(depth):
        at = np.where(X[feature[at], rows] <= threshold[at], left[at], right[at])
    return at


def _check_fields(nodes: Nodes, features: int) -> None:
    leaf = nodes["feature"] == -1
    if not (leaf | ((nodes["feature"] >= 0) & (nodes["feature"] < features))).all():
        raise DecodeError("trees: a feature is out of range")
    bare = (nodes["left"] == -1) & (nodes["right"] == -1) & (nodes["threshold"] == 0)
    if not np.where(leaf, bare, nodes["value"] == 0).all():
        raise DecodeError("trees: a leaf has children or a threshold, or a split has a value")


def _depth(tree: Nodes) -> int:
    """Return a tree's depth; raise unless each node but the first is the child of one earlier node."""
    depth = [-1] * len(tree)
    depth[0] = 0
    for parent, node in enumerate(tree.tolist()):
        feature, *children = node[:3]
        if depth[parent] < 0:
            raise DecodeError("trees: a node has no parent before it")
        for child in children if feature >= 0 else ():
            if not parent < child < len(tree) or depth[child] >= 0:
                raise DecodeError("trees: a child is out of range, before its parent, or another's")
            depth[child] = depth[parent] + 1
    return max(depth)
