"""``fedtmle bounds``."""

from __future__ import annotations

from pathlib import Path

import typer


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
