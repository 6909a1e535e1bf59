"""Selective disclosure on the paper's benchmark: records cannot be rebuilt while their mean is known.

One silo of a transport run keeps s records to itself; the server knows all others, and that the s lie on a
segment. From the run's transcript, known within eta, it fits the records and their mean.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.polynomial import chebyshev

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.plots import GREY, WIDTH, journal_style
from fedtmle.privacy.charts import row_terms
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.certificate import overhear
from fedtmle.runtime.rows import LocalRows
from fedtmle_core.types import Array, Part
from fedtmle_paper.benchmark import gaussian_mixture
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.privacy.attacks import fit_records, sent
from fedtmle_paper.privacy.collision import (
    collision_pair,
    reconstruction_risk,
    risk_radius,
    segment_smoothness,
)
from fedtmle_paper.privacy.disclosure import affine_decoder, attribute_risk, response_smoothness
from fedtmle_paper.reproduce.style import save

S = 3
RADIUS = 0.05
SILO = 40
DEGREE = 14  # of the series along so short a segment
CENTRE, DIRECTION = np.array([0.3, -0.2]), np.array([0.6, 0.8])
NOISES = tuple(float(eta) for eta in np.logspace(-12, -2, 21))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The transcript's gradient queries as functions of the s unknown positions u on the segment."""

    queries: tuple[SumsQuery, ...]
    known: Array  # the sum over the other records, as means over N_m, (m,)
    answers: Array  # (m,): from the transcript
    truth: Array  # u of the run, (s,)

    @property
    def T(self) -> int:
        return len(self.queries)

    def along(self, query: SumsQuery, u: Array) -> Array:
        """g(o_o + u v), (d, k)."""
        points = (CENTRE + u[:, None] * DIRECTION).T
        return _gradients(query, points)

    @cached_property
    def series(self) -> Array:
        """All queries along the segment as Chebyshev series in u/radius, (degree + 1, m)."""
        nodes = np.cos((np.arange(DEGREE + 1) + 0.5) * np.pi / (DEGREE + 1))
        values = np.concatenate([self.along(query, RADIUS * nodes) for query in self.queries])
        return np.asarray(chebyshev.chebfit(nodes, values.T, DEGREE))

    @cached_property
    def slopes(self) -> Array:
        return np.asarray(chebyshev.chebder(self.series) / RADIUS)

    def response(self, u: Array) -> Array:
        return np.asarray(self.known + chebyshev.chebval(u / RADIUS, self.series).sum(axis=1) / SILO)

    def jacobian(self, u: Array) -> Array:
        """(m, s)."""
        return np.asarray(chebyshev.chebval(u / RADIUS, self.slopes) / SILO)

    def smoothness(self, s: int) -> float:
        """C_s over the transcript's queries, with a factor of safety of 1.05."""
        return 1.05 * max(segment_smoothness(partial(self.along, query), s, RADIUS) for query in self.queries)


def _gradients(query: SumsQuery, points: Array) -> Array:
    """Every record's share in a gradient, (d, k)."""
    submodel = query.problem.submodel(query.law, points)
    if not isinstance(submodel, GeneralisedLinear):
        raise TypeError("a transport submodel is generalised linear")
    return row_terms(submodel, query.eps, Part.GRADIENT)


def scene(seed: int = 0) -> Scene:
    """A run of FedTMLE-G over three silos, heard by its server."""
    rng = np.random.default_rng(seed)
    problem = OptimalTransport()
    law = problem.start(gaussian_mixture(200, rng))
    truth = np.sort(rng.uniform(-RADIUS, RADIUS, size=S))[::-1]
    others = gaussian_mixture(SILO - S, rng)
    silos = {
        "attacked": np.concatenate([CENTRE + truth[:, None] * DIRECTION, others]),
        "second": gaussian_mixture(60, rng),
        "third": gaussian_mixture(50, rng),
    }
    algorithm = ft.Gradient(tolerance=1e-2, optimizer=ft.GradientDescent())
    result = ft.solve(problem, law, silos, algorithm)
    heard = overhear(
        Plan(
            program=TargetingProgram(problem=problem, law=law, algorithm=algorithm),
            roster=roster(list(silos)),
        ),
        result.transcript,
        "attacked",
    )
    asked = [(a.query, a) for a in heard if isinstance(a.query, SumsQuery)]
    points = problem.read(others)
    guess = LocalRows("server", problem.read(silos["attacked"]), SILO, None)  # for the count alone
    known, answers = [], []
    for query, one in asked:
        numbers = sent(one, guess)
        answers.append(numbers[-problem.dim :])  # the gradient; a loss may come before it
        known.append(_gradients(query, points).sum(axis=1) / SILO)
    return Scene(
        queries=tuple(query for query, _ in asked),
        known=np.concatenate(known),
        answers=np.concatenate(answers),
        truth=truth,
    )


@dataclass(frozen=True, kw_only=True)
class DisclosureErrors:
    """Errors at one eta: of the records, and of their mean position."""

    eta: float
    record_bound: float
    record_attack: float
    mean_lower: float
    mean_attack: float
    mean_upper: float
    decoder_worst: float


def measure(view: Scene, noises: tuple[float, ...] = NOISES, *, seed: int = 1) -> list[DisclosureErrors]:
    """Both tasks at each eta: bounds, and the worst that an adversary made of the attacks."""
    rng = np.random.default_rng(seed)
    C_s, C_obs = view.smoothness(S), view.smoothness(2)
    A, c = view.jacobian(np.zeros(S)), np.full(S, 1.0 / S)
    centre = view.response(np.zeros(S))
    H_g = response_smoothness(C_obs, SILO)
    points = []
    for eta in noises:
        hidden = risk_radius(S, radius=RADIUS, noise=eta, smoothness=C_s, n_rows=SILO, T=view.T)
        risk = attribute_risk(A, c, radius=RADIUS, noise=eta, T=view.T, H_g=H_g)
        decode = affine_decoder(A, c, radius=RADIUS, noise=eta, T=view.T, H_g=H_g, response=centre)
        records, means, decoded = [0.0], [0.0], [0.0]
        for truth, answers in _adversary(view, eta, hidden, A, decode.weights, rng):
            starts = [RADIUS * rng.uniform(-1, 1, size=S) for _ in range(4)]
            fit = fit_records(view.response, view.jacobian, answers, starts, radius=RADIUS)
            records.append(float(np.abs(np.sort(fit.u) - np.sort(truth)).max()))
            means.append(abs(float(fit.u.mean() - truth.mean())))
            decoded.append(abs(decode(answers) - float(truth.mean())))
        points.append(
            DisclosureErrors(
                eta=eta,
                record_bound=reconstruction_risk(
                    S, radius=RADIUS, noise=eta, smoothness=C_s, n_rows=SILO, T=view.T
                ),
                record_attack=max(records),
                mean_lower=risk.lower,
                mean_attack=max(means),
                mean_upper=risk.upper,
                decoder_worst=max(decoded),
            )
        )
    return points


def _adversary(
    view: Scene, eta: float, a: float, A: Array, weights: Array, rng: np.random.Generator
) -> list[tuple[Array, Array]]:
    """Datasets within the prior and transcripts within eta of theirs, chosen to mislead."""
    attacks = []
    pair = collision_pair(S, radius=a, centre=np.zeros(1), direction=np.ones(1))
    plus, minus = pair.plus[:, 0], pair.minus[:, 0]
    midpoint = 0.5 * (view.response(plus) + view.response(minus))  # within eta of both
    attacks += [(plus, midpoint), (minus, midpoint)]
    worst = eta * weights / max(float(np.linalg.norm(weights)), 1e-300)
    hidden = np.linalg.svd(A)[2][-1] * RADIUS / math.sqrt(S)
    for u in (view.truth, hidden, -hidden, np.full(S, RADIUS / math.sqrt(S))):
        kick = rng.normal(size=len(view.answers))
        attacks += [
            (u, view.response(u) + worst),
            (u, view.response(u) - worst),
            (u, view.response(u) + eta * kick / float(np.linalg.norm(kick))),
        ]
    return attacks


def draw(out: Path, *, noises: tuple[float, ...] = NOISES) -> list[DisclosureErrors]:
    """disclosure.png, .svg and .csv in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    view = scene()
    points = measure(view, noises)
    with (out / "disclosure.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = list(DisclosureErrors.__dataclass_fields__)
        writer.writerow(names)
        writer.writerows([[f"{getattr(point, name):.6g}" for name in names] for point in points])
    with journal_style():
        figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        eta = [point.eta for point in points]
        _line(
            left, eta, [p.record_attack for p in points], "#D55E00", "o", "least-squares attack, worst found"
        )
        _line(left, eta, [p.record_bound for p in points], "#000000", "", "no attack does better (bound)")
        _line(
            right,
            eta,
            [p.mean_upper for p in points],
            "#0072B2",
            "",
            "affine decoder, guaranteed",
            dashes="--",
        )
        _line(right, eta, [p.decoder_worst for p in points], "#0072B2", "s", "affine decoder, worst found")
        _line(
            right, eta, [p.mean_attack for p in points], "#D55E00", "o", "least-squares attack, worst found"
        )
        _line(right, eta, [p.mean_lower for p in points], "#000000", "", "no attack does better (bound)")
        for axes, title in ((left, f"{S} records, rebuilt"), (right, "their mean, recovered")):
            axes.axhline(RADIUS, color=GREY, lw=0.6, ls=":")
            axes.text(eta[0], RADIUS * 1.25, "prior radius", color=GREY, fontsize=7)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(title, loc="left")
            axes.set_xlabel(r"uncertainty $\eta$ of the transcript")
            axes.legend(frameon=False, fontsize=6.5, loc="lower right")
        left.set_ylabel("worst error")
        save(figure, out, "disclosure")
    return points


def _line(
    axes: Axes, x: list[float], y: list[float], colour: str, marker: str, label: str, *, dashes: str = "-"
) -> None:
    axes.plot(x, y, color=colour, marker=marker or None, ls=dashes, label=label)
