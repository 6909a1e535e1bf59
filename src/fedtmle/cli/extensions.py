"""Commands and demonstrations that other distributions add to `fedtmle` by entry points.

A distribution declares a function with typer's options in the group ``fedtmle.commands``, or a demonstration
in ``fedtmle.demos``. Entry points are read only when somebody calls what this package does not have itself,
because reading them takes about 30 ms, which `fedtmle --help` should not cost.
"""

from __future__ import annotations

from typing import Any, NoReturn

import typer
import typer.main

from fedtmle.cli.exits import CODES, Exit, say
from fedtmle.cli.help import ReaderGroup

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
