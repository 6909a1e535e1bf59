"""A small syntax tree of SQL, and one printer per dialect.

A statement is built from the frozen nodes below and becomes text only in `Dialect.print`. The printer is the
only place that quotes identifiers and writes constants, so a string that a trial file holds can become a
quoted identifier or a literal and nothing else. There is no node that holds SQL text.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from fedtmle.errors import InputError

MOST_IDENTIFIER_BYTES = 63  # PostgreSQL cuts longer identifiers off without an error


class SqlType(enum.Enum):
    """The types that a statement may cast to."""

    DATE = enum.auto()
    INTEGER = enum.auto()
    BIGINT = enum.auto()
    DOUBLE = enum.auto()
    TEXT = enum.auto()


class Operator(enum.Enum):
    """An infix operator; the value is its SQL, the same in both dialects."""

    EQUAL = "="
    BELOW = "<"
    AT_MOST = "<="
    ABOVE = ">"
    AT_LEAST = ">="
    PLUS = "+"
    MINUS = "-"
    TIMES = "*"
    MODULO = "%"


class Aggregate(enum.Enum):
    """An aggregate function of one expression."""

    COUNT = "count"
    COUNT_DISTINCT = "count distinct"
    MIN = "min"
    MAX = "max"


class SetOperator(enum.Enum):
    """How the rows of several selects are combined."""

    UNION = "UNION"
    UNION_ALL = "UNION ALL"
    EXCEPT = "EXCEPT"


# Expressions.


@final
@dataclass(frozen=True)
class Ref:
    """A column of a table that the statement knows by an alias."""

    alias: str
    column: str


@final
@dataclass(frozen=True)
class Value:
    """A literal: a number, a text, or NULL for None."""

    value: int | float | str | None


@final
@dataclass(frozen=True)
class Infix:
    """``left operator right``."""

    left: Expression
    operator: Operator
    right: Expression


@final
@dataclass(frozen=True)
class AllOf:
    """A conjunction; true if it has no parts."""

    parts: tuple[Expression, ...]


@final
@dataclass(frozen=True)
class AnyOf:
    """A disjunction; false if it has no parts."""

    parts: tuple[Expression, ...]


@final
@dataclass(frozen=True)
class Inverse:
    """NOT of a condition."""

    operand: Expression


@final
@dataclass(frozen=True)
class IsNull:
    """Whether an expression has no value."""

    operand: Expression


@final
@dataclass(frozen=True)
class IsNaN:
    """Whether a double is not a number."""

    operand: Expression


@final
@dataclass(frozen=True)
class FloorOf:
    """The largest whole number that is not above a double."""

    operand: Expression


@final
@dataclass(frozen=True)
class GroupingOf:
    """A bit per column, the first being highest; 1 if the row of `each_by_itself` is not grouped by it."""

    columns: tuple[Ref, ...]


@final
@dataclass(frozen=True)
class InSelect:
    """Whether an expression is among the rows of a select of one column."""

    operand: Expression
    rows: Select


@final
@dataclass(frozen=True)
class InValues:
    """Whether an expression is one of the given integers."""

    operand: Expression
    values: tuple[int, ...]


@final
@dataclass(frozen=True)
class ExistsIn:
    """Whether a select has a row."""

    rows: Select


@final
@dataclass(frozen=True)
class CastTo:
    """An expression as another type."""

    operand: Expression
    type: SqlType


@final
@dataclass(frozen=True)
class YearOf:
    """The year of a date, as an integer."""

    operand: Expression


@final
@dataclass(frozen=True)
class CaseWhen:
    """The value of the first condition that holds, or ``otherwise``."""

    cases: tuple[tuple[Expression, Expression], ...]
    otherwise: Expression


@final
@dataclass(frozen=True)
class Aggregated:
    """An aggregate of an expression over the rows of a group."""

    function: Aggregate
    operand: Expression


@final
@dataclass(frozen=True)
class RowNumber:
    """The number of a row among those with the same ``partition``; ``order`` has (expression, descending)."""

    partition: tuple[Expression, ...]
    order: tuple[tuple[Expression, bool], ...]


Expression = (
    Ref
    | Value
    | Infix
    | AllOf
    | AnyOf
    | Inverse
    | IsNull
    | IsNaN
    | FloorOf
    | GroupingOf
    | InSelect
    | InValues
    | ExistsIn
    | CastTo
    | YearOf
    | CaseWhen
    | Aggregated
    | RowNumber
)


# Statements.


@final
@dataclass(frozen=True)
class Source:
    """A table of the database (with its schema), or a named select of the statement, under an alias."""

    name: str
    alias: str
    schema: str | None = None


@final
@dataclass(frozen=True)
class Join:
    """A further source of a select; an ``outer`` join keeps rows that have no partner."""

    source: Source
    on: Expression
    outer: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Select:
    """One SELECT; ``columns`` are (name, expression) pairs.

    With ``each_by_itself`` the rows are grouped by each expression of ``group_by`` in turn.
    """

    columns: tuple[tuple[str, Expression], ...]
    source: Source | None = None
    joins: tuple[Join, ...] = ()
    where: tuple[Expression, ...] = ()
    group_by: tuple[Expression, ...] = ()
    each_by_itself: bool = False
    order_by: tuple[Expression, ...] = ()
    limit: int | None = None


@final
@dataclass(frozen=True)
class Combined:
    """The rows of several selects as one; ``order_by`` are names of the result's columns."""

    operator: SetOperator
    parts: tuple[Select, ...]
    order_by: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Statement:
    """Named selects, each of which may use those before it, and the select that is returned."""

    named: tuple[tuple[str, Select | Combined], ...]
    body: Select | Combined


class Dialect(ABC):
    """Prints statements; a subclass writes what differs between databases."""

    name: ClassVar[str]
    types: ClassVar[dict[SqlType, str]]

    @abstractmethod
    def text(self, value: str) -> str:
        """Return a text literal."""

    def print(self, statement: Statement) -> str:
        """Return the statement as SQL of this dialect, one line per named select and clause."""
        named = [f"{self.identifier(name)} AS (\n{self._rows(rows)}\n)" for name, rows in statement.named]
        head = "WITH " + ",\n".join(named) + "\n" if named else ""
        return head + self._rows(statement.body)

    def identifier(self, name: str) -> str:
        """Return a quoted identifier; raise if no database can hold the name unchanged."""
        encoded = _encoded("an identifier", name)
        if not 0 < len(encoded) <= MOST_IDENTIFIER_BYTES:
            raise InputError(
                f"an SQL identifier has 1 to {MOST_IDENTIFIER_BYTES} bytes, got {len(encoded)}; "
                "choose a shorter name"
            )
        return '"' + name.replace('"', '""') + '"'

    def literal(self, value: int | float | str | None) -> str:
        """Return a literal; negative numbers are in parentheses, because two minus signs start a comment."""
        if value is None:
            return "NULL"
        if isinstance(value, str):
            _encoded("a text", value)
            return self.text(value)
        if not math.isfinite(value):
            raise InputError("an SQL number must be finite")
        if isinstance(value, float):
            # As text, so that both dialects read the same double.
            return f"CAST({self.text(repr(value))} AS {self.types[SqlType.DOUBLE]})"
        return f"({int(value)})" if value < 0 else str(int(value))

    def _rows(self, rows: Select | Combined) -> str:
        if isinstance(rows, Select):
            return self._select(rows)
        if any(part.order_by for part in rows.parts):
            raise InputError("only the combination of selects has an order")
        parts = [self._select(part) for part in rows.parts]
        order = ", ".join(self.identifier(name) for name in rows.order_by)
        text = f"\n{rows.operator.value}\n".join(parts)
        return f"{text}\nORDER BY {order}" if order else text

    def _select(self, select: Select) -> str:
        columns = [f"{self._expression(value)} AS {self.identifier(name)}" for name, value in select.columns]
        lines = ["SELECT " + ",\n  ".join(columns)]
        if select.source is not None:
            lines.append(f"FROM {self._source(select.source)}")
        for join in select.joins:
            kind = "LEFT JOIN" if join.outer else "JOIN"
            lines.append(f"{kind} {self._source(join.source)} ON {self._expression(join.on)}")
        if select.where:
            lines.append("WHERE " + "\n  AND ".join(map(self._expression, select.where)))
        if select.group_by and select.each_by_itself:
            sets = ", ".join(f"({self._expression(key)})" for key in select.group_by)
            lines.append(f"GROUP BY GROUPING SETS ({sets})")
        elif select.group_by:
            lines.append(f"GROUP BY {self._listed(select.group_by)}")
        if select.order_by:
            lines.append(f"ORDER BY {self._listed(select.order_by)}")
        if select.limit is not None:
            lines.append(f"LIMIT {self.literal(select.limit)}")
        return "\n".join(lines)

    def _source(self, source: Source) -> str:
        schema = "" if source.schema is None else f"{self.identifier(source.schema)}."
        return f"{schema}{self.identifier(source.name)} AS {self.identifier(source.alias)}"

    def _listed(self, expressions: Iterable[Expression]) -> str:
        return ", ".join(map(self._expression, expressions))

    def _nested(self, select: Select) -> str:
        return f"(\n{self._select(select)}\n)"

    def _chain(self, parts: Sequence[Expression], word: str, empty: str) -> str:
        return f"({f' {word} '.join(map(self._expression, parts))})" if parts else empty

    def _expression(self, expression: Expression) -> str:  # noqa: PLR0911, PLR0912 - one case per node
        match expression:
            case Ref(alias, column):
                return f"{self.identifier(alias)}.{self.identifier(column)}"
            case Value(value):
                return self.literal(value)
            case Infix(left, operator, right):
                return f"({self._expression(left)} {operator.value} {self._expression(right)})"
            case AllOf(parts):
                return self._chain(parts, "AND", "(1 = 1)")
            case AnyOf(parts):
                return self._chain(parts, "OR", "(1 = 0)")
            case Inverse(operand):
                return f"(NOT {self._expression(operand)})"
            case IsNull(operand):
                return f"({self._expression(operand)} IS NULL)"
            case IsNaN(operand):
                not_a_number = f"CAST({self.text('NaN')} AS {self.types[SqlType.DOUBLE]})"
                return f"({self._expression(operand)} = {not_a_number})"
            case FloorOf(operand):
                return f"floor({self._expression(operand)})"
            case GroupingOf(columns):
                return f"GROUPING({self._listed(columns)})"
            case InSelect(operand, rows):
                return f"({self._expression(operand)} IN {self._nested(rows)})"
            case InValues(operand, values):
                return f"({self._expression(operand)} IN ({', '.join(map(self.literal, values))}))"
            case ExistsIn(rows):
                return f"(EXISTS {self._nested(rows)})"
            case CastTo(operand, kind):
                return f"CAST({self._expression(operand)} AS {self.types[kind]})"
            case YearOf(operand):
                year = f"EXTRACT(YEAR FROM {self._expression(operand)})"
                return f"CAST({year} AS {self.types[SqlType.INTEGER]})"
            case CaseWhen(cases, otherwise):
                whens = [f"WHEN {self._expression(w)} THEN {self._expression(v)}" for w, v in cases]
                return f"(CASE {' '.join(whens)} ELSE {self._expression(otherwise)} END)"
            case Aggregated(function, operand):
                if function is Aggregate.COUNT_DISTINCT:
                    return f"count(DISTINCT {self._expression(operand)})"
                return f"{function.value}({self._expression(operand)})"
            case RowNumber(partition, order):
                keys = [f"{self._expression(key)}{' DESC' if down else ''}" for key, down in order]
                within = f"PARTITION BY {self._listed(partition)} ORDER BY {', '.join(keys)}"
                return f"row_number() OVER ({within})"


@final
class DuckDB(Dialect):
    """DuckDB's SQL: a backslash in a literal is an ordinary character."""

    name = "duckdb"
    types: ClassVar[dict[SqlType, str]] = {
        SqlType.DATE: "DATE",
        SqlType.INTEGER: "INTEGER",
        SqlType.BIGINT: "BIGINT",
        SqlType.DOUBLE: "DOUBLE",
        SqlType.TEXT: "VARCHAR",
    }

    def text(self, value: str) -> str:
        return "'" + value.replace("'", "''") + "'"


@final
class PostgreSQL(Dialect):
    """PostgreSQL's SQL. Whether a backslash escapes in a plain literal depends on a server's setting, so a
    literal with a backslash is written as an escape string, which does not depend on it."""

    name = "postgresql"
    types: ClassVar[dict[SqlType, str]] = {
        SqlType.DATE: "DATE",
        SqlType.INTEGER: "INTEGER",
        SqlType.BIGINT: "BIGINT",
        SqlType.DOUBLE: "DOUBLE PRECISION",
        SqlType.TEXT: "TEXT",
    }

    def text(self, value: str) -> str:
        quoted = "'" + value.replace("'", "''") + "'"
        return "E" + quoted.replace("\\", "\\\\") if "\\" in value else quoted


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (DuckDB(), PostgreSQL())}


def _encoded(what: str, text: str) -> bytes:
    """Return the text as UTF-8; raise if it has a character that SQL text cannot hold."""
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise InputError(f"{what} of an SQL statement holds a character that is not text; leave it out")
    return encoded
