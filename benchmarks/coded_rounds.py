"""Rounds and bits of `Coded`, raw beside whitened, on the paper's benchmark (S.3).

n = 10,000, M = 10, both distributions, both partitions, a tolerance of 1e-3; beta is 1.05 times the largest
silo curvature at the origin in either coordinates (or what --over says), and the calibration is counted.
Each row is one sample and partition; the last column sets the bits beside float64 messages over the same
whitened rounds.

    python benchmarks/coded_rounds.py --seeds 1 2 3 --inner step adaptive
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import fedtmle as ft
from fedtmle.protocol.query import Phase
from fedtmle_paper import benchmark
from fedtmle_paper.optimal_transport import OptimalTransport

N, PILOT, CLIENTS, TOLERANCE = 10_000, 2_000, 10, 1e-3
GENERATE = {"gaussian": benchmark.gaussian_mixture, "curved": benchmark.curved_mixture}
Coordinates = Literal["raw", "whitened"]
Inner = Literal["step", "adaptive"]
Over = Literal["silos", "pooled"]
COORDINATES: tuple[Coordinates, ...] = get_args(Coordinates)
DOUBLE = 64  # bits of a number sent as it is
GOALS = {"rounds <= 25": 25, "rounds ratio >= 10": 10, "bits ratio >= 3.5": 3.5}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample: what both coordinates cost."""

    seed: int
    data: str
    partition: str
    inner: str
    over: str
    raw_rounds: int
    rounds: int
    raw_bits: int
    bits: int
    raw_history: int
    history: int
    float_bits: int

    @property
    def meets(self) -> tuple[bool, ...]:
        """The three goals, in the order of `GOALS`."""
        return (
            self.rounds <= GOALS["rounds <= 25"],
            self.raw_rounds >= GOALS["rounds ratio >= 10"] * self.rounds,
            self.raw_bits >= GOALS["bits ratio >= 3.5"] * self.bits,
        )


def samples(seed: int) -> Iterator[tuple[str, str, OptimalTransport, Any, dict[str, Any]]]:
    """The four panels of a seed."""
    for data, generate in GENERATE.items():
        rng = np.random.default_rng(seed)
        pilot, rows = generate(PILOT, rng), generate(N, rng)
        sizes = benchmark.client_sizes(N, CLIENTS)
        parts = {
            "random": benchmark.random_partition(sizes, rng),
            "spatial": benchmark.spatial_partition(rows, sizes, rng),
        }
        problem = OptimalTransport()
        law = problem.start(pilot)
        for partition, chosen in parts.items():
            silos = {f"silo {m + 1}": rows[part] for m, part in enumerate(chosen)}
            yield data, partition, problem, law, silos


def measure(seeds: list[int], inner: list[Inner], over: list[Over], threads: int = 1) -> Iterator[Row]:
    """Every sample under every variant; the same variant in both coordinates."""
    for seed in seeds:
        for data, partition, problem, law, silos in samples(seed):
            for rule in inner:
                for kind in over:
                    cost = {}
                    for coordinates in COORDINATES:
                        algorithm = ft.Coded(
                            tolerance=TOLERANCE,
                            coordinates=coordinates,
                            smoothness=ft.Estimated(factor=1.05, over=kind),
                            inner=rule,
                        )
                        result = ft.solve(problem, law, silos, algorithm, threads=threads)
                        if not result.status.is_converged:
                            raise SystemExit(f"seed {seed}, {data}, {partition}: {result.status.value}")
                        cost[coordinates] = result
                    raw, whitened = cost["raw"], cost["whitened"]
                    yield Row(
                        seed=seed,
                        data=data,
                        partition=partition,
                        inner=rule,
                        over=kind,
                        raw_rounds=_rounds(raw),
                        rounds=_rounds(whitened),
                        raw_bits=_bits(raw),
                        bits=_bits(whitened),
                        raw_history=_history(raw),
                        history=_history(whitened),
                        float_bits=2 * CLIENTS * problem.dim * DOUBLE * whitened.rounds,
                    )


def _rounds(result: ft.Result) -> int:
    return sum(result.account.rounds[phase] for phase in (Phase.CALIBRATION, Phase.TARGETING))


def _bits(result: ft.Result) -> int:
    return result.account.bits(Phase.CALIBRATION, Phase.TARGETING)


def _history(result: ft.Result) -> int:
    return (result.certificate.history_bits or 0) if result.certificate else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--inner", nargs="+", choices=get_args(Inner), default=get_args(Inner))
    parser.add_argument("--over", nargs="+", choices=get_args(Over), default=["silos"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="write the rows there as well")
    options = parser.parse_args()
    print(
        f"{'seed':>4} {'data':8} {'partition':9} {'inner':8} {'over':6} {'rounds':>10} {'ratio':>5} "
        f"{'bits':>13} {'ratio':>5} {'/f64':>5}"
    )
    rows = []
    for row in measure(options.seeds, options.inner, options.over, options.threads):
        rows.append(row)
        print(
            f"{row.seed:>4} {row.data:8} {row.partition:9} {row.inner:8} {row.over:6} "
            f"{row.raw_rounds:>5}/{row.rounds:>4} {row.raw_rounds / row.rounds:>5.1f} "
            f"{row.raw_bits:>7}/{row.bits:>5} {row.raw_bits / row.bits:>5.2f} "
            f"{row.float_bits / row.bits:>5.1f}",
            flush=True,
        )
    for variant in dict.fromkeys((row.inner, row.over) for row in rows):
        chosen = [row for row in rows if (row.inner, row.over) == variant]
        met = [sum(row.meets[goal] for row in chosen) for goal in range(len(GOALS))]
        counts = ", ".join(f"{goal}: {held}" for goal, held in zip(GOALS, met, strict=True))
        print(f"{variant[0]}, {variant[1]}: of {len(chosen)} panels, {counts}")
        print(
            f"  whitened rounds {min(r.rounds for r in chosen)} to {max(r.rounds for r in chosen)}, "
            f"history bits {min(r.history for r in chosen)} to {max(r.history for r in chosen)}"
        )
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(map(asdict, rows))


if __name__ == "__main__":
    main()
