"""A data-protection impact summary of one study at one silo, as Markdown: for an officer to check and attach.

It begins with one page in the terms of the GDPR; the details follow. All of it is taken from the plan,
the silo's file, and what `review` shows the owner before an approval. Entries that only the controller can
know, such as the legal basis, are marked to be filled in.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from fedtmle.data import SiloFile
from fedtmle.initial.variables import Variable
from fedtmle.layout import phase_name
from fedtmle.programs.study import Study
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import Policy
from fedtmle.studies.approval import Approval, worst_findings
from fedtmle.studies.preview import Preview
from fedtmle.studyfile.schema import schema_of
from fedtmle.text.approval import (
    MASKED,
    OWN_COLUMNS,
    explained,
    exposure,
    message_parts,
    refusal,
    sent_size,
    sentence,
    shared_levels,
)
from fedtmle.version import __version__

FILL_IN = "**(to be filled in by the controller)**"


def render(plan: Plan, study: Study, file: SiloFile, approval: Approval, today: datetime.date) -> str:
    """Return the summary of a study at the silo of ``file``, as its owner was shown it on a day."""
    view = approval.preview
    sections: list[tuple[str, Iterable[str]]] = [
        ("Summary", _summary(plan, study, file, approval)),
        ("Purpose", _purpose(study, plan)),
        ("Controllers and processors", _parties(plan, file)),
        ("Categories of people and data", _data(study, view)),
        ("Data that leave the silo", _leaves(study, view)),
        ("Recipients", _recipients(plan)),
        ("Retention", _kept(file)),
        ("Technical measures", _measures(plan, study, file.policy, approval)),
        ("Residual risk", _risk(plan, study, approval)),
        ("For the controller", _controller()),
    ]
    lines = [
        f"# Data-protection impact summary: silo '{_cell(file.name)}'",
        "",
        f"Written on {today.isoformat()} by fedtmle {__version__} from plan `{plan.digest.hex()}`, "
        "the silo's file and a rehearsal on its rows. A change of the study, of the list of silos or of the "
        "package's version makes another plan.",
    ]
    for title, text in sections:
        lines += ["", f"## {title}", "", *text]
    return "\n".join(lines) + "\n"


def _summary(plan: Plan, study: Study, file: SiloFile, approval: Approval) -> list[str]:
    """Return the page that an officer reads first; each line has a section of its own below."""
    view = approval.preview
    columns = ", ".join(dict.fromkeys(schema_of(study).names))
    numbers, kinds = view.numbers_sent, len(view.kinds)
    if view.refused_by:
        risk = refusal(view)
    elif approval.risk:
        sentences = [sentence(finding, plan.is_masked) for finding in worst_findings(approval.risk)]
        risk = " ".join([MASKED, *sentences] if plan.is_masked else sentences)
    else:
        risk = f"Not audited: {approval.unaudited}."
    measures = (
        "signed approval of this one plan",
        "masked sums" if plan.is_masked else "no masks: the server reads this silo's own sums",
        "no noise" if study.privacy is None else f"noise (epsilon = {study.privacy.epsilon:g})",
        "limits of the silo's policy",
        "a ledger of every request and answer",
    )
    readers = "totals over all silos" if plan.is_masked else "this silo's own sums"
    rows = [
        ("purpose", study.target.question),
        ("controller", f"the institution of silo '{file.name}' {FILL_IN}"),
        ("processor, or joint controller", f"the operator of the server {FILL_IN}"),
        ("categories of data", f"{view.n_rows:,} records; columns {columns}"),
        ("data that leave", f"no record; in a rehearsal {numbers:,} numbers in {kinds} kinds of message"),
        ("recipients", f"the server: {readers}; other silos: totals; the statistician: the result"),
        ("retention", f"at this silo and at the server {FILL_IN}"),
        ("technical measures", "; ".join(measures)),
        ("residual risk", risk),
        ("decision, name and date", FILL_IN),
    ]
    return _table(("item", "entry"), rows)


def _purpose(study: Study, plan: Plan) -> list[str]:
    title = [f"{_cell(study.title)}. "] if study.title else []
    return [
        "".join(title) + _cell(study.target.question),
        "",
        f"The answer is one set of estimates with confidence intervals over {len(plan.roster)} silos. "
        + (
            f"Digests of the identifiers in {_cell(study.cluster)} are compared between silos."
            if study.cluster and study.cluster_scope == "shared"
            else "Records are not matched with those of other silos."
        ),
    ]


def _parties(plan: Plan, file: SiloFile) -> list[str]:
    others = ", ".join(_cell(name) for name in plan.silos if name != file.name)
    return _table(
        ("role", "who"),
        [
            ("controller of the records", f"the institution of silo '{_cell(file.name)}' {FILL_IN}"),
            (
                "processor, or joint controller",
                f"the operator of the server, which adds up answers {FILL_IN}",
            ),
            ("other institutions", f"controllers of their own records: {others or 'none'}"),
        ],
    )


def _data(study: Study, view: Preview) -> list[str]:
    read = dict.fromkeys(schema_of(study).names)
    rows = [_variable(name, study.variables.get(name)) for name in read]
    return [
        f"{view.n_rows:,} records of this silo are read where they are. The study reads these columns only:",
        "",
        *_table(("column", "what it is", "kind", "values"), rows),
    ]


def _variable(name: str, variable: Variable | None) -> tuple[str, str, str, str]:
    if variable is None:  # a column of one period of a variable over time
        return name, "", "", ""
    if variable.range is not None:
        values = f"{variable.range[0]:g} to {variable.range[1]:g} {variable.unit}".strip()
    else:
        values = ", ".join(words or code for code, words in variable.levels) or ", ".join(variable.codes)
    return name, variable.label, variable.kind, values


def _leaves(study: Study, view: Preview) -> list[str]:
    averaged = ", ".join(_cell(name) for name in dict.fromkeys(schema_of(study).names))
    messages = []
    for kind in view.kinds:
        messages.append(f"* {phase_name(kind.phase)}: {sent_size(kind)}")
        messages += [f"    * {_cell(part)}" for part in message_parts(kind)]
    return [
        f"Counts of records, also by arm; averages of {averaged}, and of their products; no row. In a "
        "rehearsal on this silo's rows alone the messages, with what each holds, are:",
        "",
        *messages,
        "",
        " ".join(explained(view)),
        "",
        "With other silos the number of rounds differs; the kinds of message are the same. Every request and "
        "every answer is written to the silo's ledger.",
    ]


def _recipients(plan: Plan) -> list[str]:
    if plan.is_masked:
        read = (
            "Answers are masked: the server and the other silos can read totals over all silos only, as long "
            "as at least two silos, this one among them, keep their masks to themselves."
        )
    else:
        read = "Sums are open: the server reads this silo's own, and the other silos receive totals over all."
    rows = [(member.name, member.key.hex()[:16] or "none") for member in plan.roster]
    return [
        f"{read} The result has estimates, intervals, diagnostics and counts over all silos, and goes to the "
        "study's statistician.",
        "",
        *_table(("silo", "public key begins"), rows),
    ]


def _kept(file: SiloFile) -> list[str]:
    here = f"`{_cell(file.home.name)}/`"
    rows = [
        (
            "this silo",
            f"{here}, the institution's home: decisions, ledger and journal of what was asked and answered; "
            "its key",
            FILL_IN,
        ),
        (
            "this silo",
            f"{here[:-1]}people/`: keyed digests of 8 bytes of each person and record that a study was "
            "about, to notice studies that differ by few people. With the key beside them these are "
            "pseudonymised personal data",
            FILL_IN,
        ),
        ("backups of this silo", "both of the above: the digests together with their key", FILL_IN),
        ("the server", "answers as they came, totals and the result", FILL_IN),
    ]
    copies = "No record is copied, unless a streamed study reads a database: then here, for its duration."
    return [*_table(("at", "what", "until"), rows), "", copies]


def _lowered(approval: Approval) -> list[str]:
    """Return the limits that are laxer than the package's own, with the owner's reasons."""
    if not approval.lowered:
        return []
    limits = [f"* {_cell(each)}" for each in approval.lowered]
    return ["**Laxer than the package's own limits**, as the result will state:", "", *limits, ""]


def _measures(plan: Plan, study: Study, policy: Policy, approval: Approval) -> list[str]:
    given = [(limit, getattr(policy, limit.name)) for limit in Policy.limits()]
    limits = [
        (limit.name, f"{value:g}", limit.meaning) for limit, value in given if not isinstance(value, bool)
    ]
    permits = [
        (limit.name, "yes" if value else "no", limit.meaning)
        for limit, value in given
        if isinstance(value, bool)
    ]
    targets = "any" if policy.allow_targets is None else ", ".join(policy.allow_targets) or "none"
    permits.append(("allow_targets", targets, "Run code of these other distributions."))
    masks = "pairwise masks, so that only totals can be read" if plan.is_masked else "none: sums are open"
    noise = "none"
    if study.privacy is not None:
        epsilon, delta = study.privacy.epsilon, study.privacy.delta
        noise = f"differential privacy for one record, epsilon = {epsilon:g}, delta = {delta:g}"
    if plan.server:
        signed = f"signed by the server's key {approval.server}"
    else:
        signed = "**requests are not signed**: the plan has no key of the server"
    return [
        *_table(
            ("measure", "here"),
            [
                ("approval", "signed by this silo's key, for this plan and this version of the data only"),
                ("transport", "mutual TLS between each silo and the server, where the study is deployed"),
                ("requests", signed),
                ("masks", masks),
                ("noise", noise),
                *([] if approval.budget is None else [("budget across studies", str(approval.budget))]),
                ("ledger", "a log in which later changes or missing lines are detected"),
            ],
        ),
        "",
        "Limits of the silo's policy, which no study can change:",
        "",
        *_table(("key", "limit", "meaning"), limits),
        "",
        *_lowered(approval),
        "What the policy permits:",
        "",
        *_table(("key", "permitted", "meaning"), permits),
    ]


def _risk(plan: Plan, study: Study, approval: Approval) -> list[str]:
    view, lines = approval.preview, []
    if view.refused_by:
        lines += [f"**{refusal(view)}**", ""]
    behind = (*(conflict.text for conflict in view.conflicts), *view.obstacles)
    lines += [*(f"* {_cell(words)}" for words in behind), *([""] if behind else [])]
    lines += [*_audited(study, approval), "", *_earlier(approval), ""]
    if approval.literals:
        terms = "; ".join(f"`{_cell(each)}`" for each in approval.literals)
        lines += [f"* **Numbers inside I() can single out one person.** Ask why they are there: {terms}."]
    if approval.has_own_columns:
        lines += [f"* **{OWN_COLUMNS}**"]
    lines += [f"* **{_cell(words)}**" for words in shared_levels(view)]
    if not plan.is_masked:
        lines += [
            "* The server reads this silo's sums, and could compare them over rounds and studies. From them "
            "it can compute this silo's own estimate, whatever the key `release` says.",
        ]
    if not plan.is_masked and len(plan.roster) == 2:
        lines += [
            "* With two silos and open sums, the other silo can subtract its own sums from the totals, and "
            "so knows this silo's.",
        ]
    if study.privacy is None:
        lines += [
            "* Totals without noise: somebody who knows all other records of a total could compute the last "
            "one. The key `min_people` refuses numbers that are made of too few people."
        ]
    lines += [
        "* All parties know that the study took place, the list of silos and the declared ranges and levels.",
        "* `docs/threats.md` lists the attacks that were tried, with their figures.",
    ]
    return lines


def _audited(study: Study, approval: Approval) -> list[str]:
    """Return the verdict of `risk` for each column and attacker, and the columns that it did not attack."""
    if not approval.risk:
        return [f"`fedtmle risk` audited no column: {_cell(approval.unaudited)}."]
    audited = {finding["column"] for finding in approval.risk}
    left = [name for name in dict.fromkeys(schema_of(study).names) if name not in audited]
    is_masked = approval.is_masked
    lines = [MASKED, ""] if is_masked else []
    lines += ["What an attacker could learn from the answers, by `fedtmle risk`:", ""]
    lines += [f"* {_cell(sentence(finding, is_masked))}" for finding in approval.risk]
    exposures = (exposure(column, bits, is_masked) for column, bits in (approval.bits or {}).items())
    lines += [f"* {_cell(words)}" for words in exposures]
    if left:
        names = ", ".join(map(_cell, left))
        lines.append(f"* **Not audited: {names}.** `fedtmle risk --attribute NAME` attacks a column.")
    return lines


def _earlier(approval: Approval) -> list[str]:
    answers, numbers = approval.answered
    lines = (
        [f"This plan was answered here already: {answers:,} answers, {numbers:,} numbers."] if answers else []
    )
    if not approval.earlier:
        return [*lines, f"No {'other' if answers else 'earlier'} study of these people was answered here."]
    rows = [
        (f"`{each.plan[:16]}`", each.time[:10], f"{each.numbers:,}", "yes" if each.shares else "no")
        for each in approval.earlier
    ]
    lines += ["Earlier studies at this silo, whose sums can be compared with this one's:", ""]
    lines += _table(("plan", "since", "numbers", "same columns"), rows)
    findings = [
        f"* In the worst case they disclosed {b:.1f} bits of one person's {_cell(c)}."
        for c, b in approval.spent.items()
    ]
    return [*lines, "", *findings] if findings else lines


def _controller() -> list[str]:
    fields = (
        "legal basis of the processing",
        "transfer to a third country, by the place of the server",
        "information of the people concerned",
        "advice of the data-protection officer",
    )
    return _table(("item", "entry"), [(each, FILL_IN) for each in fields])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(map(_cell, row))} |" for row in rows),
    ]


def _cell(text: str) -> str:
    """Return a study's or a silo's text so that it can neither end a cell nor hide or reorder other text."""
    shown = "".join(c if c.isprintable() else f"\\u{{{ord(c):x}}}" for c in text)
    return shown.replace("|", "\\|").replace("<", "&lt;")
