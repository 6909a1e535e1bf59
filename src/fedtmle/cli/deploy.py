"""``fedtmle deploy``: kits for a consortium, a doctor for each party, a demonstration."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import Exit, reporting, require_flare, say
from fedtmle.cli.help import ReaderGroup, epilog

app = typer.Typer(
    cls=ReaderGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Run studies across machines, on NVIDIA FLARE (pip install 'fedtmle[flare]').",
)


DEPLOYMENT = typer.Argument(..., help="The deployment's folder, which `deploy init` made.")


@app.command(epilog=epilog("deploy init trial --silo north --silo south --host fed.example.org"))
def init(
    folder: Path = typer.Argument(..., help="The folder to write; it must be new or empty."),
    silo: list[str] = typer.Option(
        ..., "--silo", metavar="NAME", help="A silo's name in studies; repeat for each silo."
    ),
    host: str = typer.Option(..., help="The host name or address at which silos reach the server."),
    port: int = typer.Option(8002, min=1, max=65535, help="The server's port; it needs no other."),
    statistician: list[str] = typer.Option(
        [],
        "--statistician",
        metavar="NAME",
        help="Who may post studies from another machine; repeat for each.",
    ),
    days: int = typer.Option(360, min=1, help="For how many days the certificates are valid."),
    as_json: bool = typer.Option(False, "--json", help="Print the kits as JSON."),
) -> None:
    """Make certificates and a start-up kit for the server and each silo."""
    import json

    require_flare()
    from fedtmle.deploy.provision import provision

    with reporting(as_json=as_json):
        made = provision(folder, silos=silo, host=host, port=port, days=days, statisticians=statistician)
        kits = {name: str(made.kit(name)) for name in made.sites}
        people = {name: str(made.statistician(name)) for name in made.statisticians}
        if as_json:
            parties = {"server": str(made.server), "silos": kits, "statisticians": people}
            say(json.dumps(parties))
            return
        say(f"The server's kit: {made.server}")
        say("Hand these kits out, each to its owner alone and by a safe way: it holds a private key.")
        say("\n".join(f"  {name}: {path}" for name, path in (kits | people).items()))
        say(
            f"Keep {made.path / 'authority'} secret: whoever has it can make new certificates.\n"
            f"Next:\n  fedtmle server start {made.server}\n"
            "and at each silo:\n  fedtmle silo start <its kit> --silo-file silo.toml"
        )


@app.command(epilog=epilog("deploy add trial --silo west"))
def add(
    folder: Path = DEPLOYMENT,
    silo: str | None = typer.Option(None, "--silo", help="The new silo's name in studies."),
    statistician: str | None = typer.Option(
        None, "--statistician", help="Who may post studies from another machine."
    ),
    days: int = typer.Option(360, min=1, help="For how many days the certificate is valid."),
) -> None:
    """Make the kit of one more silo or statistician; the server and the others need nothing new."""
    require_flare()
    from fedtmle.deploy.kits import read_deployment
    from fedtmle.deploy.provision import add_silo, add_statistician

    with reporting(as_json=False):
        made = read_deployment(folder)
        if _one_of(silo, statistician):
            path = add_silo(made, str(silo), days=days).kit(str(silo))
        else:
            path = add_statistician(made, str(statistician), days=days).statistician(str(statistician))
        say(f"Hand this kit to its owner alone, by a safe way: {path}")


@app.command(epilog=epilog("deploy remove trial --silo west"))
def remove(
    folder: Path = DEPLOYMENT,
    silo: str | None = typer.Option(None, "--silo", help="The silo to remove."),
    statistician: str | None = typer.Option(None, "--statistician", help="The statistician to remove."),
) -> None:
    """Remove a silo or a statistician: the server refuses them at once, and stops runs that need the silo."""
    require_flare()
    from fedtmle.deploy.kits import read_deployment
    from fedtmle.deploy.provision import remove_silo, remove_statistician

    with reporting(as_json=False):
        if _one_of(silo, statistician):
            remove_silo(read_deployment(folder), str(silo))
        else:
            remove_statistician(read_deployment(folder), str(statistician))
        say(f"Removed: the server refuses '{silo or statistician}' from now on.")


def _one_of(silo: str | None, statistician: str | None) -> bool:
    """Return whether a silo was named; exactly one of the two options must be given."""
    if (silo is None) == (statistician is None):
        raise typer.BadParameter("give either --silo or --statistician")
    return silo is not None


@app.command(
    epilog=epilog("deploy renew kit --out north.request", "deploy renew kit --certificate north.certificate")
)
def renew(
    folder: Path = typer.Argument(..., help="A silo's or statistician's kit, or the deployment's folder."),
    out: Path | None = typer.Option(None, "--out", help="The request to write, for the coordinator."),
    certificate: Path | None = typer.Option(None, "--certificate", help="The certificate that came back."),
    days: int = typer.Option(360, min=1, help="Of a deployment: for how many days they are valid."),
) -> None:
    """Renew a kit's certificate with a key that never leaves it: first --out, then --certificate.

    With the deployment's folder: renew the certificates of the server and the coordinator.
    """
    require_flare()
    from fedtmle.deploy.authority import install, request
    from fedtmle.deploy.kits import Role, read_deployment, read_kit
    from fedtmle.deploy.provision import renew_server

    with reporting(as_json=False):
        if (folder / "deployment.json").is_file():
            renew_server(read_deployment(folder), days=days)
            say("Renewed. Restart the server to use its new certificate.")
            return
        kit = read_kit(folder)
        if kit.role is Role.SERVER:
            raise typer.BadParameter("the server's certificate is renewed with the deployment's folder")
        if (out is None) == (certificate is None):
            raise typer.BadParameter("give --out to make a request, or --certificate to install the answer")
        if out is not None:
            out.write_bytes(request(kit))
            say(f"Send {out} to the coordinator. It holds no secret; the key stays in the kit.")
        elif certificate is not None:
            end = install(kit, certificate.read_bytes())
            restart = " Restart the silo to use it." if kit.role is Role.SILO else ""
            say(f"Installed; valid until {end:%Y-%m-%d}.{restart}")


@app.command(epilog=epilog("deploy sign trial north.request --out north.certificate"))
def sign(
    folder: Path = DEPLOYMENT,
    request: Path = typer.Argument(..., help="The request that `fedtmle deploy renew` wrote."),
    out: Path = typer.Option(..., "--out", help="The certificate to write, for the sender."),
    days: int = typer.Option(360, min=1, help="For how many days it is valid."),
) -> None:
    """Sign a request for a certificate. Check with its sender that the request is their own."""
    require_flare()
    from fedtmle.deploy.authority import sign as certify
    from fedtmle.deploy.kits import read_deployment

    with reporting(as_json=False):
        name, certificate = certify(read_deployment(folder), request.read_bytes(), days=days)
        out.write_bytes(certificate)
        say(f"Send {out} to '{name}'. It holds no secret.")


@app.command(epilog=epilog("deploy doctor kit"))
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
            say(json.dumps({"findings": [asdict(finding) for finding in findings]}))
        else:
            say("\n".join(str(finding) for finding in findings))
        if not all(finding.ok for finding in findings):
            raise typer.Exit(int(Exit.DEFECTS))


@app.command(epilog=epilog("deploy health kit --metrics"))
def health(
    kit: Path = typer.Argument(..., help="The party's start-up kit, on its own machine."),
    metrics: bool = typer.Option(False, "--metrics", help="Print the numbers as Prometheus reads them."),
) -> None:
    """Say whether the party's engine runs; the exit code is 3 if not, for a container's health check."""
    require_flare()
    from fedtmle.deploy.health import exposition, is_well, samples
    from fedtmle.deploy.kits import read_kit

    with reporting(as_json=False):
        read = samples(read_kit(kit))
        well = is_well(read)
        say(exposition(read) if metrics else ("well" if well else "not running"), nl=not metrics)
        if not well:
            raise typer.Exit(int(Exit.NOT_CONVERGED))


@app.command(epilog=epilog("deploy backup kit --out backup.tar.gz"))
def backup(
    kit: Path = typer.Argument(..., help="The party's start-up kit, on its own machine."),
    out: Path = typer.Option(..., "--out", help="The backup to write, a new .tar.gz file."),
) -> None:
    """Back up a party's kit and records, while it runs or not. The file holds private keys: keep it safe."""
    require_flare()
    from fedtmle.deploy.backup import back_up
    from fedtmle.deploy.kits import read_kit

    with reporting(as_json=False):
        count = back_up(read_kit(kit), out)
        say(f"{count} files in {out}. It holds private keys; it has no records of people.")


@app.command(epilog=epilog("deploy restore backup.tar.gz kit"))
def restore(
    archive: Path = typer.Argument(..., metavar="BACKUP", help="A backup that `deploy backup` wrote."),
    kit: Path = typer.Argument(..., help="Where the party's kit is, or shall be."),
    silo_file: Path | None = typer.Option(
        None, "--silo-file", help="Where the silo.toml is or shall be; by default, where it was."
    ),
) -> None:
    """Put a backup back. Files in place that are intact and newer stay; no plan can be answered twice."""
    require_flare()
    from fedtmle.deploy.backup import restore as put_back

    with reporting(as_json=False):
        done = put_back(archive, kit, silo_file)
        say(f"Put back: {len(done.put_back)} files. Kept, intact and newer: {len(done.kept)}.")
        for plan in done.closed:
            say(f"Closed, because it may have been answered since: plan {plan[:16]}")
        if done.unknown:
            say(
                "Plans that are open at the server will be closed when it is next heard, for the same reason."
            )


@app.command(epilog=epilog("deploy service kit --user fedtmle --out fedtmle.service"))
def service(
    kit: Path = typer.Argument(..., help="The party's start-up kit, on its own machine."),
    user: str = typer.Option(..., help="The account that runs the party; not root."),
    out: Path | None = typer.Option(None, "--out", help="The unit file to write; by default it is printed."),
) -> None:
    """Write a systemd unit that runs the party from boot on, with few rights."""
    require_flare()
    from fedtmle.deploy.kits import read_kit
    from fedtmle.deploy.processes import running
    from fedtmle.deploy.service import unit

    with reporting(as_json=False):
        party = read_kit(kit)
        text = unit(party, user=user)
        if out is None:
            say(text, nl=False)
            return
        out.write_text(text, encoding="utf-8")
        say(f"Wrote {out}.")
        if running(party) is not None:
            say(
                f"Stop the {party.role} that runs in the background, or the unit cannot start:\n"
                f"  fedtmle {party.role} stop {kit}"
            )
        say(
            "To install it, as root:\n"
            f"  cp {out} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {out.name}"
        )


@app.command(epilog=epilog("deploy demo", "deploy demo --silos 3"))
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
