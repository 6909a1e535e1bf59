"""What all commands share: exit codes, help texts, and commands that other distributions add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import typer
import typer.main
from typer.core import TyperGroup

from fedtmle.layout import visible

if TYPE_CHECKING:
    from http.server import HTTPServer

    from fedtmle.defects import Defect
    from fedtmle.errors import Reached


# Exit codes of the commands that work on a study, and how an error becomes one.

CODES = (
    "Exit codes: 0 success; 1 defects in the study, the data or a ledger; 2 wrong usage of the command; "
    "3 the run did not converge or is not supported; 4 a silo refused; 5 the run converged, but overlap is "
    "poor."
)


class Exit(IntEnum):
    """The exit codes of all commands."""

    FINE = 0
    DEFECTS = 1
    USAGE = 2
    NOT_CONVERGED = 3
    REFUSED = 4
    POOR_OVERLAP = 5


def require_flare() -> None:
    """Exit with a message if NVIDIA FLARE is not installed."""
    import importlib.util

    if importlib.util.find_spec("nvflare") is None:
        say("Deployment needs NVIDIA FLARE: pip install 'fedtmle[flare]'", err=True)
        raise typer.Exit(int(Exit.DEFECTS))


@contextmanager
def reporting(*, as_json: bool) -> Iterator[None]:
    """Turn an error of the package into its message and exit code, without a traceback."""
    import warnings

    from fedtmle.defects import Defect
    from fedtmle.errors import FedTMLEError, InputError, JournalError, RefusedError
    from fedtmle.studies.validate import defects_of

    reached = None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
        return
    except FedTMLEError as error:
        defects, code, reached = defects_of(error), Exit.NOT_CONVERGED, error.reached
        if isinstance(error, InputError | JournalError):
            code = Exit.DEFECTS
        elif isinstance(error, RefusedError):
            code = Exit.REFUSED
    except OSError as error:
        defects, code = [Defect(message=str(error.strerror), file=error.filename)], Exit.DEFECTS
    fail(defects, code, as_json=as_json, reached=reached)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print lines; characters of a study that would act on the terminal are escaped."""
    typer.echo("\n".join(map(visible, text.split("\n"))), err=err, nl=nl)


def serve_page(server: HTTPServer, line: str, opened: str | None) -> None:
    """Print a line and serve a page until Ctrl-C or SIGTERM; open its address in the browser, if given."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as service managers send it
    try:  # whoever reads the line may send a signal at once
        if line:
            say(line)
        if opened is not None:
            typer.launch(opened)
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the place in the source that Python would add."""
    say(visible(f"Warning: {message}"), err=True)


def fail(defects: Sequence[Defect], code: Exit, *, as_json: bool, reached: Reached | None = None) -> NoReturn:
    """Print defects as lines on standard error, or as JSON on standard output, and exit.

    ``reached`` says how far a run got that ended with them.
    """
    import json
    from dataclasses import asdict

    if as_json:
        document: dict[str, object] = {"defects": [defect.to_dict() for defect in defects]}
        say(json.dumps(document if reached is None else {**document, "reached": asdict(reached)}))
    else:
        for defect in defects:  # indent further lines, which may be a study's own text
            say("\n  ".join(str(defect).split("\n")), err=True)
        if reached is not None:
            say(visible(str(reached)), err=True)
    raise typer.Exit(int(code))


# Help texts: commands grouped by reader, and examples under each command.

# The readers, in the order in which they meet the commands.
EVERYONE = "First steps"
STATISTICIAN = "For the statistician"
OWNER = "For a silo's owner"
ADMINISTRATOR = "For administrators"
RESEARCHER = "For methods researchers"
READERS = (EVERYONE, STATISTICIAN, OWNER, ADMINISTRATOR, RESEARCHER)

# What a silo's owner does with `fedtmle silo`.
DECIDE = "Decide about a study"
OPERATE = "Run the silo"


class ReaderGroup(TyperGroup):
    """A group whose help lists its commands by reader, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per reader; click would cut each sentence off at the end of its line."""
        sections: dict[str, list[tuple[str, str]]] = {reader: [] for reader in READERS}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            title = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(title, []).append((name, command.get_short_help_str(limit=400)))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def epilog(*examples: str) -> str:
    """Return the end of a command's help: its examples, a line each, and the exit codes."""
    lines = "".join(f"\n  fedtmle {example}" for example in examples)
    return f"\b\nExamples:{lines}\n\n{CODES}"  # click does not wrap a paragraph that starts with \b


# Commands and demonstrations that other distributions add to `fedtmle` by entry points.
#
# A distribution declares a function with typer's options in the group ``fedtmle.commands``, or a
# demonstration in ``fedtmle.demos``. Entry points are read only when somebody calls what this package does
# not have itself, because reading them takes about 30 ms, which `fedtmle --help` should not cost.

COMMANDS = "fedtmle.commands"
DEMOS = "fedtmle.demos"


class ExtensibleGroup(ReaderGroup):
    """A group of commands that asks entry points for a name it does not have, or has as a placeholder."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name, the command and its arguments, as click asks for them."""
        if args[0] == reproduce.__name__ or args[0] not in self.commands:
            added = command(args[0])
            if added is not None:
                if args[0] in self.commands:  # the placeholder has the examples
                    added.epilog = self.commands[args[0]].epilog
                return args[0], added, args[1:]
        return super().resolve_command(ctx, args)


def command(name: str) -> Any | None:
    """Return the command that an installed distribution declares as ``name``, or None."""
    function = load(COMMANDS, name)
    if function is None:
        return None
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    single.command(name, epilog=CODES)(function)
    return typer.main.get_command(single)


def load(group: str, name: str) -> Any | None:
    """Return the object behind the first entry point ``name`` of ``group``, or None if there is none."""
    from importlib.metadata import entry_points

    for point in entry_points(group=group, name=name):
        return point.load()
    return None


def reproduce() -> NoReturn:
    """Run the paper's experiments (package fedtmle-paper)."""
    fail_without_paper("fedtmle reproduce")


def fail_without_paper(called: str) -> NoReturn:
    """Print how to install the package that ``called`` needs, and leave with status 1."""
    say(
        f"`{called}` needs the package fedtmle-paper: run `pip install ./paper` in a checkout of the "
        "fedtmle repository.",
        err=True,
    )
    raise typer.Exit(int(Exit.DEFECTS))
