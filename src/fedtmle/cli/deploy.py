"""Commands of a deployment: ``fedtmle deploy``, ``fedtmle server``, and those that run a silo.

``fedtmle deploy`` has kits for a consortium, a doctor for each party and a demonstration. The others start,
stop and inspect a party on its own machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.base import Exit, ReaderGroup, epilog, reporting, require_flare, say, serve_page

if TYPE_CHECKING:
    from fedtmle.deploy.kits import Kit


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
    from fedtmle.deploy.kits import Role, read_deployment, read_kit
    from fedtmle.deploy.provision import install, renew_server, request

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
    from fedtmle.deploy.kits import read_deployment
    from fedtmle.deploy.provision import sign as certify

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
    from fedtmle.deploy.doctor import exposition, is_well, samples
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
        for plan in done.forgotten:
            say(f"Answered, but newer than the backup of the home's memory: plan {plan[:16]}")
        if done.forgotten:
            say("Whose records these studies were about is lost: later ones are not compared with them.")
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
    from fedtmle.deploy.parties import unit
    from fedtmle.deploy.processes import running

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


KIT = typer.Argument(..., help="The party's start-up kit.")
METRICS = typer.Option(
    None,
    "--metrics-port",
    min=0,
    max=65535,
    help="Serve /metrics and /health on this port of 127.0.0.1, from now on; 0 turns it off.",
)

server = typer.Typer(
    cls=ReaderGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Start, stop and inspect the server, which adds up the silos' answers.",
)


@server.command("start", epilog=epilog("server start kit"))
def start_server(kit: Path = KIT, metrics: int | None = METRICS) -> None:
    """Start the server in the background; it is restarted if it dies."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import start_server as begin

    with reporting(as_json=False):
        party = read_kit(kit, Role.SERVER)
        _keep_port(party, metrics)
        begin(party)
        say(f"Started. `fedtmle server status {kit}` says when it listens.")


@server.command("run", epilog=epilog("server run kit"))
def run_server(kit: Path = KIT, metrics: int | None = METRICS) -> None:
    """Run the server in the foreground, for a service manager; SIGTERM ends it."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import prepare_server
    from fedtmle.deploy.processes import run_here
    from fedtmle.deploy.supervisor import supervise

    with reporting(as_json=False):
        party = read_kit(kit, Role.SERVER)
        _keep_port(party, metrics)
        prepare_server(party)
        raise typer.Exit(run_here(party, supervise))


@server.command("stop", epilog=epilog("server stop kit"))
def stop_server(kit: Path = KIT) -> None:
    """Stop the server; a run in progress can be resumed."""
    _stop(kit, "server")


@server.command("status", epilog=epilog("server status kit"))
def server_status(
    kit: Path = KIT, as_json: bool = typer.Option(False, "--json", help="Print the status as JSON.")
) -> None:
    """Show whether the server runs and listens, and its runs."""
    _status(kit, "server", as_json=as_json)


SILO_FILE = typer.Option(
    None, "--silo-file", help="This silo's silo.toml, needed the first time. Its path stays in the kit."
)


def run_silo(kit: Path = KIT, silo_file: Path | None = SILO_FILE, metrics: int | None = METRICS) -> None:
    """Run this silo in the foreground, for a service manager; SIGTERM ends it."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import prepare_silo
    from fedtmle.deploy.processes import run_here
    from fedtmle.deploy.supervisor import supervise

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        _keep_port(party, metrics)
        prepare_silo(party, silo_file)
        raise typer.Exit(run_here(party, supervise))


def start_silo(kit: Path = KIT, silo_file: Path | None = SILO_FILE, metrics: int | None = METRICS) -> None:
    """Start this silo in the background: it connects to the server and answers the plans you approved."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import start_silo as begin

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        _keep_port(party, metrics)
        begin(party, silo_file)
        say(f"Started. `fedtmle silo status {kit}` lists the studies that wait for your approval.")


def notify_silo(
    kit: Path = KIT,
    command: list[str] = typer.Argument(
        None, help="The program with its whole path, and its arguments; without any, notices are turned off."
    ),
) -> None:
    """Run a command of yours whenever a study waits for you: it reads the notice as JSON from its input.

    The command is tried now, with a notice whose event is "test".
    """
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.engine.post import notice_of, set_command, tell
    from fedtmle.errors import InputError

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        if command:
            trouble = tell(command, {**notice_of(party.site, Path("none")), "event": "test"})
            if trouble:
                raise InputError(f"{command[0]}: {trouble}; nothing was changed")
        set_command(party.home, command or [])
        say("The command was run, and will be when a study waits." if command else "Notices are off.")


def silo_page(
    kit: Path = KIT,
    port: int = typer.Option(0, min=0, max=65535, help="The page's port on this machine; 0 for any."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in the browser."),
) -> None:
    """Show a local page of the studies that came: what each asks, approve or reject it, and your ledger.

    The printed address opens the page once, in one browser. Ctrl-C ends it.
    """
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.owner import OwnerServer
    from fedtmle.deploy.parties import home_of
    from fedtmle.engine.post import last_contact

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        home = home_of(party)
        try:
            server = OwnerServer(home, port=port, open_plans=lambda: last_contact(party.home).get("open"))
        except OSError as error:
            raise typer.BadParameter(
                f"cannot listen on port {port} ({error.strerror}); choose another", param_hint="--port"
            ) from None
        line = f"Open this address, once: {server.url}  (Ctrl-C ends the page)"
        serve_page(server, line, server.url if open_page else None)


def _keep_port(kit: Kit, port: int | None) -> None:
    """Note the port for monitoring in the kit, if one was given."""
    from fedtmle.deploy.doctor import set_port

    if port is not None:
        set_port(kit, port)


def stop_silo(kit: Path = KIT) -> None:
    """Stop this silo and all its processes."""
    _stop(kit, "silo")


def silo_status(
    kit: Path = KIT, as_json: bool = typer.Option(False, "--json", help="Print the status as JSON.")
) -> None:
    """Show whether the silo runs, and the studies that came."""
    _status(kit, "silo", as_json=as_json)


def _stop(path: Path, role: str) -> None:
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.processes import stop

    with reporting(as_json=False):
        say("Stopped." if stop(read_kit(path, Role(role))) else "It was not running.")


def _status(path: Path, role: str, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import status_of

    with reporting(as_json=as_json):
        status = status_of(read_kit(path, Role(role)))
        say(json.dumps(asdict(status)) if as_json else str(status))
        if not status.running:
            raise typer.Exit(int(Exit.NOT_CONVERGED))
