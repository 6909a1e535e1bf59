"""The appendix of the report: exactness, what left the silos, and how to reproduce it."""

from __future__ import annotations

from fedtmle.layout import Document, bits, phase_name, phase_rounds
from fedtmle.report import charts, series, words
from fedtmle.runtime.markup import element, scrolling, table, text
from fedtmle.text.certificate import remainder_rows, remedies
from fedtmle.text.result import PHASES


def exactness(document: Document) -> str:
    """Return the trajectory, what is proved and assumed, and the bounds of the theorems."""
    data = series.path(document)
    parts = []
    known = [norm for norm in data.norm if norm]
    if known:
        tolerance = "" if data.tolerance is None else f"; the tolerance is {data.tolerance:.2g}"
        ends = f"from {known[0]:.2g} to {known[-1]:.2g}"
        description = f"Norm of the pooled gradient in {len(known)} rounds: {ends}{tolerance}."
        title = (
            "Residual by round, with the tolerance (filled: at the current fit; open: on the way to the next)"
        )
        parts.append(
            charts.figure(charts.trajectory(data), title=title, description=description, key="trajectory")
        )
        if data.loss is None:
            note = "The pooled loss is not drawn: the run did not ask for it, as that discloses one more sum."
            parts.append(text("p", note, class_="soft"))
    for title, lines in (("What is proved", words.proved), ("What is assumed", words.assumed)):
        items = "".join(text("li", line) for line in lines(document))
        parts.append(text("h3", title) + element("ul", items))
    checks = (document["certificate"] or {}).get("checks", [])
    if checks:
        rows = [
            [
                line["name"],
                f"{line['realised']:.5g}",
                "open" if line["bound"] is None else f"{line['bound']:.4g}",
                line["basis"] or "",
                line["statement"],
            ]
            for line in checks
        ]
        caption = "The cost of the run, and the bounds of the paper's theorems"
        head = ["", "realised", "bound", "depends on", "statement"]
        parts.append(scrolling(table(head, rows, caption=caption), "Bounds"))
    terms = remainder_rows(document)
    if terms:
        caption = "The terms of the statistical theorem and the conditions of its corollary, beside the error"
        parts.append(scrolling(table(terms[0], terms[1:], caption=caption), "Statistical terms", "prose"))
        parts.append(text("p", remedies(document), class_="soft"))
    return "".join(parts)


def sent(document: Document) -> str:
    """Return the contents of the messages, and the bits by silo and phase."""
    account = document["account"]
    data = series.bits_by_round(document)
    phases = phase_rounds(account, PHASES)
    html = "".join(text("p", line) for line in words.disclosed(document))
    html += scrolling(table(["phase", "a message holds"], words.messages(document)), "Messages", "prose")
    up, down = account["bits_up"], account["bits_down"]
    rows = [
        [silo, *(bits(up[silo].get(phase, 0)) for phase in phases), bits(sum(up[silo].values())),
         bits(sum(down.get(silo, {}).values()))]
        for silo in up
    ]  # fmt: skip
    heads = [f"{phase_name(phase)} ({rounds})" for phase, rounds in phases.items()]
    caption = (
        "Bits that each silo sent, by phase (with the number of rounds; shared: in rounds of other phases), "
        "and received"
    )
    html += scrolling(table(["silo", *heads, "sent", "received"], rows, caption=caption), "Bits by silo")
    total = sum(sum(sent) for sent in data.up.values())
    description = f"{len(data.phases)} rounds, {len(data.up)} silos, {total:,} bits from silos in all."
    title = "Bits of each silo's answers, and of the broadcast to each, by round"
    return html + charts.figure(charts.bits(data), title=title, description=description, key="bits")


def reproduce(document: Document) -> str:
    """Return digests, versions, models and options."""
    study = document.get("study", {})
    rows = [
        ["plan (SHA-256)", str(document.get("plan", "-"))],
        ["transcript (SHA-256)", str(document["transcript"])],
        ["seed", str(study.get("options", {}).get("seed", "-"))],
        *([name, str(value)] for name, value in document.get("versions", {}).items()),
    ]
    for name, value in study.get("algorithm", {}).items():
        rows.append([f"algorithm: {name}", str(value)])
    for role, model in study.get("models", {}).items():
        rows.append([f"{role} model", str(model)])
    for name, value in study.get("options", {}).items():
        rows.append([f"option: {name}", str(value)])
    note = (
        "The same plan on the same records gives the same transcript with these versions on such a machine."
    )
    return text("p", note) + scrolling(table(["", ""], rows), "Reproducibility", "prose mono")
