"""Commands before a study runs: ``fedtmle init``, ``validate``, ``preflight``, ``budget``, ``bounds``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.base import Exit, fail, reporting, say

if TYPE_CHECKING:
    from fedtmle.studies.validate import Validation


def init(
    folder: Path = typer.Argument(Path(), help="The folder to write to; it is created if need be."),
    force: bool = typer.Option(False, "--force", help="Overwrite existing files."),
    all_keys: bool = typer.Option(
        False, "--all-keys", help="Also write every other key of a study file, with its default, in comments."
    ),
    table: Path | None = typer.Option(
        None, "--from", help="Draft the study's dictionary from this table (.csv, .parquet or a silo file)."
    ),
    outcome: str | None = typer.Option(None, help="With --from: the outcome's column."),
    treatment: str | None = typer.Option(None, help="With --from: the treatment's column."),
    as_json: bool = typer.Option(False, "--json", help="Print the files' names as JSON."),
) -> None:
    """Write a short study with two example silos and toy records, ready to run.

    With --from, write a study whose dictionary is drafted from a table instead, for a person to edit.
    """
    import json

    from fedtmle.studyfile.draft import write_draft
    from fedtmle.studyfile.template import write_template

    with reporting(as_json=as_json):
        if table is None:
            written = [str(path) for path in write_template(folder, force=force, all_keys=all_keys)]
        else:
            written = [str(write_draft(folder, table, outcome, treatment, force=force))]
        if as_json:
            say(json.dumps({"written": written}))
            return
        study = written[0]
        say("\n".join(["Written:", *(f"  {path}" for path in written)]))
        if table is not None:
            say(
                "It is a draft: kinds are guesses, ranges come from this table's records, and the\n"
                "formulas have every column. Edit it first; its head says how.\n"
                f"Next:\n  fedtmle validate {study}"
            )
        else:
            say(f"Next:\n  fedtmle validate {study}\n  fedtmle run {study}")


def validate(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Check a study file, its silo files and their data; report all defects with file and line."""
    import json

    from fedtmle.studies.validate import validate as check

    with reporting(as_json=as_json):
        checked = check(study)
        if checked.defects:
            fail(checked.defects, Exit.DEFECTS, as_json=as_json)
        if as_json:
            say(json.dumps(_summary(checked)))
        else:
            say("\n".join(_lines(_summary(checked))))
            for warning in checked.warnings:
                say(f"Warning: {warning}", err=True)


def _summary(checked: Validation) -> dict[str, object]:
    if checked.file is None or checked.schema is None:
        raise AssertionError("a validation without defects has read the study")
    return {
        "defects": [],
        "warnings": [warning.to_dict() for warning in checked.warnings],
        "question": checked.file.study.target.question,
        "columns": {
            column.name: column.kind.value + (", may be missing" if column.may_be_missing else "")
            for column in checked.schema.columns
        },
        "silos": {name: table.n_rows for name, table in checked.tables.items()},
    }


def _lines(summary: dict[str, object]) -> list[str]:
    from fedtmle.layout import aligned, wrapped

    columns, silos = summary["columns"], summary["silos"]
    if not (isinstance(columns, dict) and isinstance(silos, dict)):
        raise AssertionError("a summary has columns and silos")
    rows = [("silo", "records"), *((name, f"{count:,}") for name, count in silos.items())]
    return [
        *wrapped(str(summary["question"])),
        "",
        *wrapped("Columns: " + "; ".join(f"{name} ({kind})" for name, kind in columns.items()) + "."),
        "",
        *aligned(rows),
        "",
        "No defects found.",
    ]


def preflight(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    silo: str | None = typer.Option(
        None, help="Show this silo's own table in full: for its owner, on its machine."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the tables as JSON."),
) -> None:
    """Describe the cohort before a study: Table 1 by arm, missing values, overlap; small cells are hidden."""
    import json

    from fedtmle.studies.preflight import preflight as describe
    from fedtmle.studyfile.file import read_study
    from fedtmle.text.preflight import render_preflight

    with reporting(as_json=as_json):
        file = read_study(study)
        if silo is not None and silo not in file.silos:
            expected = f"expected one of the study's silos: {', '.join(file.silos)}"
            raise typer.BadParameter(expected, param_hint="--silo")
        view = describe(file.study, file.silos, silo=silo)
        say(json.dumps(view.to_dict()) if as_json else render_preflight(view))


def budget(
    study: Path = typer.Argument(..., help="The study file, study.toml, with a [privacy] section."),
    n: list[int] = typer.Option([], "--n", metavar="N", help="Records over all silos; may be repeated."),
    epsilon: list[float] = typer.Option(
        [], "--epsilon", metavar="EPSILON", help="Shown beside the study's own; may be repeated."
    ),
    silos: int | None = typer.Option(
        None, help="Silos that share the noise; those of the file unless given."
    ),
    treated: float = typer.Option(0.5, help="Assumed share of the second arm."),
    outcome_mean: float | None = typer.Option(None, help="Assumed mean outcome, in its unit."),
    outcome_sd: float | None = typer.Option(
        None, help="Assumed standard deviation of an outcome that is a number, given the covariates."
    ),
    observed: float = typer.Option(0.8, help="Assumed share of observed outcomes, if some may be missing."),
    strength: float = typer.Option(0.6, help="Assumed standard deviation of each model's linear predictor."),
    as_json: bool = typer.Option(False, "--json", help="Print the table as JSON."),
) -> None:
    """Plan a study with noise: expected widths by n and epsilon, before there are any data."""
    import json
    from dataclasses import asdict

    from fedtmle.studies.privacy_cost import PrivacyPlan
    from fedtmle.studyfile.file import read_study
    from fedtmle.text.preflight import SIZES, cost_table, render_cost

    with reporting(as_json=as_json):
        file = read_study(study)
        plan = PrivacyPlan(
            study=file.study,
            silos=len(file.silos) if silos is None else silos,
            treated=treated,
            outcome_mean=outcome_mean,
            outcome_sd=outcome_sd,
            observed=observed,
            strength=strength,
        )
        table = cost_table(plan, sorted(n) or SIZES, epsilon)
        smallest = plan.smallest_n()
        if as_json:
            costs = [asdict(cost) | {"inflation": cost.inflation} for line in table for cost in line]
            say(json.dumps({"costs": costs, "smallest_n": smallest}))
        else:
            say(render_cost(plan, table, smallest))


def bounds(
    n: int = typer.Option(..., "--n", help="Rows over all silos."),
    silos: int = typer.Option(..., "--silos", help="M, the number of silos."),
    dim: int = typer.Option(..., "--dim", help="d, the coordinates of the target."),
    tolerance: float = typer.Option(
        1e-3, help="delta, a bound on the pooled EIF mean, in the target's unit."
    ),
    beta: float | None = typer.Option(None, help="Smoothness, in the run's coordinates (whitened: near 1)."),
    delta_loss: float | None = typer.Option(
        None, help="Delta, by how much targeting can lower the mean loss."
    ),
    kappa: float | None = typer.Option(None, help="Re-centring constant; it enters the bits only as a log."),
    gradient: float | None = typer.Option(None, help="G, the largest entry of a silo's first gradient."),
    scale: float | None = typer.Option(None, help="b = ||C^-1|| of whitened coordinates; 1 if raw."),
    std_error: float | None = typer.Option(None, help="Expected standard error at this n."),
    pilot: Path | None = typer.Option(
        None,
        help="What `run --observe --out` saved of a coded run; its constants are the defaults. "
        "Else the paper's benchmark.",
    ),
    latency: float = typer.Option(0.05, help="Seconds of one upload-broadcast round."),
    bandwidth: float = typer.Option(1e6, help="Bits per second of one silo's link."),
    share: float = typer.Option(0.01, help="The part of a standard error that counts as negligible."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Plan a study: what the theorems allow it to cost, and the tolerance that it needs.

    All costs are proved worst cases for `Coded`; runs stay far below them.
    """
    import json
    from dataclasses import asdict, replace

    from fedtmle.errors import InputError
    from fedtmle.theory.planning import BENCHMARK, pilot_from_result, plan

    try:
        base = BENCHMARK
        if pilot is not None:
            base = pilot_from_result(json.loads(pilot.read_text()), str(pilot))
        given = {"beta": beta, "kappa": kappa, "Delta": delta_loss, "G": gradient, "b": scale}
        chosen = replace(base, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]  # all are floats
        if std_error is not None:
            chosen = replace(chosen, std_error=std_error, n=n)
        made = plan(
            n=n,
            M=silos,
            d=dim,
            tolerance=tolerance,
            pilot=chosen,
            latency=latency,
            bandwidth=bandwidth,
            share=share,
        )
    except (InputError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({"plan": asdict(made), "constants": asdict(chosen)}))
        return
    assumed = [name for name, value in given.items() if value is None]
    lines = [
        f"{silos} silos, n = {n:,}, d = {dim}, tolerance {tolerance:g}",
        "",
        f"  rounds R       at most {made.rounds:,.0f}",
        f"  bits B         at most {made.bits:.4g} over all links (with C = 256: {made.bits_universal:.3g})",
        f"  per silo       at most {made.bits_per_silo:.4g} bits",
        f"  time           at most {_duration(made.seconds)} at {latency:g} s a round, {bandwidth:g} bit/s",
        f"  history code   at most {made.history_bits_per_update:.0f} bits if one update is accepted",
        "",
        f"  standard error {made.std_error:.3g}; the tolerance is {made.tolerance_over_std_error:.3g} of it",
        f"  negligible     tolerance {made.negligible_tolerance:.3g} ({share:g} of a standard error)",
        f"  cor:inference  tolerance {made.scheduled_tolerance:.3g} (standard error over log n)",
        "",
        f"Constants: beta {chosen.beta:g}, Delta {chosen.Delta:g}, kappa {chosen.kappa:g}, G {chosen.G:g}, "
        f"b {chosen.b:g}.",
    ]
    if assumed:
        lines += [f"Not given, so from a pilot: {', '.join(assumed)}.", f"Pilot: {chosen.source}."]
    lines += [
        f"Bounds are worst cases: that pilot took {chosen.rounds:,} rounds and {chosen.bits:,} bits, "
        f"here {_duration(made.seconds_like_pilot)}."
    ]
    typer.echo("\n".join(lines))


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} s"
