"""The models of a study of time to an event: hazards of each cause and of censoring, a record a period."""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle.errors import InputError
from fedtmle.estimation.followup import Periods
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import regressions
from fedtmle.estimation.people import People, levels
from fedtmle.estimation.regression import Record, Regression
from fedtmle.initial.glm import GLM
from fedtmle.programs.study import Study
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle_core.terms import product
from fedtmle_core.types import Family

NO_EVENT = "no person-period that it is fitted on has an event, or every one has"
NOT_CENSORED = "nobody that it is fitted on is censored before the last period, or everyone is"


def target_of(study: Study) -> AbstractTimeEffect:
    """Return the study's target; it is one of time to an event."""
    if not isinstance(study.target, AbstractTimeEffect):
        raise TypeError("this study is not of time to an event")
    return study.target


def periods_of(declared: Declared) -> Periods:
    """Return the follow-up of a study as terms."""
    target = target_of(declared.study)
    return Periods(
        time=declared.time,
        edges=target.follow_up.edges,
        ends=levels(declared.dictionary, target.outcome, target.causes),
        subperiods=target.subperiods,
    )


def counted_causes(study: Study, *, censors: bool) -> tuple[int, ...]:
    """Return the causes whose hazards are counted; their number, after the last one, is that of censoring."""
    causes = len(target_of(study).causes)
    events = range(causes) if study.hazard_model is None else ()
    return (*events, *([causes] if censors and study.censoring_model is None else ()))


def time_regressions(
    declared: Declared, people: People, *, censors: bool
) -> dict[str, tuple[Regression, ...]]:
    """Return the regressions of each role; ``censors`` says whether anyone may be censored."""
    study, periods, causes = declared.study, periods_of(declared), target_of(declared.study).causes
    asked: dict[str, tuple[Regression, ...]] = {
        role: (each,) for role, each in regressions(declared, people).items() if role == "treatment"
    }
    if study.hazard_model is not None:
        asked["hazard"] = tuple(
            _regression(
                declared,
                "hazard",
                "hazard model" if len(causes) == 1 else f"hazard model of '{name}'",
                [
                    Record(
                        y=periods.event(cause, t),
                        w=product(people.relative, periods.at_risk_of(cause, t)),
                        world=periods.world(t),
                    )
                    for t in range(1, periods.last + 1)
                ],
                NO_EVENT,
            )
            for cause, name in enumerate(causes)
        )
    if censors and study.censoring_model is not None and periods.last > 1:
        records = [
            Record(
                y=periods.censored(t),
                w=product(people.relative, periods.at_risk_of_censoring(t)),
                world=periods.world(t),
            )
            for t in range(1, periods.last)
        ]
        asked["censoring"] = (_regression(declared, "censoring", "censoring model", records, NOT_CENSORED),)
    return asked


def _regression(
    declared: Declared, role: str, label: str, records: Sequence[Record], constant: str
) -> Regression:
    model = declared.study.models[role]
    if not isinstance(model, GLM):
        raise InputError(f"{role}_model: {type(model).__name__} is not available yet; give a GLM")
    return Regression(
        label=label,
        family=Family.LOGISTIC,
        design=declared.vocabulary.design(model.parsed),
        records=tuple(records),
        ridge=model.ridge,
        constant=constant,
    )
