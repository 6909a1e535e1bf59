"""A disclosure audit as 80 columns of text: what stays unknown of each column, and a verdict in words."""

from __future__ import annotations

from itertools import pairwise

from fedtmle.layout import Document, aligned, wrapped
from fedtmle.studies.risk import EDGES

BAR_WIDTH = 36
ATTACKERS = {
    "others": "knows every other record, and all columns of this one but the attacked one",
    "design": "knows all columns but the attacked one, and that one's range",
    "nothing": "knows only how such records are distributed",
}


def render(document: Document) -> str:
    """Return the whole report; ``document`` is `Risk.to_dict`."""
    lines = [
        f"Disclosure audit of silo '{document['silo']}'",
        *wrapped(document["question"]),
        "",
        *wrapped(_queries(document)),
        *(wrapped(_not_covered(document)) if document["not_covered"] else []),
        "",
        *_attackers(document),
    ]
    for column in dict.fromkeys(finding["column"] for finding in document["findings"]):
        findings = [finding for finding in document["findings"] if finding["column"] == column]
        lines += ["", *_column(column, findings, document)]
    lines += ["", "Verdict", *verdict(document), "", *wrapped(FOOTNOTE)]
    return "\n".join(lines)


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


def verdict(document: Document) -> list[str]:
    """Return one sentence per column and attacker."""
    lines: list[str] = []
    for finding in document["findings"]:
        lines += wrapped(sentence(finding), indent="    ", first="  * ")
    return lines


def sentence(finding: Document) -> str:
    """Return what an attacker can learn about a column, in words."""
    column, records, known = finding["column"], finding["records"], finding["known"]
    if finding["attacker"] == "nothing":
        mean = finding["mean"]
        share = 1 - (mean["after"] / mean["prior"]) ** 2 if mean["prior"] else 0.0
        if share > 0.999:
            learned = "still learns this silo's mean exactly"
        else:
            learned = f"learns {share:.0%} of the variance of this silo's mean"
        return f"{column}: someone who knows no record {learned}, and next to nothing about a single record."
    who = "who knows every other record" if finding["attacker"] == "others" else "who knows the other columns"
    if known == records:
        learned = f"can work out the value of every one of the {records:,} records"
    elif known:
        learned = f"can work out the value of {known:,} of {records:,} records"
    elif finding["worst"] < 0.5 * finding["prior"]:
        share = finding["worst"] / finding["prior"]
        learned = f"can narrow some records to {share:.0%} of the range, and can work out none"
    else:
        learned = "cannot work out any single record from the answers alone"
    if finding["mean"] is not None and finding["mean"]["after"] < 0.01 * finding["mean"]["prior"]:
        learned += f", {'and' if known else 'but'} knows this silo's mean"
    return f"{column}: an attacker {who} {learned}."


def _size(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.3g}"
