"""One engine for every regression: `fit` returns the fits of regressions side by side, in shared rounds.

Accuracy is a parameter: exact fits solve the pooled equations to the last digits, by Newton's method on exact
sums; rounded ones (`rounded`) end within a fraction of a standard error, and reveal as much less.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle.estimation.exact import fit_exactly
from fedtmle.estimation.flow import Flow, together
from fedtmle.estimation.regression import CrossFit, Fit, Regression
from fedtmle.estimation.rounded import fit_rounded
from fedtmle_core.leaves import Fold
from fedtmle_core.terms import Term


def fit(regressions: Sequence[Regression], *, n: int, accuracy: float | None = None) -> Flow[list[Fit]]:
    """Return the fits of some regressions to ``n`` people, in their order.

    ``accuracy`` is the error of a rounded fit in standard errors, None for exact fits. `FitError` says which
    model has no fit, and why.
    """
    if accuracy is not None:
        return (yield from fit_rounded(regressions, n, accuracy))
    return (yield from together([fit_exactly(regression, n) for regression in regressions]))


def folds_of(count: int, seed: int, cluster: str = "") -> tuple[Term, ...]:
    """Return the folds of cross-fitting, each 1 for its people."""
    return tuple(Fold(count, seed, cluster, fold) for fold in range(count))


def left_out(regression: Regression, folds: Sequence[Term]) -> list[Regression]:
    """Return a regression without each of the folds."""
    return [regression.without(fold, f"fold {k + 1}") for k, fold in enumerate(folds)]


def cross_fit(
    regressions: Sequence[Regression], folds: Sequence[Term], *, n: int, accuracy: float | None = None
) -> Flow[list[CrossFit]]:
    """Return the fits of some regressions without each of the folds."""
    parts = [part for each in regressions for part in left_out(each, folds)]
    fits = yield from fit(parts, n=n, accuracy=accuracy)
    size = len(folds)
    return [
        CrossFit(fits=tuple(fits[j * size : (j + 1) * size]), folds=tuple(folds))
        for j in range(len(regressions))
    ]
