"""All measured runs of a campaign, and the CSV tables made from them.

A campaign looks up runs, converts seconds to the reference unit, and averages losses along a run.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import final

from fedtmle.errors import InputError
from fedtmle_paper.reproduce.measure import Measured
from fedtmle_paper.reproduce.scenario import (
    ROUND_BUDGET,
    Dgp,
    Method,
    Partition,
    Profile,
    Scale,
    Scenario,
)

LATENCY = 0.005  # seconds per round, request and reply together
REFERENCE_DROP = 0.01
TIME_BUDGET = 1.5  # of figure 3, in reference units


@final
class Campaign:
    """The runs of one profile, read at one link latency; Algorithm 4's are the same under each."""

    def __init__(
        self, runs: Sequence[Measured], latency: float = LATENCY, profile: Profile = Profile.A
    ) -> None:
        if not runs:
            raise InputError("runs: a campaign needs at least one")
        self.measured = tuple(runs)
        self.runs = tuple(run for run in runs if run.profile is profile or not run.method.is_papers)
        self.latency = latency
        self.profile = profile
        self.scale: Scale = runs[0].scenario.scale
        self._by_key = {_key(run.scenario, run.method): run for run in self.runs}

    def under(self, profile: Profile) -> Campaign:
        """The same measurements, read under another profile."""
        return Campaign(self.measured, self.latency, profile)

    def at(self, latency: float) -> Campaign:
        """The same measurements, read at another latency."""
        return Campaign(self.measured, latency, self.profile)

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({run.scenario.seed for run in self.runs})

    @cached_property
    def clients(self) -> list[int]:
        return sorted({run.scenario.clients for run in self.runs})

    def scenarios(self, seed: int) -> Iterator[Scenario]:
        """The four panels at the reference number of clients."""
        for dgp in Dgp:
            for partition in Partition:
                yield self.scenario(seed, dgp, partition, self.scale.reference_clients)

    def scenario(self, seed: int, dgp: Dgp, partition: Partition, clients: int) -> Scenario:
        return Scenario(seed=seed, dgp=dgp, partition=partition, clients=clients, scale=self.scale)

    def run(self, scenario: Scenario, method: Method) -> Measured:
        return self._by_key[_key(scenario, method)]

    def unit(self, seed: int) -> float:
        """Seconds of FedTMLE-G until r <= 0.01 r^0: DGP 1, random partition, M = 10."""
        scenario = self.scenario(seed, Dgp.GAUSSIAN, Partition.RANDOM, self.scale.reference_clients)
        run = self.run(scenario, Method.GRADIENT)
        goal = REFERENCE_DROP * run.checkpoints[0].residual
        return next(c.elapsed(self.latency) for c in run.checkpoints if c.residual <= goal)

    def loss(self, run: Measured, units: float) -> float:
        """P_n L of the last density completed within so many reference units."""
        return run.at_time(units * self.unit(run.scenario.seed), self.latency).loss

    def residual(self, run: Measured, units: float) -> float:
        """r of the last density completed within so many reference units."""
        return run.at_time(units * self.unit(run.scenario.seed), self.latency).residual

    def mean_loss(self, run: Measured, units: float) -> float:
        """The loss of the current shared density, averaged over [0, units]."""
        end = units * self.unit(run.scenario.seed)
        seen = [c for c in run.checkpoints if c.elapsed(self.latency) <= end]
        times = [c.elapsed(self.latency) for c in seen] + [end]
        return sum(c.loss * (b - a) for c, (a, b) in zip(seen, pairwise(times), strict=True)) / end

    def best(self, scenario: Scenario) -> float:
        """The lowest loss that one of the paper's methods reached on this data, at any number of clients."""
        return min(
            c.loss
            for run in self.runs
            if run.method.is_papers and (run.scenario.seed, run.scenario.dgp) == (scenario.seed, scenario.dgp)
            for c in run.checkpoints
        )

    def decrease(self, scenario: Scenario) -> float:
        """P_n L(p^0) less the best loss: the scale on which losses are compared."""
        return self.run(scenario, Method.GRADIENT).checkpoints[0].loss - self.best(scenario)


def _key(scenario: Scenario, method: Method) -> tuple[int, Dgp, Partition, int, Method]:
    return scenario.seed, scenario.dgp, scenario.partition, scenario.clients, method


Row = Mapping[str, object]


def write(path: Path, rows: Iterable[Row]) -> None:
    """A CSV file with the first row's keys as its header; floats to 10 digits."""
    table = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]) if table else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in table)


def _each(campaign: Campaign) -> Iterator[tuple[Campaign, Measured]]:
    """Every measured run, with the campaign read under its profile."""
    views = {profile: campaign.under(profile) for profile in Profile}
    for run in campaign.measured:
        yield views[run.profile], run


def trajectories(campaign: Campaign) -> list[Row]:
    """Figures 1 and 2: every completed density of every method at the reference number of clients."""
    return [
        {
            **_where(run),
            "update": c.update,
            "rounds": c.rounds,
            "compute_s": c.compute,
            "elapsed_units": c.elapsed(view.latency) / view.unit(run.scenario.seed),
            "loss": c.loss,
            "residual": c.residual,
        }
        for view, run in _each(campaign)
        if run.scenario.clients == campaign.scale.reference_clients
        for c in run.checkpoints
    ]


def at_time_budget(campaign: Campaign) -> list[Row]:
    """Figure 3: the last density completed within 1.5 reference units."""
    return [
        {
            **_where(run),
            "unit_s": view.unit(run.scenario.seed),
            "residual": view.residual(run, TIME_BUDGET),
            "loss": view.loss(run, TIME_BUDGET),
            "stopped_before": run.checkpoints[-1].elapsed(view.latency)
            < TIME_BUDGET * view.unit(run.scenario.seed),
        }
        for view, run in _each(campaign)
    ]


def at_round_budget(campaign: Campaign) -> list[Row]:
    """Figure 4: the last density completed within 200 rounds, and the fall of its loss from p^0's."""
    table: list[Row] = []
    for run in campaign.measured:
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


def runs(campaign: Campaign) -> list[Row]:
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
        for run in campaign.measured
    ]


def rounds(campaign: Campaign) -> list[Row]:
    """The raw measurements: every round of every run."""
    return [
        {
            **_where(run),
            "round": at,
            "slowest_s": time.slowest,
            "server_s": time.server,
            "silos_s": time.silos,
        }
        for run in campaign.measured
        for at, time in enumerate(run.times, start=1)
    ]


def reference(campaign: Campaign) -> list[Row]:
    """The reference unit of each seed, with what it was measured from."""
    table: list[Row] = []
    for view in map(campaign.under, Profile):
        for seed in view.seeds:
            run = view.run(next(view.scenarios(seed)), Method.GRADIENT)
            unit = view.unit(seed)
            reached = run.at_time(unit, view.latency)
            table.append(
                {
                    "seed": seed,
                    "profile": view.profile.value,
                    "unit_s": unit,
                    "rounds": reached.rounds,
                    "compute_s": reached.compute,
                    "latency_s": view.latency,
                    "residual": reached.residual,
                    "residual_start": run.checkpoints[0].residual,
                }
            )
    return table


def _where(run: Measured) -> dict[str, object]:
    scenario = run.scenario
    return {
        "seed": scenario.seed,
        "dgp": scenario.dgp.value,
        "partition": scenario.partition.value,
        "clients": scenario.clients,
        "profile": run.profile.value,
        "method": run.method.value,
    }


def _cell(value: object) -> object:
    return f"{value:.10g}" if isinstance(value, float) else value
