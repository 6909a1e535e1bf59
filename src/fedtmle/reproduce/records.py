"""Measurements as CSV files: one row per checkpoint, per run, per round."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedtmle.reproduce.measure import Measured
from fedtmle.reproduce.scenario import ROUND_BUDGET, Method
from fedtmle.reproduce.study import TIME_BUDGET, Study

Row = Mapping[str, object]


def write(path: Path, rows: Iterable[Row]) -> None:
    """A CSV file with the first row's keys as its header; floats to 10 digits."""
    table = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]) if table else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in table)


def trajectories(study: Study) -> list[Row]:
    """Figures 1 and 2: every completed density of every method at the reference number of clients."""
    return [
        {
            **_where(run),
            "update": c.update,
            "rounds": c.rounds,
            "compute_s": c.compute,
            "elapsed_units": c.elapsed(study.latency) / study.unit(run.cell.seed),
            "loss": c.loss,
            "residual": c.residual,
        }
        for run in study.runs
        if run.cell.clients == study.scale.reference_clients
        for c in run.checkpoints
    ]


def at_time_budget(study: Study) -> list[Row]:
    """Figure 3: the last density completed within 1.5 reference units."""
    return [
        {
            **_where(run),
            "unit_s": study.unit(run.cell.seed),
            "residual": study.residual(run, TIME_BUDGET),
            "loss": study.loss(run, TIME_BUDGET),
        }
        for run in study.runs
    ]


def at_round_budget(study: Study) -> list[Row]:
    """Figure 4: the last density completed within 200 rounds, and the fall of its loss from p^0's."""
    table: list[Row] = []
    for run in study.runs:
        last = run.at_round(ROUND_BUDGET)
        table.append(
            {
                **_where(run),
                "rounds_used": last.rounds,
                "updates": last.update,
                "loss": last.loss,
                "loss_change": last.loss - run.checkpoints[0].loss,
                "residual": last.residual,
            }
        )
    return table


def runs(study: Study) -> list[Row]:
    """How each run ended, with the endpoint check."""
    return [
        {
            **_where(run),
            "status": run.status,
            "rounds": run.rounds,
            "updates": run.updates,
            "bits": run.bits,
            "residual": run.checkpoints[-1].residual,
            "endpoint_error": run.endpoint_error,
            "std_error": run.std_error,
            "digest": run.digest,
            "slowest_s": sum(time.slowest for time in run.times),
            "server_s": sum(time.server for time in run.times),
            "all_silos_s": sum(time.silos for time in run.times),
        }
        for run in study.runs
    ]


def rounds(study: Study) -> list[Row]:
    """The raw measurements: every round of every run."""
    return [
        {
            **_where(run),
            "round": at,
            "slowest_s": time.slowest,
            "server_s": time.server,
            "silos_s": time.silos,
        }
        for run in study.runs
        for at, time in enumerate(run.times, start=1)
    ]


def reference(study: Study) -> list[Row]:
    """The reference unit of each seed, with what it was measured from."""
    table: list[Row] = []
    for seed in study.seeds:
        run = study.run(next(study.cells(seed)), Method.GRADIENT)
        unit = study.unit(seed)
        reached = run.at_time(unit, study.latency)
        table.append(
            {
                "seed": seed,
                "unit_s": unit,
                "rounds": reached.rounds,
                "compute_s": reached.compute,
                "latency_s": study.latency,
                "residual": reached.residual,
                "residual_start": run.checkpoints[0].residual,
            }
        )
    return table


def _where(run: Measured) -> dict[str, object]:
    cell = run.cell
    return {
        "seed": cell.seed,
        "dgp": cell.dgp.value,
        "partition": cell.partition.value,
        "clients": cell.clients,
        "method": run.method.value,
    }


def _cell(value: object) -> object:
    return f"{value:.10g}" if isinstance(value, float) else value
