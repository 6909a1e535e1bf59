"""The words of a study that a clinician reads: its measure, title and labels, and a methods paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fedtmle.layout import Document, silo_count

ALGORITHMS = {
    "Coded": "federated TMLE with rounded gradients (FedTMLE, Algorithm 4 of Li, Wang and Gan)",
    "Gradient": "federated TMLE with exact pooled gradients (FedTMLE-G)",
    "LocalAverage": "federated TMLE by averaged local fits (FedTMLE-L)",
    "Personalized": "federated TMLE with retirement (FedTMLE-LR)",
    "Central": "TMLE on pooled records",
    "OneStep": "a one-step (augmented inverse probability weighted) correction",
}


def label(document: Document, name: str | None) -> str:
    """Return the label of a variable from the dictionary, or its name."""
    declared = document.get("study", {}).get("variables", {}).get(name, {})
    return str(declared.get("label") or name)


def outcome(document: Document) -> str:
    """Return the outcome's label, with its unit."""
    name = document["study"]["target"]["outcome"]
    unit = document["study"].get("variables", {}).get(name, {}).get("unit")
    return f"{label(document, name)} ({unit})" if unit else label(document, name)


def time(document: Document) -> str:
    """Return the label of the time to the event, with its unit."""
    name = document["study"]["target"].get("time")
    unit = document["study"].get("variables", {}).get(name, {}).get("unit")
    return f"{label(document, name)} ({unit})" if unit else label(document, name)


def arm(document: Document, code: str) -> str:
    """Return the label of an arm from the dictionary's levels of the treatment, or its code."""
    treatment = document["study"]["target"]["treatment"]
    levels = document["study"].get("variables", {}).get(treatment, {}).get("levels") or {}
    return str((levels.get(code) if isinstance(levels, dict) else None) or code)


def rule(document: Document, name: str) -> str:
    """Return the words of a rule over time: its name, or "always" and the arm if it is one arm."""
    return f"always {arm(document, name)}" if name in document["study"]["target"]["arms"] else name


def component(document: Document, name: str) -> str:
    """Return the words of a component such as "E[Y(usual)]": the arm, and the population if not everyone."""
    regime, _, population = name.removeprefix("E[Y(").partition(")]")
    return f"{arm(document, regime)}{population}" if name.startswith("E[Y(") else name


def caption(document: Document) -> str:
    """Return the caption of a table of estimates: the measure, the outcome and the arms compared."""
    first, compared = measure(document), comparison(document)
    named = f"{first[:1].upper()}{first[1:]} of {outcome(document)}"
    return f"{named}: {compared}" if compared else named


def asked(document: Document) -> str:
    """Return a sentence that says what was estimated, where the page's title does not."""
    if "study" not in document or title(document) == document["question"]:
        return ""
    if document["study"]["target"]["measure"] is None:
        return str(document["question"])
    return f"{caption(document)}." if document["study"].get("title") else ""


def measure(document: Document) -> str:
    """Return the measure, such as "risk difference"; for an estimand of another package, its name."""
    target = document["study"]["target"]
    return str(target["measure"] or _spaced(target["kind"]))


def curve_measure(document: Document) -> str:
    """Return the measure that the curves of a study of time to an event show, such as "risk"."""
    kind = str(document["grid"]["measure"])
    words = _spaced(kind.removeprefix("Policy").removesuffix("Difference").removesuffix("Ratio"))
    return f"{words} in periods" if kind.startswith(("RMST", "TimeLost")) else words


def _spaced(name: str) -> str:
    """Return the name of a class as words: "RiskDifference" is "risk difference", "RMST" stays as it is."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[^A-Z]+", name)
    return " ".join(word if word.isupper() and len(word) > 1 else word.lower() for word in words)


def title(document: Document) -> str:
    """Return the title of the page: the study's own, or one made of measure, outcome and arms."""
    if "study" not in document:
        return str(document["question"])
    own = document["study"].get("title")
    if own:
        return str(own)
    if document["study"]["target"]["measure"] is None:
        return str(document["question"])
    first = measure(document)
    named = f"{first[:1].upper()}{first[1:]}: {label(document, document['study']['target']['outcome'])}"
    compared = comparison(document)
    return f"{named}, {compared}" if compared else named


def comparison(document: Document) -> str:
    """Return the arms that are compared, as in "exercise against usual"; empty without a treatment."""
    target = document["study"]["target"]
    if target["treatment"] is None or target["kind"] == "PolicyMeans" or "over_time" in target:
        return ""
    reference, *others = (arm(document, code) for code in target["arms"])
    treatment = label(document, target["treatment"])
    named = " and ".join(others)
    if treatment.lower() not in named.lower():  # "Early intervention" needs no "early intervention" after it
        named = f"{treatment} {named}"
    return f"{named} against {reference}"


def _own_methods(document: Document) -> Iterator[str]:
    """Yield the sentences about the models of a target that another distribution brings."""
    study, brought = document["study"], document["study"]["target"]["brought"]
    source = f"{brought['distribution'] or brought['module']} {brought['version'] or ''}".strip()
    yield f"The target, {study['target']['kind']}, comes from the package {source}."
    for role, model in study["models"].items():
        yield f"The {role} model was {model}."
    if document.get("g_floor"):
        yield f"Probabilities were truncated from below at {document['g_floor']:.3g}."


def methods(document: Document) -> Iterator[str]:
    """Yield the sentences of a methods paragraph, all from the values of this run."""
    study = document["study"]
    target, options, models = study["target"], study["options"], study["models"]
    compared = comparison(document)
    yield (
        f"We estimated the {measure(document)} of {outcome(document)}"
        + (f", comparing {compared}," if compared else "")
        + " by targeted maximum likelihood estimation (TMLE) over "
        f"{document['n']:,} records held by {silo_count(document)}; records were not pooled."
    )
    if "brought" in target:
        yield from _own_methods(document)
        models = {}
    if "over_time" in target:
        bound = document.get("weight_bound")
        limit = f"truncated at {bound:.3g}" if bound else "not truncated"
        yield (
            "Outcomes under the rules were estimated by sequential regression, backwards over "
            f"{len(document['periods'])} periods, each regression fluctuated with the cumulative inverse "
            f"probability weights, {limit}."
        )
    if "outcome" in models:
        yield f"The outcome regression was {models['outcome']}."
    if "hazard" in models:
        yield f"The hazard of the event was modelled by {models['hazard']}."
    if "treatment" in models:
        floor = document.get("g_floor")
        bound = f", truncated from below at {floor:.3g}" if floor else ", not truncated"
        yield f"The propensity score was {models['treatment']}{bound}."
    if "missingness" in models:
        yield (
            "Missing outcomes were accounted for by inverse probability of observation weights from "
            f"{models['missingness']}."
        )
    if "censoring" in models:
        yield f"Censoring was modelled by {models['censoring']}."
    if target["strata"]:
        yield f"Effects were also estimated within levels of {label(document, target['strata'])}."
    if options.get("folds"):
        yield f"Models were cross-fitted over {options['folds']} folds."
    if options.get("weights"):
        yield f"Records were weighted by {label(document, options['weights'])}."
    clustered = (
        f", with records clustered by {label(document, options['cluster'])}" if options.get("cluster") else ""
    )
    yield (
        f"Standard errors are those of the efficient influence function{clustered}; intervals are Wald "
        f"intervals with {options['confidence']:.0%} confidence, on the log scale for ratios."
    )
    kind = study["algorithm"]["kind"]
    stated = document.get("certificate") or {}
    privacy = document.get("privacy")
    if privacy:
        stated = {}
        yield (
            f"Sums had discrete Gaussian noise for ({privacy['epsilon']:g}, {privacy['delta']:g})-"
            "differential privacy of single records; standard errors include the noise and its effect on "
            "the models."
        )
    what = "estimate was made" if privacy else "estimating equation was solved"
    sentence = f"The {what} by {ALGORITHMS.get(kind, kind)}"
    errors = [row["std_error"] for row in document["estimates"] if row["std_error"]]
    if stated.get("residual_bound") is not None and errors:
        relative = stated["residual_bound"] / min(errors)
        sentence += (
            f" until it held over all records to within {relative:.1g} of the smallest standard error, so "
            "that the estimate is that of the pooled records to this accuracy"
        )
    yield f"{sentence}."
    yield (
        f"Analyses used fedtmle {document.get('version', '')} (plan {str(document.get('plan', ''))[:16]}, "
        f"random seed {options.get('seed', 0)})."
    )
