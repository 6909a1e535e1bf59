"""The fit of a nuisance regression: where it ends, in how many rounds, and what each of them asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedtmle.algorithms.base import Run
from fedtmle.algorithms.optimizers import Newton, Origin
from fedtmle.initial.glm import AbstractResponse, GLMModel
from fedtmle.initial.syntax import parse_formula
from fedtmle.model.table import Table
from fedtmle.programs.nuisance import GRADIENT_GOAL as GOAL
from fedtmle.programs.nuisance import LARGEST_GRADIENT, NewtonPoint, minimise
from fedtmle.protocol.query import Phase
from fedtmle.protocol.sums import SumsQuery
from fedtmle_core.types import Family, Part, unpack
from tests.effects.longhand import irls

N, NAMES = 700, ("u", "v", "w")
GRADIENT, BOTH = Part.GRADIENT, Part.GRADIENT | Part.HESSIAN


def people(family: Family, slope: float = 1.0) -> Table:
    rng = np.random.default_rng(11)
    numeric = {name: rng.uniform(-1, 1, N) for name in NAMES}
    eta = slope * (numeric["u"] - numeric["v"])
    mean = {Family.LOGISTIC: 1 / (1 + np.exp(-eta)), Family.POISSON: np.exp(eta)}.get(family, eta)
    y = rng.poisson(mean) if family is Family.POISSON else (rng.random(N) < mean)
    return Table(n_rows=N, numeric={**numeric, "y": y.astype(float)}, factors={})


class Y(AbstractResponse):
    """The column y, every row with weight one."""

    def of(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        return table.numeric["y"], np.ones(table.n_rows)


def model_of(family: Family) -> GLMModel:
    return GLMModel(
        formula=parse_formula(" + ".join(NAMES)),
        levels={},
        scales=(0,) * 4,
        family=family,
        response=Y(),
    )


def answered(flow: Any, model: GLMModel, table: Table) -> tuple[Any, list[SumsQuery]]:
    """What the flow returns, and what it asked on the way."""
    rows, reply = model.submodel(None, table), None
    asked: list[SumsQuery] = []
    while True:
        try:
            query = flow.send(reply)
        except StopIteration as stop:
            return stop.value, asked
        asked.append(query)
        reply = rows.sums(query.eps, query.parts)


def start(model: GLMModel, table: Table) -> tuple[Run[GLMModel], Any, Any]:
    sums = model.submodel(None, table).sums(np.zeros(4), BOTH).values(N)
    return Run(model, N, Phase.NUISANCE), sums[:4], unpack(sums[4:], 4)


def fitted(family: Family, table: Table, goal: float = GOAL) -> tuple[NewtonPoint, list[SumsQuery]]:
    model = model_of(family)
    run, gradient, hessian = start(model, table)
    flow = minimise(
        run, gradient, hessian, goal=goal, acceptable=LARGEST_GRADIENT, is_quadratic=family is Family.GAUSSIAN
    )
    return answered(flow, model, table)


@pytest.mark.parametrize("slope", [0.3, 1.0, 4.0])
def test_the_fit_is_that_of_iterated_least_squares(slope: float) -> None:
    table = people(Family.LOGISTIC, slope)
    fit, _ = fitted(Family.LOGISTIC, table)
    X = np.column_stack([np.ones(N), *(table.numeric[name] for name in NAMES)])
    np.testing.assert_allclose(fit.eps, irls(X, table.numeric["y"], np.ones(N)), atol=1e-11)
    assert fit.norm <= GOAL


@pytest.mark.parametrize("family", [Family.LOGISTIC, Family.POISSON])
@pytest.mark.parametrize("slope", [0.3, 1.0])
def test_curvatures_are_left_out_and_no_round_is_added(family: Family, slope: float) -> None:
    table, model = people(family, slope), model_of(family)
    run, gradient, hessian = start(model, table)
    origin = Origin(law=None, update=0, gradient=gradient, hessian=hessian, goal=GOAL)
    newton, rounds = answered(Newton(max_steps=100).minimise(run, origin), model, table)
    fit, asked = fitted(family, table)
    np.testing.assert_allclose(fit.eps, newton.eps, atol=1e-11)
    assert len(asked) <= len(rounds)
    assert asked[-1].parts is GRADIENT
    assert {query.parts for query in asked} <= {GRADIENT, BOTH}  # the loss is never told


def test_a_quadratic_loss_takes_one_gradient() -> None:
    fit, asked = fitted(Family.GAUSSIAN, people(Family.GAUSSIAN))
    assert [query.parts for query in asked] == [GRADIENT]
    assert fit.norm <= GOAL


def test_a_step_that_goes_too_far_is_halved() -> None:
    """From zero, where every mean is 1, Newton's step towards a mean of 6 is to e^5."""
    rng = np.random.default_rng(3)
    numeric = {name: rng.uniform(-1, 1, N) for name in NAMES}
    table = Table(n_rows=N, numeric={**numeric, "y": rng.poisson(6.0, N).astype(float)}, factors={})
    fit, asked = fitted(Family.POISSON, table)
    assert fit.norm <= GOAL
    assert fit.eps[0] == pytest.approx(np.log(6.0), abs=0.05)
    first, second, third = (query.eps for query in asked[:3])
    assert (second == first / 2).all()
    assert (third == first / 4).all()


def test_the_fit_ends_where_exact_sums_allow_no_smaller_gradient() -> None:
    fit, asked = fitted(Family.LOGISTIC, people(Family.LOGISTIC), goal=0.0)
    assert fit.norm < GOAL
    assert len(asked) < 12
