"""Rounds and bits of Coded, raw and whitened, beside float64 messages over the same rounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import fedtmle as ft
from benchmarks.table import Row
from fedtmle.protocol.query import Phase
from fedtmle_paper import benchmark
from fedtmle_paper.optimal_transport import OptimalTransport

PHASES = (Phase.CALIBRATION, Phase.TARGETING)
GENERATE = {"DGP 1": benchmark.gaussian_mixture, "DGP 2": benchmark.curved_mixture}


def rows(quick: bool) -> Iterator[Row]:
    n, clients = (2_000 if quick else 10_000), 10
    for data, generate in GENERATE.items():
        rng = np.random.default_rng(1)
        pilot, sample = generate(400 if quick else 2_000, rng), generate(n, rng)
        sizes = benchmark.client_sizes(n, clients)
        parts = {
            "random": benchmark.random_partition(sizes, rng),
            "spatial": benchmark.spatial_partition(sample, sizes, rng),
        }
        problem = OptimalTransport()
        law = problem.start(pilot)
        for partition, chosen in parts.items():
            silos = {f"silo {m}": sample[part] for m, part in enumerate(chosen)}
            for coordinates in ("raw", "whitened"):
                algorithm = ft.Coded(
                    tolerance=1e-3, coordinates=coordinates, smoothness=ft.Estimated(factor=1.05)
                )
                account = ft.solve(problem, law, silos, algorithm).account
                rounds = sum(account.rounds[phase] for phase in PHASES)
                bits = account.bits(*PHASES)
                yield Row(
                    group="Coded",
                    what=f"{data}, {partition} partition, {coordinates}, n = {n:,}, M = {clients}",
                    against="float64 messages",
                    unit="kbit",
                    ours=bits / 1e3,
                    theirs=2 * clients * problem.dim * 64 * rounds / 1e3,
                    faster=True,
                    note=f"{rounds} rounds",
                )
