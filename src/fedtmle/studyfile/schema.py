"""The schema of a study: what it asks of each silo's table, and whether a table may be streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedtmle.data import Column, Kind, Schema
from fedtmle.errors import DataError, InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.superlearner import formulas
from fedtmle.initial.variables import Variables
from fedtmle.model.table import SILO, AnyTable, StreamedTable, Table
from fedtmle.programs.study import Study
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.timeline import PeriodView
from fedtmle.targets.time.estimands import AbstractTimeEffect

OUTSIDE_RANGE = (
    "is outside the declared range {low:g} to {high:g}",
    "check the unit (scale and shift in the silo file), correct the records, or widen the variable's range",
)


def schema_of(study: Study) -> Schema:
    """Return the columns that a study reads, with their kinds, ranges and levels."""
    columns: dict[tuple[str, bool], Column] = {}
    for column in (*_roles(study), *_covariates(study)):
        declared = _declared(column, study.variables)
        for each in _by_period(declared, study):
            columns.setdefault(
                (each.name, column.kind is Kind.FACTOR),
                replace(each, if_missing=_if_missing(study, column.name)),
            )
    return Schema(tuple(columns.values()))


def _if_missing(study: Study, name: str) -> str:
    """Return what to do about missing values of a column, by its part in the study."""
    target, part = study.target, study.always_complete.get(name)
    if name == target.treatment:
        return (
            "complete it; it is the treatment, and the study can leave such records out, with "
            'missing = "omit" in [variables]'
        )
    if part is None:
        ways = '"impute" or "indicator"' if target.may_impute else '"indicator"'
        return f"complete it; it is a covariate, and the study can declare missing = {ways} in [variables]"
    if name == target.outcome and name not in target.never_missing():
        return "complete it; it is the outcome, and the study can have a model of its missingness"
    return f"complete it; it is {part}, which every record must have"


def _by_period(column: Column, study: Study) -> Iterator[Column]:
    """Yield one column per period for a variable over time, and any other column unchanged.

    A variable over time may be missing once a person is no longer at risk.
    """
    target = study.target
    if isinstance(target, AbstractRegimeEffect) and column.name in target.over_time:
        for name in target.over_time[column.name]:
            yield replace(column, name=name, may_be_missing=True)
    else:
        yield column


def _declared(column: Column, variables: Variables) -> Column:
    """Return the column with what the dictionary declares: its kind, range and levels."""
    variable = variables.get(column.name)
    if variable is None or variable.kind == "identifier":  # predictions that the silos supply, clusters
        return column
    missing = column.may_be_missing or variable.missing != "refuse"
    if column.kind is Kind.FACTOR:
        column = replace(column, may_be_missing=missing)
        return column if column.levels else replace(column, levels=variable.codes)
    kind = {"binary": Kind.BINARY, "count": Kind.COUNT, "number": Kind.NUMERIC}[variable.basic_kind]
    return Column(
        name=column.name,
        kind=kind,
        may_be_missing=missing,
        bounds=None if kind is Kind.BINARY else variable.range,
        levels=variable.codes if kind is Kind.BINARY else None,
        outside=OUTSIDE_RANGE,
        unit=variable.unit,
    )


def _roles(study: Study) -> Iterator[Column]:
    """Yield the columns with a role of their own. They come first: their declarations are more detailed."""
    target = study.target
    if isinstance(target, AbstractTimeEffect):
        yield from _time_roles(target)
    else:
        may_be_missing = study.missingness_model is not None or study.censoring_model is not None
        yield Column(name=target.outcome, kind=Kind.NUMERIC, may_be_missing=may_be_missing)
    if isinstance(target, AbstractRegimeEffect) and target.censoring is not None:
        yield Column(name=target.censoring, kind=Kind.NUMERIC)
    if target.treatment is not None and target.is_modified:
        yield Column(name=target.treatment, kind=Kind.NUMERIC)
    elif target.treatment is not None:
        yield Column(name=target.treatment, kind=Kind.FACTOR, levels=target.arms)
    if target.strata is not None:
        yield Column(name=target.strata, kind=Kind.FACTOR)
    if study.weights is not None:
        yield Column(name=study.weights, kind=Kind.NUMERIC)
    if study.cluster is not None:
        yield Column(name=study.cluster, kind=Kind.FACTOR)
    for name, use in target.more_columns().items():
        yield Column(name=name, kind=Kind.FACTOR if use == "factor" else Kind.NUMERIC)
    for regime in target.regimes():
        yield from (Column(name=study.declared_name(name), kind=Kind.NUMERIC) for name in regime.needs)


def _time_roles(target: AbstractTimeEffect) -> Iterator[Column]:
    yield Column(name=target.outcome, kind=Kind.FACTOR, levels=(target.censored, *target.causes))
    yield Column(name=target.time, kind=Kind.NUMERIC)
    if target.entry is not None:
        yield Column(name=target.entry, kind=Kind.NUMERIC)


def _covariates(study: Study) -> Iterator[Column]:
    for model in study.models.values():
        if isinstance(model, Supplied):
            yield from (Column(name=name, kind=Kind.NUMERIC) for name in model.columns)
        for formula in formulas(model, public=True):
            numbers = {study.declared_name(name) for name in formula.numeric_names}
            factors = {study.declared_name(name) for name in formula.factor_names}
            factors -= {study.target.treatment, SILO}
            for names, kind in ((numbers, Kind.NUMERIC), (factors, Kind.FACTOR)):
                there = sorted(name for name in names if not study.is_period(name))
                yield from (Column(name=name, kind=kind) for name in there)


def first_period(study: Study, tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return the tables with each variable over time under its own name, at its value in period 1.

    Without variables over time, the tables are returned unchanged. Values that are imputed stay missing.
    """
    timeline = study.timeline
    if timeline is None:
        return dict(tables)
    view = PeriodView(timeline=timeline, period=1)
    columns = {name: timeline.column(name, 1) for name in timeline.imputed}

    def shown(table: Table) -> Table:
        numeric = {name: table.numeric[c] for name, c in columns.items() if c in table.numeric}
        factors = {name: table.factors[c] for name, c in columns.items() if c in table.factors}
        first = view.show(table)
        return Table(
            n_rows=first.n_rows,
            numeric={**first.numeric, **numeric},
            factors={**first.factors, **factors},
        )

    return {name: shown(table) for name, table in tables.items()}


def check_streams(study: Study, tables: Mapping[str, AnyTable]) -> None:
    """Raise `InputError` if a silo streams its table and the study needs all rows at once."""
    check_streaming(study, [name for name, table in tables.items() if isinstance(table, StreamedTable)])


def check_streaming(study: Study, streams: Sequence[str]) -> None:
    """Raise `InputError` if there are silos that stream their tables and the study needs all rows at once."""
    if not streams:
        return
    whole = [
        f"the {role} model, which is neither a GLM nor supplied"
        for role, model in study.models.items()
        if not isinstance(model, GLM | Supplied)
    ]
    whole += ["cluster"] if study.cluster else []
    whole += ["folds"] if study.folds else []
    if whole:
        raise InputError(
            f"silo '{streams[0]}' streams its table, and this study needs all rows at once "
            f"({'; '.join(whole)}); leave out stream in the silo file, or change the study"
        )


def check_follow_up(study: Study, tables: Mapping[str, AnyTable]) -> None:
    """Raise `DataError`, which names the silo, if the follow-up in a table is not as the study says."""
    target = study.target
    read: Callable[[Table], object]
    if isinstance(target, AbstractTimeEffect):
        read = target.follow_up.read
    elif isinstance(target, AbstractRegimeEffect):
        read = target.timeline(study.variables).follow
    else:
        return
    for name, table in tables.items():
        try:
            for block in table.blocks():
                read(block)
        except DataError as error:
            raise error.at(name) from None


def in_memory(tables: Mapping[str, AnyTable], user: str) -> dict[str, Table]:
    """Return the tables in memory; raise `InputError`, which names ``user``, if a silo streams its table."""
    held: dict[str, Table] = {}
    for name, table in tables.items():
        if isinstance(table, StreamedTable):
            raise InputError(
                f"silo '{name}' streams its table, and {user} needs all rows at once; leave out stream in "
                "the silo file, or give it a smaller table"
            )
        held[name] = table
    return held
