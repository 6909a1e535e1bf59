"""What a silo's owner reads, as 80 columns of text: previews, audits, accounts, and what there is to approve.

A study's own words never start a line of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fedtmle.layout import Document, aligned, bits, phase_name, wrapped
from fedtmle.protocol.policy import lowered_limit
from fedtmle.runtime.ledger import StudyAccount
from fedtmle.studies.approval import Approval, Decided, worst_findings
from fedtmle.studies.preview import MessageKind, Preview
from fedtmle.studies.risk import EDGES, MOST_BITS

# A preview as 80 columns of text: what a silo would send, its limits, and whether its policy allows it.

EXPLAINED = {
    "gradient": "A gradient has one number for each term of a model: the mean over your rows of the term "
    "times the prediction's error. It says in which direction the model should move to fit better.",
    "curvature": "A curvature has one number for each pair of a model's terms: a weighted mean over your "
    "rows of the product of the two. It says how far the model should move.",
}


def render_preview(view: Preview) -> str:
    """Return the whole preview."""
    lines = [
        *wrapped(f"What silo '{view.silo}' would send in plan {view.plan[:16]}, one of {view.silos} silos."),
        "",
        *wrapped(
            f"Rehearsed on your {view.n_rows:,} rows alone. With the other silos the numbers and "
            "the number of rounds differ; the kinds of message are the same. Nothing has been sent."
        ),
        "",
    ]
    for each in view.brought:
        lines += wrapped(f"It runs code of another distribution here: {each}.")
    lines += [""] if view.brought else []
    for kind in view.kinds:
        parts = message_parts(kind)
        named = parts[0] if len(parts) == 1 else f"a message of {len(parts)} parts"
        lines += wrapped(f"{named} ({phase_name(kind.phase)})", first="* ", indent="  ")
        for part in parts if len(parts) > 1 else ():
            lines += wrapped(part, first="  - ", indent="    ")
        lines += [f"    {sent_size(kind)}"]
    for meaning in explained(view):
        lines += ["", *wrapped(meaning)]
    lines += ["", "Your limits:"]
    lines += aligned(
        [(limit.name, limit.text, "ok" if limit.is_met else "NOT MET") for limit in view.limits], indent="  "
    )
    lines += lowered(view.lowered)
    lines += ["", *preview_verdict(view)]
    for words in (*(conflict.text for conflict in view.conflicts), *view.obstacles):
        lines += wrapped(words, first="* ", indent="  ")
    lines += [line for words in shared_levels(view) for line in ("", *wrapped(words))]
    return "\n".join(lines)


def shared_levels(view: Preview) -> list[str]:
    """Return a remark if everyone at the silo has a level that perhaps no other silo has, under masks."""
    if not view.shared_levels:
        return []
    named = ", ".join(view.shared_levels)
    return [
        f"All your people are in {named}. If no other silo has people there, totals over all silos are your "
        "silo's own sums, and masks do not hide them. Your silo sees during the study whether that is so, "
        "and its account says it; allow_own_columns = false in [policy] refuses such a study."
    ]


def lowered(limits: Sequence[str]) -> list[str]:
    """Return the limits that are laxer than the package's own, with the owner's reasons."""
    if not limits:
        return []
    lines = [
        "",
        *wrapped("LOWERED: your policy is laxer than the package's own limits. All parties see why:"),
    ]
    for limit in limits:
        lines += wrapped(limit, first="  * ", indent="    ")
    return lines


def message_parts(kind: MessageKind) -> list[str]:
    """Return what a message holds, each once."""
    return list(dict.fromkeys(kind.explanation.split("; ")))


def explained(view: Preview) -> list[str]:
    """Return explanations of the technical words in the messages."""
    return [
        meaning for word, meaning in EXPLAINED.items() if any(word in kind.explanation for kind in view.kinds)
    ]


def sent_size(kind: MessageKind) -> str:
    """Return how often a message is sent, and how large all of them are."""
    return f"{kind.times} time{'s'[: kind.times != 1]}, {kind.numbers:,} numbers, {bits(kind.bits)}"


def preview_verdict(view: Preview) -> list[str]:
    """Return whether the policy would allow the study."""
    if view.refused_by:
        return wrapped(f"{refusal(view)} The server would learn only this reason: {view.reason}.")
    if view.stopped:
        return wrapped(
            f"The rehearsal on your rows alone stopped: {view.stopped}. With other silos it may continue."
        )
    if view.judges_together:
        return wrapped(
            "Your policy would allow every one of these messages as far as your own rows show. Sums are "
            "masked: the silos judge those of the study's models together during the run (min_pooled), and "
            "your silo may refuse one then."
        )
    return wrapped(
        "Your policy would allow every one of these messages. The real run also depends on the other silos, "
        "so its questions may differ: your silo decides on each request anew, and may still refuse one."
    )


def refusal(view: Preview) -> str:
    """Return the limit by which the silo would refuse a study, and how much would have left before."""
    key = view.refused_by.removeprefix("memory: ")
    earlier = [conflict for conflict in view.conflicts if conflict.key == key and not conflict.is_alone]
    by = f"because of an earlier study (limit {key})" if earlier else f"by its key {key}"
    before = (
        f"Before the refusal: {view.numbers_sent:,} numbers." if view.numbers_sent else "Nothing would leave."
    )
    return f"Your policy would refuse this study here, {by}. {before}"


# A disclosure audit as 80 columns of text: what stays unknown of each column, and a verdict in words.

BAR_WIDTH = 36
ATTACKERS = {
    "others": "knows every other record, and all columns of this one but the attacked one",
    "design": "knows all columns but the attacked one, and that one's range",
    "nothing": "knows only how such records are distributed",
}


def render_risk(document: Document) -> str:
    """Return the whole report; ``document`` is `Risk.to_dict`."""
    lines = [
        f"Disclosure audit of silo '{document['silo']}'",
        *wrapped(document["question"]),
        "",
        *([*wrapped(MASKED), ""] if document["masked"] else []),
        *wrapped(_queries(document)),
        *(wrapped(_not_covered(document)) if document["not_covered"] else []),
        "",
        *_attackers(document),
    ]
    for column in dict.fromkeys(finding["column"] for finding in document["findings"]):
        findings = [finding for finding in document["findings"] if finding["column"] == column]
        lines += ["", *_column(column, findings, document)]
    lines += ["", "Verdict", *risk_verdict(document), "", *wrapped(FOOTNOTE)]
    return "\n".join(lines)


MASKED = (
    "Masked: the server and the other silos learn totals over several silos. The figures below say what "
    "would hold if the masks failed, or all other silos worked together."
)
FOOTNOTE = (
    "Computed here; nothing was sent. Rounding is not counted as protection. Only declared noise limits "
    "every attack; a column not listed here was not audited."
)


def _queries(document: Document) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in document["kinds"].items())
    if document["queries"] == "planned":
        how = (
            f"Planned: the study rehearsed on this silo alone, and {document['probes']} gradients at the "
            "edge of what a silo accepts. The run itself may send more or fewer queries."
        )
    else:
        how = "Answered: the queries of the transcript, derived again from its broadcasts."
    answers = f"{document['answers']} answers, {document['numbers']:,} numbers ({kinds})"
    return f"{document['n_rows']:,} records; {answers}. {how}"


def _not_covered(document: Document) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in document["not_covered"].items())
    return f"Not covered, because they are not sums over records: {kinds}."


def _attackers(document: Document) -> list[str]:
    attackers = dict.fromkeys(finding["attacker"] for finding in document["findings"])
    lines = ["Attackers"]
    for name in attackers:
        lines += wrapped(ATTACKERS[name] + ".", indent=" " * 12, first=f"  {name:<10}")
    return lines


def _column(column: str, findings: list[Document], document: Document) -> list[str]:
    noise = document["noise"]
    head = ["attacker", "before", "worst record", "median record", "known"]
    rows = [head]
    for finding in findings:
        rows.append(
            [
                finding["attacker"],
                _size(finding["prior"]),
                _size(finding["worst"]),
                _size(finding["median"]),
                _known(finding),
            ]
        )
    lines = [f"{column} (before: {document['priors'][column]})", *aligned(rows, indent="  ")]
    means = [["the column's mean", "before", "after", *(["at noise"] if noise else [])]]
    for finding in findings:
        if finding["mean"] is not None:
            mean = finding["mean"]
            cells = [finding["attacker"], _size(mean["prior"]), _size(mean["after"])]
            means.append(cells + ([_size(mean["noisy"])] if noise else []))
    if len(means) > 1:
        lines += ["", *aligned(means, indent="  ")]
    if noise:
        noisy = [[f"worst, median at noise {noise:g}", "no attack below", "an attack reaches"]]
        for finding in findings:
            if finding["noisy"] is not None:
                n = finding["noisy"]
                noisy.append(
                    [
                        finding["attacker"],
                        f"{_size(n['worst'])}, {_size(n['median'])}",
                        f"{_size(n['achieved_worst'])}, {_size(n['achieved_median'])}",
                    ]
                )
        lines += ["", *aligned(noisy, indent="  ")]
    return [*lines, "", *_histogram(findings[0])]


def _known(finding: Document) -> str:
    return "-" if finding["attacker"] == "nothing" else f"{finding['known']:,} of {finding['records']:,}"


def _histogram(finding: Document) -> list[str]:
    """Return a histogram of records by the remaining share of their prior uncertainty."""
    counts = finding["histogram"]["counts"]
    largest = max(counts) or 1
    names = [f"below {EDGES[1]:g}"]
    names += [f"{low:g} to {high:g}" for low, high in pairwise(EDGES[1:])]
    names.append("all of it")
    if finding["discrete"]:  # a value is known, narrowed, or not
        keep = [k for k, count in enumerate(counts) if count or k in (0, len(counts) - 1)]
    else:
        keep = list(range(len(counts)))
    rows = [
        (names[k], f"{counts[k]:,}", "#" * max(round(BAR_WIDTH * counts[k] / largest), int(counts[k] > 0)))
        for k in keep
    ]
    wide = max(len(row[1]) for row in rows)
    return [
        f"  remaining share of the prior, attacker '{finding['attacker']}' (records)",
        *(f"  {name:>14}  {count:>{wide}}  {bar}".rstrip() for name, count, bar in rows),
    ]


def risk_verdict(document: Document) -> list[str]:
    """Return one sentence per column and attacker."""
    lines: list[str] = []
    for finding in document["findings"]:
        lines += wrapped(sentence(finding, document["masked"]), indent="    ", first="  * ")
    return lines


class Verbs(NamedTuple):
    """The verbs of a verdict, as a fact or as what would hold without masks."""

    without: str
    can: str
    cannot: str
    learns: str
    still_learns: str
    knows: str


FACT = Verbs("", "can", "cannot", "learns", "still learns", "knows")
UNMASKED = Verbs("without masks, ", "could", "could not", "would learn", "would still learn", "would know")


def sentence(finding: Document, is_masked: bool) -> str:
    """Return in words what an attacker can learn about a column.

    Of a masked study it is what could be learned if there were no masks.
    """
    verbs = UNMASKED if is_masked else FACT
    column, records, known = finding["column"], finding["records"], finding["known"]
    if finding["attacker"] == "nothing":
        mean = finding["mean"]
        share = 1 - (mean["after"] / mean["prior"]) ** 2 if mean["prior"] else 0.0
        if share > 0.999:
            learned = f"{verbs.still_learns} this silo's mean exactly"
        else:
            learned = f"{verbs.learns} {share:.0%} of the variance of this silo's mean"
        who = f"{verbs.without}someone who knows no record"
        return f"{column}: {who} {learned}, and next to nothing about a single record."
    who = "who knows every other record" if finding["attacker"] == "others" else "who knows the other columns"
    if known == records:
        learned = f"{verbs.can} work out the value of every one of the {records:,} records"
    elif known:
        learned = f"{verbs.can} work out the value of {known:,} of {records:,} records"
    elif finding["worst"] < 0.5 * finding["prior"]:
        share = finding["worst"] / finding["prior"]
        learned = (
            f"{verbs.can} narrow some records to {share:.0%} of the range, and {verbs.can} work out none"
        )
    else:
        learned = f"{verbs.cannot} work out any single record from the answers alone"
    if finding["mean"] is not None and finding["mean"]["after"] < 0.01 * finding["mean"]["prior"]:
        learned += f", {'and' if known else 'but'} {verbs.knows} this silo's mean"
    return f"{column}: {verbs.without}an attacker {who} {learned}."


def _size(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.3g}"


# The account of every study at a silo, as 80 columns of text, in the words of the preview.


def render_accounts(accounts: Sequence[StudyAccount], names: Mapping[str, str]) -> str:
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


OWN_COLUMNS = (
    "A model has columns of C(silo). The total of the one for your silo is your silo's own sum, so that "
    "masks do not hide it: the server reads how many people you have, and sums over them. This version makes "
    "no such plan. Ask for a study without C(silo), unless you would approve it with open sums."
)


def render_approval(approval: Approval) -> str:
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
    for words in shared_levels(approval.preview):
        lines += ["", *wrapped(f"LOOK: {words}")]
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
    lines = wrapped(f"LOOK: {approval.snapshot}") if approval.snapshot else []
    if answers:
        lines += wrapped(
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
    for column, spent in approval.spent.items():
        lines += _bullet(f"In the worst case they disclosed {spent:.1f} bits of one person's {column}.")
    return lines


def _verdicts(approval: Approval) -> list[str]:
    lines = preview_verdict(approval.preview)
    for obstacle in approval.preview.obstacles:
        lines += _bullet(obstacle)
    lines.append("")
    if approval.risk and approval.is_masked:
        lines += wrapped(MASKED)
    for finding in worst_findings(approval.risk):
        lines += wrapped(f"Risk: {sentence(finding, approval.is_masked)}")
    if not approval.risk:
        lines += wrapped(f"Risk: not audited ({approval.unaudited}); `fedtmle risk` says more.")
    for column, exposed in (approval.bits or {}).items():
        lines += _bullet(exposure(column, exposed, approval.is_masked))
    if approval.budget is not None:
        lines += wrapped(f"Privacy: {approval.budget}.")
    conflicts = approval.preview.conflicts
    if conflicts:
        why = "" if all(conflict.is_alone for conflict in conflicts) else ", because of earlier ones"
        lines += ["", f"Your silo will REFUSE this study{why}:"]
        for each in conflicts:
            lines += _bullet(each.text)
    return lines


def exposure(column: str, bits: float, is_masked: bool) -> str:
    """Return in words how much of the most exposed person's value a study would disclose."""
    case = "In the worst case, and without masks," if is_masked else "In the worst case"
    if bits >= MOST_BITS:
        return f"{case} one person's {column} becomes known ({bits:g} bits, the most we count)."
    return (
        f"{case} {bits:.1f} bits of one person's {column} become known. One bit halves the range; "
        "a category that becomes known counts 1."
    )


def _named(name: str, words: str) -> list[str]:
    return wrapped(words, first=f"{name}: ", indent="    ")


def _bullet(text: str) -> list[str]:
    return wrapped(text, first="  * ", indent="    ")
