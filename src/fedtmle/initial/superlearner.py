"""Learners: models that a silo fits and ships whole, boosted trees among them, and the super learner.

The super learner is a convex combination of learners, weighted by pooled cross-validated risk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from fedtmle.errors import DataError, DecodeError, InputError
from fedtmle.initial.crossfit import Fitted, Folds
from fedtmle.initial.design import column_names, design
from fedtmle.initial.glm import FAMILIES, GLM, FittedGLM, Levels, Supplied
from fedtmle.initial.syntax import Formula, Name, parse_formula
from fedtmle.model.table import Table
from fedtmle_core import kernels
from fedtmle_core.types import Array, Family

# Gradient-boosted trees: fitted at a silo by scikit-learn, kept and shipped as plain arrays.
#
# The arrays are checked before anything is computed from them and evaluated here, so that no
# library's own file, and no pickle, ever crosses a silo's border.

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


# Models fitted at one silo, or on a public sample, and shipped whole.


@final
@dataclass(frozen=True)
class Pilot:
    """A model that is fitted at one silo and sent to all, or one that is public.

    The coefficients or trees of a model fitted at one silo are seen by everyone. They disclose more about
    its records than pooled sums do, most of all where the silo is small or the model large. Fit it where
    the owner agreed to that, or on public data.

    Parameters
    ----------
    model
        The model to fit, or a fitted one.
    at
        The silo that fits it. None if the model is fitted already.
    unit_scale
        Whether a public model predicts the outcome on the scale of its declared bounds, from 0 to 1.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Pilot(ft.GLM("age"), at="north").at
    'north'
    """

    model: GLM | GradientBoostedTrees | FittedGLM | TreeEnsemble
    at: str | None = None
    unit_scale: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, FittedGLM | TreeEnsemble) != (self.at is None):
            raise InputError("at: name the silo that fits the model, or give a model already fitted")
        if self.unit_scale and self.at is not None:
            raise InputError("unit_scale: is about a public model; a silo's fit knows its scale")

    @classmethod
    def from_coefficients(
        cls, formula: str, levels: Levels, family: str, coefficients: Sequence[float]
    ) -> Pilot:
        """Return a public GLM: coefficients in the order of the formula's columns, on the outcome's scale."""
        if family not in FAMILIES:
            raise InputError(f"family: expected one of {tuple(FAMILIES)}, not {family!r}")
        parsed = parse_formula(formula)
        names = column_names(parsed, levels)
        if len(names) != len(coefficients):
            raise InputError(
                f"coefficients: expected {len(names)} ({', '.join(names)}), not {len(coefficients)}"
            )
        if not all(map(math.isfinite, coefficients)):
            raise InputError("coefficients: expected finite numbers")
        fitted = FittedGLM(
            formula=parsed,
            levels={name: tuple(levels[name]) for name in parsed.factor_names},
            family=FAMILIES[family],
            coefficients=tuple(map(float, coefficients)),
        )
        return cls(fitted)

    @property
    def is_public(self) -> bool:
        return self.at is None


@final
@dataclass(frozen=True, kw_only=True)
class Rescaled:
    """A prediction on the outcome's own scale, brought to the unit scale of its declared bounds."""

    model: Fitted
    low: float
    width: float

    def predict(self, table: Table) -> Array:
        return (self.model.predict(table) - self.low) / self.width


# The super learner: a convex combination of learners, weighted by pooled cross-validated risk.
#
# With r_k = y - p_k the out-of-fold residual of learner k and weights a on the simplex, the
# combination's residual is sum_k a_k r_k, so its risk is a' A a with A_kl = sum_i w_i r_k r_l: the
# silos send the sums A, no prediction. Squared error serves binary responses too (it is a proper
# score); this is what R's SuperLearner calls method.CC_LS.

MAX_CANDIDATES = 32  # exact weights of more take too long in the worst case
KEPT_BITS = 96  # bits kept of the largest sum; the rest is far below the ridge
RIDGE_BITS = 50


@final
@dataclass(frozen=True)
class PerSilo:
    """Trees that each silo fits on its own records. Each silo's trees have a weight of their own.

    A silo with too few records for a split abstains. All trees are sent to all silos: they disclose more
    about a silo's records than pooled sums do, as with `Pilot`.

    Parameters
    ----------
    model
        The trees to fit.

    Examples
    --------
    >>> ft.PerSilo(ft.GradientBoostedTrees("age + C(sex)")).model.rounds
    50
    """

    model: GradientBoostedTrees


Learner = GLM | Pilot | PerSilo


@final
@dataclass(frozen=True)
class SuperLearner:
    """The convex combination of learners with the least cross-validated squared error over all silos.

    Parameters
    ----------
    learners
        The candidates, such as `GLM`, `PerSilo` or `Pilot`.
    folds
        The number of folds. Each learner is fitted without each fold, and on all records.
    seed
        The seed of the folds, which each silo draws within its own records.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.SuperLearner((ft.GLM("age"), ft.GLM("age + I(age**2)")), folds=5).folds
    5
    """

    learners: tuple[Learner, ...]
    folds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "learners", tuple(self.learners))
        for learner in self.learners:
            if not isinstance(learner, Learner):
                raise InputError(
                    f"learners: expected GLM, Pilot or PerSilo, not {type(learner).__name__} "
                    "(trees go into a Pilot or PerSilo)"
                )
        if not 1 <= len(self.learners) <= MAX_CANDIDATES:
            raise InputError(f"learners: expected 1 to {MAX_CANDIDATES}, not {len(self.learners)}")
        if not self.folds >= 2:
            raise InputError(f"folds: expected at least 2, not {self.folds}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed: expected an integer from 0 to 2^32 - 1, not {self.seed}")

    def folds_within(self, left_out: int | None, cluster: str | None, *, spanning: bool = False) -> Folds:
        """Return the learner's folds when the study leaves out its fold ``left_out``, or none."""
        # Each fold that the study leaves out has another stream: if the study's own folds were drawn again,
        # one of them would be left without rows.
        stream = self.seed + ((1 if left_out is None else left_out + 2) << 32)
        return Folds(count=self.folds, seed=stream, cluster=cluster, spanning=spanning)


def formulas(model: object, *, public: bool = False) -> tuple[Formula, ...]:
    """Return the formulas to fit, whose factors need the study's levels.

    With ``public`` also those of models that are already fitted, which have levels of their own.
    """
    match model:
        case GLM() | GradientBoostedTrees():
            return (model.parsed,)
        case FittedGLM() | TreeEnsemble():
            return (model.formula,) if public else ()
        case Pilot(inner) | PerSilo(inner):
            return formulas(inner, public=public)
        case SuperLearner(learners):
            return tuple(formula for learner in learners for formula in formulas(learner, public=public))
        case _:
            return ()


def used_columns(model: object) -> tuple[str, ...]:
    """Return the columns that a nuisance model reads to predict, each once."""
    if isinstance(model, Supplied):
        return model.columns
    used = formulas(model, public=True)
    return tuple(dict.fromkeys(name for f in used for name in (*f.numeric_names, *f.factor_names)))


def pilots(model: object) -> tuple[Pilot, ...]:
    """Return the pilots among a nuisance model and its learners."""
    learners = model.learners if isinstance(model, SuperLearner) else (model,)
    return tuple(learner for learner in learners if isinstance(learner, Pilot))


def unit(prediction: Array) -> Array:
    """Return the prediction truncated to [0, 1], where every response of a study lies."""
    return np.clip(prediction, 0.0, 1.0)


@final
@dataclass(frozen=True, kw_only=True)
class SuperLearned:
    """The fitted combination; ``risks`` are the candidates' cross-validated mean squared errors."""

    labels: tuple[str, ...]
    models: tuple[Fitted, ...]
    weights: tuple[float, ...]
    risks: tuple[float, ...]

    def predict(self, table: Table) -> Array:
        """Return sum_k a_k p_k, added in order: the same bits in any partition; shape (N,)."""
        total = np.zeros(table.n_rows)
        for weight, model in zip(self.weights, self.models, strict=True):
            if weight:
                total += weight * unit(model.predict(table))
        return total


def simplex_weights(gram: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return argmin of a' A a over the simplex, by Wolfe's nearest-point method in exact integers.

    A is symmetric, of pooled sums in units of one grid. A ridge of 2^-50 of its largest entry makes
    it positive definite, so that the minimiser is unique: the same at all parties, and equal
    learners share their weight.
    """
    top = max(row[k] for k, row in enumerate(gram))
    cut = max(0, top.bit_length() - KEPT_BITS)
    ridge = max(1, top >> cut >> RIDGE_BITS)
    size = range(len(gram))
    A = [[(gram[k][j] >> cut) + (ridge if k == j else 0) for j in size] for k in size]
    first = min(size, key=lambda k: A[k][k])
    weights = {first: Fraction(1)}
    while True:
        weights, level = _descend(A, weights)
        outside = [j for j in size if j not in weights]
        slopes = {j: sum(A[j][k] * weight for k, weight in weights.items()) for j in outside}
        best = min(slopes, key=lambda j: slopes[j], default=None)
        if best is None or slopes[best] >= level:
            return tuple(float(weights.get(k, Fraction(0))) for k in size)
        weights[best] = Fraction(0)


def _descend(A: list[list[int]], weights: dict[int, Fraction]) -> tuple[dict[int, Fraction], Fraction]:
    """Return the minimiser over the learners in use, without those that would get a negative weight."""
    while True:
        used = list(weights)
        parts, determinant = _solve_ones([[A[i][j] for j in used] for i in used])
        total = sum(parts)
        target = {k: Fraction(part, total) for k, part in zip(used, parts, strict=True)}
        negative = [k for k in used if target[k] <= 0]
        if not negative:
            return target, Fraction(determinant, total)  # (A a)_k, equal for all in use
        step = min(weights[k] / (weights[k] - target[k]) for k in negative)
        moved = {k: weights[k] + step * (target[k] - weights[k]) for k in used}
        weights = {k: weight for k, weight in moved.items() if weight > 0}


def _solve_ones(A: list[list[int]]) -> tuple[list[int], int]:
    """Return x and d with A x = d 1, A positive definite, by fraction-free elimination (Bareiss)."""
    size = len(A)
    rows = [[*row, 1] for row in A]
    previous = 1
    for p in range(size):
        pivot = rows[p]
        if pivot[p] <= 0:  # a leading minor; while all are positive, the method ends
            raise DecodeError("the pooled risk is no sum of squares")
        for i in range(size):
            if i != p:
                factor = rows[i][p]
                rows[i] = [
                    (x * pivot[p] - factor * y) // previous for x, y in zip(rows[i], pivot, strict=True)
                ]
        previous = pivot[p]
    return [row[size] for row in rows], previous
