"""``fedtmle budget``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import reporting, say


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
    from fedtmle.text.privacy_cost import SIZES, cost_table, render

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
            say(render(plan, table, smallest))
