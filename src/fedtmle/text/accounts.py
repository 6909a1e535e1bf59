"""The account of every study at a silo, as 80 columns of text, in the words of the preview."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedtmle.layout import bits, phase_name, wrapped
from fedtmle.runtime.accounts import StudyAccount


def render(accounts: Sequence[StudyAccount], questions: Mapping[str, str]) -> str:
    """Return all accounts; ``questions`` has the question of a study by its plan, where it is known."""
    if not accounts:
        return "No study has been answered yet."
    blocks = [_account(account, questions.get(account.plan, "")) for account in accounts]
    return "\n\n".join("\n".join(block) for block in blocks)


def _account(account: StudyAccount, question: str) -> list[str]:
    state = "closed" if account.closed else "not closed"
    lines = wrapped(question) if question else []
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
