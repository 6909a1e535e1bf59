"""The demonstrations: a real trial at eight hospitals, and the paper's benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Certified, Coded
from fedtmle.algorithms.gradient import Central
from fedtmle.datasets import ihdp as ihdp_columns
from fedtmle.model.types import Array
from fedtmle.protocol.query import Phase, Problem
from fedtmle.runtime.result import Result
from fedtmle.runtime.session import RoundReport
from fedtmle.solve import solve
from fedtmle.targets.benchmark import client_sizes, gaussian_mixture, random_partition
from fedtmle.targets.optimal_transport import OptimalTransport
from fedtmle.targets.two_arm import TwoArm

COVARIATES = ("bw", "momage", "mom_lths", "mom_hs", "mom_scoll", "momblack", "momhisp", "cigs")
IQ_BOUNDS = (40.0, 160.0)
ALLOCATION = 377 / 985  # randomised: the share assigned to the intervention


def ihdp(*, as_json: bool, quiet: bool) -> None:
    """Early intervention and IQ at 36 months; Q is a pilot fit at hospital 1, g the allocation."""
    problem = TwoArm(outcome_bounds=IQ_BOUNDS, weight_ceiling=4.0)
    silos = ihdp_silos()
    algorithm = Coded(tolerance=1e-6, smoothness=Certified())
    federated = _run(problem, problem.start(), silos, algorithm, quiet=quiet or as_json)
    if as_json:
        print(json.dumps(federated.to_dict()))  # noqa: T201 - the command's output
        return
    pooled = solve(problem, problem.start(), silos, Central(tolerance=1e-10))
    console = Console(width=min(80, Console().width))
    console.print(
        f"\n[bold]Early intervention and IQ at 36 months[/bold] (IHDP, {len(silos)} hospitals, "
        f"{federated.n} infants with an outcome)\n"
    )
    table = Table("", "estimate", "std. error", "95% interval", box=None)
    for label, result in (("federated", federated), ("pooled", pooled)):
        for name, weights in (("effect", (1, -1)), *zip(problem.names, ((1, 0), (0, 1)), strict=True)):
            estimate, error = result.contrast(weights)
            interval = f"{estimate - 1.96 * error:.3f} to {estimate + 1.96 * error:.3f}"
            table.add_row(f"{label}: {name}", f"{estimate:.6f}", f"{error:.6f}", interval)
    console.print(table)
    _cost(console, federated)


def transport(*, as_json: bool, quiet: bool) -> None:
    """The paper's benchmark: an entropic optimal-transport target, DGP 1, random partition."""
    rng = np.random.default_rng(1)
    problem = OptimalTransport()
    law = problem.start(gaussian_mixture(2_000, rng))
    rows = gaussian_mixture(10_000, rng)
    parts = random_partition(client_sizes(10_000, 10), rng)
    silos = {f"silo {m + 1}": rows[part] for m, part in enumerate(parts)}
    federated = _run(problem, law, silos, Coded(tolerance=1e-3), quiet=quiet or as_json)
    if as_json:
        print(json.dumps(federated.to_dict()))  # noqa: T201 - the command's output
        return
    direct = problem.direct(rows)
    console = Console(width=min(80, Console().width))
    console.print(
        f"\n[bold]Optimal-transport offsets[/bold] (the paper's DGP 1, {len(silos)} silos, "
        f"{federated.n} records)\n"
    )
    table = Table("", "federated", "std. error", "direct pooled solution", box=None)
    for j, name in enumerate(federated.names):
        table.add_row(name, f"{_psi(federated)[j]:.6f}", f"{_errors(federated)[j]:.6f}", f"{direct[j]:.6f}")
    console.print(table)
    _cost(console, federated)


def ihdp_silos() -> dict[str, dict[str, Array]]:
    """The eight hospitals' infants with an outcome, with Q from hospital 1's own regression."""
    columns = ihdp_columns()
    seen = ~np.isnan(columns["iqsb_36"])
    columns = {name: column[seen] for name, column in columns.items()}
    features = np.column_stack([np.ones(int(seen.sum())), *(columns[name] for name in COVARIATES)])
    pilot = columns["site"] == 1
    design = np.column_stack([features, columns["treat"]])
    beta, *_ = np.linalg.lstsq(design[pilot], columns["iqsb_36"][pilot], rcond=None)
    baseline = features @ beta[:-1]
    low, high = IQ_BOUNDS[0] + 1, IQ_BOUNDS[1] - 1  # predictions must lie inside the bounds
    table = {
        "outcome": columns["iqsb_36"],
        "treatment": columns["treat"],
        "Q1": np.clip(baseline + beta[-1], low, high),
        "Q0": np.clip(baseline, low, high),
        "g": np.full(len(baseline), ALLOCATION),
    }
    return {
        f"hospital {site:.0f}": {name: column[columns["site"] == site] for name, column in table.items()}
        for site in np.unique(columns["site"])
    }


def _run(
    problem: Problem, law: Any, silos: Mapping[str, object], algorithm: AbstractAlgorithm, *, quiet: bool
) -> Result:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ProgressBar(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("opening the session")

        def report(round_: RoundReport) -> None:
            bar.update(
                task,
                description=f"round {round_.round}, {round_.phase}: {round_.silos} silos, "
                f"{round_.bits / 1000:.1f} kbit so far",
            )

        return solve(problem, law, silos, algorithm, progress=report)


def _cost(console: Console, result: Result) -> None:
    certificate = result.certificate
    if certificate is None or certificate.smoothness is None:
        raise AssertionError("a coded run has a certificate and a smoothness")
    sent = sum(result.account.bits_up.values()) / len(result.sizes)
    console.print(
        f"\n{result.status.value.capitalize()}: the pooled EIF mean is at most "
        f"{certificate.residual_bound:.2g} (asked: {certificate.tolerance:g}).\n"
        f"{result.rounds} targeting rounds and {result.account.rounds[Phase.CALIBRATION]} of calibration; "
        f"{result.bits:,} targeting bits over all links; each silo sent {sent:,.0f} bits in all.\n"
        f"Smoothness {certificate.smoothness.value:.4g} ({certificate.smoothness.basis}). "
        "Keeping data local is not in itself a privacy guarantee.",
        highlight=False,
    )


def _psi(result: Result) -> Array:
    if result.psi is None:
        raise AssertionError("a coded run has a pooled estimate")
    return result.psi


def _errors(result: Result) -> Array:
    if result.std_error is None:
        raise AssertionError("a coded run has standard errors")
    return result.std_error
