"""`docs/proved.md`: each statement of the paper with the function that computes it and its test."""

from __future__ import annotations

from fedtmle_paper.registry import STATEMENTS


def page() -> str:
    """Return the page's text."""
    lines = [
        "# What was proved, where it is computed, what checks it",
        "",
        "Written by `python -m tools.document`; a test compares the two.",
        "Labels are the paper's; entries without a colon are statements that it does not number.",
        "The package `fedtmle_paper` is in the folder `paper` of the repository.",
        "",
        "| statement | function | test |",
        "|---|---|---|",
    ]
    for statement in STATEMENTS:
        functions = "<br>".join(f"`{name}`" for name in statement.functions) or f"none: {statement.reason}"
        tests = "<br>".join(f"`{name}`" for name in statement.tests)
        lines.append(f"| {statement.label} | {functions} | {tests} |")
    return "\n".join(lines) + "\n"
