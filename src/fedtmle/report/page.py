"""The report of a study: one HTML page, made from its document alone."""

from __future__ import annotations

from importlib.resources import files

from fedtmle.layout import Document, bits, decimals, learner_tables, phase_name, probability, share
from fedtmle.report import charts, emulation, series, words
from fedtmle.runtime.markup import element, scrolling, table, text
from fedtmle.text.result import PHASES, cells, interval_title

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(document: Document) -> str:
    """Return the page, which loads no other file."""
    sections = {
        title: body
        for title, body in (
            ("Estimates", _estimates(document)),
            ("Silo by silo", _forest(document)),
            ("Heterogeneity", _heterogeneity(document)),
            *emulation.sections(document),
            ("Who was studied, and how", _cohort(document)),
            ("How exactly", _exactness(document)),
            ("What left the silos", _sent(document)),
            ("To reproduce this", _reproduce(document)),
        )
        if body
    }
    keys = {title: title.lower().replace(" ", "-").replace(",", "") for title in sections}
    links = "".join(element("li", text("a", title, href=f"#{keys[title]}")) for title in sections)
    body = "".join(
        element("section", text("h2", title) + html, id=keys[title]) for title, html in sections.items()
    )
    nav = element("nav", element("ul", links), aria_label="Sections")
    style = files("fedtmle.report").joinpath("style.css").read_text(encoding="utf-8")
    question = str(document["question"])
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        f"{text('title', question)}<style>{style}</style>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>'
        f'<a class="skip" href="#main">Skip to the results</a>'
        f"{element('header', _header(document) + nav)}"
        f"{element('main', body, id='main')}"
        f"{element('footer', _footer(document))}</body></html>\n"
    )


def _header(document: Document) -> str:
    parts = [text("h1", str(document["question"]))]
    sizes = document["sizes"]
    silos = "1 silo" if len(sizes) == 1 else f"{len(sizes)} silos"
    parts.append(text("p", f"{document['n']:,} records in {silos}", class_="soft"))
    if len(document["estimates"]) == 1:
        (row,) = document["estimates"]
        value, _, interval = cells(row)
        aside = text("small", f"{_interval_title(document)}: {interval}")
        answer = text("span", f"{row['estimand']}: {value}")
        parts.append(element("p", f"{answer} {aside}", class_="answer"))
    style = "status" if document["converged"] else "status bad"
    status = str(document["status_text"])
    parts.append(element("p", text("span", status[:1].upper() + status[1:], class_=style)))
    parts += [text("p", f"Warning: {warning}", class_="warning") for warning in document.get("warnings", [])]
    return "".join(parts)


def _interval_title(document: Document) -> str:
    return interval_title(document) if "study" in document else "95% interval"


def _estimates(document: Document) -> str:
    estimates = document["estimates"]
    if not estimates:
        return _personalized(document)
    digits = _digits(document)
    title = _interval_title(document)
    head = ["estimand", "estimate", "std. error", title, "p"]
    rows = [[row["estimand"], *cells(row, digits), probability(row["p_value"])] for row in estimates]
    html = scrolling(table(head, rows), "Estimates")
    if len(estimates) > 1 and document.get("simultaneous"):
        rows = [[row["estimand"], cells(row, digits)[2]] for row in document["simultaneous"]]
        html += text("p", "Simultaneous intervals: all of them hold together with the same confidence.")
        html += scrolling(table(["estimand", f"simultaneous {title}"], rows), "Simultaneous intervals")
    return html


def _personalized(document: Document) -> str:
    silos = document.get("personalized", {})
    rows = [
        [name, f"{silo['n_rows']:,}", "unfinished" if silo["retired_at"] is None else str(silo["retired_at"])]
        for name, silo in silos.items()
    ]
    html = text("p", "Each silo keeps its own estimate; there is no pooled one.")
    if rows:
        html += scrolling(table(["silo", "records", "left at update"], rows), "Silos")
    released = [(name, row) for name, silo in silos.items() for row in silo["estimates"]]
    if released:
        head = ["released by silos", "estimand", "estimate", "std. error", _interval_title(document)]
        rows = [[name, row["estimand"], *cells(row)] for name, row in released]
        html += scrolling(table(head, rows), "Released estimates")
    return html


def _digits(document: Document) -> int:
    return max((decimals(row["std_error"]) for row in document["estimates"]), default=4)


def _forest(document: Document) -> str:
    figures = []
    digits = _digits(document)
    for k, data in enumerate(series.forests(document)):
        pooled = data.rows[-1]
        description = (
            f"Forest plot of {data.estimand}: pooled {pooled.estimate:.{digits}f}, "
            f"interval {pooled.low:.{digits}f} to {pooled.high:.{digits}f}; "
            f"{sum(row.kind == 'silo' for row in data.rows)} silos show their own."
        )
        title = f"{data.estimand} with its {_interval_title(document)}"
        figures.append(
            charts.figure(
                charts.forest(data, digits), title=title, description=description, key=f"forest-{k}"
            )
        )
    if not figures:
        return ""
    note = (
        "Only silos that consented are shown by themselves. A silo's own estimate is its own TMLE: the "
        "study's models fitted and targeted on its records alone. The summary is their random-effects mean "
        "(REML, Hartung-Knapp interval), with the interval for the effect at another such silo."
        if document.get("silos")
        else "No silo consented to showing an estimate of its own, so only the pooled one is drawn."
    )
    rows = [
        [row.name, f"{row.n:,}", *(f"{v:.{digits}f}" for v in (row.estimate, row.low, row.high))]
        for data in series.forests(document)
        for row in data.rows
    ]
    numbers = scrolling(table(["", "records", "estimate", "from", "to"], rows), "Numbers of the forest plot")
    return text("p", note) + "".join(figures) + element("details", text("summary", "The numbers") + numbers)


def _heterogeneity(document: Document) -> str:
    figures = []
    spreads = series.heterogeneity(document)
    for k, data in enumerate(spreads):
        description = (
            f"Each silo's {data.estimand} against their weighted mean, in standard errors: "
            + ", ".join(f"{silo} {value:+.1f}" for silo, value in data.distance.items())
        )
        title = f"{data.estimand}: distance of each silo from their weighted mean"
        figures.append(
            charts.figure(charts.heterogeneity(data), title=title, description=description, key=f"spread-{k}")
        )
    if not figures:
        return ""
    rows = [[s.estimand, f"{s.Q:.2f}", str(s.df), probability(s.p), f"{s.I2:.0%}"] for s in spreads]
    head = ["estimand", "Cochran's Q", "df", "p", "I\N{SUPERSCRIPT TWO}"]
    note = (
        "If all silos had the same effect, Q would be near its degrees of freedom. "
        "I\N{SUPERSCRIPT TWO} is the share of the spread beyond chance. With few silos both are rough."
    )
    return scrolling(table(head, rows), "Heterogeneity") + text("p", note) + "".join(figures)


def _cohort(document: Document) -> str:
    data = series.overlap(document)
    if data is None:
        return ""
    rows = [
        [
            arm.name,
            f"{arm.records:,}",
            f"{arm.observed:,} ({share(arm.observed, arm.records)})",
            f"{arm.truncated:,} ({share(arm.truncated, arm.records)})"
            + (f"; hidden in {arm.hidden_in}" if arm.hidden_in else ""),
        ]
        for arm in data.arms
    ]
    html = scrolling(table(["arm", "records", "with outcome", "truncated"], rows), "Arms")
    study = document["study"]
    models = [[f"{role} model", formula] for role, formula in study["models"].items()]
    truncation = "none" if data.truncation is None else f"{data.truncation:.4g}"
    rule = " (auto)" if study["options"]["g_bounds"] == "auto" else ""
    models += [["algorithm", study["algorithm"]["kind"]], ["truncation of g", truncation + rule]]
    html += scrolling(table(["", ""], models), "Models", "prose")
    for head, *learners in learner_tables(document):
        html += scrolling(table(head, learners), head[0].capitalize())
    truncated = "; ".join(f"{arm.name} {arm.truncated:,}" for arm in data.arms)
    sizes = "; ".join(f"{name} {size:,.0f}" for name, size in data.effective.items())
    description = f"Truncated records: {truncated}. Effective sample size: {sizes}."
    title = (
        "Overlap: records by arm (dark: with an outcome; red: truncated, because the probability "
        "of the arm and of an observed outcome is below the bound), and effective sample sizes"
    )
    html += charts.figure(charts.overlap(data), title=title, description=description, key="overlap")
    for k, spread in enumerate(series.probabilities(document)):
        title = f"Modelled probability of arm {spread.of} by observed arm (?: hidden, too few records)"
        counts = "; ".join(
            f"{arm}: {', '.join('hidden' if count is None else str(count) for count in by_bin)}"
            for arm, by_bin in spread.counts.items()
        )
        description = (
            f"Counts in bins that begin at {', '.join(f'{edge:g}' for edge in spread.edges[:-1])}. {counts}."
        )
        drawn = charts.probabilities(spread)
        html += charts.figure(drawn, title=title, description=description, key=f"probability-{k}")
    return html


def _exactness(document: Document) -> str:
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
    return "".join(parts)


def _sent(document: Document) -> str:
    account = document["account"]
    data = series.bits_by_round(document)
    phases = [phase for phase in PHASES if account["rounds"].get(phase)]
    html = "".join(text("p", line) for line in words.disclosed(document))
    html += scrolling(table(["phase", "a message holds"], words.messages(document)), "Messages", "prose")
    up, down = account["bits_up"], account["bits_down"]
    rows = [
        [silo, *(bits(up[silo].get(phase, 0)) for phase in phases), bits(sum(up[silo].values())),
         bits(sum(down.get(silo, {}).values()))]
        for silo in up
    ]  # fmt: skip
    heads = [f"{phase_name(phase)} ({account['rounds'][phase]})" for phase in phases]
    caption = "Bits that each silo sent, by phase (with the number of rounds), and received"
    html += scrolling(table(["silo", *heads, "sent", "received"], rows, caption=caption), "Bits by silo")
    total = sum(sum(sent) for sent in data.up.values())
    description = f"{len(data.phases)} rounds, {len(data.up)} silos, {total:,} bits from silos in all."
    title = "Bits of each silo's answers, and of the broadcast to each, by round"
    return html + charts.figure(charts.bits(data), title=title, description=description, key="bits")


def _reproduce(document: Document) -> str:
    study = document.get("study", {})
    rows = [
        ["plan (SHA-256)", str(document.get("plan", "-"))],
        ["transcript (SHA-256)", str(document["transcript"])],
        ["seed", str(study.get("options", {}).get("seed", "-"))],
        *([name, str(value)] for name, value in document.get("versions", {}).items()),
    ]
    for name, value in study.get("algorithm", {}).items():
        rows.append([f"algorithm: {name}", str(value)])
    for name, value in study.get("options", {}).items():
        rows.append([f"option: {name}", str(value)])
    note = (
        "The same plan on the same records gives the same transcript with these versions on such a machine."
    )
    return text("p", note) + scrolling(table(["", ""], rows), "Reproducibility", "prose mono")


def _footer(document: Document) -> str:
    version = str(document.get("version", ""))
    return text("p", f"Made by fedtmle {version} from a saved result. The page loads nothing from a network.")
