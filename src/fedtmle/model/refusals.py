"""Fits that have no answer, refused by the name of the column: collinear, separated, or without convergence.

All of it is arithmetic on totals, the same at every hospital.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from fedtmle.errors import FitError, NumericalError
from fedtmle.model.linear import cholesky, congruence, eigen, invert_lower, multiply
from fedtmle_core.types import Array, Family

# Where a logistic predictor runs away, treat the response as separated if less of the first gradient is left:
# records near the boundary alone still pull. A range that is too wide runs away at once.
FLAT = 2.0**-6
COLLINEAR_PIVOT = 1e-10  # treat columns as collinear if a pivot of the scaled Hessian is below this
MINORITY_WEIGHT = 1e-9  # treat the response as constant if the minority's share of the weight is below this
NARROW_SQUARE = 2.0**-24  # least mean square of a column over its declared range: less leaves too few digits
SEPARATED_CURVATURE = 1e-7  # treat as separated if this share of the curvature at zero is left at the fit


def remedy(hessian: Array, names: tuple[str, ...], family: Family) -> str:
    """Return advice about a fit that did not converge.

    On columns that are scaled by their declared ranges, the curvature at zero is their mean square, over 4
    for a logistic model. A range that is far wider than the values leaves sums without enough digits.
    """
    square = np.diag(hessian) * (4.0 if family is Family.LOGISTIC else 1.0)
    wide = [name for name, mean in zip(names, square, strict=True) if mean < NARROW_SQUARE]
    if wide:
        return f"the declared range behind {', '.join(wide)} is far wider than the values: narrow it"
    return "give it a small ridge, or fewer terms"


def refuse_collinear(hessian: Array, names: tuple[str, ...], label: str) -> None:
    """Refuse columns that the ones before determine, by name: pivots of the scaled Hessian that vanish."""
    diagonal = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    empty = [name for name, d in zip(names, diagonal, strict=True) if d == 0]
    if empty:
        raise FitError(
            "collinear", f"{label}: column(s) {', '.join(empty)} are zero in every row used; drop them"
        )
    rest = hessian / np.outer(diagonal, diagonal)
    redundant = []
    for j, name in enumerate(names):
        pivot = rest[j, j]
        if pivot <= COLLINEAR_PIVOT:
            redundant.append(name)
            continue
        column = rest[:, j].copy()
        rest = rest - np.outer(column, column) / pivot
    if redundant:
        refuse_redundant(redundant, label)


def refuse_redundant(names: Sequence[str], label: str) -> NoReturn:
    """Refuse columns that those before them determine."""
    raise FitError(
        "collinear",
        f"{label}: column(s) {', '.join(names)} are determined by the columns before them; "
        "drop them, or give the model a small ridge. If nobody has the reference level of a factor, name "
        "another reference, as in C(site, ref='b')",
    )


def refuse_separation(at_zero: Array, at_fit: Array, names: tuple[str, ...], label: str) -> None:
    """Refuse a logistic fit whose curvature has vanished in some direction: it has no finite coefficients.

    The message names the columns that move most along that direction, in units of their standard deviations.
    """
    if cholesky(at_fit - SEPARATED_CURVATURE * at_zero) is not None:  # the usual case, without eigenvalues
        return
    factor = cholesky(at_zero)
    if factor is None:  # collinear columns were refused before
        raise NumericalError(f"{label}: the curvature of its loss is not positive definite")
    root = invert_lower(factor)
    values, vectors = eigen(congruence(root, at_fit))
    if values[0] >= SEPARATED_CURVATURE:
        return
    refuse_separated(
        multiply(root.T, vectors[:, :1])[:, 0], spread_of(at_zero, names[0] == "1"), names, label
    )


def spread_of(matrix: Array, has_intercept: bool) -> Array:
    """Return a multiple of each column's standard deviation, given the mean of their products."""
    mean = matrix[:, 0] ** 2 / matrix[0, 0] if has_intercept else 0.0
    return np.asarray(np.sqrt(np.maximum(np.diag(matrix) - mean, 0.0)))


def refuse_separated(direction: Array, spread: Array, names: Sequence[str], label: str) -> None:
    """Refuse a fit without finite coefficients; name the columns that move most along a direction.

    ``spread`` has the size of each column: a multiple of its standard deviation.
    """
    moved = np.abs(direction) * spread
    most = [name for name, size in zip(names, moved, strict=True) if size > 0.3 * moved.max()]
    raise FitError(
        "separation",
        f"{label}: its response is perfectly predicted, mostly by {', '.join(most)}, so the fit has no "
        "finite coefficients; drop columns, or give the model a small ridge",
    )


def refuse_runaway(eps: Array, names: Sequence[str], label: str) -> NoReturn:
    """Refuse a fit whose linear predictor may be beyond all bounds; name the largest coefficients."""
    most = [name for name, e in zip(names, np.abs(eps), strict=True) if e > 0.3 * np.abs(eps).max()]
    raise FitError(
        "convergence",
        f"{label}: the fit did not converge, the coefficients of {', '.join(most)} run away; if its declared "
        "range is far wider than the values, narrow it, or give the model a small ridge",
    )


def refuse_constant(gradients: Array, curvature: float, exponent: int, label: str, message: str) -> None:
    """Refuse a response that is the same in every record, or a class without records.

    Given are the intercept's gradients at zero, one for each class but the first, and the first one's
    curvature. They are W (1/J - share_j) and W (1/J)(1 - 1/J), with W the total weight, J the number of
    classes, and the intercept's column 2^-exponent.
    """
    classes = len(gradients) + 1
    weight = math.ldexp(curvature, 2 * exponent) / ((1 - 1 / classes) / classes)
    if not weight > 0:
        return
    shares = [1 / classes - math.ldexp(g, exponent) / weight for g in gradients.tolist()]
    if min(*shares, 1.0 - math.fsum(shares)) <= MINORITY_WEIGHT:
        raise FitError("arm", f"{label}: {message}")
