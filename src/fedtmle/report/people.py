"""The sections of the report about the people of a study: who they are, and what the estimate rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fedtmle.layout import (
    Document,
    covariate_name,
    decimals,
    decreasing,
    element,
    learner_tables,
    partial,
    partial_share,
    scrolling,
    share,
    silo_count,
    table,
    text,
)
from fedtmle.report import charts, clinical, emulation, series
from fedtmle.targets.effects.estimands import Scale
from fedtmle.text.result import MISSING_HANDLED, finer_sentence

FEW_EVENTS = "+ or few: some silos hide how many have the event, because few of them have it, or few do not."


def participants(document: Document) -> str:
    """Return the flow of records into the arms, and their numbers by arm and by silo."""
    if "periods" in document:
        return clinical.participants(document)
    data = series.overlap(document)
    if data is None:
        return ""
    head = ["", *(series.arm(document, arm.name) for arm in data.arms), "all"]
    records = [arm.records for arm in data.arms]
    everyone, unseen = (
        sum(arm.observed for arm in data.arms),
        sum(arm.observed_hidden_in for arm in data.arms),
    )
    counted = "with the event" if "curves" in document else "with an outcome"
    rows = [
        ["records", *(f"{count:,}" for count in records), f"{document['n']:,}"],
        [
            counted,
            *(partial_share(arm.observed, arm.records, arm.observed_hidden_in) for arm in data.arms),
            partial_share(everyone, document["n"], unseen),
        ],
    ]
    by_silo = [
        [silo, "not disclosed" if size is None else f"{size:,}"] for silo, size in document["sizes"].items()
    ]
    by_silo += [[silo, f"did not take part: {why}"] for silo, why in document["absent"].items()]
    numbers = scrolling(table(["silo", "records"], by_silo), "Records by silo")
    return (
        ("" if "emulation" in document else _flow(document, counted))
        + scrolling(table(head, rows), "Participants")
        + (text("p", FEW_EVENTS, class_="soft") if unseen else "")
        + element("details", text("summary", "Records by silo") + numbers)
    )


def _flow(document: Document, counted: str) -> str:
    """Draw the records of the silos that took part, the omitted records, and the arms with their outcomes."""
    data, people = series.overlap(document), document["participants"]
    if data is None:
        return ""
    boxes, lost = [f"Records at {silo_count(document)}: {people['records']:,}"], []
    if people["omitted"]:
        boxes.append(f"Analysed: {people['analysed']:,}")
        lost.append(f"without a treatment: {people['omitted']:,}")
    ends = []
    for arm in data.arms:
        rest = "" if "curves" in document else f", {arm.records - arm.observed:,} without"
        observed = partial(arm.observed, arm.observed_hidden_in)
        ends.append(f"{series.arm(document, arm.name)}: {arm.records:,} records, {observed} {counted}{rest}")
    description = ". ".join([*boxes, *lost, *ends]) + "."
    title = "Records that were analysed, and the arms that are compared"
    return charts.figure(
        emulation.diagram(boxes, lost, ends), title=title, description=description, key="participants-flow"
    )


def characteristics(document: Document) -> str:
    """Return Table 1: the covariates of the models by arm, unweighted, from the silos that disclose them."""
    described = document["balance"]
    if not described:
        return ""
    lines, silos = [], len(document["sizes"])
    for line in described["covariates"]:
        if line["hidden_in"] == silos:
            continue
        hidden = f" [{silos - line['hidden_in']} of {silos} silos]" if line["hidden_in"] else ""
        unit = f" ({line['unit']})" if line["unit"] else ""
        known = [value for value in line["differences"] if value is not None]
        lines.append(
            {
                "label": f"{covariate_name(line)}{unit}{hidden}",
                "mean": [] if None in line["means"] else line["means"],
                "sd": line["sds"],
                "difference": max(known, key=abs, default=None),
            }
        )
    arms = [series.arm(document, arm) for arm in (described["reference"], *described["arms"])]
    note = "Unweighted, over all records of each arm, with or without an outcome."
    if "periods" in document:
        note = "Covariates in period 1, by the treatment in that period, unweighted."
    if not described["is_complete"]:
        note += " A silo hides a covariate if in some arm few records have a value, or all have the same."
    note += _hidden(document)
    return emulation.table1(arms, [f"{count:,}" for count in described["counts"]], lines, note)


def _hidden(document: Document) -> str:
    """Return a sentence that names the covariates which every silo hides."""
    lines = document["balance"]["covariates"]
    hidden = [line["label"] for line in lines if line["hidden_in"] == len(document["sizes"])]
    return f" Every silo hides: {', '.join(dict.fromkeys(hidden))}." if hidden else ""


def balance(document: Document) -> str:
    """Return a Love plot for each arm but the reference."""
    html = ""
    for k, data in enumerate(series.balance(document)):
        pairs = zip(data.names, data.unweighted, data.weighted, strict=True)
        rows = [[name, *(_signed(value) for value in values)] for name, *values in pairs]
        where = "" if data.is_complete else ", some silos only"
        named = f"{series.arm(document, data.arm)} against {series.arm(document, data.reference)}"
        description = (
            f"Standardised differences of {len(data.names)} covariates between {named}{where}; the largest "
            f"after weighting of those that no silo hides is {data.largest:.2f}."
        )
        title = f"Balance of covariates, {named}{where}"
        html += charts.figure(clinical.love(data), title=title, description=description, key=f"balance-{k}")
        if not data.is_complete:
            note = "Silos that hide a covariate are left out of it: pale dots do not cover all records."
            html += text("p", note + _hidden(document))
        numbers = scrolling(table(["covariate", "unweighted", "weighted"], rows), f"Balance, {named}")
        html += element("details", text("summary", "The numbers") + numbers)
    if html:
        html = (
            text(
                "p",
                "Differences of means in standard deviations, before and after weighting by the inverse "
                "propensity score. Differences within 0.1 (shaded) usually need no attention.",
            )
            + html
        )
    return html


def _signed(value: float | None) -> str:
    return "hidden" if value is None else f"{value:+.3f}"


def overlap(document: Document) -> str:
    """Return truncation, effective sample sizes and the histograms of the propensity score."""
    data = series.overlap(document)
    if data is None or not data.effective or "treatment" not in document["study"]["models"]:
        return ""
    data = replace(
        data,
        arms=tuple(replace(arm, name=series.arm(document, arm.name)) for arm in data.arms),
        effective={series.component(document, name): size for name, size in data.effective.items()},
    )
    truncated = "; ".join(f"{arm.name} {arm.truncated:,}" for arm in data.arms)
    sizes = "; ".join(f"{name} {size:,.0f}" for name, size in data.effective.items())
    description = f"Truncated records: {truncated}. Effective sample size: {sizes}."
    title = (
        "Records by arm (dark: with an outcome; red: truncated, because the probability of the arm and of an "
        "observed outcome is below the bound), and effective sample sizes"
    )
    html = charts.figure(charts.overlap(data), title=title, description=description, key="overlap-sizes")
    for k, coded in enumerate(series.probabilities(document)):
        counts_by_arm = {series.arm(document, arm): counts for arm, counts in coded.counts.items()}
        spread = replace(coded, of=series.arm(document, coded.of), counts=counts_by_arm)
        title = (
            f"Propensity score of {spread.of} by observed arm (each silo joins bins of few records with the "
            "next; ?: hidden)"
        )
        counts = "; ".join(
            f"{arm}: {', '.join('hidden' if count is None else str(count) for count in by_bin)}"
            for arm, by_bin in spread.counts.items()
        )
        edges = ", ".join(f"{edge:g}" for edge in spread.edges[:-1])
        drawn = charts.probabilities(spread)
        description = f"Counts in bins that begin at {edges}. {counts}."
        html += charts.figure(drawn, title=title, description=description, key=f"probability-{k}")
    return html


def fit(document: Document) -> str:
    """Return the outcome model's fit: R squared and calibration, and the weights of super learners."""
    html = "".join(
        scrolling(table(head, learners), head[0].capitalize()) for head, *learners in learner_tables(document)
    )
    fitted = (document["diagnostics"] or {}).get("outcome_fit")
    if not fitted:
        return html
    shown = fitted.get("r_squared") or {}
    if shown.get("initial") is not None:
        html += text(
            "p",
            f"The outcome model explains {shown['initial']:.0%} of the outcome's variance before targeting, "
            f"{shown['targeted']:.0%} after.",
        )
    calibration = fitted.get("calibration")
    if calibration:
        rows = [
            [f"{low:.4g} to {high:.4g}", "hidden" if count is None else f"{count:,}", *map(_plain, means)]
            for low, high, count, *means in zip(
                calibration["edges"][:-1],
                calibration["edges"][1:],
                calibration["counts"],
                calibration["observed"],
                calibration["initial"],
                calibration["targeted"],
                strict=True,
            )
            if count != 0  # 0 if the bin is empty or joined with the next
        ]
        caption = (
            "Calibration: mean outcome by bins of the model's prediction (each silo joins bins of few "
            "records with the next, so that all records are in the table)"
        )
        head = ["prediction", "records", "observed", "initial model", "targeted"]
        html += scrolling(table(head, rows, caption=caption), "Calibration")
    return html


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def sensitivity(document: Document) -> str:
    """Return the estimate by truncation bound, E-values and bounds on the bias of an omitted variable."""
    return _ladder(document) + "".join(_confounding(document))


def _ladder(document: Document) -> str:
    steps = document["ladder"]
    if not steps or not document["estimates"]:
        return ""
    html = ""
    for k, first in enumerate(steps[0]["estimates"]):
        rows = []
        own = document["g_floor"]
        mine = {"bound": own, "estimates": document["estimates"]}
        for step in sorted([*steps, mine], key=lambda step: step["bound"]):
            row = step["estimates"][k]
            ends = (row["estimate"], row["conf_low"], row["conf_high"])
            if None not in ends:
                bound = f"bound {step['bound']:.3g}" if step["bound"] else "no bound"
                rows.append((bound + (" (the study's)" if step is mine else ""), *ends))
        if not rows:
            continue
        title = f"{first['estimand']} over other bounds on the propensity score; the study's own is {own:.3g}"
        description = "; ".join(f"{name}: {estimate:.4g}" for name, estimate, _, _ in rows)
        drawn = clinical.ladder(rows, Scale(first["scale"]).null, first["estimand"])
        html += charts.figure(drawn, title=title, description=description, key=f"ladder-{k}")
    return html


def _confounding(document: Document) -> Iterator[str]:
    lines = document["sensitivity"]
    if not lines:
        return
    rows = []
    for line in lines:
        robustness = [line.get("robustness_value"), line.get("robustness_value_interval")]
        rows.append(
            [
                str(line.get("estimand", "")),
                *(_plain(line.get(key)) for key in ("e_value", "e_value_interval")),
                *("-" if value is None else f"{value:.1%}" for value in robustness),
            ]
        )
    head = ["", "E-value", "of the interval", "robustness value", "of the interval"]
    yield scrolling(table(head, rows), "Unmeasured confounding")
    yield text(
        "p",
        "The E-value is the risk ratio that an unmeasured confounder would need with both treatment and "
        "outcome to explain the estimate away (VanderWeele and Ding 2017). The robustness value is the share "
        "of the residual variation of outcome and weights that it would have to explain.",
    )


def missing(document: Document) -> str:
    """Return the numbers of missing values, and how the analysis accounts for them."""
    data = series.overlap(document)
    if data is None:
        return ""
    html, models = "", document["study"]["models"]
    if "grid" in document or "periods" in document:
        if "censoring" in models:
            html += text(
                "p",
                "Follow-up that ends without an event is accounted for by inverse probability of censoring "
                f"weights from {models['censoring']}.",
            )
    else:
        html += _without_outcome(document, sum(arm.records - arm.observed for arm in data.arms))
    omitted = document["participants"]["omitted"]
    if omitted:
        html += text("p", f"{omitted:,} records have no treatment and are left out, as the study declares.")
    lines = document["missing"]
    if lines:
        rows = [
            [
                series.label(document, name),
                f"{line['count']:,} ({share(line['count'], line['of'])})",
                MISSING_HANDLED[line["handled"]],
            ]
            for name, line in lines.items()
        ]
        html += scrolling(table(["missing covariate", "records", "handled by"], rows), "Missing covariates")
    return html + _imputation(document)


def _imputation(document: Document) -> str:
    """Return what imputation costs each estimate; empty if nothing was imputed."""
    imputation = document["imputation"]
    if not imputation:
        return ""
    rows = [
        [line["estimand"], f"{line['missing_information']:.0%}", f"{line['df']:.0f}"]
        for line in imputation["estimands"]
    ]
    head = [f"over {imputation['datasets']} imputed data sets", "missing information", "df"]
    note = text(
        "p",
        "Estimates and intervals combine the imputed data sets by Rubin's rules. Missing information is the "
        "share of an estimate's information that is lost because values are missing; df are the degrees of "
        "freedom of its interval.",
    )
    return scrolling(table(head, rows), "Imputed data sets") + note


def _without_outcome(document: Document, unknown: int) -> str:
    models = document["study"]["models"]
    if not unknown:
        return text("p", "Every record has an outcome.")
    counted = f"{unknown:,} of {document['n']:,} records have no outcome."
    if "missingness" in models:
        counted += (
            f" They count: inverse probability of observation weights come from {models['missingness']}."
        )
    return text("p", counted)


def finer_grid(document: Document) -> str:
    """Return the estimates on a finer grid next to the study's own, if the study asks for the comparison."""
    finer = document.get("finer_grid")
    if not finer:
        return ""
    html = text("p", finer_sentence(document))
    if not finer["estimates"]:
        return html
    digits = max(decimals(row["std_error"]) for row in document["estimates"])
    rows = [
        [
            row["estimand"],
            *(f"{each['estimate']:.{digits}f} ({each['std_error']:.{digits}f})" for each in (own, row)),
            f"{row['difference']:+.2f}",
        ]
        for own, row in zip(document["estimates"], finer["estimates"], strict=True)
    ]
    head = ["", "estimate (std. error)", "on the finer grid", "difference in std. errors"]
    return html + scrolling(table(head, rows), "A finer grid")


def curves(document: Document) -> str:
    """Return the curves of a study of time to an event, with numbers at risk."""
    drawn = document.get("curves") or []
    if not drawn:
        return ""
    html = ""
    groups = list(dict.fromkeys((curve["population"], curve["cause"]) for curve in drawn))
    for k, (population, cause) in enumerate(groups):
        same = [
            {**curve, "name": series.arm(document, curve["arm"])}
            for curve in drawn
            if (curve["population"], curve["cause"]) == (population, cause)
        ]
        causes = document["grid"]["causes"]
        named = ", ".join(str(part) for part in (cause if len(causes) > 1 else "", population) if part)
        measure, arms = series.curve_measure(document), [curve["arm"] for curve in same]
        compared = "arm" if arms == document["arms"] else "rule"
        title = f"{measure[:1].upper()}{measure[1:]} by time and {compared}" + (f": {named}" if named else "")
        ends = "; ".join(
            f"{curve['name']} {curve['estimate'][-1]:.{decimals(curve['std_error'][-1])}f}" for curve in same
        )
        html += charts.figure(
            clinical.curves(
                same,
                series.time(document),
                begin=float(document["grid"]["measure"] == "Survival"),
                at_risk=[] if population else _at_risk(document, arms),
            ),
            title=f"{title}; bands hold for all times and {compared}s at once",
            description=f"At the last horizon: {ends}.",
            key=f"curve-{k}",
        )
    return html + _at_risk_table(document) + clinical.by_horizon(document)


def _at_risk(document: Document, arms: Sequence[str]) -> list[clinical.AtRisk]:
    """Return the times and numbers at risk of each arm; none if an arm of the curves is a rule."""
    shown, edges = document.get("at_risk"), [0.0, *document["grid"]["edges"]]
    if not shown or list(arms) != document["arms"]:
        return []
    begins = [edges[period - 1] for period in shown["periods"]]
    return [
        list(zip(begins, decreasing(counts, hides), strict=True))
        for counts, hides in zip(shown["counts"], shown["hidden_in"], strict=True)
    ]


def _at_risk_table(document: Document) -> str:
    shown = document.get("at_risk")
    if not shown:
        return ""
    head = ["", *(f"period {period}" for period in shown["periods"])]
    arms = zip(document["arms"], shown["counts"], shown["hidden_in"], strict=True)
    rows = [[series.arm(document, arm), *decreasing(counts, hides)] for arm, counts, hides in arms]
    caption = "People at risk when a period begins"
    html = element(
        "details", text("summary", caption) + scrolling(table(head, rows, caption=caption), caption)
    )
    if any(map(any, shown["hidden_in"])):
        note = (
            "+: at least so many people at risk; some silos hide their number, because few left just before."
        )
        html += text("p", note, class_="soft")
    return html
