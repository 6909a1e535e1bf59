"""An institution's home as 80 columns of text: where it is, and what was asked about the same people."""

from __future__ import annotations

from fedtmle.layout import wrapped
from fedtmle.studies.home import HomeAccount
from fedtmle_core.home import MOST_REFUSALS

POOLED = (
    "Each study's sums leave pooled with those of other hospitals, whose records change too: whether the "
    "difference of two pooled results shows a person cannot be judged here."
)


def render_home(account: HomeAccount) -> str:
    """Return the whole account."""
    silos = ", ".join(f"'{name}'" for name in account.hospitals) or "none has records yet"
    lines = [
        *wrapped(f"Home {account.folder}", indent="  "),
        *wrapped(f"Silos with records in it: {silos}", indent="  "),
        *remembered(account),
    ]
    if account.forgotten:
        lines += wrapped(
            f"Restored from an older backup: the people of {account.forgotten} answered studies are not "
            "known, and later studies are not compared with these.",
            indent="  ",
        )
    for author, refused in account.refused.items():
        lines += wrapped(
            f"{refused} of {MOST_REFUSALS} refusals a year are charged to "
            f"{f'the server with the key {author}' if author else 'servers without a key'}.",
            indent="  ",
        )
    return "\n".join(lines)


def remembered(account: HomeAccount) -> list[str]:
    """Return what was asked about the same people, and what that cannot tell."""
    if not account.studies:
        return ["No study was answered yet."]
    asked, studies = account.asked, "study" if account.studies == 1 else "studies"
    words = (
        f"It remembers the people of {account.studies:,} {studies}. About the same person, up to "
        f"{asked.studies:,} of them were answered, with {asked.numbers:,} numbers in all."
    )
    return wrapped(f"{words} {POOLED}", indent="  ")
