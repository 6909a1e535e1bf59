"""The document of a study's result: plain data, computed from what the server received and from no row.

`docs/result.md` has its keys. It holds the study, the estimates with their intervals, diagnostics on the
outcome's scale, the weights of super learners, and warnings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

import msgspec

from fedtmle.algorithms.local import Personalized
from fedtmle.initial.crossfit import CrossFitted
from fedtmle.initial.glm import FAMILIES, GLM, FittedGLM, FittedMultinomial, Supplied
from fedtmle.initial.superlearner import (
    GradientBoostedTrees,
    PerSilo,
    Pilot,
    SuperLearned,
    SuperLearner,
    TreeEnsemble,
)
from fedtmle.initial.variables import Variables
from fedtmle.layout import Document
from fedtmle.programs.flow import Details, StudyDetails, study_details
from fedtmle.programs.imputation import MultiplyImputed
from fedtmle.programs.regimes import RegimeDetails
from fedtmle.programs.study import Study
from fedtmle.programs.target import AbstractTarget
from fedtmle.programs.time import TimeDetails
from fedtmle.protocol.outcome import SiteTest, Status
from fedtmle.protocol.plan import Plan, provenance
from fedtmle.protocol.policy import lowered_limit
from fedtmle.protocol.sites import OwnEstimate, OwnStatus
from fedtmle.results.inference import (
    Row,
    convergence_document,
    heterogeneity,
    imputed_rows,
    interaction_tests,
    leave_one_out,
    silo_tables,
    table_rows,
    uncovered,
)
from fedtmle.results.over_time import regime_document, time_document
from fedtmle.results.result import FORMAT, versions
from fedtmle.results.sensitivity import (
    balance_document,
    ladder_document,
    overlap_document,
    overlap_warnings,
    sensitivity_document,
)
from fedtmle.runtime.result import Result
from fedtmle.runtime.rows import LocalOutcome
from fedtmle.runtime.session import Finished
from fedtmle.studyfile.file import study_of
from fedtmle.targets.diagnostics import PROBABILITY_EDGES, AnyBin, Histogram, OutcomeFit
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.version import __version__
from fedtmle_core.types import Response


def document(plan: Plan, finished: Finished, result: Result, release: Sequence[str]) -> Document:
    """Return the whole result as plain data; ``release`` names the silos that show their own estimate."""
    study = study_of(plan)
    details = study_details(finished.outcome)
    estimates: list[Row] = []
    simultaneous: list[Row] = []
    per_silo: dict[str, list[Row]] = {}
    own: dict[str, OwnEstimate] = {}
    combinations: list[MultiplyImputed] = []
    interaction: list[Document] = []
    sensitivity: list[Document] = []
    if result.psi is not None and result.covariance is not None:
        interaction = interaction_tests(study, details.components, result.psi, result.covariance)
        sensitivity = sensitivity_document(study, details, result.psi, result.covariance)
        if details.imputed:
            estimates, simultaneous, combinations = imputed_rows(
                study, details.components, details.imputed, result.n
            )
        else:
            estimates, simultaneous = table_rows(study, details.components, result.psi, result.covariance)
    if details.silos is not None:
        own = dict(zip(finished.sizes, details.silos.own, strict=True))
        per_silo = silo_tables(study, details.components, own)
    return {
        "format": FORMAT,
        "version": __version__,
        "versions": versions(),
        "plan": plan.digest.hex(),
        "question": study.target.question,
        "study": describe(study),
        "estimates": [row.to_dict() for row in estimates],
        "simultaneous": [row.to_dict() for row in simultaneous],
        "interaction": interaction,
        "sensitivity": sensitivity,
        "silos": {name: [row.to_dict() for row in rows] for name, rows in per_silo.items()},
        "without": {
            name: [row.to_dict() for row in rows]
            for name, rows in leave_one_out(per_silo, study.confidence).items()
        },
        "heterogeneity": heterogeneity(per_silo, study.confidence),
        "site_tests": [_site_test(test) for test in _tested(details, result)],
        "personalized": _personalized(study, details, finished, result, release),
        "absent": dict(finished.absent),
        **({"lowered": _lowered_document(finished)} if finished.lowered else {}),
        "participants": {
            "records": result.n + details.omitted,
            "omitted": details.omitted,
            "analysed": result.n,
            "with_outcome": sum(details.observed_counts),
        },
        "missing": _missing_document(study, details),
        "imputation": _imputation_document(study, estimates, combinations),
        "arms": list(study.target.arms),
        "arm_counts": list(details.arm_counts),
        "observed_counts": list(details.observed_counts),
        **(
            time_document(study, details, result, len(finished.sizes))
            if isinstance(details, TimeDetails)
            else {}
        ),
        **(
            regime_document(study, details, result, len(finished.sizes))
            if isinstance(details, RegimeDetails)
            else {}
        ),
        "g_floor": details.g_floor,
        "truncated": list(details.overlap.truncated),
        "truncated_hidden": [len(finished.sizes) - count for count in details.overlap.disclosing],
        "effective_sizes": dict(zip(details.groups, details.overlap.effective_sizes, strict=True)),
        "overlap": overlap_document(study, details, result.n),
        "ladder": [] if result.psi is None else ladder_document(study, details),
        "balance": balance_document(study, details, len(finished.sizes)),
        **({} if study.privacy is None else {"privacy": private_document(study, details)}),
        "fits": fits_document(study, details, result.n),
        "learners": learners_document(study, details),
        "diagnostics": diagnostics_document(study, finished),
        "convergence": convergence_document(study, details.components, result),
        "uncovered": uncovered(study),
        "warnings": [
            *_absent_silos(finished),
            *_unsupported(estimates, result),
            *overlap_warnings(study, details, result.n),
            *_privacy_warnings(details),
            *_unfinished_silos(study, result),
            *_loose_bounds(study, result),
            *_differing_silos(study, details),
            *_separated_silos(study, details),
            *_different_populations(result),
        ],
        "notes": [
            *_unneeded_models(study, details),
            *([] if result.psi is None else _silos_without_estimate(study, own, release)),
            *_lowered_limits(finished),
        ],
        **result.to_dict(),
    }


def _personalized(
    study: Study, details: Details, finished: Finished, result: Result, release: Sequence[str]
) -> Document:
    """Return when each silo of a personalised run retired, with the estimates of the silos that release them.

    Under masks nobody knows when a silo retired, so that only those that release their estimate are shown.
    """
    shown: dict[str, int | None] = dict(result.retired_at)
    if not shown:
        shown = {name: local.retired_at for name, local in result.silos.items() if name in release}
    return {
        name: {
            "retired_at": update,
            "n_rows": finished.sizes[name],
            "estimates": _personal(study, details, result.silos.get(name)) if name in release else [],
        }
        for name, update in shown.items()
    }


def _personal(study: Study, details: Details, local: LocalOutcome | None) -> list[Document]:
    """Return a releasing silo's own estimates in a personalised run; none if it is in another process."""
    if local is None:
        return []
    rows, _ = table_rows(study, details.components, local.estimate.psi, local.estimate.covariance)
    return [row.to_dict() for row in rows]


def _absent_silos(finished: Finished) -> list[str]:
    """Warn if silos were absent, with the reason of each."""
    absent, joined = finished.absent, len(finished.sizes)
    named = "; ".join(f"'{silo}': {reason}" for silo, reason in absent.items())
    return [f"{joined} of {joined + len(absent)} silos took part. Without {named}"] if absent else []


def _lowered_document(finished: Finished) -> Document:
    """Return the limits that owners made laxer than the package's own, by silo."""
    return {
        silo: [msgspec.structs.asdict(each) for each in limits] for silo, limits in finished.lowered.items()
    }


def _lowered_limits(finished: Finished) -> list[str]:
    """Note the limits that owners made laxer than the package's own, with their reasons."""
    return [
        f"silo '{silo}' lowered a limit of its policy: {lowered_limit(each)}"
        for silo, limits in finished.lowered.items()
        for each in limits
    ]


def _unsupported(estimates: Sequence[Row], result: Result) -> list[str]:
    """Warn if the certificate does not support the intervals."""
    warnings = []
    if not result.status.is_converged:
        warnings.append(result.status.value)
    if estimates and result.residual is not None:
        smallest = min(row.std_error for row in estimates)
        if result.residual > smallest / math.log(max(result.n, 3)):
            warnings.append(
                f"the residual {result.residual:.2g} is not small against the standard error "
                f"{smallest:.2g}: the interval is not supported"
            )
    return warnings


def private_document(study: Study, details: Details) -> Document | None:
    """Return the privacy guarantee, its cost and the parts of the standard error; None without privacy."""
    account = details.privacy if isinstance(details, StudyDetails) else None
    if account is None or study.privacy is None:
        return None
    return {
        "epsilon": study.privacy.epsilon,
        "delta": account.delta,
        "rho": account.rho,
        "spent_epsilon": account.epsilon,
        "colluders": account.colluders,
        "server": study.privacy.server,
        "g_bound": account.g_bound,
        "places": list(account.places),
        "rows": dict(zip(details.strata, account.rows, strict=True)),
        "std_error_sampling": [math.sqrt(v) for v in account.sampling],
        "std_error_noise": [math.sqrt(v) for v in account.noise],
        "std_error_models": [math.sqrt(v) for v in account.remainder],
        "inflation": list(account.inflation),
        "expected_bias": list(account.bias),
        "truncated": list(account.truncated),
        "is_promised": not account.limits,
    }


def _privacy_warnings(details: Details) -> list[str]:
    """Warn if the interval of a private study may cover less often than it says."""
    account = details.privacy if isinstance(details, StudyDetails) else None
    return [] if account is None else [f"privacy: {limit}" for limit in account.limits]


def _unneeded_models(study: Study, details: Details) -> list[str]:
    """Note the models that were not fitted because they were not needed."""
    if "missingness" in study.models and "missingness" not in details.nuisances:
        return ["no outcome is missing, so the missingness model was not needed and is left out"]
    if "censoring" in study.models and "censoring" not in details.nuisances:
        return ["nobody is censored before the last period, so the censoring model is left out"]
    return []


def _silos_without_estimate(
    study: Study, own: Mapping[str, OwnEstimate], release: Sequence[str]
) -> list[str]:
    """Note the silos that would release an estimate of their own but have none, with the reason."""
    warnings = [
        f"silo '{silo}' has no estimate of its own: {each.status.reason}"
        for silo, each in own.items()
        if not each.status.has_estimate and each.status is not OwnStatus.WITHHELD
    ]
    penalised = [silo for silo, each in own.items() if each.status is OwnStatus.PENALISED]
    if penalised:
        warnings.append(
            f"the own estimate of {', '.join(penalised)} is from weakly penalised fits of the outcome or the "
            "missingness model: without a penalty there is no fit to its records alone"
        )
    if release and not own and not study.diagnostics:
        warnings.append("no silo has an estimate of its own: the study leaves out its diagnostics")
    return warnings


def _missing_document(study: Study, details: Details) -> dict[str, Document]:
    """Return, for each covariate that may be missing, the number of missing values and their treatment."""
    missing = details.missing
    if missing is None:
        return {}
    return {
        name: {"count": count, "of": missing.of(name), "handled": study.variable_of(name).missing}
        for name, count in missing.counts.items()
        if name != study.target.outcome
    }


def _imputation_document(
    study: Study, rows: Sequence[Row], combinations: Sequence[MultiplyImputed]
) -> Document | None:
    """Return what the intervals of an imputed study rest on; None if nothing was imputed."""
    if not combinations:
        return None
    return {
        "datasets": study.imputations,
        "sweeps": study.imputation_sweeps,
        "estimands": [
            {
                "estimand": row.estimand,
                "df": found.df,
                "missing_information": found.missing_information,
                "increase_in_variance": found.increase,
            }
            for row, found in zip(rows, combinations, strict=True)
        ],
    }


def _tested(details: Details, result: Result) -> tuple[SiteTest, ...]:
    """Return the tests of differences between silos that have at least two silos to compare."""
    tests = () if details.silos is None else details.silos.tests
    if result.populations is not None:
        tests = (*tests, result.populations)
    return tuple(test for test in tests if test.df > 0)


def _site_test(test: SiteTest) -> Document:
    return {
        "model": test.model,
        "statistic": test.statistic,
        "df": test.df,
        "p_value": test.p_value,
    }


def _differing_silos(study: Study, details: Details) -> list[str]:
    return [] if details.silos is None else site_warnings(study, details.silos.tests)


def _separated_silos(study: Study, details: Details) -> list[str]:
    """Warn about silos whose own coefficients predict some response perfectly."""
    if not isinstance(details, StudyDetails | TimeDetails | RegimeDetails):
        return []
    warnings = []
    for label, silos in details.separated.items():
        where = "some silo" if study.algorithm.pools_rows else f"{silos} silo{'s' if silos > 1 else ''}"
        warnings.append(
            f"{label}: at {where}, C(silo) predicts some response perfectly, as where all responses are the "
            "same. The predictions there are 0 or 1, up to the bounds, and rest on the model. Leave C(silo) "
            "out of the term, or ask whether such a silo belongs in the study"
        )
    return warnings


def _different_populations(result: Result) -> list[str]:
    """Warn if a run that averages local fits finds silos of different populations."""
    test = result.populations
    if test is None or test.p_value >= SITE_LEVEL:
        return []
    shown = "p < 0.001" if test.p_value < 0.001 else f"p = {test.p_value:.3f}"
    return [
        f"the silos do not look like samples of one population (chi-squared {test.statistic:.1f} with "
        f"{test.df} degrees of freedom, {shown}): bounds on averages of local fits assume that they are"
    ]


def site_warnings(study: Study, tests: Sequence[SiteTest]) -> list[str]:
    """Warn if treatment or outcome differs between silos beyond chance and the silo is in no model."""
    if study.uses_silo:
        return []
    beyond = [test for test in tests if test.p_value < SITE_LEVEL]
    words = {"treatment": study.target.treatment, "outcome": study.target.outcome}
    differing = list(dict.fromkeys(str(words[test.model.partition(" ")[0]]) for test in beyond))
    if not differing:
        return []
    largest = max(test.p_value for test in beyond)
    p = "p < 0.001" if largest < 0.001 else f"p = {largest:.3f}"
    return [
        f"{' and '.join(map(repr, differing))} {'differ' if len(differing) > 1 else 'differs'} between silos "
        f"beyond what the models explain ({p}), and the silo is in no model: the estimate may "
        "be the effect of the silos. Add C(silo) to the formulas"
    ]


def _loose_bounds(study: Study, result: Result) -> list[str]:
    """Warn if the computed residual is within the tolerance, but exact sums do not certify that."""
    stated = result.certificate
    if not result.status.is_converged or stated is None:
        return []
    bound, tolerance, arithmetic = stated.residual_bound, stated.tolerance, stated.arithmetic
    if bound is None or tolerance is None or arithmetic is None or bound <= tolerance:
        return []
    low, high = study.outcome_bounds
    return [
        f"the computed residual is within the tolerance {tolerance:.2g}, but exact sums certify only "
        f"{bound:.2g}: rounding errors are relative to the outcome's declared range, "
        f"[{low:g}, {high:g}], and to g_bounds. Declare a tighter range, or a tolerance well above "
        f"{arithmetic:.2g}"
    ]


def _unfinished_silos(study: Study, result: Result) -> list[str]:
    """Warn about silos of a personalised run that did not leave, and say what would let them."""
    algorithm = study.algorithm
    open_ended = result.status in (Status.UNFINISHED, Status.CANCELLATION, Status.FEW_ACTIVE)
    if not (isinstance(algorithm, Personalized) and open_ended):
        return []
    still = ", ".join(name for name, update in result.retired_at.items() if update is None)
    still = (
        still or f"{result.active[-1].silos} of {len(result.sizes)} silos"
    )  # under masks, nobody knows who
    rules = {"noise": algorithm.noise, "gap": algorithm.gap, "lattice": algorithm.lattice}
    now = ", ".join(f"{key} = {value:g}" for key, value in rules.items() if value is not None)
    return [
        f"unfinished: {still}. A silo leaves once its own fit is zero, to the last digit unless the "
        f"algorithm says otherwise{f' (now: {now})' if now else ''}. Set noise, e.g. noise = 0.5: a silo "
        "leaves once its EIF mean is within half of its own sampling error; or lattice, a spacing to which "
        "fits are rounded, so that small ones are zero. A silo that disagrees with the others for good "
        "never leaves; its estimate is flagged as unfinished."
    ]


SITE_LEVEL = 0.01  # below this p-value, silos are said to differ
_EVERY_EFFECT = {field.name for field in fields(AbstractEffect)}


def describe(study: Study) -> Document:
    """Return the study as plain data: target, models, algorithm and options."""
    target = study.target
    further = [field.name for field in fields(target) if field.name not in _EVERY_EFFECT]
    settings = {
        field.name: getattr(study, field.name)
        for field in fields(study)
        if field.name not in ("target", "algorithm", "variables", "title", "privacy")
        and not field.name.endswith("_model")
    }
    return {
        "title": study.title,
        "target": {
            "kind": type(target).__name__,
            "measure": target.measures and target.measures[study.response != "binary"],
            "outcome": target.outcome,
            "outcome_bounds": list(study.outcome_bounds),
            "response": study.response,
            "treatment": target.treatment,
            "arms": list(target.arms),
            "strata": target.strata,
            **{name: _plain(getattr(target, name)) for name in further},
            "regimes": [regime.label for regime in target.regimes()],
            "assumptions": list(target.assumptions()),
            **_brought(target),
        },
        "models": {role: _role_text(role, model, study) for role, model in study.models.items()},
        "algorithm": {"kind": type(study.algorithm).__name__, **_settings(study.algorithm)},
        "variables": _dictionary(study.variables),
        "options": settings,
        **({} if study.privacy is None else {"privacy": _settings(study.privacy)}),
    }


def _brought(target: AbstractEffect) -> Document:
    """Return where a target with a problem of its own comes from."""
    if not isinstance(target, AbstractTarget):
        return {}
    return {"brought": provenance(type(target))._asdict()}


def _role_text(role: str, model: object, study: Study) -> str:
    """Return a nuisance model in words, with how it is fitted to more than two arms."""
    # With noise, outcomes are scaled to [0, 1] and every model is logistic.
    text = model_text(model, study.response if role == "outcome" and study.privacy is None else "binary")
    if role == "treatment" and len(study.target.arms) > 2 and not isinstance(model, Supplied):
        if isinstance(model, GLM):
            return text.replace("(binomial", "(multinomial")
        return f"{text}; each arm against the rest, normalised"
    return text


def model_text(model: object, response: Response) -> str:
    """Return a nuisance model in words; ``response`` decides a GLM's family where it is "auto"."""
    match model:
        case Supplied():
            text = f"predictions supplied by the silos: {', '.join(model.columns)}"
        case GLM():
            ridge = f", ridge {model.ridge:g}" if model.ridge else ""
            text = f"{model.formula} ({model.family_for(response)}{ridge})"
        case GradientBoostedTrees():
            columns = model.formula if isinstance(model.formula, str) else " + ".join(model.formula)
            text = f"{columns} ({model.rounds} trees of depth {model.depth})"
        case FittedGLM():
            family = next(name for name, known in FAMILIES.items() if known is model.family)
            text = f"{model.formula} ({family})"
        case TreeEnsemble():
            text = f"{model.formula} ({len(model.sizes)} trees)"
        case Pilot(inner, at):
            text = f"{model_text(inner, response)}, {f'fitted at {at}' if at else 'public'}"
        case PerSilo(inner):
            text = f"{model_text(inner, response)}, fitted at each silo"
        case SuperLearner(learners, folds):
            texts = [f"{k}. {model_text(each, response)}" for k, each in enumerate(learners, start=1)]
            text = f"super learner over {folds} folds: {'; '.join(texts)}"
        case _:
            text = repr(model)
    return text


def _settings(value: object) -> Document:
    """Return the fields of a dataclass as plain data, an empty dict for anything else."""
    if not is_dataclass(value):
        return {}
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _dictionary(variables: Variables) -> Document:
    """Return the dictionary's entry of each variable, by name."""
    return {
        name: {
            "kind": variable.kind,
            "label": variable.label,
            "unit": variable.unit,
            "range": None if variable.range is None else list(variable.range),
            "levels": dict(variable.levels),
            "missing": variable.missing,
        }
        for name, variable in variables.items()
    }


def _plain(value: object) -> object:
    """Return a setting as plain data; an object becomes its constructor call as text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    arguments = ", ".join(f"{name}={item!r}" for name, item in _settings(value).items())
    return f"{type(value).__name__}({arguments})"


def diagnostics_document(study: Study, finished: Finished) -> Document | None:
    """Return overlap, outcome fit and EIF means; None for a personalised run, or without diagnostics."""
    details, silos = study_details(finished.outcome), len(finished.sizes)
    if isinstance(details, TimeDetails):
        return (
            None
            if details.at_risk is None
            else {
                "overlap": [histogram_document(histogram, silos) for histogram in details.at_risk.overlap],
                "outcome_fit": None,
                "eif_mean": eif_means(finished),
            }
        )
    if isinstance(details, RegimeDetails):
        if details.adherence is None:
            return None
        return {"overlap": [], "outcome_fit": None, "eif_mean": eif_means(finished)}
    if not isinstance(details, StudyDetails) or details.diagnostics is None:
        return None
    return {
        "overlap": [histogram_document(histogram, silos) for histogram in details.diagnostics.overlap],
        "outcome_fit": _fit_document(details.diagnostics.fit, study, silos),
        "eif_mean": eif_means(finished),
    }


def histogram_document(histogram: Histogram, silos: int) -> Document:
    """Return one histogram; a count is over the silos that disclose it, None if none does."""
    return {
        "probability_of": histogram.of,
        "arm": histogram.arm,
        "edges": list(PROBABILITY_EDGES),
        "counts": _counts(histogram.bins),
        "hidden_in": [silos - cell.silos for cell in histogram.bins],
    }


def _counts(bins: Sequence[AnyBin]) -> list[int | None]:
    return [cell.count if cell.silos else None for cell in bins]


def _fit_document(fit: OutcomeFit, study: Study, silos: int) -> Document:
    """Return the fit of the outcome model, with means on the outcome's scale."""
    low, high = study.outcome_bounds

    def on_outcome_scale(share: float) -> float:
        return low + (high - low) * share

    def mean(k: int) -> Callable[[AnyBin], float | None]:
        return lambda cell: (
            on_outcome_scale(cell.sums[k] / cell.sums[0]) if cell.silos and cell.sums[0] else None
        )

    return {
        "r_squared": _before_after(fit.r_squared),
        "deviance_explained": None if fit.deviance is None else _before_after(fit.deviance),
        "calibration": {
            "edges": [low, *(min(max(on_outcome_scale(edge), low), high) for edge in fit.edges), high],
            "counts": _counts(fit.calibration),
            "hidden_in": [silos - cell.silos for cell in fit.calibration],
            "observed": list(map(mean(1), fit.calibration)),
            "initial": list(map(mean(2), fit.calibration)),
            "targeted": list(map(mean(3), fit.calibration)),
        },
    }


def _before_after(pair: tuple[float, float]) -> dict[str, float | None]:
    initial, targeted = (value if math.isfinite(value) else None for value in pair)
    return {"initial": initial, "targeted": targeted}


def eif_means(finished: Finished) -> dict[str, float]:
    """Return P_n D of each component: (sum u - sum m)/n, as the plug-in part cancels."""
    details = study_details(finished.outcome)
    if finished.closing is None:  # of a sealed study they stay in the program
        return {}
    pooled, d = finished.closing.fractions(), len(details.components)
    return {
        component.name: float((pooled[r] - pooled[2 * d + r]) / finished.n)
        for r, component in enumerate(details.components)
    }


def learners_document(study: Study, details: Details) -> list[Document]:
    """Return the weight and the cross-validated mean squared error of each learner of each super learner."""
    learners: list[Document] = []
    low, high = study.outcome_bounds
    for role, fits in details.nuisances.items():
        spec = study.models.get(role)  # None where hazards were counted
        if not isinstance(spec, SuperLearner):
            continue
        kind = study.response if role == "outcome" else "binary"
        scale = (high - low) ** 2 if role == "outcome" else 1.0
        for k, fit in enumerate(fits):
            arm = details.fit_names(study.target, role)[k] if len(fits) > 1 else None  # each against the rest
            parts = enumerate(fit.models, start=1) if isinstance(fit, CrossFitted) else [(None, fit)]
            for fold, part in parts:
                learners += [
                    {"model": role, "arm": arm, "fold": fold, **learner}
                    for learner in _weighted(
                        part, [model_text(learner, kind) for learner in spec.learners], scale
                    )
                ]
    return learners


def fits_document(study: Study, details: Details, n: int) -> Document | None:
    """Return how far stopping the coded fits early may move the estimate, in standard errors.

    A fit stops when sqrt(n) times the root mean square error of its linear predictor is at most
    ``accuracy``; ``effect`` is that number at the end of each fit. None if all fits used exact sums.
    """
    effects: list[tuple[str, float]] = [
        (role, math.sqrt(n) * error)
        for role, fits in details.nuisances.items()
        for fit in fits
        for error in _fit_errors(fit)
    ]
    if not effects:
        return None
    return {
        "accuracy": study.fit_accuracy,
        "largest": max(effect for _, effect in effects),
        "models": [{"model": role, "effect": effect} for role, effect in effects],
    }


def _fit_errors(fit: object) -> Iterator[float]:
    """Yield the errors of the coded fits that a fitted nuisance consists of."""
    if isinstance(fit, FittedGLM | FittedMultinomial) and fit.bits is not None:
        yield fit.error
    elif isinstance(fit, CrossFitted | SuperLearned):
        for part in fit.models:
            yield from _fit_errors(part)


def _weighted(fit: object, texts: list[str], scale: float) -> Iterator[Document]:
    if not isinstance(fit, SuperLearned):
        raise TypeError("the regression of a super learner gives a SuperLearned")
    for label, weight, risk in zip(fit.labels, fit.weights, fit.risks, strict=True):
        learner, *silo = map(int, re.findall(r"\d+", label))  # "learner 2, silo 1"
        yield {
            "learner": learner,
            "text": texts[learner - 1] + (f", silo {silo[0]}" if silo else ""),
            "weight": weight,
            "risk": scale * risk,
        }
