"""Models of one response are judged by the union of their columns, and each by itself elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fedtmle.model.submodel import GeneralisedLinear, StreamedLinear
from fedtmle.protocol.subjects import Designs, _disclosed
from fedtmle_core.types import Array, Family, RowBound

N = 60
RNG = np.random.default_rng(3)
Y = RNG.random(N).round()
W = RNG.uniform(0.5, 1.5, N)
AGE = RNG.normal(size=N)
SEX = RNG.random(N).round()
ALONE = np.zeros(N)
ALONE[17] = 1.0  # one person


@dataclass(frozen=True)
class Named:
    """A model, as far as `Designs` reads it."""

    design_names: tuple[str, ...] | None
    shared_residuals: str | None = None

    @property
    def dim(self) -> int:
        return len(self.design_names or ())


def add(
    designs: Designs,
    columns: dict[str, Array],
    *,
    y: Array = Y,
    w: Array | None = None,
    model: Named | None = None,
    enough: float = 0.0,
) -> float:
    submodel = GeneralisedLinear(
        family=Family.LOGISTIC,
        X=np.stack(list(columns.values())),
        offset=np.zeros(N),
        y=y,
        w=w,
        bound=RowBound(gradient=4, curvature=4),
    )
    asked: Any = model or Named(tuple(columns))
    return designs.add(asked, submodel, enough)


def largest(columns: list[Array], w: Array | None = None) -> float:
    """Return the largest diagonal element of the projection on the columns, by a factorisation."""
    X = np.stack(columns, axis=1) if w is None else np.stack(columns, axis=1) * w[:, None]
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    return float((U[:, s > 1e-9 * s[0]] ** 2).sum(axis=1).max())


def test_a_column_that_another_model_adds_is_judged_with_the_others() -> None:
    designs = Designs()
    assert add(designs, {"age": AGE}) == 0.0  # judged where it is evaluated
    assert add(designs, {"age": AGE, "sex": SEX}) == pytest.approx(largest([AGE, SEX]), abs=1e-12)


def test_a_difference_of_two_models_that_is_one_person() -> None:
    designs = Designs()
    assert add(designs, {"sex": SEX}) == 0.0
    assert add(designs, {"sex but one": SEX - SEX * ALONE + (1 - SEX) * ALONE}) == pytest.approx(1.0)


@pytest.mark.parametrize("w", [None, W])
def test_weights_are_those_of_the_response(w: Array | None) -> None:
    designs = Designs()
    add(designs, {"age": AGE}, w=w)
    assert add(designs, {"sex": SEX}, w=w) == pytest.approx(largest([AGE, SEX], w), abs=1e-12)


@pytest.mark.parametrize("other", [{"y": 1.0 - Y}, {"w": W}])
def test_another_response_has_columns_of_its_own(other: dict[str, Array]) -> None:
    designs = Designs()
    add(designs, {"sex": SEX})
    assert add(designs, {"sex but one": SEX + ALONE}, **cast("Any", other)) == 0.0


def test_equal_responses_need_not_be_the_same_array() -> None:
    designs = Designs()
    add(designs, {"sex": SEX}, w=W)
    assert add(designs, {"sex and one": SEX + ALONE}, y=Y.copy(), w=W.copy()) == pytest.approx(1.0)


def test_nothing_new_is_not_judged() -> None:
    designs, model = Designs(), Named(("sex and one",))
    add(designs, {"sex": SEX})
    columns = {"sex and one": SEX + ALONE}
    assert add(designs, columns, model=model) == pytest.approx(1.0)
    assert add(designs, columns, model=model) == 0.0  # the same model at another eps
    assert add(designs, columns) == 0.0  # another model of columns that were judged
    assert add(designs, {"age": AGE}, model=Named(None)) == 0.0  # not a regression on a table


def test_a_bound_that_is_enough_is_enough() -> None:
    designs = Designs()
    add(designs, {"age": AGE})
    exact = largest([AGE, SEX])
    assert exact <= add(designs, {"sex": SEX}, enough=1.0) <= 1.0


def test_every_row_counts() -> None:
    """The rows are read in parts; the one person is in the last of them."""
    n = 10_000
    rng = np.random.default_rng(1)
    y, x, alone = rng.random(n).round(), rng.normal(size=n), np.zeros(n)
    alone[-1] = 1.0
    designs, found = Designs(), []
    for name, column in (("x", x), ("x and one", x + alone)):
        submodel = GeneralisedLinear(
            family=Family.LOGISTIC,
            X=column[None],
            offset=np.zeros(n),
            y=y,
            bound=RowBound(gradient=4, curvature=4),
        )
        found.append(designs.add(cast("Any", Named((name,))), submodel, 0.0))
    assert found == [0.0, pytest.approx(1.0)]


@pytest.mark.parametrize("by_name", [False, True])
def test_two_completions_of_a_column_differ_in_one_person(by_name: bool) -> None:
    """Columns of one name have other values where missing ones are imputed twice."""
    designs = Designs(by_name=by_name)
    add(designs, {"age": AGE})
    assert add(designs, {"age": AGE.copy()}) == 0.0
    assert add(designs, {"age": AGE + 0.1 * ALONE}) == (0.0 if by_name else pytest.approx(1.0))


def test_models_that_share_residuals_are_judged_by_their_weights() -> None:
    """Two rules that one person follows differently; responses and offsets do not matter."""
    designs, one = Designs(by_name=True), {"1": np.ones(N)}
    follows = SEX.copy()
    follows[17] = 1.0 - SEX[17]
    rules = Named(("1",), "period 1")
    assert add(designs, one, w=SEX, model=rules) == 0.0
    assert add(designs, one, w=SEX, y=1.0 - Y, model=Named(("1",), "period 1")) == 0.0  # at another point
    assert add(designs, one, w=follows, model=Named(("1",), "period 2")) == 0.0
    assert add(designs, one, w=W, model=Named(("1",), "period 1")) == pytest.approx(
        largest([SEX, W]), abs=1e-12
    )
    assert add(designs, one, w=follows, model=Named(("1",), "period 1")) == pytest.approx(1.0)


def test_streamed_rows_are_judged_as_those_in_memory() -> None:
    """A streamed submodel discloses the same columns, batch by batch."""
    found = []
    for weights in (SEX, SEX + ALONE):
        held = GeneralisedLinear(
            family=Family.LOGISTIC,
            X=np.ones((1, N)),
            y=Y,
            w=weights,
            bound=RowBound(gradient=4, curvature=4),
        )
        batches: Any = SimpleNamespace(map=lambda work: map(work, [np.arange(23), np.arange(23, N)]))
        streamed = StreamedLinear(
            table=batches, family=held.family, dim=1, bound=held.bound, design=cast("Any", held.take)
        )
        found.append(_disclosed(streamed, 1))
        assert np.array_equal(found[-1], _disclosed(held, 1))
    assert not np.array_equal(found[0], found[1])


def test_fits_without_a_fold_disclose_the_sums_over_each() -> None:
    """Whoever alone has a covariate in a fold is alone in a difference, and not in any of the fits."""
    fold = np.arange(N) % 5
    rare = ((fold == fold[17]) & (ALONE > 0)) | ((fold != fold[17]) & (np.arange(N) < 40))
    designs, x = Designs(), rare * 1.0
    without = [(fold != k) * 1.0 for k in range(5)]
    found = [add(designs, {"rare": x}, w=w, model=Named(("rare",))) for w in without]
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(largest([x * w for w in without]))
    assert found[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("w", [W, (np.arange(N) > 5) * W])
def test_people_who_weigh_otherwise_are_another_response(w: Array) -> None:
    designs = Designs()
    add(designs, {"sex": SEX}, w=2.0 * W)
    assert add(designs, {"sex and one": SEX + ALONE}, w=w) == 0.0
    assert add(designs, {"age": AGE}, w=w) > 0.0


def test_weights_of_none_and_of_one_agree() -> None:
    designs = Designs()
    add(designs, {"sex": SEX})
    assert add(designs, {"age": AGE}, w=np.ones(N)) == pytest.approx(largest([SEX, AGE]))
    assert add(designs, {"age and one": AGE + ALONE}, w=W) == 0.0
