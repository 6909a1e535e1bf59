"""The columns of a formula on a silo's table: which there are, their values, and their public ranges.

The intercept comes first, then the terms as written. Within an interaction the columns of the last variable
vary fastest: C(a):C(b) gives a2:b2, a2:b3, a3:b2, ... A column is identified by what it computes, and a
second one of the same is left out: age + poly(age, 2) has the columns age and I(age**2). C(name) has no
column for the reference level, unless nothing else spans it: `codings` says when. Which columns there are
depends on the formula and the study's levels alone, never on rows. Values are computed elementwise and in a
fixed order.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, reduce
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from fedtmle.errors import DataError, InputError
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
    Term,
    TermVariable,
    Transformed,
    quoted_level,
)
from fedtmle.model.table import Table
from fedtmle_core import kernels
from fedtmle_core.parallel import done
from fedtmle_core.types import Array, IntArray, Scaled

# Which factors of a term get a column for every level: as many as the model needs, none twice.
#
# An indicator of all levels spans the constant and the contrasts to the reference, f+ = 1 + f-. A term
# a:b thus spans 1, a-, b- and a-:b-; what earlier terms span already is left out, and what is left is
# put together again, largest pieces first:
#
#     1 + a      a-          0 + a + b    a+, b-        1 + a:x        a+:x
#     0 + a      a+          1 + a:b      b-, a-:b+     1 + x + a:x    a-:x
#
# So "0 + C(site)" has a column for every site, as in R, and no formula is collinear by its coding alone.
# Terms with other numeric variables span other things: each such group is counted by itself.

Coding = Mapping[str, bool]  # the factors of a piece; True if all levels get a column


def codings(formula: Formula) -> list[list[Coding]]:
    """Return the pieces that each term adds; a term of numeric variables alone is one piece."""
    spanned: dict[tuple[str, ...], set[frozenset[str]]] = {(): {frozenset()} if formula.intercept else set()}
    pieces_of: dict[int, list[Coding]] = {}
    # A factor by itself is coded before an interaction that has it, wherever it was written.
    for index in sorted(range(len(formula.terms)), key=lambda k: len(_factors(formula.terms[k]))):
        term = formula.terms[index]
        numeric = tuple(sorted(str(v) for v in term if not isinstance(v, Categorical)))
        used = spanned.setdefault(numeric, set())
        names = _factors(term)
        parts = [frozenset(part) for size in range(len(names) + 1) for part in combinations(names, size)]
        new = [part for part in parts if part not in used]
        used.update(new)
        pieces_of[index] = _joined_pieces(new)
    return [pieces_of[index] for index in range(len(formula.terms))]


def _factors(term: Term) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.name for v in term if isinstance(v, Categorical)))


def _joined_pieces(parts: list[frozenset[str]]) -> list[Coding]:
    """Return the pieces with s- and s-:f- joined to s-:f+, from the left, until nothing joins."""
    pieces: list[Coding] = [dict.fromkeys(part, False) for part in parts]
    while True:
        pair = next(
            (
                (short, long)
                for short in pieces
                for long in pieces
                if len(long) == len(short) + 1 and short.items() <= long.items()
            ),
            None,
        )
        if pair is None:
            return pieces
        short, long = pair
        (extra,) = long.keys() - short.keys()
        pieces[pieces.index(long)] = {**long, extra: True}
        pieces.remove(short)


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


# Ranges of a formula's columns, from the declared ranges of its variables: interval arithmetic.
#
# A study that declares the range of every variable knows public bounds of every column of its models, so no
# silo is asked for the size of its values. Every operation is monotone in each argument on the pieces that
# are looked at, and so is rounding to the nearest double: the corners of a box, computed as a silo computes
# its rows, enclose all rows. Powers and logarithms are not correctly rounded everywhere; their ends move
# outward by a few units in the last place.

Range = tuple[float, float]  # the least and the largest value
Ranges = Mapping[str, Range]  # ranges of numeric columns, by name

SLACK = 4  # units in the last place by which an elementary function may err
UNIT: Range = (0.0, 1.0)
ONE: Range = (1.0, 1.0)


def column_ranges(formula: Formula, levels: Levels, ranges: Ranges) -> tuple[Range, ...]:
    """Return the range of each column of the formula's design, in its order.

    ``ranges`` has the declared range of every numeric column that the formula names. A column that these do
    not bound, such as ``I(1/x)`` where x may be 0, is an `InputError` that names it.
    """
    missing = [name for name in formula.numeric_names if name not in ranges]
    if missing:
        raise InputError(f"the range of {', '.join(map(repr, missing))} is not declared")
    return tuple(
        reduce(_times, (part_range(part, ranges) for part in column), ONE)
        for column in design_columns(formula, levels)
    )


def column_exponents(formula: Formula, levels: Levels, ranges: Ranges) -> tuple[int, ...]:
    """Return for each column the least e with every value below 2^e in magnitude."""
    return tuple(range_exponent(each) for each in column_ranges(formula, levels, ranges))


def range_exponent(bounds: Range) -> int:
    """Return the least e with every value of a range below 2^e in magnitude."""
    return math.frexp(max(abs(bounds[0]), abs(bounds[1])))[1]


def part_range(part: DesignPart, ranges: Ranges) -> Range:
    """Return the range of one variable's column."""
    label = part.label
    match part.variable:
        case Categorical():
            return UNIT
        case Name(name):
            return ranges[name]
        case Computed(expression):
            return _arithmetic_range(expression, ranges, label)
        case Transformed("log", name):
            low, high = ranges[name]
            if not low > 0:
                raise _unbounded(label, f"the range of '{name}' reaches 0 or below")
            return _outward((math.log(low), math.log(high)), label)
        case Transformed(_, name):
            low, high = ranges[name]
            if low < 0:
                raise _unbounded(label, f"the range of '{name}' reaches below 0")
            return math.sqrt(low), math.sqrt(high)
        case NaturalSpline(name, knots):
            ends = natural_spline(
                np.array(ranges[name]), knots, part.index
            )  # convex, and 0 at the left: it rises
            return _outward((float(ends[0]), float(ends[1])), label)
        case BSpline(name, _, low, high, _):
            declared = ranges[name]
            if declared[0] < low or declared[1] > high:
                raise _unbounded(label, f"the range of '{name}' goes beyond its low and high")
            return _outward(UNIT, label)
        case _:
            raise AssertionError(f"{label}: a variable of another kind")


def _arithmetic_range(expression: Arithmetic, ranges: Ranges, label: str) -> Range:
    match expression:
        case Number(value):
            return value, value
        case Name(name):
            return ranges[name]
        case Negative(operand):
            low, high = _arithmetic_range(operand, ranges, label)
            return -high, -low
        case Power(base, raised_to):
            return _power(
                _arithmetic_range(base, ranges, label), _arithmetic_range(raised_to, ranges, label), label
            )
        case Chain(first, rest):
            result = _arithmetic_range(first, ranges, label)
            for operator, operand in rest:
                result = _RANGE_OPERATIONS[operator](result, _arithmetic_range(operand, ranges, label), label)
            return result


def _plus(left: Range, right: Range, label: str) -> Range:
    return _finite((left[0] + right[0], left[1] + right[1]), label)


def _minus(left: Range, right: Range, label: str) -> Range:
    return _finite((left[0] - right[1], left[1] - right[0]), label)


def _product(left: Range, right: Range, label: str) -> Range:
    return _finite(_times(left, right), label)


def _quotient(left: Range, right: Range, label: str) -> Range:
    if right[0] <= 0 <= right[1]:
        raise _unbounded(label, "a denominator may be 0")
    return _finite(_hull(a / b for a, b in product(left, right)), label)


_RANGE_OPERATIONS: dict[str, Callable[[Range, Range, str], Range]] = {
    "+": _plus,
    "-": _minus,
    "*": _product,
    "/": _quotient,
}


def _power(base: Range, raised_to: Range, label: str) -> Range:
    """Return the range of base ** exponent.

    A power is monotone in each argument while the base stays positive. An integer exponent also allows a
    base of either sign: an even one turns at 0.
    """
    is_integer = raised_to[0] == raised_to[1] and raised_to[0].is_integer()
    if base[0] < 0 and not is_integer:
        raise _unbounded(label, "a power that is not a fixed integer has a base that may be negative")
    if base[0] <= 0 <= base[1] and raised_to[0] < 0:
        raise _unbounded(label, "a negative power has a base that may be 0")
    corners = [_raised(b, e) for b, e in product(base, raised_to)]
    if base[0] < 0 < base[1] and is_integer and raised_to[0] % 2 == 0:
        corners.append(_raised(0.0, raised_to[0]))
    low, high = _outward(_hull(corners), label)
    return (max(low, 0.0), high) if base[0] >= 0 or (is_integer and raised_to[0] % 2 == 0) else (low, high)


def _raised(base: float, exponent: float) -> float:
    with np.errstate(all="ignore"):  # beyond the range of a double: refused as unbounded
        return float(np.float64(base) ** np.float64(exponent))


def _times(left: Range, right: Range) -> Range:
    return _hull(a * b for a, b in product(left, right))


def _hull(corners: Iterable[float]) -> Range:
    values = list(corners)
    return min(values), max(values)


def _outward(bounds: Range, label: str) -> Range:
    low, high = bounds
    for _ in range(SLACK):
        low, high = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    return _finite((low, high), label)


def _finite(bounds: Range, label: str) -> Range:
    if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1])):
        raise _unbounded(label, "its values may exceed the range of double precision")
    return bounds


def _unbounded(label: str, reason: str) -> InputError:
    return InputError(
        f"{label} has no finite range: {reason}; narrow the declared range of its variables, or write the "
        "term in another way"
    )
