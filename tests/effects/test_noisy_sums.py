"""The sums of a study with privacy: sensitivities by brute force, budgets by a distinguishing attack."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from benchmarks.privacy import Cell, draw, run_flow, study_of
from scipy.stats import norm

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.initial.glm import FittedGLM
from fedtmle.model.table import AbstractPrivateColumns, Table
from fedtmle.programs.flow import StudyProgram
from fedtmle.programs.noisy_fit import shrunk_root
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.sums import PLACES, NoisySums
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.silo import with_noise
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.effects.noisy import COUNT_SCALE, SQUARE_SCALE, GradientColumns, OneStepColumns
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, upper_pairs
from tests import kinds
from tests.declare import declare

VARIABLES = declare(x=(-2, 5), z=(0, 1), site=["a", "b", "c"], arm="binary", y=(0, 4))
STUDY = ft.Study(
    target=ft.ATE(outcome="y", treatment="arm"),
    outcome_model=ft.GLM("arm + x + I(x**2)"),
    treatment_model=ft.GLM("x + z + C(site)"),
    missingness_model=ft.GLM("arm + z"),
    variables=VARIABLES,
    g_bounds=0.1,
    privacy=ft.Privacy(epsilon=1.0, colluders=0),
)


def corners(extreme: tuple[float, ...] = (0.0, 4.0, math.nan)) -> Table:
    """A record at every corner of the declared box, with the outcome at its ends or missing."""
    rows = list(itertools.product((-2.0, 0.0, 5.0), (0.0, 1.0), "abc", (0, 1), extreme))
    x, z, site, arm, y = zip(*rows, strict=True)
    frame = {"x": np.array(x), "z": np.array(z), "site": list(site), "arm": np.array(arm), "y": np.array(y)}
    return load_all({"s": frame}, schema_of(STUDY))["s"]  # type: ignore[return-value]  # in memory


def queries(study: ft.Study, table: Table) -> list[NoisySums]:
    """The four queries of a study over these rows, without noise."""
    local = LocalRows("s", table, table.n_rows)
    flow = StudyProgram.of(study, ["s", "t", "u"]).flow(table.n_rows)
    asked, query = [], next(flow)
    while True:
        assert isinstance(query, NoisySums)
        asked.append(query)
        try:
            query = flow.send(query.answer(local))
        except StopIteration:
            return asked


def row_terms(columns: AbstractPrivateColumns[Any], table: Table) -> Array:
    """The terms of each record, shape (terms, N)."""
    values = np.asarray(columns.evaluate(table))
    return np.stack([np.prod(values[list(term)], axis=0) for term in columns.terms])


def steep(fit: FittedGLM) -> FittedGLM:
    """A model whose predictions are nearly 0 or 1."""
    return replace(fit, coefficients=tuple(20.0 * (-1) ** j for j in range(len(fit.coefficients))))


def with_steep_models(columns: OneStepColumns) -> OneStepColumns:
    prepare: Any = columns.problem.prepare
    roles = ("outcome", "treatment", "missingness")
    models = {role: tuple(map(steep, getattr(prepare, role))) for role in roles}
    return replace(columns, problem=replace(columns.problem, prepare=replace(prepare, **models)))


@pytest.fixture(scope="module")
def asked() -> list[NoisySums]:
    return queries(STUDY, corners())


def test_every_kind_of_private_columns_is_asked(asked: list[NoisySums]) -> None:
    assert kinds.without_example(AbstractPrivateColumns, [type(query.columns) for query in asked]) == set()


@pytest.mark.parametrize("number", range(4))
def test_no_replaced_record_moves_the_sums_by_more_than_declared(asked: list[NoisySums], number: int) -> None:
    columns = asked[number].columns
    if isinstance(columns, GradientColumns):  # whose residuals reach -1 and 1
        columns = replace(columns, fits={role: steep(fit) for role, fit in columns.fits.items()})
    if isinstance(columns, OneStepColumns):
        columns = with_steep_models(columns)
    terms = row_terms(columns, corners())
    squares = ((terms[:, :, None] - terms[:, None, :]) ** 2).sum(axis=0)
    declared = float(columns.squared_sensitivity)
    assert squares.max() <= declared * (1 + 1e-12)
    assert squares.max() >= 0.2 * declared  # and the bound is not idle
    assert np.abs(terms).max() <= 1.5


@pytest.mark.parametrize("target", [ft.ATE, ft.TSM], ids=lambda target: target.__name__)
def test_no_record_that_changes_its_stratum_moves_the_sums_by_more_than_declared(target: Any) -> None:
    """All pairs of corners, three strata: one record changes the sums of two strata at most."""
    study = replace(
        STUDY, target=target(outcome="y", treatment="arm", strata="site"), submodel="per arm", g_bounds=0.3
    )
    table = corners()
    columns = queries(study, table)[-1].columns
    assert isinstance(columns, OneStepColumns)
    columns = with_steep_models(columns)
    terms, site = row_terms(columns, table), np.asarray(columns.columns.stratum(table))
    squares = ((terms[:, :, None] - terms[:, None, :]) ** 2).sum(axis=0)
    declared = float(columns.squared_sensitivity)
    same = site[:, None] == site[None, :]
    assert squares[same].max() <= declared * (1 + 1e-12)
    assert squares[~same].max() <= declared * (1 + 1e-12)
    assert squares[~same].max() >= 0.8 * declared  # and the bound is not idle
    assert squares[same].max() >= 0.8 * declared
    moments = len(columns.names) - columns.arms
    by_stratum = (terms[:moments, :, None] != terms[:moments, None, :]).reshape(3, -1, *same.shape)
    assert set(by_stratum.any(axis=1).sum(axis=0).ravel().tolist()) == {0, 1, 2}
    # The sums of all strata are those of a study without strata, but for the scale of the squares.
    pooled = terms[:moments].reshape(3, -1, table.n_rows).sum(axis=0)
    np.testing.assert_array_equal(pooled[0], np.full(table.n_rows, COUNT_SCALE))
    alone = replace(columns, columns=replace(columns.columns, strata=None, strata_levels=()))
    np.testing.assert_allclose(pooled[1 : 1 + columns.dim], alone.evaluate(table)[: columns.dim])


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_moments_in_two_strata_move_by_at_most_two(dim: int) -> None:
    """The largest change by a record that goes to another stratum, over the ball; larger scales break it."""
    points = np.random.default_rng(dim).standard_normal((dim, 2000))
    points /= np.linalg.norm(points, axis=0) * np.random.default_rng(9).choice([1.0, 2.0], 2000)

    def largest(count: float, square: float) -> float:
        lanes = [points[j] * points[k] * (1.0 if j == k else math.sqrt(2.0)) for j, k in upper_pairs(dim)]
        norms = count**2 + (points**2).sum(axis=0) + square**2 * (np.stack(lanes) ** 2).sum(axis=0)
        return 2.0 * float(norms.max())

    assert 3.9 < largest(COUNT_SCALE, SQUARE_SCALE[2]) <= 4.0
    assert largest(COUNT_SCALE, SQUARE_SCALE[1]) > 4.0  # the scale without strata would not do
    assert largest(1.0, SQUARE_SCALE[2]) > 4.0


def test_values_beyond_the_declared_range_are_clipped(asked: list[NoisySums]) -> None:
    """A silo refuses such values when it reads them; the sums would not leave their ball either."""
    table = corners()
    wild = table.with_numeric("x", table.numeric["x"] * 1e6).with_numeric("y", table.numeric["y"] * 1e6)
    for query in asked:
        terms = row_terms(query.columns, wild)
        squares = ((terms[:, :, None] - terms[:, None, :]) ** 2).sum(axis=0)
        assert squares.max() <= float(query.columns.squared_sensitivity) * (1 + 1e-12)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_moments_of_a_ball_move_by_at_most_two(dim: int) -> None:
    """The claim behind the last round: a fine search over pairs of points of the unit ball."""
    rng = np.random.default_rng(dim)
    if dim == 1:
        points = np.linspace(-1, 1, 2001)[None]
    else:
        points = rng.standard_normal((dim, 3000))
        points /= np.linalg.norm(points, axis=0)
        points *= np.where(rng.random(3000) < 0.5, 1.0, rng.random(3000))
    scale = SQUARE_SCALE[min(dim, 2)]
    products = [
        scale * points[j] * points[k] * (1.0 if j == k else math.sqrt(2.0)) for j, k in upper_pairs(dim)
    ]
    moments = np.concatenate([points, np.stack(products)])
    gram = moments.T @ moments
    squares = np.diag(gram)[:, None] + np.diag(gram)[None] - 2 * gram
    assert 3.9 < squares.max() <= 4 + 1e-9
    larger = np.concatenate([points, 1.3 * np.stack(products)])  # so that the search could fail
    gram = larger.T @ larger
    assert (np.diag(gram)[:, None] + np.diag(gram)[None] - 2 * gram).max() > 4.01


def test_the_public_ball_holds_every_term_of_the_estimate() -> None:
    """Nothing is clipped if all values are in their ranges, whatever the models; the ball is not idle."""
    for target in (ft.ATE(outcome="y", treatment="arm"), ft.RR(outcome="y", treatment="arm")):
        study = ft.Study(
            target=target,
            outcome_model=ft.GLM("arm + x"),
            treatment_model=ft.GLM("x + z"),
            missingness_model=ft.GLM("arm + z"),
            variables=declare(VARIABLES, y="binary") if isinstance(target, ft.RR) else VARIABLES,
            g_bounds=0.3,
            privacy=ft.Privacy(epsilon=2.0),
        )
        table = corners((0.0, 1.0, math.nan))
        columns = queries(study, table)[-1].columns
        assert isinstance(columns, OneStepColumns)
        columns = with_steep_models(columns)
        wider = replace(columns, radius=2 * columns.radius)  # in which nothing is clipped
        lengths = 2 * np.linalg.norm(wider.evaluate(table)[: columns.dim], axis=0)
        assert 0.8 < lengths.max() < 1 + 1e-6


def test_noise_has_the_variance_of_the_budget(asked: list[NoisySums]) -> None:
    for query in asked:
        delta = math.sqrt(float(query.columns.squared_sensitivity)) * 2**PLACES
        assert query.sensitivity >= delta
        assert query.sensitivity < delta * (1 + 1e-5)
        assert query.sensitivity**2 / (2 * query.variance) <= query.rho
        assert query.noise * 3 == query.variance  # three shares, nobody colludes
        assert query.spent - query.rho < Fraction(1, 10**30)
    privacy = STUDY.privacy
    assert privacy is not None
    assert sum(query.spent for query in asked) <= privacy.rho + Fraction(1, 10**30)


RUNS = 100_000


def realised_rho(shift: float, noise: Array, level: float = 2.6) -> float:
    """A lower confidence bound of rho from a threshold test between two neighbouring data sets.

    Gaussian noise with mean shift mu (in standard deviations) has rho = mu^2/2, and the test at the middle
    has the advantage 2 Phi(mu/2) - 1.
    """
    half = len(noise) // 2
    one, other = noise[:half] + shift, noise[half:]
    advantage = float(np.mean(one > shift / 2)) - float(np.mean(other > shift / 2))
    advantage -= level * math.sqrt(0.5 / half)
    return 2.0 * float(norm.ppf((1 + max(advantage, 0.0)) / 2)) ** 2


@pytest.mark.parametrize("number", range(4))
def test_a_distinguishing_attack_stays_within_the_budget(asked: list[NoisySums], number: int) -> None:
    """The best test between the two worst records of the box, over 2 x 100,000 runs of the mechanism."""
    query, table = asked[number], corners()
    terms = row_terms(query.columns, table)
    squares = ((terms[:, :, None] - terms[:, None, :]) ** 2).sum(axis=0)
    shift = math.sqrt(float(squares.max()))
    rng = np.random.default_rng(number)
    deviation = query.deviation
    noise = rng.standard_normal(2 * RUNS) * deviation
    rho = float(query.rho)
    worst = math.sqrt(float(query.columns.squared_sensitivity))
    assert realised_rho(shift, noise) <= rho
    assert realised_rho(worst, noise) <= rho
    assert realised_rho(worst, noise / 2) > rho  # halved noise is noticed
    twice = (noise[:RUNS] + noise[RUNS:]) / 2  # a retry with fresh noise gives two draws
    assert realised_rho(worst, twice, level=0.0) > 1.3 * rho


@pytest.mark.slow
def test_the_attack_on_shares_of_the_sampler() -> None:
    """The same with the silos' own draws: two silos of three, because the third colludes."""
    query = NoisySums(
        columns=queries(STUDY, corners())[-1].columns, n=100, rho=Fraction(1, 40), silos=3, colluders=1
    )
    below = random.Random(3).randrange  # noqa: S311 - a test
    zero = Sums((0,), (PLACES,))

    def drawn() -> float:
        return sum(with_noise(query, zero, below).units[0] for _ in range(2)) / 2**PLACES

    noise = np.array([drawn() for _ in range(2 * RUNS)])
    worst = math.sqrt(float(query.columns.squared_sensitivity))
    assert realised_rho(worst, noise) <= float(query.rho) < realised_rho(worst, noise / 2)
    alone = noise - np.array([with_noise(query, zero, below).units[0] for _ in range(2 * RUNS)]) / 2**PLACES
    assert alone.std() > noise.std()


def test_noise_that_is_shared_leaves_only_under_masks() -> None:
    """A share of the noise is too little for an answer that is not added up with the others'."""
    columns, rows = queries(STUDY, corners())[-1].columns, LocalRows("a", corners(), corners().n_rows, None)
    shared = NoisySums(columns=columns, n=100, rho=Fraction(1, 40), silos=3, colluders=1)
    with pytest.raises(RefusalError, match="privacy") as refusal:
        Guard(Policy()).admit(shared, rows)
    assert refusal.value.reason is Reason.UNMASKED
    Guard(Policy(), is_masked=True).admit(shared, rows)
    Guard(Policy()).admit(replace(shared, needs_masks=False), rows)  # to a trusted server


def test_a_range_from_the_data_would_break_the_budget() -> None:
    """A trap: scaled by its own largest value, one record moves the sums by more than the declared bound."""
    table = corners()
    own = table.numeric["x"][:6]
    scaled = own / np.abs(own).max()
    replaced = np.append(own[:-1], 1e3)
    change = np.abs(scaled.sum() - (replaced / np.abs(replaced).max()).sum())
    assert change > 2.0  # with a declared range each record is in [-1, 1], so that at most 2


def test_noise_in_the_last_round_alone_would_break_the_budget() -> None:
    """A trap: models that were fitted without noise tell one record to the terms of all others.

    Of 100 records two are untreated, so that Q(0) is the mean of two outcomes. If one of them is replaced,
    Q(0) moves by 1/2, and with it the terms of all 100 records.
    """
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="arm"),
        outcome_model=ft.GLM("arm"),
        treatment_model=ft.GLM("x"),
        variables=declare(x=(-2, 5), arm="binary", y="binary"),
        g_bounds=0.1,
        privacy=ft.Privacy(epsilon=1.0),
    )
    x, arm = np.zeros(100), np.array([0, 0] + [1] * 98)
    totals = []
    for first in (0, 1):
        y = np.array([first, 0] + [0, 1] * 49)
        table = load_all({"s": {"x": x, "arm": arm, "y": y}}, schema_of(study))["s"]
        assert isinstance(table, Table)
        columns = queries(study, table)[-1].columns
        assert isinstance(columns, OneStepColumns)
        prepare: Any = columns.problem.prepare
        means = [min(max(float(y[arm == a].mean()), 1e-6), 1 - 1e-6) for a in (0, 1)]
        logits = [math.log(mean / (1 - mean)) for mean in means]
        exact = {
            "outcome": (replace(prepare.outcome[0], coefficients=(logits[0], logits[1] - logits[0])),),
            "treatment": (replace(prepare.treatment[0], coefficients=(math.log(0.98 / 0.02), 0.0)),),
        }
        problem = replace(columns.problem, prepare=replace(prepare, **exact))
        totals.append(row_terms(replace(columns, problem=problem), table).sum(axis=1))
    change = float(((totals[1] - totals[0]) ** 2).sum())
    assert change > 6 * float(columns.squared_sensitivity)  # 5^2, for a declared 4


def test_without_noise_the_flow_gives_the_usual_one_step_estimate() -> None:
    """With a huge budget the estimate and its standard error are those of OneStep, up to the models' fit."""
    cell = Cell(n=4_000, p=3, epsilon=20.0, g_bounds=0.05)
    columns, _ = draw(cell, cell.n, np.random.default_rng(4))
    private = run_flow(study_of(cell), columns, None)
    study = study_of(cell)
    plain = ft.run(
        ft.Study(
            target=study.target,
            outcome_model=study.outcome_model,
            treatment_model=study.treatment_model,
            algorithm=ft.OneStep(),
            submodel="contrast",
            g_bounds=0.05,
            variables=study.variables,
            diagnostics=False,
        ),
        {"s0": {k: v[::2] for k, v in columns.items()}, "s1": {k: v[1::2] for k, v in columns.items()}},
    )
    (row,) = plain.document["estimates"]
    assert abs(private.estimate.psi[0] - row["estimate"]) < 0.02 * row["std_error"]
    sampling = private.details.privacy.sampling[0]  # type: ignore[attr-defined]  # of a study
    assert abs(math.sqrt(sampling) / row["std_error"] - 1) < 0.01


def test_covariances_are_shrunk_by_the_share_of_noise_in_them() -> None:
    """Longhand: with known noise, the kept share is near the one of least squared error; variances stay."""
    rng = np.random.default_rng(4)
    p, deviation = 12, 0.02
    correlation = 0.3 ** np.abs(np.subtract.outer(np.arange(p), np.arange(p)))
    truth = 0.1 * correlation
    errors: dict[str, list[float]] = {"shrunk": [], "noisy": [], "best": []}
    off = ~np.eye(p, dtype=bool)
    for _ in range(40):
        noise = np.triu(rng.normal(0.0, deviation, (p, p)), 1)
        noisy = truth + noise + noise.T
        root = shrunk_root(noisy, deviation)
        found = root @ root.T
        np.testing.assert_allclose(np.diag(found), 0.1, rtol=0.15)  # but for eigenvalues that are raised
        assert np.linalg.eigvalsh(found)[0] >= 0.25 * 0.1 - 1e-12
        kept = (noisy[off] @ truth[off]) / (noisy[off] @ noisy[off])
        for name, estimate in (("shrunk", found), ("noisy", noisy), ("best", kept * noisy)):
            errors[name].append(float(((estimate - truth)[off] ** 2).sum()))
    mean = {name: np.mean(each) for name, each in errors.items()}
    assert mean["best"] <= mean["shrunk"] < 1.15 * mean["best"]
    assert mean["shrunk"] < 0.7 * mean["noisy"]


def test_a_covariance_that_noise_drowns_is_its_diagonal() -> None:
    rng = np.random.default_rng(5)
    noise = np.triu(rng.normal(0.0, 0.001, (5, 5)), 1)
    root = shrunk_root(np.diag([0.1, 0.2, 0.3, 1.0, 0.5]) + noise + noise.T, 0.05)
    np.testing.assert_allclose(root @ root.T, np.diag([0.1, 0.2, 0.3, 1.0, 0.5]), atol=1e-12)
