"""The certificate of a run and the attrition of an emulated trial, as text, from a document alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedtmle.layout import GAP, WIDTH, Document, aligned, decimals, number, wrapped


def certificate(document: Document) -> Iterator[str]:
    """Yield how exactly the pooled equation was solved, in two sentences."""
    stated = document["certificate"]
    if document.get("privacy"):
        yield from wrapped(f"Certificate: {private_certificate(document)}")
        return
    if not stated or stated["tolerance"] is None:
        yield from wrapped(f"Certificate: {document['status_text']}.")
        return
    bound, tolerance = stated["residual_bound"], stated["tolerance"]
    if bound is None:
        yield from wrapped(f"Certificate: none, {document['status_text']}.")
        return
    errors = [row["std_error"] for row in document["estimates"] if row["std_error"]]
    relative = f", {bound / min(errors):.1g} of the smallest standard error" if errors else ""
    first = (
        f"The pooled estimating equation holds to within {bound:.2g} (tolerance: {tolerance:.2g}){relative}."
    )
    if document["residual_kind"] == "certified bound":
        smoothness = stated["smoothness"]
        second = (
            "The bound includes all rounding. It is proved from what the silos sent and does not depend on "
            f"the smoothness constant ({smoothness['basis']}), which sets the step size and affects only the "
            "number of rounds."
        )
    else:
        second = "This was computed from exact sums over all silos and depends on no estimated constant."
    yield from wrapped(f"Certificate: {first} {second}")
    for line in (convergence(document), *history(document)):
        yield from wrapped(line) if line else ()


def convergence(document: Document) -> str:
    """Return how far the estimates may be from convergence, in a sentence; empty if nothing is known."""
    stated = document["convergence"]
    if not stated:
        return ""
    if not stated["estimands"]:
        return f"There is no bound on the distance from the estimate at convergence: {stated['reason']}."
    errors = {row["estimand"]: row["std_error"] for row in document["estimates"]}
    shares = [
        (row["bound"] / errors[row["estimand"]], row["bound"])
        for row in stated["estimands"]
        if row["bound"] is not None and errors.get(row["estimand"])
    ]
    if len(shares) < len(stated["estimands"]):
        return "There is no bound on the distance from convergence of a ratio so close to zero or infinity."
    share, bound = max(shares)
    which = "The estimate is" if len(shares) == 1 else "Every estimate is"
    return (
        f"{which} within {bound:.1g} ({share:.1g} standard errors) of the value that more rounds would reach."
    )


def history(document: Document) -> Iterator[str]:
    """Yield what thm:statistical says about the run, beside the standard error."""
    terms = (document["certificate"] or {}).get("remainder")
    if not terms or not terms["std_error"]:
        return
    total, error = terms["initial_bits"] + terms["history_bits"], terms["std_error"]
    process, envelope = terms["process"], terms["envelope"]
    bound = f"{process / error:.2g} standard errors times the relative error of the influence function"
    if envelope is None:
        bound += ", plus a term without a known bound"
    else:
        bound += f", plus {envelope / error:.2g} standard errors"
    fitted = f"the run's {total:,} bits of fitted numbers ({terms['initial_bits']:,} for the models)"
    if envelope is None or process + envelope > error / 2:
        yield (
            f"The interval rests on large-sample theory. For {fitted} the paper's finite-sample bound "
            f"(thm:statistical) is a worst case, far wider than the interval: {bound}."
        )
    else:
        yield f"Finite-sample bound (thm:statistical) for {fitted}: {bound}."
    if document["uncovered"]:
        yield f"The theorem does not cover this study: {'; '.join(document['uncovered'])}."


def remainder_rows(document: Document) -> list[list[str]]:
    """Return the terms of thm:statistical and the conditions of cor:inference as a table, or nothing."""
    terms = (document["certificate"] or {}).get("remainder")
    if not terms:
        return []
    error = terms["std_error"]

    def row(name: str, value: float | None, note: str) -> list[str]:
        if value is None:
            return [name, "open", "", note]
        return [name, f"{value:.3g}", f"{value / error:.3g}" if error else "", note]

    share, needed = terms["largest_share"], terms["rows_needed"]
    small = "" if share is None else f"a tenth of a standard error if {share:.2g} of it is wrong"
    enough = "" if needed is None else f"a tenth of a standard error at n = {needed:.1g}, same history"
    conditions = [
        ["sqrt(n) |R_2| (cor:inference)", "open", "", "the models' errors multiply; no data can tell"],
        ["sqrt(H_K + log n), times share", f"{terms['condition_process']:.3g}", "", "must tend to 0"],
    ]
    if terms["condition_envelope"] is not None:
        value = f"{terms['condition_envelope']:.3g}"
        conditions.append(["G sqrt(d) (H_K + log n)/sqrt(n)", value, "", "must tend to 0; over |D|"])
    return [
        [f"thm:statistical, {1 - terms['level']:.0%}", "value", "in SE", ""],
        ["bits of the initial fit, H_init", f"{terms['initial_bits']:,}", "", "broadcasts to one silo"],
        ["bits of the updates", f"{terms['history_bits']:,}", "", ""],
        row("residual", terms["residual"], "certified"),
        row("process term, times share", terms["process"], small),
        row("envelope term", terms["envelope"], enough),
        ["remainder R_2", "open", "", "depends on the models' errors"],
        *conditions,
    ]


def remedies(document: Document) -> str:
    """Return what would make the terms of thm:statistical small, in sentences."""
    terms = document["certificate"]["remainder"]
    error = terms["std_error"] or math.nan
    alone = f"{terms['process_alone'] / error:.2g} standard errors times the share"
    text = f"Models fitted to other records cost no bits: the process term would be {alone}"
    if terms["envelope"] is not None:
        text += f", the envelope term {terms['envelope_alone'] / error:.2g} standard errors"
        text += f". With this history it is a tenth of one at n = {terms['rows_needed']:.1g}"
    return (
        f"{text}. Fewer columns, a coarser fit (fit_accuracy) and fewer updates shorten the history. A "
        "larger bound on the propensity score and a narrower range of the outcome lower the envelope. Better "
        "models lower the share that is wrong."
    )


def certificate_table(document: Document) -> str:
    """Return the certificate at length: its sentences, the theorems' bounds, and the statistical terms."""
    parts = ["\n".join(certificate(document))]
    checks = (document["certificate"] or {}).get("checks", [])
    if checks:
        rows = [["bound of the paper", "realised", "bound", "rests on"]]
        for line in checks:
            bound = "open" if line["bound"] is None else f"{line['bound']:.4g}"
            rows.append([line["name"], f"{line['realised']:.5g}", bound, line["basis"] or ""])
        parts.append("\n".join(aligned(rows)))
    moves = (document["convergence"] or {}).get("estimands", [])
    if moves:
        rows = [["distance from convergence", "at most"]]
        rows += [[row["estimand"], "-" if row["bound"] is None else f"{row['bound']:.2g}"] for row in moves]
        parts.append("\n".join(aligned(rows)))
    if remainder_rows(document):
        parts.append("\n".join(aligned([row[:3] for row in remainder_rows(document)])))
        parts.append("\n".join(wrapped(remedies(document))))
    return "\n\n".join(parts)


def private_certificate(document: Document) -> str:
    """Return what is proved about a study with privacy: the budget, and that no equation was solved."""
    privacy = document["privacy"]
    return (
        f"The silos' answers together are {privacy['rho']:.4g}-zCDP, which is "
        f"({privacy['spent_epsilon']:.4g}, {privacy['delta']:g})-differential privacy. No "
        "estimating equation was solved: the estimate is a one-step estimate, and the noise and its effect "
        "on the models are in the standard error."
    )


def privacy_budget(document: Document) -> str:
    """Return what a study with privacy spent, and where to read what is left."""
    privacy = document["privacy"]
    return (
        f"epsilon = {privacy['spent_epsilon']:.4g} of {privacy['epsilon']:g} is spent, at delta = "
        f"{privacy['delta']:g}; this study can ask nothing more. What is left for other studies of the same "
        "people is in each owner's ledger"
    )


def privacy_cost(document: Document) -> str:
    """Return how much wider noise makes the intervals, and the parts of a single standard error.

    With strata it is said for each of them, with the noisy number of its records.
    """
    privacy = document["privacy"]
    by_place: dict[str, float] = {}
    for place, inflation in zip(privacy["places"], privacy["inflation"], strict=True):
        by_place[place] = max(inflation, by_place.get(place, 0.0))
    text = f"intervals {by_place.pop(''):.2f} times as wide as without noise"
    if by_place:
        strata = [
            f"{wider:.2f} {place} (some {max(round(rows), 0):,} records)"
            for (place, wider), rows in zip(by_place.items(), privacy["rows"].values(), strict=True)
        ]
        return f"{text}, {', '.join(strata)}; the numbers of records have noise"
    names = {"sampling": "sampling", "noise": "noise", "models": "noisy models"}
    parts = {words: privacy[f"std_error_{name}"] for name, words in names.items()}
    rows = document["estimates"]
    if len(rows) != 1 or len(parts["sampling"]) != 1:
        return text
    (row,) = rows
    half = (row["conf_high"] - row["conf_low"]) / 2 / privacy["inflation"][0]
    digits = decimals(row["std_error"])
    shown = ", ".join(f"{words} {number(each[0], digits)}" for words, each in parts.items())
    return (
        f"{text}: the interval that counts sampling alone, {number(row['estimate'] - half, digits)} to "
        f"{number(row['estimate'] + half, digits)}, would miss too often. The standard error has three "
        f"parts, whose squares add up: {shown}"
    )


NOT_COVERED = (
    "the number of records, which silos took part, that the study took place, and the levels and ranges of "
    "the dictionary, which are public; and more than one record of a person"
)


# The attrition of an emulated trial as 80 columns of text, from the key `emulation` of its document.


def render(emulation: Document) -> str:
    """Return the attrition: one line per step and one per arm, over the silos and by silo."""
    silos = emulation["silos"]
    if not silos:
        return "\n".join([*wrapped(emulation["trial"]), "", "No silo has shared its counts."])
    lines = [*wrapped(emulation["trial"]), ""]
    lines += _numbered_steps(emulation["steps"], _table(emulation))
    lines += ["", *aligned([["arm", "people", "events", "without", "unknown"], *arms(emulation)])]
    if emulation["floor"] is not None and any(map(_hides, silos.values())):
        floor = emulation["floor"]
        hidden = f"Counts and losses of fewer than {floor} people are not shown (-; +: in some silos)."
        lines += ["", *wrapped(hidden)]
    if emulation.get("not_shared"):
        lines += ["", *wrapped(f"Without the counts of {', '.join(emulation['not_shared'])}.")]
    return "\n".join(lines)


def total(counts: Sequence[int | None]) -> str:
    """Return the sum of the counts that are shown, with a + where some are not."""
    shown = [count for count in counts if count is not None]
    return f"{sum(shown):,}{'+' if len(shown) < len(counts) else ''}" if shown else "-"


def arms(emulation: Document) -> Iterator[list[str]]:
    """Yield a row per arm over all silos: its name, people, events, people without, and unknown outcomes."""
    for by_silo in zip(*(silo["arms"] for silo in emulation["silos"].values()), strict=True):
        yield [
            by_silo[0]["name"],
            total([arm["people"] for arm in by_silo]),
            total([arm["events"] for arm in by_silo]),
            total([_without(arm) for arm in by_silo]),
            total([arm["unknown"] for arm in by_silo]),
        ]


def _without(arm: Document) -> int | None:
    if None in (arm["people"], arm["events"], arm["unknown"]):
        return None
    return int(arm["people"] - arm["events"] - arm["unknown"])


def _hides(silo: Document) -> bool:
    return None in silo["people"] or any(None in (arm["people"], arm["events"]) for arm in silo["arms"])


def _numbered_steps(steps: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the table with a number per step, and the steps' words below where they do not fit beside it."""
    rows = [["people", *cells[0]], *([step, *row] for step, row in zip(steps, cells[1:], strict=True))]
    width = max(len(row[0]) for row in rows) + sum(
        max(map(len, column)) for column in zip(*cells, strict=True)
    )
    if width + len(GAP) * len(cells[0]) <= WIDTH:
        return aligned(rows)
    short = [["step", *cells[0]], *([str(k), *row] for k, row in enumerate(cells[1:]))]
    return [*aligned(short), "", *(line for k, step in enumerate(steps) for line in wrapped(f"{k}  {step}"))]


def _table(emulation: Document) -> list[list[str]]:
    """Return one row of counts per step: over all silos, and by silo where these fit into the width."""
    silos = emulation["silos"]
    by_silo = len(silos) > 1 and sum(max(len(name), 7) + len(GAP) for name in silos) < WIDTH - 16
    rows = [["all", *silos] if by_silo else ["all"]]
    for k in range(len(emulation["steps"])):
        counts = [silo["people"][k] for silo in silos.values()]
        rows.append([total(counts), *([total([count]) for count in counts] if by_silo else [])])
    return rows
