"""``fedtmle demo --study transport``: the paper's benchmark as a demonstration."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from rich.console import Console
from rich.table import Table

from fedtmle.algorithms.coded import Coded
from fedtmle.protocol.query import Phase
from fedtmle.report.series import document_of
from fedtmle.results.result import versions
from fedtmle.runtime.result import Result
from fedtmle.solver import solve
from fedtmle.studies.progress import live_progress
from fedtmle_core.types import Array
from fedtmle_paper.benchmark import client_sizes, gaussian_mixture, random_partition
from fedtmle_paper.optimal_transport import OptimalTransport

QUESTION = "Which offsets make entropic optimal transport reach its targets (the paper's DGP 1)?"


def transport(*, as_json: bool, quiet: bool, observe: bool = False) -> Mapping[str, object]:
    """Run the paper's benchmark, print the result, and return its document.

    The target is entropic optimal transport, the data are DGP 1, partitioned at random over ten silos.
    ``observe`` also records the loss and the residual at every update.
    """
    rng = np.random.default_rng(1)
    problem = OptimalTransport()
    law = problem.start(gaussian_mixture(2_000, rng))
    rows = gaussian_mixture(10_000, rng)
    parts = random_partition(client_sizes(10_000, 10), rng)
    silos = {f"silo {m + 1}": rows[part] for m, part in enumerate(parts)}
    with live_progress("benchmark", quiet=quiet or as_json) as progress:
        federated = solve(problem, law, silos, Coded(tolerance=1e-3), progress=progress, observe=observe)
    document = {"question": QUESTION, **document_of(federated), "versions": versions()}
    if as_json:
        print(json.dumps(federated.to_dict()))  # noqa: T201 - the command's output
        return document
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
    return document


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
