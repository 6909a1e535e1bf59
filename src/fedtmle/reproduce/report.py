"""RESULTS.md: what was run, what each sentence of section 5 turned out to be, and the numbers."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedtmle import __version__
from fedtmle.reproduce.extra import Extra
from fedtmle.reproduce.extra_report import extra_sections
from fedtmle.reproduce.scenario import ROUND_BUDGET, STANDSTILL, Method
from fedtmle.reproduce.sentences import Finding, findings
from fedtmle.reproduce.study import TIME_BUDGET, Study

LATENCIES = (0.0, 0.005, 0.02, 0.1)
ENOUGH_SEEDS = 5


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What the measurements cost on this machine."""

    wall: float
    compute: float  # seconds charged to all silos and the server, shared work as often as needed
    workers: int


def report(study: Study | None, extra: Extra | None, effort: Effort) -> str:
    """The whole file."""
    sections = ["# The paper's experiments, as they came out here", "", *_conditions(study, effort)]
    if study is not None:
        sections += [*_sentences(study), *_latencies(study), *_reference(study), *_endpoints(study)]
    if extra is not None:
        sections += extra_sections(extra)
    return "\n".join(sections) + "\n"


def _conditions(study: Study | None, effort: Effort) -> Iterator[str]:
    yield (
        f"fedtmle {__version__}, Python {platform.python_version()}, {platform.machine()}; "
        f"{effort.workers} worker process(es), {effort.wall:.0f} s in all."
    )
    if study is None:
        return
    seeds = ", ".join(map(str, study.seeds))
    yield from (
        "",
        f"n = {study.scale.n:,}, pilot sample {study.scale.pilot:,}, M in {study.clients}, "
        f"seeds {seeds}. Charged to all parties together: {effort.compute:.0f} s of compute.",
        "",
        "* **Time** is simulated parallel time of a synchronous federation: per round the slowest silo's "
        f"CPU time, the server's, and a link latency of {1e3 * study.latency:g} ms (request and reply). Work "
        "on the law (quadrature, normalisers) is done once in this process, and every party that needs it is "
        "charged its measured time, as if it had done it itself. Set-up: the pilot density, the greetings.",
        "* **Reference unit**: FedTMLE-G's time to r <= 0.01 r^0 on DGP 1, random partition, M = "
        f"{study.scale.reference_clients}, of the same seed.",
        f"* **Stops**: G and L at r <= {study.scale.tolerance:g}, Algorithm 4 (one step per update) at a "
        f"certified r <= {study.scale.coded_tolerance:g}; L also when an update is shorter than "
        f"{STANDSTILL:g}, its fixed point. After its stop a method keeps its last density, in time and up "
        f"to {ROUND_BUDGET} rounds.",
        "* **A density counts** once its last eps is pooled and its law rebuilt. Figure 3 uses "
        f"{TIME_BUDGET} units. Losses are P_n L; the decrease is P_n L(p^0) less the lowest loss of any run.",
        "* Different methods solve the same equation with different densities, so even converged runs differ "
        "in loss.",
    )
    if len(study.seeds) < ENOUGH_SEEDS:
        yield f"* Only {len(study.seeds)} seed(s): the verdicts below are no more than an indication."


def _sentences(study: Study) -> Iterator[str]:
    yield from ("", "## The sentences of section 5", "")
    found = findings(study)
    for verdict in ("confirmed", "mixed", "not confirmed"):
        names = [f.sentence.name for f in found if f.verdict == verdict]
        yield f"* {verdict}: {len(names)} ({', '.join(names) or 'none'})"
    required = [f for f in found if f.sentence.required]
    counts = ", ".join(f"{f.sentence.name} in {f.held} of {len(f.evidence)} panels" for f in required)
    yield f"* required to hold: {counts}"
    for finding in found:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    sentence = finding.sentence
    yield from (
        "",
        f"### {sentence.name}: {finding.verdict} ({finding.held} of {len(finding.evidence)})",
        "",
        f"> {sentence.quote}",
        "",
        f"Asked: {sentence.criterion}.{' Required to hold.' if sentence.required else ''}",
        "",
        f"| panel | holds | {sentence.number}: median | least | greatest |",
        "|---|---|---|---|---|",
    )
    for where, (held, total, middle, least, greatest) in finding.by_panel().items():
        yield f"| {where} | {held} of {total} | {middle:.3g} | {least:.3g} | {greatest:.3g} |"


def _latencies(study: Study) -> Iterator[str]:
    """The same runs read at other latencies: rounds are dear or cheap, computation is as measured."""
    views = [Study(study.runs, latency) for latency in LATENCIES]
    table = [findings(view) for view in views]
    header = " | ".join(f"{1e3 * latency:g} ms" for latency in LATENCIES)
    yield from (
        "",
        "## Sensitivity to the link latency",
        "",
        "Panels that hold, of all; rows that change only.",
        "",
    )
    yield f"| sentence | {header} |"
    yield "|---" * (len(LATENCIES) + 1) + "|"
    units = " | ".join(f"{view.unit(study.seeds[0]):.3g} s" for view in views)
    yield f"| *reference unit, seed {study.seeds[0]}* | {units} |"
    for row in zip(*table, strict=True):
        if len({finding.held for finding in row}) > 1:
            cells = " | ".join(f"{finding.held} of {len(finding.evidence)}" for finding in row)
            yield f"| {row[0].sentence.name} | {cells} |"


def _reference(study: Study) -> Iterator[str]:
    yield from ("", "## The reference unit", "", "| seed | seconds |", "|---|---|")
    yield from (f"| {seed} | {study.unit(seed):.4f} |" for seed in study.seeds)


def _endpoints(study: Study) -> Iterator[str]:
    """Each converged run's Psi against the direct pooled solution."""
    yield from (
        "",
        "## The endpoint check",
        "",
        "Psi(p^K) against the direct solution of the pooled transport problem: the largest coordinate of the "
        "difference, over the runs that converged (and, for the record, over those that did not).",
        "",
        "| method | converged | worst error | worst error / r^K | worst error / SE | others | their worst |",
        "|---|---|---|---|---|---|---|",
    )
    for method in Method:
        runs = [run for run in study.runs if run.method is method]
        done = [run for run in runs if run.converged]
        others = [run for run in runs if not run.converged]
        ratio = _worst([run.endpoint_error / run.checkpoints[-1].residual for run in done])
        yield (
            f"| {method} | {len(done)} of {len(runs)} | {_worst([run.endpoint_error for run in done])} "
            f"| {ratio} "
            f"| {_worst([run.endpoint_error / run.std_error for run in done])} "
            f"| {', '.join(sorted({run.status for run in others})) or 'none'} "
            f"| {_worst([run.endpoint_error for run in others])} |"
        )


def _worst(values: Sequence[float]) -> str:
    return f"{max(values):.2g}" if values else "-"
