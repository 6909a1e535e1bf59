"""The protocol, with 10 rows in each silo: many silos, many coordinates, and what is on top."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import fedtmle as ft
from benchmarks.table import Row
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol import messages
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle_core.journal import MemoryJournal

ROWS, ROUNDS = 10, 200


def rows(quick: bool) -> Iterator[Row]:
    _run(2)  # compiles
    for silos in (2, 10, 100) if quick else (2, 10, 100, 1_000):
        cpu, wall, rounds, _ = _run(silos)
        note = f"{rounds} rounds: {cpu:.1f} s of CPU, {ROWS} rows a silo"
        yield Row(
            group="scaling in M",
            what=f"{silos} silos in one process, journals in memory",
            against="60 s" if silos == 1_000 else "",
            unit="s",
            ours=wall,
            theirs=60.0 if silos == 1_000 else None,
            most=1.0 if silos == 1_000 else None,
            note=note + f"; {1e6 * cpu / (silos * rounds):.0f} us of CPU a silo and round",
        )
    yield from _overheads()
    yield from _dimensions((1, 10) if quick else (1, 2, 5, 10, 20, 50))


def _run(silos: int, *, guarded: bool = False, noted: bool = False) -> tuple[float, float, int, int]:
    """Seconds of CPU and by the clock, rounds, and bytes exchanged."""
    rng = np.random.default_rng(0)
    problem = ft.Mean(bounds=(0.0, 20.0))
    law = problem.start(3.0)
    descent = ft.GradientDescent(step=0.01, max_steps=ROUNDS - 2, stop=1e-9)
    algorithm = ft.Gradient(tolerance=1e-12, optimizer=descent, max_updates=1)
    names = [f"silo {m}" for m in range(silos)]
    plan = Plan(program=TargetingProgram(problem=problem, law=law, algorithm=algorithm), roster=roster(names))
    with tempfile.TemporaryDirectory() as folder:
        parties = []
        for name in names:
            own = read_rows(problem, name, rng.uniform(0, 20, ROWS))
            ledger = Ledger(Path(folder) / f"{name}.jsonl", sync=False) if noted else None
            policy = UNGUARDED
            if guarded:  # every gradient is looked at; so few rows are not refused
                policy = replace(policy, min_people=1.001)
            keeper = Keeper(policy=policy, journal=MemoryJournal(), ledger=ledger)
            parties.append(Silo(name, plan, own, keeper=keeper))
        begin, clock = time.process_time(), time.perf_counter()
        finished = Session(plan, InProcess(parties)).run()
        spent = time.process_time() - begin, time.perf_counter() - clock
        for party in parties:
            party._keeper.close()
    account = finished.account
    carried = sum(account.bytes_up.values()) + sum(account.bytes_down.values())
    return *spent, sum(account.rounds.values()), carried


def _overheads() -> Iterator[Row]:
    """One silo's round: bare, with every check of rows, with a ledger; and its two messages alone."""
    silos = 20
    runs = {"bare": {}, "guarded": {"guarded": True}, "ledger": {"noted": True}}
    least = {name: min(_run(silos, **options)[0] for _ in range(3)) for name, options in runs.items()}
    share = silos * ROUNDS
    bare = 1e6 * least["bare"] / share
    yield Row(
        group="a silo's round", what="protocol, journal in memory, 10 rows", against="", unit="us", ours=bare
    )
    for what, name in (
        ("with the guard's look at every gradient", "guarded"),
        ("with a ledger on disk", "ledger"),
    ):
        yield Row(
            group="a silo's round",
            what=what,
            against="without",
            unit="us",
            ours=1e6 * least[name] / share,
            theirs=bare,
        )
    yield Row(
        group="a silo's round",
        what="transport in process: two messages encoded and decoded",
        against="the round",
        unit="us",
        ours=_messages(),
        theirs=bare,
        note="over NVIDIA FLARE see flare_round",
    )


def _messages() -> float:
    payload = messages.Payload(400, bytes(50))
    ask, answer = messages.Ask(bytes(16), 7, payload), messages.Answered(7, payload)
    count = 5_000
    begin = time.process_time()
    for _ in range(count):
        messages.decode_request(messages.encode(ask))
        messages.decode_reply(messages.encode(answer))
    return 1e6 * (time.process_time() - begin) / count


def _dimensions(sizes: tuple[int, ...]) -> Iterator[Row]:
    """One fused gradient of d coordinates, beside d passes of one."""
    from fedtmle_core import kernels, parallel
    from fedtmle_core.types import Family, Part

    n = 200_000
    parallel.set_threads(1)
    for d in sizes:
        X, eps = np.random.default_rng(d).normal(size=(d, n)), np.full(d, 0.1 / d)
        rows, least = kernels.glm_rows(Family.LOGISTIC, X), float("inf")
        for _ in range(6):
            begin = time.process_time()
            kernels.glm_sums(rows, eps, Part.GRADIENT, (40,) * d)
            least = min(least, time.process_time() - begin)
        yield Row(
            group="scaling in d",
            what=f"gradient, d = {d}, 1 thread",
            against="",
            unit="ns/row (CPU)",
            ours=1e9 * least / n,
            note=f"{1e9 * least / (n * d):.2f} ns a row and coordinate",
        )
    parallel.set_threads(None)
