"""What an owner approves, as 80 columns of text. A study's own words never start a line of their own."""

from __future__ import annotations

from fedtmle.layout import aligned, wrapped
from fedtmle.protocol.policy import lowered_limit
from fedtmle.studies.approval import MOST_BITS, Approval, Decided, worst_findings
from fedtmle.text.preview import lowered, verdict
from fedtmle.text.risk import sentence

OWN_COLUMNS = (
    "A model has columns of C(silo). The total of the one for your silo is your silo's own sum, so that "
    "masks do not hide it: the server reads how many people you have, and sums over them. Ask for a study "
    "without C(silo), or with C(silo) as a term by itself, if you would not approve it with open sums."
)


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
    if approval.has_own_columns:
        lines += ["", *wrapped(f"LOOK: {OWN_COLUMNS}")]
    lines += lowered(approval.lowered)
    return "\n".join([*lines, "", *_past(approval), "", *_verdicts(approval)])


def render_decision(decided: Decided) -> str:
    """Return one decision: when, what, about which study, and how many answers had left before it."""
    decision = decided.decision
    words = "approved" if decision.approved else "rejected"
    left = f", after {decided.answers:,} answers had left" if decided.answers else ""
    lines = [f"{decision.time[:19]}  {words}{left}{'' if decided.in_force else ' (replaced below)'}"]
    deeper = " " * 8  # a long title must not start a line where "Lowered:" or "Plan" could stand
    lines += wrapped(decision.title, first="    Title: ", indent=deeper) if decision.title else []
    lines.append(f"    Plan {decision.plan}")
    lines += wrapped(decision.note, first="    Note: ", indent=deeper) if decision.note else []
    for limit in decision.lowered:
        lines += wrapped(lowered_limit(limit), first="    Lowered: ", indent=deeper)
    return "\n".join(lines)


def _server(approval: Approval) -> str:
    if approval.server:
        return f"Requests must be signed by the server with the key {approval.server}."
    return "Requests are NOT signed: the study has no key of the server under [plan]."


def _sums(approval: Approval) -> str:
    if approval.is_masked:
        masked = "Sums are masked: the server and the other silos read totals over all silos."
        if not approval.groups:
            return f"{masked} Your silo judges them by its own rows."
        if len(approval.groups) == 1 and approval.colluders:
            return (
                f"{masked} The silos judge the sums of models together, by coarse totals over all silos. You "
                "rely on what they say of their rows (trust_looks): one may be curious, none may lie."
            )
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
    answers, numbers = approval.answered
    lines = []
    if answers:
        lines = wrapped(
            f"This plan was answered here already: {answers:,} answers, {numbers:,} numbers left. A plan is "
            "answered once; to run the study again the statistician changes its seed, which is another plan."
        )
    if not approval.earlier:
        return [*lines, f"No {'other' if answers else 'earlier'} study was answered here."]
    lines.append(f"{'Other' if answers else 'Earlier'} studies that were answered here:")
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
        lines += _bullet(f"In the worst case they disclosed {bits:.1f} bits of one person's {column}.")
    return lines


def _verdicts(approval: Approval) -> list[str]:
    lines = verdict(approval.preview)
    for obstacle in approval.preview.obstacles:
        lines += _bullet(obstacle)
    lines.append("")
    for finding in worst_findings(approval.risk):
        lines += wrapped(f"Risk: {sentence(finding)}")
    if not approval.risk:
        lines += wrapped(f"Risk: not audited ({approval.unaudited}); `fedtmle risk` says more.")
    for column, bits in (approval.bits or {}).items():
        lines += _bullet(exposure(column, bits))
    if approval.budget is not None:
        lines += wrapped(f"Privacy: {approval.budget}.")
    if approval.conflicts:
        lines += ["", "Your silo will REFUSE this study, because of earlier ones:"]
        for each in approval.conflicts:
            lines += _bullet(each)
    return lines


def exposure(column: str, bits: float) -> str:
    """Return in words how much of the most exposed person's value a study would disclose."""
    if bits >= MOST_BITS:
        return f"In the worst case one person's {column} becomes known ({bits:g} bits, the most we count)."
    return (
        f"In the worst case {bits:.1f} bits of one person's {column} become known. One bit halves the range; "
        "a category that becomes known counts 1."
    )


def _named(name: str, words: str) -> list[str]:
    return wrapped(words, first=f"{name}: ", indent="    ")


def _bullet(text: str) -> list[str]:
    return wrapped(text, first="  * ", indent="    ")
