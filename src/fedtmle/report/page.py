"""The report of a study: one HTML page, made from its document alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from fedtmle.layout import Document, decimals, number, probability, silo_count
from fedtmle.report import charts, emulation, over_time, people, series, technical, wording
from fedtmle.report import checklist as checklists
from fedtmle.report.checklist import STROBE, anchor
from fedtmle.runtime.markup import element, scrolling, table, text
from fedtmle.text.result import cells, interval_title

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
APPENDIX = ("How exactly", "What left the silos", "To reproduce this")
MOST_ROWS = 8  # with more estimates than this, figures come first
CHECKLISTS = (STROBE, emulation.TARGET)  # TARGET is used if the study emulates a trial


def render(document: Document) -> str:
    """Return the page, which loads no other file."""
    sections = {title: html for title, html in _sections(document) if html}
    checklist = CHECKLISTS["emulation" in document]
    if "study" in document:
        appendix = {title: sections.pop(title) for title in APPENDIX if title in sections}
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
        f"{text('title', wording.title(document))}<style>{style}</style>"
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
    over: tuple[tuple[str, str], ...] = ()
    if "study" in document:
        over = (
            ("Survival curves", people.curves(document)),
            ("Risks over time", over_time.risks(document)),
        )
    is_long = len(document["estimates"]) > MOST_ROWS
    yield from over if is_long else ()  # figures before the table
    yield "Estimates", _estimates(document)
    yield from () if is_long else over
    if "study" in document:
        yield "A finer grid", people.finer_grid(document)
        yield "Participants", people.participants(document)
        yield "Adherence", over_time.adherence(document)
        yield "Weights over time", over_time.weights(document)
    yield from emulation.sections(document)
    if "study" in document and "emulation" not in document:
        yield "Baseline characteristics", people.characteristics(document)
    if "study" in document:
        yield "Missing data", people.missing(document)
        yield "Balance", people.balance(document)
        yield "Overlap", people.overlap(document)
        yield "Outcome model", people.fit(document)
        yield "Sensitivity", people.sensitivity(document)
    yield "Silo by silo", _forest(document)
    yield "Heterogeneity", _heterogeneity(document)
    if "study" in document:
        yield "Methods", _methods(document)
    yield "How exactly", technical.exactness(document)
    yield "What left the silos", technical.sent(document)
    yield "To reproduce this", technical.reproduce(document)


def _methods(document: Document) -> str:
    note = "A paragraph to paste, from the values of this run; the reasons for them are the authors' to give."
    return text("p", note, class_="soft") + text(
        "blockquote", " ".join(wording.methods(document)), class_="paste"
    )


def _header(document: Document) -> str:
    parts = [text("h1", wording.title(document))]
    silos = f"{document['n']:,} records in {silo_count(document)}"
    asked = wording.asked(document)
    parts.append(text("p", f"{asked} {silos}.".strip(), class_="soft"))
    if len(document["estimates"]) == 1:
        (row,) = document["estimates"]
        value, _, interval = cells(row)
        aside = text("small", f"{_interval_title(document)}: {interval}")
        answer = text("span", f"{_measure(document, row)}: {value}")
        parts.append(element("p", f"{answer} {aside}", class_="answer"))
    style = "status" if document["converged"] else "status bad"
    style += " noted" if document["converged"] and document.get("warnings") else ""
    status = str(document["status_text"])
    parts.append(element("p", text("span", status[:1].upper() + status[1:], class_=style)))
    parts += [text("p", f"Warning: {warning}", class_="warning") for warning in document.get("warnings", [])]
    parts += [text("p", f"Note: {note}", class_="soft") for note in document.get("notes", [])]
    return "".join(parts)


def _measure(document: Document, row: Document) -> str:
    """Return an estimate's name for a reader; if the study estimates one value, this is its measure."""
    if "study" not in document or len(document["estimates"]) > 1:
        return str(row["estimand"])
    first = wording.measure(document)
    return f"{first[:1].upper()}{first[1:]}"


def _interval_title(document: Document) -> str:
    return interval_title(document) if "study" in document else "95% interval"


def _estimates(document: Document) -> str:
    estimates = document["estimates"]
    if not estimates:
        return _personalized(document)
    digits = _digits(document)
    title = _interval_title(document)
    tests = any(row["p_value"] is not None for row in estimates)
    head = ["estimand", "estimate", "std. error", title, *(["p"] if tests else [])]
    rows = [
        [row["estimand"], *cells(row, digits), *([probability(row["p_value"])] if tests else [])]
        for row in estimates
    ]
    caption = wording.caption(document) if "study" in document else ""
    html = scrolling(table(head, rows, caption=caption), "Estimates") + _means(document, digits)
    if len(estimates) > 1 and document.get("simultaneous"):
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
    if "study" not in document or not is_comparison or not document["psi"] or document.get("curves"):
        return ""
    if document["study"]["options"].get("submodel") == "contrast":  # no means were estimated
        return ""
    each = zip(document["names"], document["psi"], document["std_error"], strict=True)
    rows = [
        [wording.component(document, name), number(value, digits), number(error, digits)]
        for name, value, error in each
    ]
    kind = "Risk" if document["study"]["target"]["response"] == "binary" else "Mean"
    title, caption = "Means by arm", f"{kind} of {wording.outcome(document)} under each arm"
    if "brought" in document["study"]["target"]:  # a target from another package need not have means
        title = caption = "Quantities behind the estimates"
    return scrolling(table(["", "estimate", "std. error"], rows, caption=caption), title)


def _personalized(document: Document) -> str:
    silos = document.get("personalized", {})
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
        "Only silos whose owner allows it are shown by themselves. A silo's own estimate is its own TMLE: "
        "the study's models fitted and targeted on its records alone. The summary is their random-effects "
        "mean (REML, Hartung-Knapp interval), with the interval for the effect at another such silo."
        if document.get("silos")
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
    version = str(document.get("version", ""))
    return text("p", f"Made by fedtmle {version} from a saved result. The page loads nothing from a network.")
