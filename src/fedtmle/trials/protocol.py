"""The protocol of a trial in words: each component of the target trial, and how the records emulate it.

The components are those of the TARGET statement (Cashin et al., JAMA 2025, doi:10.1001/jama.2025.13350).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedtmle.trials.elements import Censoring, ConceptSet
from fedtmle.trials.trial import TargetTrial

_CONTRASTS = {
    "risk difference": "difference of the risks",
    "risk ratio": "ratio of the risks",
    "odds ratio": "ratio of the odds",
    "risks": "risk under each strategy",
}


@final
@dataclass(frozen=True, kw_only=True)
class ProtocolElement:
    """One component of the protocol: what the target trial would do, and what is done with the records."""

    name: str
    target: str
    emulation: str


def protocol(trial: TargetTrial) -> tuple[ProtocolElement, ...]:
    """Return the components of a trial's protocol, in the order of the TARGET statement."""
    parts = (
        ("Eligibility criteria", *_eligibility(trial)),
        ("Treatment strategies", *_strategies(trial)),
        ("Assignment", *_assignment(trial)),
        ("Time zero and follow-up", *_follow_up(trial)),
        ("Outcome", *_outcome(trial)),
        ("Causal contrast", *_contrast(trial)),
        ("Identifying assumptions", *_assumptions(trial)),
        ("Data analysis", *_analysis(trial)),
    )
    return tuple(ProtocolElement(name=name, target=target, emulation=done) for name, target, done in parts)


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _eligibility(trial: TargetTrial) -> tuple[str, str]:
    eligibility, zero = trial.eligibility, trial.time_zero
    asked = []
    if zero.condition is not None:
        asked.append(f"a first condition {zero.condition.name}")
    if eligibility.age is not None:
        asked.append("aged {} to {} years".format(*eligibility.age))
    if zero.washout_days is None:
        asked.append("no earlier use of a drug of any strategy")
    else:
        asked.append(f"no drug of any strategy in the {zero.washout_days} days before")
    asked += [criterion.words for criterion in eligibility.criteria]
    if zero.condition is not None:
        asked.append("alive and free of the outcome at the end of the grace period")
    days = eligibility.observation_days_before
    observed = (
        "observation periods were not looked at"
        if days is None
        else f"an observation period that holds time zero and the {days} days before it was required"
    )
    done = [
        "the same, by records of the OMOP CDM with the descendants of each concept",
        observed,
        "people who started drugs of two strategies on one day were left out",
    ]
    return _sentence(asked), _sentence(done)


def _concepts(concepts: ConceptSet) -> str:
    ids = ", ".join(map(str, concepts.ids))
    below = "with descendants" if concepts.descendants else "without descendants"
    without = f", not {', '.join(map(str, concepts.exclude))}" if concepts.exclude else ""
    return f"{concepts.name} ({ids}{without}; {below})"


def _strategies(trial: TargetTrial) -> tuple[str, str]:
    grace = trial.time_zero.grace_days
    when = f" within {grace} days" if grace else ""
    asked = [f"{strategy.name}: start{when}" for strategy in trial.strategies]
    done = [f"{s.name}: the first record of {_concepts(s.drugs)}" for s in trial.strategies]
    return _sentence(asked), _sentence(done)


def _assignment(trial: TargetTrial) -> tuple[str, str]:
    covariates = [
        variable.label or name
        for covariate in trial.covariates
        for name, variable in covariate.variables(trial.eligibility).items()
    ]
    given = "; ".join(covariates) or "nothing: there are no covariates"
    return (
        "At random at time zero; people know their strategy.",
        f"By the drug that was started, taken as random given these covariates at baseline: {given}.",
    )


def _follow_up(trial: TargetTrial) -> tuple[str, str]:
    zero, days = trial.time_zero, trial.outcome.days
    if zero.condition is None:
        begins = "Time zero is the day of assignment and of the start of the drug."
        entered = "Time zero is the first eligible day on which a drug was started."
    else:
        begins = f"Time zero is the day of the condition; follow-up starts {zero.grace_days} days later."
        entered = f"Time zero is the first record of {_concepts(zero.condition)}; a landmark analysis."
    ends = f"Follow-up is day 1 to day {days}"
    unknown = {
        Censoring.END_OF_OBSERVATION: "the observation period ends before the last day",
        Censoring.SWITCH: "a drug of another strategy is started first",
    }
    reasons = " or if ".join(unknown[reason] for reason in trial.censoring)
    if trial.outcome.period_days is not None:
        unknown_words = f"A person is censored if {reasons}." if reasons else ""
        grid = f"The time to the event is analysed on periods of {trial.outcome.period_days} days."
        done = f"{unknown_words} {grid}".strip()
    else:
        done = (
            f"The outcome is unknown if {reasons}." if reasons else "Nobody is lost: no record is no event."
        )
    return f"{begins} {ends}.", f"{entered} {ends} after it. {done}"


def _outcome(trial: TargetTrial) -> tuple[str, str]:
    outcome = trial.outcome
    if outcome.conditions is None:
        return f"Death by day {outcome.days}.", "The date in the table of deaths."
    event = f"A first {outcome.conditions.name} by day {outcome.days}."
    return event, f"A record of a condition of {_concepts(outcome.conditions)}."


def _contrast(trial: TargetTrial) -> tuple[str, str]:
    contrast = _CONTRASTS[trial.effect]
    if trial.outcome.horizons:
        contrast += f" by day {', '.join(map(str, trial.outcome.horizons))}"
    if Censoring.SWITCH in trial.censoring:
        kept = "people who switch would have been followed without switching (an analogue of per protocol)"
        return f"The {contrast} if nobody switched.", f"The same; {kept}."
    return (
        f"The {contrast} by assignment (intention to treat).",
        "The same, by the drug started: what people did later is part of the strategy.",
    )


def _assumptions(trial: TargetTrial) -> tuple[str, str]:
    known = "Whether an outcome is known depends on strategy and covariates only."
    also = f" {known}" if trial.censoring else ""
    done = (
        "Given the covariates, strategies were as if assigned at random (no unmeasured confounding), and "
        "everyone had a chance of each strategy (positivity). Differences between ways to follow a strategy "
        "do not matter (consistency). Codes and dates of the records are right."
    )
    return f"Assignment is random.{also}", f"{done}{also}"


def _analysis(trial: TargetTrial) -> tuple[str, str]:
    roles = {
        "outcome": "the outcome",
        "treatment": "the treatment",
        "missingness": "who is observed",
        "hazard": "the hazard of the event in each period",
        "censoring": "who is censored in each period",
    }
    models = ", ".join(roles[role] for role in trial.study.models)
    return (
        "Risks by strategy, adjusted for baseline covariates.",
        f"Federated targeted maximum likelihood with models of {models}; intervals by the efficient "
        "influence function. The section on who was studied has the models' formulas.",
    )
