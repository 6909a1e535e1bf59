"""The columns of a formula on a silo's table, elementwise and in a fixed order.

The intercept comes first, then the terms as written. Within an interaction the columns of the last
variable vary fastest: C(a):C(b) gives a2:b2, a2:b3, a3:b2, ... A column is identified by what it
computes, and a second one of the same is left out: age + poly(age, 2) has the columns age and I(age**2).
C(name) has no column for the reference level, unless nothing else spans it: `coding` says when.
Which columns there are depends on the formula and the study's levels alone, never on rows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedtmle.errors import DataError, InputError
from fedtmle.initial.coding import Coding, codings
from fedtmle.initial.syntax import (
    Arithmetic,
    BSpline,
    Categorical,
    Chain,
    Computed,
    Formula,
    Name,
    NaturalSpline,
    Negative,
    Number,
    Polynomial,
    Power,
    TermVariable,
    Transformed,
    quoted_level,
)
from fedtmle.model import kernels
from fedtmle.model.parallel import done
from fedtmle.model.table import Table
from fedtmle.model.types import Array, IntArray, Scaled

Levels = Mapping[str, tuple[str, ...]]
Mask = NDArray[np.bool_]

MAX_COLUMNS = 5_000  # a study's formula must not exhaust a silo's memory


def column_names(formula: Formula, levels: Levels) -> tuple[str, ...]:
    """Return one name for each column of the design; the intercept is "1"."""
    return tuple(_joined(column) for column in design_columns(formula, levels))


def design(formula: Formula, table: Table, levels: Levels) -> Array:
    """Return the design of the table's rows, one row for each column of the formula; shape (p, N)."""
    return scaled_design(formula, table, levels, [0] * len(design_columns(formula, levels))).part(slice(None))


def scaled_design(formula: Formula, table: Table, levels: Levels, scales: Sequence[int]) -> Scaled:
    """Return the design with column j divided by 2^scales[j]; columns of the table are not copied."""
    columns = design_columns(formula, levels)
    _require_columns(formula, table)  # also where there is no block to find it in
    names = [_table_column(column) for column in columns]
    made = [
        None if name or not column else np.empty(table.n_rows)
        for name, column in zip(names, columns, strict=True)
    ]

    def fill(place: tuple[slice, Table]) -> None:
        rows, block = place
        for result, values in zip(made, columns_of(formula, block, levels), strict=True):
            if result is not None:
                result[rows] = values

    if in_place(formula, levels):
        columns_of(formula, table, levels)  # refuses what is missing or not finite
    else:
        try:
            done(fill, table.placed_blocks())
        except DataError:
            columns_of(formula, table, levels)  # refused for the same reason, with a count over all rows
            raise
    ones = np.broadcast_to(np.float64(1.0), (table.n_rows,))
    values_by_column = [
        values if values is not None else table.numeric[name] if name else ones
        for name, values in zip(names, made, strict=True)
    ]
    largest = [
        table.reach[name] if name else kernels.largest(values)
        for name, values in zip(names, values_by_column, strict=True)
    ]
    return Scaled(tuple(values_by_column), np.exp2(-np.array(scales, dtype=np.float64)), np.array(largest))


def in_place(formula: Formula, levels: Levels) -> bool:
    """Return whether every column of the design is a column of the table, so that none is computed."""
    return all(not column or _table_column(column) for column in design_columns(formula, levels))


def columns_of(formula: Formula, table: Table, levels: Levels) -> list[Array]:
    """Return the columns of the design, (N,) each; some may be the table's: do not write to them."""
    return [values for values, _ in _evaluated(formula, table, levels)]


def _evaluated(formula: Formula, table: Table, levels: Levels) -> Iterator[tuple[Array, str | None]]:
    """Yield each column's values, and its name if it is a column of the table."""
    columns = design_columns(formula, levels)
    _require_columns(formula, table)
    codes = {name: study_codes(name, table, levels[name]) for name in formula.factor_names}
    _require_complete(formula, table, codes)
    ones = np.broadcast_to(np.float64(1.0), (table.n_rows,))
    parts: dict[str, Array] = {}
    for column in columns:
        name = _table_column(column)
        if name is not None:
            values = table.numeric[name]
            _require_finite(values, table.reach[name], column)
            yield values, name
            continue
        values = ones
        with np.errstate(all="ignore"):  # whatever is not finite is counted and refused
            for part in column:
                if part.label not in parts:
                    parts[part.label] = part_values(part, table, codes)
                values = values * parts[part.label]
        if column:
            _require_finite(values, kernels.largest(values), column)
        yield values, None


@dataclass(frozen=True)
class DesignPart:
    """Column ``index`` of one variable; for a factor, ``index`` is the code of a level."""

    variable: TermVariable
    index: int
    label: str  # two parts with one label have the same values


def _table_column(column: tuple[DesignPart, ...]) -> str | None:
    """Return the name of the table's column that this one is, or None."""
    variable = column[0].variable if len(column) == 1 else None
    return variable.name if isinstance(variable, Name) else None


def _joined(column: tuple[DesignPart, ...]) -> str:
    return ":".join(part.label for part in column) or "1"


def design_columns(formula: Formula, levels: Levels) -> tuple[tuple[DesignPart, ...], ...]:
    """Return the columns of the design, each as the parts whose product it is; the intercept has none."""
    return _expanded(formula, tuple(levels.items()))


@lru_cache(maxsize=64)  # asked again for every block of rows
def _expanded(
    formula: Formula, declared: tuple[tuple[str, tuple[str, ...]], ...]
) -> tuple[tuple[DesignPart, ...], ...]:
    levels = dict(declared)
    columns: dict[tuple[str, ...], tuple[DesignPart, ...]] = {(): ()} if formula.intercept else {}
    expanded = 0
    for term, pieces in zip(formula.terms, codings(formula), strict=True):
        for piece in pieces:
            # A piece may lack some of the term's factors: what they would add is there already.
            used = [v for v in term if not isinstance(v, Categorical) or v.name in piece]
            parts = [list(_parts(variable, levels, piece)) for variable in used]
            expanded += math.prod(map(len, parts))
            if expanded > MAX_COLUMNS:
                raise InputError(f"the formula has more than {MAX_COLUMNS} columns")
            for column in itertools.product(*parts):
                columns.setdefault(tuple(sorted(part.label for part in column)), column)
    return tuple(columns.values())


def reference_columns(formula: Formula, levels: Levels) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return combinations of columns, by column and factor 1 or -1, that are zero but for a reference level.

    A column less its products with the indicators of all other levels of a factor is its product with the
    indicator of the reference level.
    """
    return _references(formula, tuple(levels.items()))


@lru_cache(maxsize=64)
def _references(
    formula: Formula, declared: tuple[tuple[str, tuple[str, ...]], ...]
) -> tuple[tuple[tuple[int, float], ...], ...]:
    columns, levels = _expanded(formula, declared), dict(declared)
    places = {frozenset(part.label for part in column): j for j, column in enumerate(columns)}
    products: dict[tuple[int, str], list[int]] = {}
    for j, column in enumerate(columns):
        for part in column:
            whole = places.get(frozenset(other.label for other in column if other is not part))
            if isinstance(part.variable, Categorical) and whole is not None:
                products.setdefault((whole, part.variable.name), []).append(j)
    return tuple(
        ((whole, 1.0), *((j, -1.0) for j in parts))
        for (whole, factor), parts in products.items()
        if len(parts) == len(levels[factor]) - 1
    )


def _level_label(level: str) -> str:
    # Quoted where it could be taken for the end of the bracket or for another column.
    return level if re.fullmatch(r"[\w.-]+", level) else quoted_level(level)


def _parts(variable: TermVariable, levels: Levels, coding: Coding) -> Iterator[DesignPart]:
    match variable:
        case Categorical(name, reference):
            known = levels.get(name)
            if known is None:
                raise InputError(f"the study declares no levels for {variable}")
            if reference is not None and reference not in known:
                declared = ", ".join(map(quoted_level, known))
                raise InputError(f"{variable}: the reference is not one of the study's levels {declared}")
            left_out = None if coding[name] else known[0] if reference is None else reference
            for code, level in enumerate(known):
                if level != left_out:
                    factor = Categorical(name)  # an indicator is the same whatever the reference
                    yield DesignPart(factor, code, f"{factor}[{_level_label(level)}]")
        case Polynomial(name, degree):
            yield from _parts(Name(name), levels, coding)
            for power in range(2, degree + 1):
                yield from _parts(Computed(Power(Name(name), Number(float(power)))), levels, coding)
        case NaturalSpline(name, knots):
            yield from _parts(Name(name), levels, coding)
            for index in range(len(knots) - 2):
                yield DesignPart(variable, index, f"{variable}[{index + 2}]")
        case BSpline(_, knots, _, _, degree):
            for index in range(1, len(knots) + degree + 1):
                yield DesignPart(variable, index, f"{variable}[{index}]")
        case _:
            yield DesignPart(variable, 0, str(variable))


def _require_columns(formula: Formula, table: Table) -> None:
    problems = []
    for name in formula.numeric_names:
        if name not in table.numeric:
            wrong_kind = f"column '{name}' is categorical, write C({Name(name)})"
            problems.append(wrong_kind if name in table.factors else _no_column(name, table))
    for name in formula.factor_names:
        if name not in table.factors:
            wrong_kind = f"column '{name}' is numeric, write {Name(name)} without C()"
            problems.append(wrong_kind if name in table.numeric else _no_column(name, table))
    if problems:
        raise InputError("; ".join(problems))


def _no_column(name: str, table: Table) -> str:
    near = get_close_matches(name, sorted({*table.numeric, *table.factors}))
    return f"there is no column '{name}'" + (f", near matches: {', '.join(near)}" if near else "")


_MISSING, _UNDECLARED = -1, -2


def study_codes(name: str, table: Table, levels: tuple[str, ...]) -> IntArray:
    """Return codes into the study's levels, -1 for missing and -2 for a level that the study lacks."""
    factor = table.factors[name]
    position = {level: code for code, level in enumerate(levels)}
    lookup = [position.get(level, _UNDECLARED) for level in factor.levels]
    return np.asarray(np.array([*lookup, _MISSING], dtype=np.int64)[factor.codes])


def _require_complete(formula: Formula, table: Table, codes: Mapping[str, IntArray]) -> None:
    names = [name for name in formula.numeric_names if math.isnan(table.reach[name])]
    checks = [("has missing values in", name, np.isnan(table.numeric[name])) for name in names]
    for name, code in codes.items():
        checks.append(("has missing values in", name, code == _MISSING))
        # The level itself stays unsaid: it may be what a record holds.
        checks.append(("has a level that the study does not declare in", name, code == _UNDECLARED))
    problems = [f"column '{name}' {what} {_rows(bad)}" for what, name, bad in checks if bad.any()]
    if problems:
        raise DataError("; ".join(problems))


def _rows(bad: Mask) -> str:
    count = int(np.count_nonzero(bad))
    return f"{count} row" if count == 1 else f"{count} rows"


def _require(good: Mask, message: str) -> None:
    if not good.all():
        raise DataError(f"{message} in {_rows(~good)}")


def _require_finite(values: Array, reach: float, column: tuple[DesignPart, ...]) -> None:
    if not math.isfinite(reach):
        _require(np.isfinite(values), f"{_joined(column)} is not finite")


def part_values(part: DesignPart, table: Table, codes: Mapping[str, IntArray]) -> Array:
    """Return one part's values, shape (N,); ``codes`` holds the factors' codes into the study's levels."""
    values: Array
    match part.variable:
        case Categorical(name):
            values = (codes[name] == part.index).astype(np.float64)
        case Name(name):
            values = table.numeric[name]
        case Computed(expression):
            values = _arithmetic(expression, table)
        case Transformed("log", name):
            _require(table.numeric[name] > 0, f"{part.label}: column '{name}' is not positive")
            values = np.log(table.numeric[name])
        case Transformed(_, name):
            _require(table.numeric[name] >= 0, f"{part.label}: column '{name}' is negative")
            values = np.sqrt(table.numeric[name])
        case NaturalSpline(name, knots):
            values = natural_spline(table.numeric[name], knots, part.index)
        case BSpline(name, _, low, high, _) as spline:
            x = table.numeric[name]
            _require((low <= x) & (x <= high), f"{part.label}: column '{name}' is outside low and high")
            values = _b_spline(x, spline, part.index)
    return values


def _arithmetic(expression: Arithmetic, table: Table) -> Array:
    """Return the expression on every row; a part without names is an array of no dimension."""
    match expression:
        case Number(value):
            # An array, because Python's float raises on 10**400 where an array has inf.
            return np.array(value)
        case Name(name):
            return table.numeric[name]
        case Negative(operand):
            return np.negative(_arithmetic(operand, table))
        case Power(base, exponent):
            return np.asarray(_arithmetic(base, table) ** _arithmetic(exponent, table))
        case Chain(first, rest):
            result = _arithmetic(first, table)
            for operator, operand in rest:
                result = _OPERATIONS[operator](result, _arithmetic(operand, table))
            return result


_OPERATIONS = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}


def natural_spline(x: Array, knots: tuple[float, ...], j: int) -> Array:
    """Return Harrell's restricted cubic spline, divided by (t_k - t_1)^2 to stay of the order of x.

    (x - t_j)_+^3 - (x - t_{k-1})_+^3 (t_k - t_j)/(t_k - t_{k-1})
                  + (x - t_k)_+^3 (t_{k-1} - t_j)/(t_k - t_{k-1})
    """
    inner, last = knots[-2], knots[-1]
    # Beyond t_k the cubes cancel to a line; written as that line, no digit cancels far out.
    inside = np.minimum(x, last)
    after_knot, after_inner = np.maximum(inside - knots[j], 0.0), np.maximum(inside - inner, 0.0)
    cubes = _cube(after_knot) - _cube(after_inner) * ((last - knots[j]) / (last - inner))
    line = (3.0 * (last - knots[j]) * (inner - knots[j])) * (x - inside)
    return np.asarray((cubes + line) / ((last - knots[0]) * (last - knots[0])))


def _cube(x: Array) -> Array:
    return x * x * x


def _b_spline(x: Array, spline: BSpline, index: int) -> Array:
    """Return B-spline number ``index`` by the recursion of Cox and de Boor, 0/0 read as 0."""
    degree = spline.degree
    t = [spline.low] * (degree + 1) + list(spline.knots) + [spline.high] * (degree + 1)
    last = len(t) - degree - 2  # the interval that ends at high has it inside
    pieces = [
        ((t[m] <= x) & ((x < t[m + 1]) | (m == last))).astype(np.float64)
        for m in range(index, index + degree + 1)
    ]
    for order in range(1, degree + 1):
        for i in range(degree + 1 - order):
            m = index + i
            rising, falling = t[m + order] - t[m], t[m + order + 1] - t[m + 1]
            rise = pieces[i] * ((x - t[m]) / rising) if rising else 0.0
            fall = pieces[i + 1] * ((t[m + order + 1] - x) / falling) if falling else 0.0
            pieces[i] = np.asarray(rise + fall)
    return pieces[0]
