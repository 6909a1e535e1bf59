"""The result of a study as 80 columns of text, made from its document alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fedtmle.layout import (
    POOR_OVERLAP,
    Document,
    aligned,
    bits,
    covariate_name,
    decimals,
    decreasing,
    histogram_table,
    is_poor,
    learner_tables,
    number,
    partial,
    partial_share,
    phase_name,
    phase_rounds,
    probability,
    sent_bits,
    share,
    silo_count,
    wrapped,
)
from fedtmle.text import certificate as certificates
from fedtmle.text.certificate import NOT_COVERED, certificate, privacy_budget, privacy_cost

WAYS = ("bits_up", "bits_down")
MISSING_HANDLED = {"indicator": "a constant and an indicator", "impute": "multiple imputation"}
PHASES = ("nuisance", "calibration", "targeting", "closing", "diagnostics")


def render(document: Document) -> str:
    """Return the whole result; its first line is the title."""
    parts = (
        _emulation(document),
        _question(document),
        _cohort(document),
        _how(document),
        _learners(document),
        _estimates(document),
        finer_grid(document),
        _missing(document),
        _personalized(document),
        _silos(document),
        sensitivity(document),
        _at_risk(document),
        _adherence(document),
        _overlap(document),
        ladder(document),
        _balance(document),
        _fit(document),
        certificate(document),
        cost(document),
        _warnings(document),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _emulation(document: Document) -> Iterator[str]:
    if "emulation" in document:
        yield certificates.render(document["emulation"])


def _question(document: Document) -> Iterator[str]:
    yield from wrapped(document["study"]["title"] or document["question"], first="", indent="    ")
    target = document["study"]["target"]
    treatment = f" of {target['treatment']}" if target["treatment"] else ""
    yield f"{target['kind']}{treatment}; {document['n']:,} records in {silo_count(document)}"
    if document["study"]["title"]:
        yield from wrapped(document["question"], first="", indent="    ")
    if is_poor(document):
        yield from wrapped(f"{POOR_OVERLAP} Read the warnings first.")
    elif document["warnings"]:
        yield "Read the warnings first; they are at the end."


def _cohort(document: Document) -> Iterator[str]:
    rule = "rule" if "periods" in document else "arm"
    rows = [(rule, "records", "with event" if "curves" in document else "with outcome", "truncated")]
    counts = ("arms", "arm_counts", "observed_counts", "truncated", "truncated_hidden")
    if not document["truncated"]:  # a target with a problem of its own counts none
        document = {**document, **dict.fromkeys(counts[3:], [0] * len(document["arms"]))}
    unseen = document.get("events_hidden_in", [0] * len(document["arms"]))
    for arm, count, observed, below, hidden, less in zip(
        *(document[key] for key in counts), unseen, strict=True
    ):
        truncated = partial(below, hidden)
        if below:  # everyone has a score of every arm, whichever arm was taken
            truncated += f" of {document['n']:,}"
        rows.append((arm, f"{count:,}", partial_share(observed, count, less), truncated))
    yield from aligned(rows if document["effective_sizes"] else [row[:3] for row in rows])


def _how(document: Document) -> Iterator[str]:
    """Yield the outcome, the models, the algorithm, the truncation and the effective sample sizes."""
    study = document["study"]
    target = study["target"]
    if "grid" in document:
        lines = list(_grid(document))
    else:
        low, high = target["outcome_bounds"]
        lines = [("outcome", f"{target['response']}, {low:g} to {high:g}")]
    for role, text in study["models"].items():  # the learners of a super learner have their own table
        lines.append((f"{role} model", text.partition(":")[0] if text.startswith("super learner") else text))
    lines.append(("algorithm", study["algorithm"]["kind"]))
    rule = study["options"]["g_bounds"]
    bound = f"{document['g_floor']:.4g}" if document["g_floor"] else "none"
    lines.append(("truncation", f"{bound}{' (auto)' if rule == 'auto' else ''}"))
    lines += _privacy_lines(document)
    sizes = [f"{size:,.1f} for {name}" for name, size in document["effective_sizes"].items()]
    lines += [("effective sample size", "; ".join(sizes))] if sizes else []
    lines += [("target", brought_text(target["brought"]))] if "brought" in target else []
    width = max(len(label) for label, _ in lines) + 2
    for label, text in lines:
        yield from wrapped(text, indent=" " * width, first=label.ljust(width))


def brought_text(brought: Document) -> str:
    """Return the distribution that brought a target, in words."""
    source = f"{brought['distribution'] or brought['module']} {brought['version'] or '(not installed)'}"
    return f"{brought['name']} of {source}, files {(brought['digest'] or 'not readable')[:16]}"


def _privacy_lines(document: Document) -> list[tuple[str, str]]:
    """Return the guarantee of a study with privacy, what it does not cover, its budget and its cost."""
    privacy = document.get("privacy")
    if privacy is None:
        return []
    against = "server, public" if privacy["server"] == "untrusted" else "public"
    collude = f", up to {privacy['colluders']} colluding silo(s)" if privacy["colluders"] else ""
    return [
        (
            "privacy",
            f"({privacy['epsilon']:g}, {privacy['delta']:g})-differential privacy of one record against "
            f"{against}{collude}; counts have noise",
        ),
        ("not covered", NOT_COVERED),
        ("budget", privacy_budget(document)),
        ("cost of privacy", privacy_cost(document)),
    ]


def _grid(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the event, its causes and the grid, and the hazards that were counted."""
    target, grid = document["study"]["target"], document["grid"]
    edges = grid["edges"]
    causes = f", causes {', '.join(grid['causes'])}" if len(grid["causes"]) > 1 else ""
    yield "event", f"{target['outcome']} at {target['time']}{causes}"
    parts = grid["subperiods"]
    ends = f"{len(edges)} periods to {edges[-1]:g}" + (f", each of {parts} parts" if parts > 1 else "")
    longest = longest_period(document) / parts
    within = "a period" if parts == 1 else "a part"
    yield "grid", f"{ends}, the longest {longest:g}; times within {within} count as equal"
    for role in ("hazard", "censoring"):
        if role not in document["study"]["models"]:
            yield f"{role} model", "none: counted by arm and period"


def longest_period(document: Document) -> float:
    """Return the length of the longest period of a study of times."""
    edges: list[float] = document["grid"]["edges"]
    return max(b - a for a, b in zip((0.0, *edges), edges, strict=False))


def finer_grid(document: Document) -> Iterator[str]:
    """Yield the estimates on a finer grid beside the study's own, if the study compares one."""
    finer = document.get("finer_grid")
    if not finer:
        return
    if finer["estimates"]:
        digits = _digits(document)
        rows = [["estimand", "estimate (SE)", "on the finer grid", "difference in SE"]]
        for pair in zip(document["estimates"], finer["estimates"], strict=True):
            shown = [f"{number(r['estimate'], digits)} ({number(r['std_error'], digits)})" for r in pair]
            rows.append([pair[1]["estimand"], *shown, f"{pair[1]['difference']:+.2f}"])
        yield from aligned(rows)
    yield from wrapped(finer_sentence(document))


def finer_sentence(document: Document) -> str:
    """Return what the comparison with a finer grid shows, or why there is none."""
    finer = document["finer_grid"]
    length = longest_period(document) / finer["subperiods"]
    grid = f"a grid of {finer['periods']} periods, the longest {length:g}"
    if not finer["estimates"]:
        return f"There is no estimate on {grid}: {finer['reason']}."
    largest = max(abs(row["difference"]) for row in finer["estimates"])
    return f"On {grid}, the estimates differ by at most {largest:.2f} of their standard errors."


def _at_risk(document: Document) -> Iterator[str]:
    """Yield the numbers at risk, with the silos that hide theirs."""
    shown = document.get("at_risk")
    if not shown:
        return
    rows = [["at risk in period", *map(str, shown["periods"])]]
    for arm, counts, hidden in zip(document["arms"], shown["counts"], shown["hidden_in"], strict=True):
        rows.append([arm, *decreasing(counts, hidden)])
    yield from aligned(rows)


def _adherence(document: Document) -> Iterator[str]:
    """Yield who is at risk and censored in each period, and who has followed each rule so far."""
    if "periods" not in document:
        return
    periods = document["periods"]
    rows = [["period", *(str(each["period"]) for each in periods)]]
    for key in ("at risk", "censored", "events"):
        counts = [each[key.replace(" ", "_")] for each in periods]
        if any(counts):
            rows.append([key, *(f"{count:,}" for count in counts)])
    for each in document["adherence"] or ():
        shown = decreasing(each["followers"], each["hidden_in"])
        padded = [*shown, *[""] * (len(periods) - len(shown))]
        rows.append([f"followed the rule: {each['rule']}", *padded])
    yield from aligned(rows)


def _learners(document: Document) -> Iterator[str]:
    """Yield a line for each learner of a super learner."""
    for index, rows in enumerate(learner_tables(document)):
        yield from ([""] if index else [])
        yield from aligned(rows)


def interval_title(document: Document) -> str:
    return f"{100 * document['study']['options']['confidence']:.4g}% interval"


def cells(row: Document, digits: int | None = None) -> tuple[str, str, str]:
    """Return estimate, standard error and interval, by default with three digits of the standard error."""
    digits = decimals(row["std_error"]) if digits is None else digits
    interval = f"{number(row['conf_low'], digits)} to {number(row['conf_high'], digits)}"
    return number(row["estimate"], digits), number(row["std_error"], digits), interval


def _digits(document: Document) -> int:
    """Return the number of decimals that suits the whole table."""
    released = (row for silo in document["personalized"].values() for row in silo["estimates"])
    return max(decimals(row["std_error"]) for row in (*document["estimates"], *released))


def _estimates(document: Document) -> Iterator[str]:
    estimates, simultaneous = document["estimates"], document["simultaneous"]
    if not estimates:
        return
    digits, title = _digits(document), interval_title(document)
    rows = [["estimand", "estimate", "std. error", title, "p"]]
    rows += [[row["estimand"], *cells(row, digits), probability(row["p_value"])] for row in estimates]
    yield from aligned(rows)
    if len(estimates) > 1:
        yield ""
        rows = [[row["estimand"], cells(row, digits)[2]] for row in simultaneous]
        yield from aligned([["all estimands at once", f"simultaneous {title}"], *rows])
    if document["interaction"]:
        strata = document["study"]["target"]["strata"]
        yield ""
        tests = [
            [row["estimand"], f"{row['statistic']:.2f}", str(row["df"]), probability(row["p_value"])]
            for row in document["interaction"]
        ]
        yield from aligned([[f"difference between {strata}", "chi-squared", "df", "p"], *tests])


def _missing(document: Document) -> Iterator[str]:
    """Yield the records left out, the missing covariates and what was done, and what imputation costs."""
    participants, missing = document["participants"], document["missing"]
    if participants["omitted"]:
        yield from wrapped(
            f"{participants['omitted']:,} of {participants['records']:,} records have no treatment and are "
            "left out, as the study declares."
        )
    rows = [["missing covariate", "records", "handled by"]]
    for name, line in missing.items():
        rows.append(
            [
                name,
                f"{line['count']:,} ({share(line['count'], line['of'])})",
                MISSING_HANDLED[line["handled"]],
            ]
        )
    if missing:
        yield from aligned(rows)
    imputation = document["imputation"]
    if imputation:
        yield ""
        rows = [[f"over {imputation['datasets']} imputed data sets", "missing information", "df"]]
        for line in imputation["estimands"]:
            rows.append([line["estimand"], f"{line['missing_information']:.0%}", f"{line['df']:.0f}"])
        yield from aligned(rows)


def _personalized(document: Document) -> Iterator[str]:
    silos, active = document["personalized"], document.get("active", [])
    if silos or active:
        yield from wrapped("Each silo keeps its own estimate; there is no pooled one.")
    if active:
        rows = [["update", "silos still fitting", "their records"]]
        for number, each in enumerate(active):
            people = "-" if each["people"] is None else f"{each['people']:,}"
            rows.append([str(number), str(each["silos"]), people])
        yield from aligned(rows)
    if silos:
        yield ""
        rows = [["silo", "records", "retired at update"]]
        for name, silo in silos.items():
            update = "unfinished" if silo["retired_at"] is None else str(silo["retired_at"])
            rows.append([name, "-" if silo["n_rows"] is None else f"{silo['n_rows']:,}", update])
        yield from aligned(rows)
        released = [(name, row) for name, silo in silos.items() for row in silo["estimates"]]
        if released:
            yield ""
            digits, title = _digits(document), interval_title(document)
            table = [["released by silos", "estimand", "estimate", "std. error", title]]
            table += [[name, row["estimand"], *cells(row, digits)] for name, row in released]
            yield from aligned(table)


def _silos(document: Document) -> Iterator[str]:
    """Yield the estimates of the silos that released them, one estimand after the other."""
    released = document["silos"]
    if not released:
        return
    estimands = [row["estimand"] for row in document["estimates"]]
    digits = _digits(document)
    rows = [["released by silos", "estimate", "std. error", interval_title(document)]]
    for index, estimand in enumerate(estimands):
        indent = ""
        if len(estimands) > 1:
            rows.append([estimand, "", "", ""])
            indent = "  "
        rows += [[f"{indent}{name}", *cells(by[index], digits)] for name, by in released.items()]
    yield from aligned(rows)
    if document["without"]:
        yield ""
        rows = [["summary without a silo", "estimate", "std. error", interval_title(document)]]
        for index, estimand in enumerate(estimands):
            rows += [[estimand, "", "", ""]] if len(estimands) > 1 else []
            indent = "  " if len(estimands) > 1 else ""
            for name, others in document["without"].items():
                rows.append([f"{indent}without {name}", *cells(others[index], digits)])
        yield from aligned(rows)
    if document["heterogeneity"]:
        yield ""
        summaries = {line["estimand"]: line["summaries"][0] for line in document["heterogeneity"]}
        rows = [["random effects", "estimate", "std. error", f"Hartung-Knapp {interval_title(document)}"]]
        yield from aligned(rows + [[name, *cells(each, digits)] for name, each in summaries.items()])
        yield ""
        rows = [["at another silo", f"prediction {interval_title(document)}"]]
        for name, each in summaries.items():
            ends = (number(each[f"prediction_{end}"], digits) for end in ("low", "high"))
            rows.append([name, " to ".join(ends)])
        yield from aligned(rows)
        yield ""
        rows = [["heterogeneity", "Q", "df", "p", "I2"]]
        for line in document["heterogeneity"]:
            test = [f"{line['Q']:.2f}", str(line["df"]), probability(line["p_value"]), f"{line['I2']:.0%}"]
            rows.append([line["estimand"], *test])
        yield from aligned(rows)


def sensitivity(document: Document) -> Iterator[str]:
    """Yield how strong an unmeasured confounder would have to be to explain each comparison away."""
    rows = [["unmeasured confounding", "E-value", "of the limit", "robustness value", "of the limit"]]
    for row in document["sensitivity"]:
        values = [_decimal(row["e_value"]), _decimal(row["e_value_interval"])]
        shares = [_percent(row["robustness_value"]), _percent(row["robustness_value_interval"])]
        rows.append([row["estimand"], *values, *shares])
    if any(cell != "-" for row in rows[1:] for cell in row[1:]):  # with noise nothing is known
        yield from aligned(rows)


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def ladder(document: Document) -> Iterator[str]:
    """Yield the estimates under other bounds of the propensity score, with the study's own among them."""
    others = document["ladder"]
    if not others:
        return
    names = [row["estimand"] for row in others[0]["estimates"]]
    own = {"bound": document["g_floor"], "estimates": document["estimates"][: len(names)]}
    rungs = sorted([*others, own], key=lambda rung: rung["bound"])
    digits = _digits(document)
    for k, name in enumerate(names):
        if k:
            yield ""
        rows = [[f"{name} by bound on g", "estimate", "std. error", interval_title(document)]]
        for rung in rungs:
            label = f"{rung['bound']:.4g}" if rung["bound"] else "none"
            rows.append(
                [label + (" (the study's)" if rung is own else ""), *cells(rung["estimates"][k], digits)]
            )
        yield from aligned(rows)
    yield from wrapped("Other bounds: one-step estimates from rounded sums, without another targeting.")


def _balance(document: Document) -> Iterator[str]:
    """Yield standardised differences of the covariates; from some silos only, it says so."""
    balance = document["balance"]
    if not balance:
        return
    for k, arm in enumerate(balance["arms"]):
        if k:
            yield ""
        among = "" if balance["is_complete"] else ", some silos only"
        rows = [
            [
                f"arm {arm} less {balance['reference']}, in SD{among}",
                "unweighted",
                "weighted",
                "silos left out",
            ]
        ]
        for line in balance["covariates"]:
            name = covariate_name(line)
            values = [line[key][k] for key in ("differences", "weighted_differences")]
            shown = ["-" if value is None else f"{value:+.2f}" for value in values]
            rows.append([name, *shown, str(line["hidden_in"] or "")])
        yield from aligned(rows)


def _overlap(document: Document) -> Iterator[str]:
    """Yield histograms of the propensity score by arm."""
    if document["diagnostics"]:
        yield from histogram_table(document["diagnostics"]["overlap"])


def _fit(document: Document) -> Iterator[str]:
    """Yield how well the outcome model predicts, before and after targeting."""
    if not document["diagnostics"]:
        return
    fit = document["diagnostics"]["outcome_fit"]
    if fit is None:  # hazards have no such table
        return
    calibration = fit["calibration"]
    digits = max((decimals(row["std_error"]) for row in document["estimates"]), default=3)
    rows = [["outcome by its prediction", "records", "observed", "predicted", "targeted"]]
    for b, (low, high) in enumerate(pairwise(calibration["edges"])):
        means = [number(calibration[key][b], digits) for key in ("observed", "initial", "targeted")]
        count = partial(calibration["counts"][b], calibration["hidden_in"][b])
        if count != "0":
            rows.append([f"{number(low, digits)} to {number(high, digits)}", count, *means])
    yield from aligned(rows)
    yield from wrapped(
        "Silos add a bin with few records to a neighbouring bin, so that means may lie outside of their bin."
    )
    shares = [("R2", fit["r_squared"]), ("deviance explained", fit["deviance_explained"])]
    explained = [
        f"{name} {pair['initial']:.3f} before targeting, {pair['targeted']:.3f} after"
        for name, pair in shares
        if pair and None not in pair.values()
    ]
    means = [f"{mean:.1g} for {name}" for name, mean in document["diagnostics"]["eif_mean"].items()]
    yield from wrapped(f"Outcome model: {'; '.join(explained) or 'nothing to explain'}.")
    yield from wrapped(f"Mean of the EIF: {'; '.join(means)}.")


def cost(document: Document) -> Iterator[str]:
    """Yield rounds and bits by phase, over all links."""
    account = document["account"]
    rows = [["cost", "rounds", "from silos", "to silos"]]
    for phase, rounds in phase_rounds(account, PHASES).items():
        sent = [bits(sent_bits(account, way, phase)) for way in WAYS]
        rows.append([phase_name(phase), rounds, *sent])
    totals = [bits(sum(sent_bits(account, way, phase) for phase in PHASES)) for way in WAYS]
    yield from aligned([*rows, ["total", str(sum(account["rounds"].values())), *totals]])


def _warnings(document: Document) -> Iterator[str]:
    for warning in document["warnings"]:
        yield from wrapped(warning, indent="         ", first="Warning: ")
    for note in document["notes"]:
        yield from wrapped(note, indent="      ", first="Note: ")
