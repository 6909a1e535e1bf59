"""``fedtmle deploy``: kits for a consortium, a doctor for each party, a demonstration."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import CODES, Exit, reporting, require_flare

app = typer.Typer(
    no_args_is_help=True,
    help="Run studies across machines, on NVIDIA FLARE (pip install 'fedtmle[flare]').",
)


DEPLOYMENT = typer.Argument(..., help="The deployment's folder, which `deploy init` made.")


@app.command(epilog=CODES)
def init(
    folder: Path = typer.Argument(..., help="The folder to write; it must be new or empty."),
    silo: list[str] = typer.Option(..., "--silo", help="A silo's name in studies; repeat for each silo."),
    host: str = typer.Option(..., help="The host name or address at which silos reach the server."),
    port: int = typer.Option(8002, min=1, max=65535, help="The server's port; it needs no other."),
    days: int = typer.Option(360, min=1, help="For how many days the certificates are valid."),
    as_json: bool = typer.Option(False, "--json", help="Print the kits as JSON."),
) -> None:
    """Make certificates and a start-up kit for the server and each silo."""
    import json

    require_flare()
    from fedtmle.deploy.provision import provision

    with reporting(as_json=as_json):
        made = provision(folder, silos=silo, host=host, port=port, days=days)
        kits = {name: str(made.kit(name)) for name in made.sites}
        if as_json:
            typer.echo(json.dumps({"server": str(made.server), "silos": kits}))
            return
        typer.echo(f"The server's kit: {made.server}")
        typer.echo("Hand these kits out, each to its silo alone and by a safe way: it holds a private key.")
        typer.echo("\n".join(f"  {name}: {path}" for name, path in kits.items()))
        typer.echo(
            f"Keep {made.path / 'authority'} secret: whoever has it can make new certificates.\n"
            f"Next:\n  fedtmle server start {made.server}\n"
            "and at each silo:\n  fedtmle silo start <its kit> --silo-file silo.toml"
        )


@app.command(epilog=CODES)
def add(
    folder: Path = DEPLOYMENT,
    silo: str = typer.Option(..., "--silo", help="The new silo's name in studies."),
    days: int = typer.Option(360, min=1, help="For how many days its certificate is valid."),
) -> None:
    """Make the kit of one more silo; the server and the other silos need nothing new."""
    require_flare()
    from fedtmle.deploy.kits import read_deployment
    from fedtmle.deploy.provision import add_silo

    with reporting(as_json=False):
        made = add_silo(read_deployment(folder), silo, days=days)
        typer.echo(f"Hand this kit to its silo alone, by a safe way: {made.kit(silo)}")


@app.command(epilog=CODES)
def remove(
    folder: Path = DEPLOYMENT,
    silo: str = typer.Option(..., "--silo", help="The silo to remove."),
) -> None:
    """Remove a silo: the server refuses it at once, and stops the runs that need it."""
    require_flare()
    from fedtmle.deploy.kits import read_deployment
    from fedtmle.deploy.provision import remove_silo

    with reporting(as_json=False):
        remove_silo(read_deployment(folder), silo)
        typer.echo(f"Removed: the server refuses '{silo}' from now on.")


@app.command(epilog=CODES)
def sign(
    folder: Path = DEPLOYMENT,
    request: Path = typer.Argument(..., help="The request that `fedtmle silo renew` wrote."),
    out: Path = typer.Option(..., "--out", help="The certificate to write, for the silo."),
    days: int = typer.Option(360, min=1, help="For how many days it is valid."),
) -> None:
    """Sign a silo's request for a certificate. Check with the silo that the request is its own."""
    require_flare()
    from fedtmle.deploy.authority import sign as certify
    from fedtmle.deploy.kits import read_deployment

    with reporting(as_json=False):
        name, certificate = certify(read_deployment(folder), request.read_bytes(), days=days)
        out.write_bytes(certificate)
        typer.echo(f"Send {out} to '{name}'. It holds no secret.")


@app.command(epilog=CODES)
def doctor(
    kit: Path = typer.Argument(..., help="The party's start-up kit, on its own machine."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check everything that a party needs, and say how to fix what is wrong."""
    import json
    from dataclasses import asdict

    require_flare()
    from fedtmle.deploy.doctor import examine
    from fedtmle.deploy.kits import read_kit

    with reporting(as_json=as_json):
        findings = examine(read_kit(kit))
        if as_json:
            typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
        else:
            typer.echo("\n".join(str(finding) for finding in findings))
        if not all(finding.ok for finding in findings):
            raise typer.Exit(int(Exit.DEFECTS))


@app.command(epilog=CODES)
def service(
    kit: Path = typer.Argument(..., help="The party's start-up kit, on its own machine."),
    user: str = typer.Option(..., help="The account that runs the party; not root."),
    out: Path | None = typer.Option(None, "--out", help="The unit file to write; by default it is printed."),
) -> None:
    """Write a systemd unit that runs the party from boot on, with few rights."""
    require_flare()
    from fedtmle.deploy.kits import read_kit
    from fedtmle.deploy.service import unit

    with reporting(as_json=False):
        text = unit(read_kit(kit), user=user)
        if out is None:
            typer.echo(text, nl=False)
            return
        out.write_text(text, encoding="utf-8")
        typer.echo(
            f"Wrote {out}. To install it, as root:\n"
            f"  cp {out} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {out.name}"
        )


@app.command(epilog=CODES)
def demo(
    silos: int = typer.Option(8, min=2, max=8, help="How many of the 8 IHDP hospitals take part."),
    port: int | None = typer.Option(None, help="The server's port; by default a free one."),
    as_json: bool = typer.Option(False, "--json", help="Print the comparison as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
) -> None:
    """Run a study over a real server and silos on this machine; compare it with a run in one process."""
    require_flare()
    from fedtmle.deploy.demo import run_demo

    with reporting(as_json=as_json):
        same = run_demo(silos, port=port, as_json=as_json, quiet=quiet)
        if not same:
            raise typer.Exit(int(Exit.NOT_CONVERGED))
