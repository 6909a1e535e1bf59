"""The report of a study: one HTML page with a technical appendix, made from its document alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from fedtmle.layout import (
    Document,
    bits,
    decimals,
    element,
    number,
    phase_name,
    phase_rounds,
    probability,
    scrolling,
    silo_count,
    table,
    text,
)
from fedtmle.report import charts, clinical, emulation, people, series
from fedtmle.report import emulation as checklists
from fedtmle.report.emulation import STROBE, anchor
from fedtmle.runtime.certificate import OPEN
from fedtmle.text.certificate import (
    NOT_COVERED,
    convergence,
    history,
    privacy_budget,
    privacy_cost,
    private_certificate,
    remainder_rows,
    remedies,
)
from fedtmle.text.result import PHASES, cells, interval_title

# The certificate and the disclosures in plain language: what is proved, assumed and disclosed.

TARGETING = {
    "Coded": "the silo's mean gradient, rounded to a public grid, as a difference from its last message",
    "Adaptive": "the silo's mean gradient and its own fit of the fluctuation, rounded to a public grid",
    "Gradient": "exact sums over the silo's records of the gradient; for Newton steps, of the curvature too",
    "LocalAverage": "the silo's own fit of the fluctuation, and exact sums of the influence function",
    "Personalized": "the silo's own fit of the fluctuation, zero once it has retired",
    "Central": "nothing beyond the records themselves, which are in one place",
}
MODELS = (
    "counts by arm, and what fits the models: sums of gradients and curvatures, rounded unless the study "
    "asks for exact sums; whole models if a learner sends them"
)
CONTENTS = {
    "nuisance": ("models", MODELS),
    "calibration": (
        "calibration",
        "sums for preliminary standard errors; the curvature for the grid",
    ),
    "closing": ("closing", "sums for the estimate and its covariance, at the final fit"),
    "diagnostics": (
        "diagnostics",
        "counts and means by bin, with bins of few records added to a neighbour; sums of the outcome fit",
    ),
}


def proved(document: Document) -> Iterator[str]:
    """Yield the statements that hold for any data, if the parties followed the protocol."""
    stated = document["certificate"] or {}
    bound, tolerance = stated.get("residual_bound"), stated.get("tolerance")
    if document.get("privacy"):
        yield private_certificate(document)
    elif bound is None or tolerance is None:
        yield f"Nothing is proved about the pooled estimating equation: {document['status_text']}."
    else:
        errors = [row["std_error"] for row in document["estimates"] if row["std_error"]]
        relative = f", which is {bound / min(errors):.1g} of the smallest standard error" if errors else ""
        yield (
            "The equation that the analysis of pooled records solves (the mean of the efficient influence "
            f"function is zero) holds over all silos to within {bound:.2g}{relative}. "
            f"The tolerance was {tolerance:.2g}."
        )
        if document["residual_kind"] == "certified bound":
            yield "The bound includes all rounding. It follows from the integers that the silos sent."
        else:
            yield "This was computed from exact sums over all silos; it depends on no estimated constant."
        if not document["converged"]:
            yield f"The run stopped early: {document['status_text']}."
        yield from filter(None, (convergence(document), *history(document)))
    yield (
        "Every bit in the account was counted when it was sent, and the silos that took part until the end "
        "confirmed that they all received the same broadcasts."
    )


def assumed(document: Document) -> Iterator[str]:
    """Yield the assumptions that no computation on these records can check."""
    study = document["study"]
    yield from study["target"]["assumptions"]
    if "missingness" in study["models"]:
        yield "Whether an outcome is missing depends only on what the missingness model uses."
    yield (
        "The models are right, or are learned fast enough (the remainder is small against the standard "
        "error); which of them may be wrong is for the target's own documentation."
        if "brought" in study["target"]
        else "For the estimate: the outcome model or the models of treatment and missingness are right. "
        "For the interval: all of them are, or are learned fast enough (the remainder is small against "
        "the standard error)."
    )
    yield "Records are independent" + (
        f" between clusters of {study['options']['cluster']}." if study["options"]["cluster"] else "."
    )
    smoothness = (document["certificate"] or {}).get("smoothness")
    if smoothness:
        uses = "It affects the number of rounds; the bound on the residual does not depend on it."
        yield f"The smoothness constant {smoothness['value']:.4g} is {smoothness['basis']}. {uses}"
    for line in (document["certificate"] or {}).get("assumptions", []):
        yield (
            "The theorems' bounds on rounds and bits need two constants that this run did not measure; "
            "they are marked open in the table."
            if line == OPEN
            else f"{line[:1].upper()}{line[1:]}."
        )
    yield "The silos computed with the records they described, and the server pooled as the protocol says."


def messages(document: Document) -> Iterator[tuple[str, str]]:
    """Yield each phase with the contents of a silo's message."""
    algorithm = document["study"]["algorithm"]["kind"]
    contents = {
        **CONTENTS,
        "targeting": ("targeting", TARGETING.get(algorithm, "what the algorithm asks for")),
    }
    for phase in phase_rounds(document["account"], list(contents)):
        yield contents[phase]


def disclosed(document: Document) -> Iterator[str]:
    """Yield sentences about what the silos disclosed."""
    released, silos = document["silos"], document["sizes"]
    seen = (
        "The silos' sums were masked: the server and the silos read totals over all silos only, unless all "
        "silos but one share what they know."
        if None in silos.values()
        else "The server saw each silo's answers by themselves, not only their sum."
    )
    privacy = document.get("privacy")
    if privacy:
        yield (
            "The sums have noise for differential privacy: one record, whatever it holds, changes the "
            "probability of any set of published results by at most a factor of "
            f"exp({privacy['epsilon']:g}) and {privacy['delta']:g}. Not covered are {NOT_COVERED}."
        )
        yield f"Budget: {privacy_budget(document)}."
        yield f"Cost: {privacy_cost(document)}."
    yield (
        f"{seen} Sums over few records, or many sums over the same records, can reveal something about "
        "single records. Keeping data local is not in itself a privacy guarantee."
    )
    if released:
        shown = f"{len(released)} of {len(silos)} silos"
        yield f"The owners of {shown} allow their own estimate to be shown, and it is."
    else:
        yield "No silo's own estimate is shown: no owner allows it, or none was asked."
    yield "Every silo disclosed how many records it has."


# The appendix of the report: exactness, what left the silos, and how to reproduce it.


def exactness(document: Document) -> str:
    """Return the trajectory, what is proved and assumed, and the bounds of the theorems."""
    data = series.path(document)
    parts = []
    if any(data.norm):
        tolerance = "" if data.tolerance is None else f"; the tolerance is {data.tolerance:.2g}"
        first, last = (f"{norm:.2g}" if norm else series.ZERO for _, norm in (data.known[0], data.known[-1]))
        description = (
            f"Norm of the pooled gradient in {len(data.known)} rounds: from {first} to {last}{tolerance}."
        )
        marks = "filled: at the current fit; open: on the way to the next"
        marks += f"; triangle: {series.ZERO}" if data.zeros else ""
        title = f"Residual by round, with the tolerance ({marks})"
        parts.append(
            charts.figure(charts.trajectory(data), title=title, description=description, key="trajectory")
        )
        if data.loss is None:
            note = "The pooled loss is not drawn: the run did not ask for it, as that discloses one more sum."
            parts.append(text("p", note, class_="soft"))
    for title, lines in (("What is proved", proved), ("What is assumed", assumed)):
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
    html = "".join(text("p", line) for line in disclosed(document))
    html += scrolling(table(["phase", "a message holds"], messages(document)), "Messages", "prose")
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
    if not data.phases:  # a published result has no bits by round
        return html
    total = sum(sum(sent) for sent in data.up.values())
    description = f"{len(data.phases)} rounds, {len(data.up)} silos, {total:,} bits from silos in all."
    title = "Bits of each silo's answers, and of the broadcast to each, by round"
    return html + charts.figure(charts.bits(data), title=title, description=description, key="bits")


def reproduce(document: Document) -> str:
    """Return digests, versions, models and options."""
    study = document["study"]
    rows = [
        ["plan (SHA-256)", str(document["plan"])],
        ["transcript (SHA-256)", str(document["transcript"])],
        ["seed", str(study["options"]["seed"])],
        *([name, str(value)] for name, value in document["versions"].items()),
    ]
    for name, value in study["algorithm"].items():
        rows.append([f"algorithm: {name}", str(value)])
    for role, model in study["models"].items():
        rows.append([f"{role} model", str(model)])
    for name, value in study["options"].items():
        rows.append([f"option: {name}", str(value)])
    note = (
        "The same plan on the same records gives the same transcript with these versions on such a machine."
    )
    return text("p", note) + scrolling(table(["", ""], rows), "Reproducibility", "prose mono")


CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
APPENDIX = ("How exactly", "What left the silos", "To reproduce this")
MOST_ROWS = 8  # with more estimates than this, figures come first
CHECKLISTS = (STROBE, emulation.TARGET)  # TARGET is used if the study emulates a trial


def render(document: Document) -> str:
    """Return the page, which loads no other file."""
    sections = {title: html for title, html in _sections(document) if html}
    checklist = CHECKLISTS["emulation" in document]
    appendix = {title: sections.pop(title) for title in APPENDIX}
    titles = {*sections, *appendix, checklist.name}
    sections |= {checklist.name: checklists.render(checklist, titles), **appendix}
    links = "".join(element("li", text("a", title, href=f"#{anchor(title)}")) for title in sections)
    body = "".join(
        element("section", text("h2", title) + html, id=anchor(title)) for title, html in sections.items()
    )
    nav = element("nav", element("ul", links), aria_label="Sections")
    style = files("fedtmle.report").joinpath("style.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        f"{text('title', series.title(document))}<style>{style}</style>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>'
        f'<a class="skip" href="#main">Skip to the results</a>'
        f"{element('header', _header(document) + nav)}"
        f"{element('main', body, id='main')}"
        f"{element('footer', _footer(document))}</body></html>\n"
    )


def _sections(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the titles and the HTML of the sections, in their order; those without HTML are left out."""
    over = (
        ("Survival curves", people.curves(document)),
        ("Risks over time", clinical.risks(document)),
    )
    is_long = len(document["estimates"]) > MOST_ROWS
    yield from over if is_long else ()  # figures before the table
    yield "Estimates", _estimates(document)
    yield from () if is_long else over
    yield "A finer grid", people.finer_grid(document)
    yield "Participants", people.participants(document)
    yield "Adherence", clinical.adherence(document)
    yield "Weights over time", clinical.followers_weights(document)
    yield from emulation.sections(document)
    if "emulation" not in document:
        yield "Baseline characteristics", people.characteristics(document)
    yield "Missing data", people.missing(document)
    yield "Balance", people.balance(document)
    yield "Overlap", people.overlap(document)
    yield "Outcome model", people.fit(document)
    yield "Sensitivity", people.sensitivity(document)
    yield "Silo by silo", _forest(document)
    yield "Heterogeneity", _heterogeneity(document)
    yield "Methods", _methods(document)
    yield "How exactly", exactness(document)
    yield "What left the silos", sent(document)
    yield "To reproduce this", reproduce(document)


def _methods(document: Document) -> str:
    note = "A paragraph to paste, from the values of this run; the reasons for them are the authors' to give."
    return text("p", note, class_="soft") + text(
        "blockquote", " ".join(series.methods(document)), class_="paste"
    )


def _header(document: Document) -> str:
    parts = [text("h1", series.title(document))]
    silos = f"{document['n']:,} records in {silo_count(document)}"
    asked = series.asked(document)
    parts.append(text("p", f"{asked} {silos}.".strip(), class_="soft"))
    if len(document["estimates"]) == 1:
        (row,) = document["estimates"]
        value, _, interval = cells(row)
        aside = text("small", f"{interval_title(document)}: {interval}")
        answer = text("span", f"{_measure(document, row)}: {value}")
        parts.append(element("p", f"{answer} {aside}", class_="answer"))
    style = "status" if document["converged"] else "status bad"
    style += " noted" if document["converged"] and document["warnings"] else ""
    status = str(document["status_text"])
    parts.append(element("p", text("span", status[:1].upper() + status[1:], class_=style)))
    parts += [text("p", f"Warning: {warning}", class_="warning") for warning in document["warnings"]]
    parts += [text("p", f"Note: {note}", class_="soft") for note in document["notes"]]
    return "".join(parts)


def _measure(document: Document, row: Document) -> str:
    """Return an estimate's name for a reader; if the study estimates one value, this is its measure."""
    if len(document["estimates"]) > 1:
        return str(row["estimand"])
    first = series.measure(document)
    return f"{first[:1].upper()}{first[1:]}"


def _estimates(document: Document) -> str:
    estimates = document["estimates"]
    if not estimates:
        return _personalized(document)
    digits = _digits(document)
    title = interval_title(document)
    tests = any(row["p_value"] is not None for row in estimates)
    head = ["estimand", "estimate", "std. error", title, *(["p"] if tests else [])]
    rows = [
        [row["estimand"], *cells(row, digits), *([probability(row["p_value"])] if tests else [])]
        for row in estimates
    ]
    html = scrolling(table(head, rows, caption=series.caption(document)), "Estimates")
    html += _means(document, digits)
    if len(estimates) > 1 and document["simultaneous"]:
        rows = [[row["estimand"], cells(row, digits)[2]] for row in document["simultaneous"]]
        said = "Simultaneous intervals: all of them hold together with the same confidence."
        joint = scrolling(table(["estimand", f"simultaneous {title}"], rows), "Simultaneous intervals")
        if len(estimates) > MOST_ROWS:
            html += element("details", text("summary", said) + joint)
        else:
            html += text("p", said) + joint
    return html


def _means(document: Document, digits: int) -> str:
    """Return the mean outcome in each arm, for an estimand that compares arms."""
    is_comparison = any(row["scale"] != "value" for row in document["estimates"])
    if not is_comparison or not document["psi"] or document.get("curves"):
        return ""
    if document["study"]["options"]["submodel"] == "contrast":  # no means were estimated
        return ""
    each = zip(document["names"], document["psi"], document["std_error"], strict=True)
    rows = [
        [series.component(document, name), number(value, digits), number(error, digits)]
        for name, value, error in each
    ]
    kind = "Risk" if document["study"]["target"]["response"] == "binary" else "Mean"
    title, caption = "Means by arm", f"{kind} of {series.outcome(document)} under each arm"
    if "brought" in document["study"]["target"]:  # a target from another package need not have means
        title = caption = "Quantities behind the estimates"
    return scrolling(table(["", "estimate", "std. error"], rows, caption=caption), title)


def _personalized(document: Document) -> str:
    silos = document["personalized"]
    html = text("p", "Each silo keeps its own estimate; there is no pooled one.")
    rows = [
        [str(update), str(each["silos"]), "-" if each["people"] is None else f"{each['people']:,}"]
        for update, each in enumerate(document.get("active", []))
    ]
    if rows:
        html += scrolling(table(["update", "silos still fitting", "their records"], rows), "Active silos")
    rows = [
        [
            name,
            "-" if silo["n_rows"] is None else f"{silo['n_rows']:,}",
            "unfinished" if silo["retired_at"] is None else str(silo["retired_at"]),
        ]
        for name, silo in silos.items()
    ]
    if rows:
        html += scrolling(table(["silo", "records", "retired at update"], rows), "Silos")
    released = [(name, row) for name, silo in silos.items() for row in silo["estimates"]]
    if released:
        head = ["released by silos", "estimand", "estimate", "std. error", interval_title(document)]
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
        title = f"{data.estimand} with its {interval_title(document)}"
        figures.append(
            charts.figure(
                charts.forest(data, digits), title=title, description=description, key=f"forest-{k}"
            )
        )
    if not figures:
        return ""
    note = (
        "Only silos whose owner allows it are shown by themselves. A silo's own estimate is its own TMLE: "
        "the study's models fitted and targeted on its records alone. The summary is their random-effects "
        "mean (REML, Hartung-Knapp interval), with the interval for the effect at another such silo."
        if document["silos"]
        else "No owner allows an estimate of their silo's own to be shown, so only the pooled one is drawn."
    )
    rows = [
        [
            row.name,
            "" if row.n is None else f"{row.n:,}",
            f"{data.weights[row.label]:.1%}" if row.kind == "silo" and row.label in data.weights else "",
            *(f"{v:.{digits}f}" for v in (row.estimate, row.low, row.high)),
        ]
        for data in series.forests(document)
        for row in data.rows
    ]
    numbers = scrolling(
        table(["", "records", "weight", "estimate", "from", "to"], rows), "Numbers of the forest plot"
    )
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


def _footer(document: Document) -> str:
    version = str(document["version"])
    return text("p", f"Made by fedtmle {version} from a saved result. The page loads nothing from a network.")
