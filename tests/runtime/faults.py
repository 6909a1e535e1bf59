"""Runs through seeded faults, held against the run in which nothing went wrong.

    python -m tests.runtime.faults --schedules 1000000 --first 0

runs as many schedules as asked and prints what befell them; it ends with status 1 at a divergence.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.data import load_all
from fedtmle.errors import DeadlineError
from fedtmle.initial.glm import GLM
from fedtmle.model.problem import Estimate
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Reason, Refused
from fedtmle.protocol.outcome import Outcome, Targeted
from fedtmle.protocol.plan import Member, Plan, roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.runtime.ledger import Ledger, read, text
from fedtmle.runtime.records import Keeper, Record
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import Finished
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.journal import Journal
from fedtmle_core.signing import SigningKey
from tests.cases import targets
from tests.declare import declare
from tests.initial.silos import pooled_table, split, trial
from tests.runtime.simulator import (
    Fate,
    Faults,
    Kind,
    SimulatedJournal,
    SimulatedLedger,
    SimulatedRun,
    run_until_done,
)

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
PASSING = {
    messages.encode(Refused(reason)) for reason in (Reason.OUT_OF_ORDER, Reason.CANNOT_RECORD)
}  # what a silo may say of a stray, or on a full disk; neither is an answer


@dataclass(frozen=True)
class Reference:
    """A plan, its rows, and its run without faults."""

    plan: Plan
    rows: Mapping[str, Any]
    finished: Finished
    records: Mapping[str, list[tuple[bytes, bytes]]]  # what each silo heard and said
    local: Mapping[str, Any]


def _small(case: str, algorithm: Any, sizes: tuple[int, ...] = (22, 31)) -> tuple[Plan, Mapping[str, Any]]:
    one = targets()[case]
    cuts = np.cumsum((0, *sizes))
    silos = one.silos([np.arange(a, b) for a, b in itertools.pairwise(cuts)])
    rows = {name: read_rows(one.problem, name, raw) for name, raw in silos.items()}
    return Plan(
        program=TargetingProgram(problem=one.problem, law=one.law, algorithm=algorithm),
        roster=roster(list(silos)),
    ), rows


def _study(silos: int = 2, rows: int = 90) -> tuple[Plan, Mapping[str, Any]]:
    algorithm = ft.Gradient(tolerance=1e-2, optimizer=ft.Newton())
    tables = split(pooled_table(rows, 1), silos)
    return study_plan(trial(GLM("a + x"), algorithm=algorithm), roster(list(tables))), tables


def key_of(silo: str) -> SigningKey:
    return SigningKey(hashlib.sha256(b"faults " + silo.encode()).digest())


def _masked(case: tuple[Plan, Mapping[str, Any]], *, signed: bool) -> tuple[Plan, Mapping[str, Any]]:
    """Return the same under masks; signed answers are relayed."""
    plan, rows = case
    members = tuple(
        Member(
            name=name,
            key=key_of(name).public if signed else b"",
            mask_key=key_of(name).mask_key.public,
        )
        for name in plan.silos
    )
    return dataclasses.replace(plan, roster=members), rows


def _noisy() -> tuple[Plan, Mapping[str, Any]]:
    tables = split(pooled_table(300, 1, binary=True), 3)
    privacy = ft.Privacy(epsilon=1.0)
    study = trial(GLM("a + x"), binary=True, algorithm=ft.OneStep(), privacy=privacy)
    return _masked((study_plan(study, roster(list(tables))), tables), signed=True)


RARE = ft.Study(
    target=ft.ATE(outcome="y", treatment="a"),
    outcome_model=ft.GLM("a + w"),
    treatment_model=ft.GLM("w"),
    variables=declare(y="binary", a="binary", w=(-4, 4)),
)


def rare(silos: int, *, events: int = 1, seed: int = 4, n: int = 200) -> dict[str, Any]:
    """Silos of n people, each with so many events in each arm."""
    rng = np.random.default_rng(seed)
    data = {}
    for m in range(silos):
        w, a, y = rng.standard_normal(n).clip(-4, 4), np.arange(n) % 2, np.zeros(n)
        for arm in (0, 1):
            y[rng.choice(np.flatnonzero(a == arm), events, replace=False)] = 1.0
        data[f"silo {m}"] = {"y": y, "a": a.astype(float), "w": w}
    return data


def _void() -> tuple[Plan, Mapping[str, Any]]:
    """Five silos with one event in each arm: closing sums are void, and asked again after a look."""
    study = dataclasses.replace(RARE, algorithm=ft.Gradient(tolerance=1e-2, optimizer=ft.Newton()))
    rows = dict(load_all(rare(5, n=60), schema_of(study)))
    return _masked((study_plan(study, roster(list(rows))), rows), signed=True)


CROWDED = ft.Study(
    target=ft.ATE(outcome="y", treatment="a"),
    outcome_model=ft.GLM("a + w0 + w1 + w2 + w3"),
    treatment_model=ft.GLM("1"),
    variables=declare(y=(-4, 4), a="binary", w0=(-4, 4), w1=(-4, 4), w2=(-4, 4), w3=(-4, 4)),
)


def crowded() -> dict[str, Any]:
    """Four silos with few people to a column: they state by how much shares grow if one leaves."""
    rng, data = np.random.default_rng(5), {}
    for m in range(4):
        y, *covariates = rng.standard_normal((5, 24)).clip(-4, 4)
        columns = {f"w{j}": column for j, column in enumerate(covariates)}
        data[f"silo {m}"] = {"y": y, "a": np.arange(24) % 2.0, **columns}
    return data


def _crowded() -> tuple[Plan, Mapping[str, Any]]:
    algorithm = ft.Gradient(tolerance=1e-2, optimizer=ft.Newton())
    study = dataclasses.replace(CROWDED, algorithm=algorithm)
    rows = dict(load_all(crowded(), schema_of(study)))
    return _masked((study_plan(study, roster(list(rows))), rows), signed=True)


SIX = (30, 31, 22, 24, 23, 21)  # six silos of which some retire while three still fit
RETIRING = ft.Personalized(lattice=0.05, max_updates=4, min_active=3)
SGD = ft.StochasticGradientDescent(batch=20, step=0.01, steps=3, seed=3)
CASES: dict[str, Callable[[], tuple[Plan, Mapping[str, Any]]]] = {
    "mean, gradient": lambda: _small("mean", ft.Gradient(tolerance=1e-2)),
    "mean, coded": lambda: _small("mean", ft.Coded(tolerance=0.1)),
    "two arms, newton": lambda: _small("two arms", ft.Gradient(tolerance=1e-2, optimizer=ft.Newton())),
    "mean, sgd": lambda: _small("mean", ft.Gradient(tolerance=1e-9, optimizer=SGD, max_updates=1)),
    "two arms, coded": lambda: _small("two arms", ft.Coded(tolerance=0.1)),
    "mean, local": lambda: _small("mean", ft.LocalAverage(tolerance=1e-3, max_updates=2)),
    "mean, coded raw": lambda: _small("mean", ft.Coded(tolerance=0.2, coordinates="raw"), (20, 21, 22)),
    "mean, personalized": lambda: _small("mean", ft.Personalized(lattice=0.05, max_updates=3), (20, 25, 22)),
    "mean, personalized by noise": lambda: _small("mean", ft.Personalized(noise=0.5, max_updates=2)),
    "mean, personalized and counted": lambda: _small("mean", RETIRING, SIX),
    "two arms, adaptive": lambda: _small("two arms", ft.Adaptive(tolerance=0.1)),
    "study": _study,
    "mean, masked": lambda: _masked(_small("mean", ft.Coded(tolerance=0.1), (20, 21, 22)), signed=False),
    "two arms, relayed": lambda: _masked(
        _small("two arms", ft.Coded(tolerance=0.1), (22, 31, 25)), signed=True
    ),
    "study, relayed": lambda: _masked(_study(3), signed=True),
    "study, looks": lambda: _masked(_study(6, 210), signed=True),
    "study, void": _void,
    "study, gains": _crowded,
    "mean, personalized and relayed": lambda: _masked(_small("mean", RETIRING, SIX), signed=True),
}
# Noise differs from run to run, so that no run is a reference for another.
NOISY = {"study, noisy": _noisy}
NAMES = tuple(CASES)
TURNS = (*NAMES, *NAMES[:3], *NAMES[:3], *NAMES[:3])  # cheap ones come more often


@cache
def reference(case: str) -> Reference:
    plan, rows = CASES[case]()
    run = run_until_done(plan, rows, 0, faults=Faults(), keeper=keeper_without_ledger)
    assert run.finished is not None, run.error
    assert not run.counts
    return Reference(
        plan=plan,
        rows=rows,
        finished=run.finished,
        records={silo: records(medium) for silo, medium in run.media.items()},
        local={silo: restarted(plan, rows, silo, medium).local for silo, medium in run.media.items()},
    )


# What the guard knows of batches' partition and of the silos' looks has to survive a restart too.
POLICY = dataclasses.replace(UNGUARDED, min_batch=1, min_people=1.2, min_pooled=2.0, colluders=1)


def keeper_without_ledger(silo: str, journal: Journal, _: Fate) -> Keeper:
    key = key_of(silo)
    return Keeper(journal=journal, policy=POLICY, clock=lambda: NOON, key=key, mask_key=key.mask_key)


def restarted(
    plan: Plan, rows: Mapping[str, Any], silo: str, medium: bytes, ledger: Ledger | None = None
) -> Silo:
    """The silo as it is after one more restart, in which nothing goes wrong."""
    calm = Fate(0, Faults())
    keeper = keeper_without_ledger(silo, SimulatedJournal(bytearray(medium), calm), calm)
    return Silo(silo, plan, rows[silo], keeper=dataclasses.replace(keeper, ledger=ledger))


def records(medium: bytes) -> list[tuple[bytes, bytes]]:
    journal = SimulatedJournal(bytearray(medium), Fate(0, Faults()))
    found = [msgspec.msgpack.decode(data, type=Record) for data in journal.records[1:]]
    return [(record.request, record.reply) for record in found]


def run_schedule(seed: int, folder: Path, faults: Faults | None = None) -> tuple[Reference, SimulatedRun]:
    expected = reference(TURNS[seed % len(TURNS)])
    with ExitStack() as opened:

        def keeper(silo: str, journal: Journal, fate: Fate) -> Keeper:
            ledger = SimulatedLedger(folder / f"{silo}.jsonl", fate)
            opened.callback(ledger.close)
            return dataclasses.replace(keeper_without_ledger(silo, journal, fate), ledger=ledger)

        return expected, run_until_done(expected.plan, expected.rows, seed, faults=faults, keeper=keeper)


def differences(seed: int, faults: Faults | None = None) -> tuple[list[str], Counter[str]]:
    """What a schedule changed, and what befell it."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        expected, run = run_schedule(seed, Path(folder), faults)
        found = [*_ending(expected, run), *_said(expected, run)]
        for silo in expected.plan.silos:
            found += _kept(expected, run, silo, Path(folder) / f"{silo}.jsonl")
    befell = Counter({str(kind): count for kind, count in run.counts.items()})
    befell["resumed by the server"] = run.sessions - 1
    befell["ended at the deadline, a silo being dead"] = int(run.finished is None)
    return found, befell


def _memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - a private folder is made in it


def _ending(expected: Reference, run: SimulatedRun) -> list[str]:
    if run.finished is None:
        named = isinstance(run.error, DeadlineError) and set(run.error.silos) & run.network.dead
        return [] if named else [f"did not end: {run.error}"]
    found = []
    if encoded(run.finished) != encoded(expected.finished):
        found.append("another transcript")
    if (
        run.finished.account != expected.finished.account
        or run.finished.retired_at != expected.finished.retired_at
    ):
        found.append("another account")
    if not same(_estimate(run.finished.outcome), _estimate(expected.finished.outcome)):
        found.append("another estimate")
    return found


def _estimate(outcome: Outcome) -> Estimate | None:
    return outcome.estimate if isinstance(outcome, Targeted) else None


def _said(expected: Reference, run: SimulatedRun) -> list[str]:
    """No request was ever answered in two ways, nor in another than without faults."""
    answers = {(silo, request): reply for silo, said in expected.records.items() for request, reply in said}
    return [
        f"{silo} gave another answer"
        for (silo, request), replies in run.network.told.items()
        if replies - PASSING - {answers.get((silo, request), b"")}
    ]


def _kept(expected: Reference, run: SimulatedRun, silo: str, ledger: Path) -> list[str]:
    """The journal, the ledger and the silo's own outcome."""
    found, kept, whole = [], records(run.media[silo]), expected.records[silo]
    if kept != (whole if run.finished is not None else whole[: len(kept)]):
        found.append(f"{silo} has another journal")
    with closing(Ledger(ledger, sync=False)) as opened:
        own = restarted(expected.plan, expected.rows, silo, run.media[silo], opened).local
    lines = [line for line in read(ledger) if line["decision"] == "answered"]
    if [(line["asked"], line["replied"]) for line in lines] != [(text(a), text(b)) for a, b in kept]:
        found.append(f"{silo} has another ledger")
    before = expected.local[silo]
    if run.finished is not None and not same(own and own.estimate, before and before.estimate):
        found.append(f"{silo} has another outcome of its own")
    return found


def encoded(finished: Finished) -> bytes:
    transcript = finished.transcript
    return msgspec.msgpack.encode((transcript.session, transcript.exchanges), order="deterministic")


def same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a.psi, b.psi) and np.array_equal(a.covariance, b.covariance, equal_nan=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs through seeded faults.")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    arguments = parser.parse_args()
    befell: Counter[str] = Counter()
    diverged, started = 0, time.monotonic()
    for done, seed in enumerate(range(arguments.first, arguments.first + arguments.schedules), start=1):
        found, counts = differences(seed)
        befell += counts
        diverged += bool(found)
        for what in found:
            print(f"\nseed {seed} ({TURNS[seed % len(TURNS)]}): {what}", flush=True)  # noqa: T201
        if done % 100 == 0 or done == arguments.schedules:
            rate = done / (time.monotonic() - started)
            left = (arguments.schedules - done) / rate
            line = f"{done:,} schedules, {diverged} divergent, {rate:.0f}/s, {left / 60:.0f} min left"
            print(f"\r{line:<79}", end="", flush=True)  # noqa: T201
    print()  # noqa: T201
    for what in (*map(str, Kind), *sorted(set(befell) - set(map(str, Kind)))):
        print(f"{befell[what]:>12,}  {what}")  # noqa: T201
    return int(diverged > 0)


if __name__ == "__main__":
    sys.exit(main())
