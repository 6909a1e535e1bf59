"""What an owner approves, as 80 columns of text. A study's own words never start a line of their own."""

from __future__ import annotations

from fedtmle.layout import aligned, wrapped
from fedtmle.studies.approval import Approval
from fedtmle.text.preview import verdict
from fedtmle.text.risk import sentence


def render(approval: Approval) -> str:
    """Return the whole of it; the words of the study follow a dash, a name or a bullet of ours."""
    lines = [
        *_named("Title", approval.title or "(none)"),
        *_named("Question", approval.question),
        f"Plan {approval.plan}",
        *([f"Last day {approval.expires}"] if approval.expires else []),
        *wrapped(_server(approval)),
        *wrapped(_sums(approval)),
        "",
        f"The {len(approval.roster)} silos, and the fingerprints of their keys (signatures, masks):",
        *_roster(approval),
    ]
    if approval.goes_on:
        lines += wrapped("The study goes on without a silo that refuses or is absent when it opens.")
    lines += ["", "Variables:"]
    for name, words in approval.variables:
        lines += _bullet(f"{name}: {words}")
    lines += ["", "What is computed:"]
    for name, words in approval.parts:
        lines += _bullet(f"{name}: {words}")
    for each in approval.brought:
        lines += wrapped(f"It runs code of another distribution here: {each}")
    if approval.literals:
        lines += ["", *wrapped("LOOK: numbers inside I() can single out one person. Ask why they are there:")]
        for each in approval.literals:
            lines += _bullet(each)
    return "\n".join([*lines, "", *_past(approval), "", *_verdicts(approval)])


def _server(approval: Approval) -> str:
    if approval.server:
        return f"Requests must be signed by the server with the key {approval.server}."
    return "Requests are NOT signed: the study has no key of the server under [plan]."


def _sums(approval: Approval) -> str:
    if approval.is_masked:
        masked = "Sums are masked: the server and the other silos read totals over all silos."
        if not approval.groups:
            return f"{masked} Your silo judges them by its own rows."
        sizes = " and ".join(map(str, approval.groups))
        return (
            f"{masked} The silos judge the sums of models together, by coarse totals over groups of {sizes} "
            f"silos. {approval.colluders or 'NONE'} of them may lie about their rows."
        )
    return "Sums are open: the server reads your silo's own."


def _roster(approval: Approval) -> list[str]:
    lines = []
    for member in approval.roster:
        vouched = {None: "", True: ", in your peers", False: ", NOT in your peers"}[member.vouched]
        own = ", you" if member.name == approval.silo else vouched
        keys = " and ".join(member.fingerprints) or "no key"
        lines += _bullet(f"'{member.name}'{own}: {keys}")
    return lines


def _past(approval: Approval) -> list[str]:
    if not approval.earlier:
        return ["No earlier study was answered here."]
    lines = ["Earlier studies that were answered here:"]
    rows = [("plan", "since", "answers", "numbers", "same columns")]
    rows += [
        (
            each.plan[:16],
            each.time[:10],
            f"{each.answers:,}",
            f"{each.numbers:,}",
            "yes" if each.shares else "no",
        )
        for each in approval.earlier
    ]
    lines += aligned(rows, indent="  ")
    for column, bits in approval.spent.items():
        lines += _bullet(f"of one person's {column}, they told up to {bits:.1f} bits")
    return lines


def _verdicts(approval: Approval) -> list[str]:
    lines = verdict(approval.preview)
    for obstacle in approval.preview.obstacles:
        lines += _bullet(obstacle)
    lines.append("")
    for finding in approval.risk:
        lines += wrapped(f"Risk: {sentence(finding)}")
    if not approval.risk:
        lines += wrapped(f"Risk: not audited ({approval.unaudited}); `fedtmle risk` says more.")
    for column, bits in (approval.bits or {}).items():
        lines += _bullet(f"of one person's {column}, it would tell up to {bits:.1f} bits")
    if approval.budget is not None:
        lines += wrapped(f"Privacy: {approval.budget}.")
    if approval.conflicts:
        lines += ["", "Your silo will REFUSE this study, because of earlier ones:"]
        for each in approval.conflicts:
            lines += _bullet(each)
    return lines


def _named(name: str, words: str) -> list[str]:
    return wrapped(words, first=f"{name}: ", indent="    ")


def _bullet(text: str) -> list[str]:
    return wrapped(text, first="  * ", indent="    ")
