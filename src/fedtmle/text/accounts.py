"""The account of every study at a silo, as 80 columns of text, in the words of the preview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedtmle.layout import bits, phase_name, wrapped
from fedtmle.runtime.accounts import StudyAccount


def render(accounts: Sequence[StudyAccount], names: Mapping[str, str]) -> str:
    """Return all accounts; ``names`` has a study's title, or its question, by plan, where it is known."""
    if not accounts:
        return "No study has been answered yet."
    blocks = [_account(account, names.get(account.plan, "")) for account in accounts]
    return "\n\n".join("\n".join(block) for block in blocks)


def _account(account: StudyAccount, name: str) -> list[str]:
    state = "closed" if account.closed else "not closed"
    lines = wrapped(name, first="Study: ", indent=" " * 8) if name else []
    plan = account.plan[:16] or "(unknown)"
    lines.append(f"Plan {plan}, {account.first[:16]} to {account.last[:16]}, {state}")
    lines.append(
        f"  {account.answers} answer{'s'[: account.answers != 1]}, {account.numbers:,} numbers, "
        f"{bits(account.bits)}"
    )
    for kind in account.kinds.values():
        lines += wrapped(f"{kind.words} ({phase_name(kind.phase)})", first="  * ", indent="    ")
        times = f"{kind.times} time{'s'[: kind.times != 1]}"
        lines.append(f"      {times}, {kind.numbers:,} numbers, {bits(kind.bits)}")
    for refusal in account.refusals:
        by = f", by your key {refusal.key}" if refusal.key else ""
        why = f"refused {refusal.time[:19]}: {refusal.reason}{by}. {refusal.advice}".removesuffix(". ")
        lines += wrapped(why, first="  ! ", indent="    ")
    if account.repeated:
        lines.append(f"  {account.repeated} requests came again and got the recorded answer")
    return lines
