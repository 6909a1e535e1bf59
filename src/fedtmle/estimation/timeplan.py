"""What is judged of a study of time to an event: the columns of its counts, models and closing sums.

A person's part of a hazard's gradient is a sum over periods of predictions times x in the period. What is
judged is the sum over periods without predictions: x times the number of periods at risk, and x times the
event, one column a person. A coordinate that only some periods have, such as C(period), has its own sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedtmle.estimation.components import rule
from fedtmle.estimation.followup import Periods
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import study_folds
from fedtmle.estimation.people import People
from fedtmle.estimation.regression import Record, Regression
from fedtmle.estimation.strands import Timed
from fedtmle.estimation.timemodels import counted_causes, periods_of, target_of, time_regressions
from fedtmle.estimation.worlds import scaled
from fedtmle_core.plan import Model
from fedtmle_core.terms import ONE, ZERO, Constant, Term, product, total


def time_models(declared: Declared, people: People) -> Iterator[Model]:
    """Yield what is judged before the fits: who is counted, and the columns of each regression."""
    study, target, periods = declared.study, target_of(declared.study), periods_of(declared)
    horizon = max(each.horizon for each in target.functionals)
    arms, folds = (ONE, *people.taken), study_folds(study)
    seen = (periods.at_risk(horizon), *periods.happens)
    counted = [product(weight, arm) for weight in (ONE, people.relative) for arm in arms]
    counted += [product(arm, each) for arm in arms for each in seen] + [periods.is_censored]
    yield Model(columns=(ONE, *people.strata, *folds), responses=_once(counted))
    # Thresholds of rules, which the end of a study adds up, are judged with all that comes before it.
    rules = [rule(each, people.arms, declared.dictionary) for each in target.regimes()]
    cuts = dict.fromkeys(part for each in rules for part in each if not isinstance(part, Constant))
    if cuts:
        yield Model(columns=(ONE, *cuts), responses=(people.relative,))
    tallied = [
        product(people.relative, each)
        for cause in counted_causes(study, censors=True)
        for each in _life_table(periods, cause)
    ]
    if tallied:
        yield Model(columns=people.taken, responses=_once(tallied))
    for role in time_regressions(declared, people, censors=True).values():
        for regression in role:
            for part in [regression.without(fold, "") for fold in folds] or [regression]:
                yield from over_records(part)


def _life_table(periods: Periods, cause: int) -> Iterator[Term]:
    """Yield who is at risk and who has the event, by period; the last number of a cause is censoring."""
    if cause == len(periods.ends):
        for t in range(1, periods.last):
            yield from (periods.at_risk_of_censoring(t), periods.censored(t))
    else:
        for t in range(1, periods.last + 1):
            yield from (periods.at_risk_of(cause, t), periods.event(cause, t))


def over_records(regression: Regression) -> Iterator[Model]:
    """Yield the columns of a regression by the records that have them, with sums over these records."""
    found: dict[tuple[int, ...], dict[Term, None]] = {}
    by_record = [
        [_bare(x) for x in record.world.of_all(regression.design.columns)] for record in regression.records
    ]
    for of_coordinate in zip(*by_record, strict=True):
        for column in dict.fromkeys(of_coordinate):
            if column != ZERO:
                places = tuple(t for t, x in enumerate(of_coordinate) if x == column)
                found.setdefault(places, {})[column] = None
    for places, columns in found.items():
        records = [regression.records[t] for t in places]
        yield Model(
            columns=tuple(columns),
            responses=_once([total([_weight(each) for each in records]), *_responses(records)]),
            groups=_once(
                [
                    total([product(_weight(r), 1.0 - r.ys[j]) for r in records])
                    for j in range(len(records[0].ys))
                ]
            ),
        )


def _responses(records: Sequence[Record]) -> Iterator[Term]:
    for j in range(len(records[0].ys)):
        yield total([product(_weight(record), record.ys[j]) for record in records])


def _weight(record: Record) -> Term:
    return ONE if record.w is None else record.w


def _bare(column: Term) -> Term:
    """Return a column without its factor; a number is ONE."""
    term, _ = scaled(column)
    return ONE if isinstance(term, Constant) and term != ZERO else term


def _once(terms: Iterable[Term]) -> tuple[Term, ...]:
    return tuple(dict.fromkeys(terms))


# What is added up after the fits.


def closing_columns(timed: Timed) -> tuple[Term, ...]:
    """Return the columns of all sums that targeting and closing ask for, as sums over a person's periods.

    They are weights at risk and of events, v by arm, and the weights of `last_weights`.
    """
    people, periods, own = timed.people, timed.periods, timed.own
    found: list[Term] = []
    for s, group in enumerate(timed.groups):
        omega = [product(people.relative, own.shares[s], inverse) for inverse in own.inverses[s]]
        for cause in range(len(periods.ends)):
            at_risk = [product(each, periods.at_risk_of(cause, t + 1)) for t, each in enumerate(omega)]
            events = [product(each, periods.event(cause, t + 1)) for t, each in enumerate(at_risk)]
            found += [total(at_risk), total(events)]
        weighed = product(people.relative, group.v)
        found += [weighed, *(product(weighed, d) for d in group.d if d != ZERO)]
    return _once((*found, *last_weights(timed)))


def last_weights(timed: Timed) -> tuple[Term, ...]:
    """Return each group's weight omega in a person's last period at risk."""
    return tuple(
        product(
            timed.people.relative,
            share,
            total(
                [
                    product(timed.periods.leaves_in(t + 1, timed.horizon), inverse)
                    for t, inverse in enumerate(inverses)
                ]
            ),
        )
        for share, inverses in zip(timed.own.shares, timed.own.inverses, strict=True)
    )
