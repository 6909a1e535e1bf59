"""Help texts: commands grouped by reader, and examples under each command."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from fedtmle.cli.exits import CODES

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
