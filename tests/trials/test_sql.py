"""Whatever strings a trial holds, the SQL holds them as quoted identifiers or literals, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.data import sql
from fedtmle.data.sql import (
    DIALECTS,
    AllOf,
    AnyOf,
    Combined,
    Dialect,
    Infix,
    Operator,
    Ref,
    Select,
    SetOperator,
    Source,
    Statement,
    Value,
)
from fedtmle.errors import InputError
from fedtmle.trials import ConceptSet, TargetTrial, TreatmentStrategy
from fedtmle.trials.compile import compile_trial
from fedtmle.trials.steps import CdmLayout
from tests.trials.conftest import Cursor, Urls, cursor
from tests.trials.test_compile import TRIALS

ATTACKS = (
    "'; DROP TABLE person; --",
    '"; DROP TABLE person; --',
    "\\'; DROP TABLE person; --",
    "' OR '1'='1",
    "/* */ -- \n; $$ $x$",
    "'' || (SELECT 1) || ''",
    "E'\\x27'",
    "\u2019\u02bc\uff07; --",
    "a\nb\r\tc",
    "%s {0} ? :name $1",
)
HOSTILE = st.one_of(
    st.sampled_from(ATTACKS),
    st.text(alphabet="'\"\\;-*/$ \nEe\u2019ab", min_size=1, max_size=20),
    st.text(min_size=1, max_size=20),
)
NAMES = HOSTILE.filter(lambda text: text.isprintable() and text == text.strip() and _is_text(text))
TWO = st.lists(NAMES, min_size=2, max_size=2, unique=True)
WHICH = st.sampled_from(sorted(name for name, trial in TRIALS.items() if len(trial.strategies) == 2))
DUCKDB, POSTGRESQL = DIALECTS["duckdb"], DIALECTS["postgresql"]
BOTH = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))

# An independent reader of SQL's tokens: identifiers, texts, PostgreSQL's texts with escapes, words, numbers.
TOKEN = re.compile(
    r"""(?P<identifier>"(?:[^"]|"")*")|(?P<escaped>E'(?:[^'\\]|''|\\.)*')|(?P<text>'(?:[^']|'')*')"""
    r"""|(?P<word>[A-Za-z_]+)|(?P<number>\d+)|(?P<operator><=|>=|[-+<>=%(),.])|(?P<blank>[ \n]+)""",
    re.DOTALL,
)
Token = tuple[str, str]


@pytest.fixture(scope="module")
def connected(urls: Urls) -> Iterator[Cursor]:
    with cursor(urls.admin) as opened:
        opened.execute("SET escape_string_warning = off")
        yield opened


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tokens(text: str) -> Iterator[Token]:
    """Yield the kind and the meaning of every token; fail at anything else, a comment or a semicolon too."""
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        assert found is not None, text[at : at + 40]
        at = found.end()
        kind, written = str(found.lastgroup), found[0]
        if kind == "identifier":
            yield kind, written[1:-1].replace('""', '"')
        elif kind == "text":
            yield "text", written[1:-1].replace("''", "'")
        elif kind == "escaped":
            yield "text", re.sub(r"\\(.)|''", lambda m: m[1] or "'", written[2:-1], flags=re.DOTALL)
        elif kind != "blank":
            yield kind, written


def hostile(trial: TargetTrial, names: list[str], schema: str) -> tuple[TargetTrial, CdmLayout]:
    """Put strings into every place of a trial and of a silo's section that takes any."""
    sets = iter([*names, "x", "y", "z"] * 9)

    def renamed(concepts: ConceptSet) -> ConceptSet:
        return replace(concepts, name=next(sets))

    strategies = tuple(
        TreatmentStrategy(name=name, drugs=renamed(strategy.drugs))
        for name, strategy in zip(names, trial.strategies, strict=True)
    )
    criteria = tuple(replace(rule, concepts=renamed(rule.concepts)) for rule in trial.eligibility.criteria)
    changed = replace(
        trial,
        name=names[0],
        strategies=strategies,
        eligibility=replace(trial.eligibility, criteria=criteria),
    )
    return changed, CdmLayout(schema=schema, vocabulary_schema=names[-1][:15], part=(0, 4))


def statements(trial: TargetTrial, layout: CdmLayout, dialect: Dialect) -> list[str]:
    compiled = compile_trial(trial, layout)
    return [dialect.print(compiled.attrition), dialect.print(compiled.table)]


@BOTH
@settings(max_examples=60, deadline=None)
@given(names=TWO, schema=NAMES, which=WHICH)
def test_strings_become_quoted_identifiers_or_literals(
    dialect: Dialect, names: list[str], schema: str, which: str
) -> None:
    base = TRIALS[which]
    schema = schema[:15]
    trial, layout = hostile(base, names, schema)
    plain, plain_layout = hostile(base, ["first", "second"], "schema")
    changed = {"first": names[0], "second": names[1], "schema": schema}
    identifiers = {"schema": schema, "second": layout.vocabulary_schema}
    for attacked, harmless in zip(
        statements(trial, layout, dialect), statements(plain, plain_layout, dialect), strict=True
    ):
        seen = list(tokens(attacked))
        assert len(seen) == len(list(tokens(harmless)))
        for (kind, meaning), (plain_kind, plain_meaning) in zip(seen, tokens(harmless), strict=True):
            assert kind == plain_kind
            if kind == "text":
                assert meaning == changed.get(plain_meaning, plain_meaning)
            elif kind == "identifier":
                assert meaning == identifiers.get(plain_meaning, plain_meaning)
            else:
                assert meaning == plain_meaning


@BOTH
@settings(max_examples=40, deadline=None)
@given(names=TWO, schema=NAMES, which=WHICH)
def test_what_is_printed_is_one_select(dialect: Dialect, names: list[str], schema: str, which: str) -> None:
    """DuckDB's parser reads the form for PostgreSQL too."""
    trial, layout = hostile(TRIALS[which], names, schema[:15])
    for text in statements(trial, layout, dialect):
        (statement,) = duckdb.extract_statements(text)
        assert statement.type is duckdb.StatementType.SELECT


@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_duckdb_reads_a_literal_and_an_identifier_back(text: str) -> None:
    if "\0" in text or not _is_text(text):
        with pytest.raises(InputError):
            DUCKDB.literal(text)
        return
    name = text[:15]
    statement = Statement((), Select(columns=((name, Value(text)),)))
    result = duckdb.execute(DUCKDB.print(statement))
    assert result.description[0][0] == name
    assert result.fetchall() == [(text,)]


@settings(max_examples=60, deadline=None)
@given(text=HOSTILE.filter(lambda text: "\0" not in text and _is_text(text)))
def test_postgresql_reads_a_literal_and_an_identifier_back(connected: Cursor, text: str) -> None:
    statement = Statement((), Select(columns=((text[:15], Value(text)),)))
    for setting in ("on", "off"):  # whether backslashes are ordinary characters
        connected.execute(f"SET standard_conforming_strings = {setting}")
        connected.execute(POSTGRESQL.print(statement))
        table = connected.fetch_arrow_table()
        assert table.column_names == [text[:15]]
        assert table.column(0).to_pylist() == [text]


@settings(max_examples=40, deadline=None)
@given(names=TWO, which=WHICH)
def test_postgresql_plans_what_is_printed(connected: Cursor, names: list[str], which: str) -> None:
    trial, _ = hostile(TRIALS[which], names, "invented")
    for text in statements(trial, CdmLayout(schema="invented", part=(1, 3)), POSTGRESQL):
        connected.execute(f"PREPARE planned AS {text}")  # parsed and analysed, not run
        connected.execute("DEALLOCATE planned")


def test_no_node_holds_sql_text() -> None:
    """Strings are names and values; every operator, function and type is a member of an enumeration."""
    nodes = [node for node in vars(sql).values() if isinstance(node, type) and is_dataclass(node)]
    texts = {
        f"{node.__name__}.{field.name}" for node in nodes for field in fields(node) if "str" in field.type
    }
    assert texts == {
        "Combined.order_by",
        "Ref.alias",
        "Ref.column",
        "Select.columns",
        "Source.alias",
        "Source.name",
        "Source.schema",
        "Statement.named",
        "Value.value",
    }
    for place in texts:
        name = place.replace(".", '"; --')
        assert DUCKDB.identifier(name) == '"' + name.replace('"', '""') + '"'


@BOTH
@pytest.mark.parametrize("name", ["", "x" * 64, "\u00e4" * 32, "a\0b", "\ud800"])
def test_identifiers_that_a_database_would_change_are_refused(dialect: Dialect, name: str) -> None:
    with pytest.raises(InputError):
        dialect.identifier(name)
    assert dialect.identifier("x" * 63) == f'"{"x" * 63}"'


@BOTH
def test_numbers(dialect: Dialect) -> None:
    assert dialect.literal(-5) == "(-5)"  # two minus signs in a row would start a comment
    assert dialect.literal(None) == "NULL"
    for value in (float("nan"), float("inf")):
        with pytest.raises(InputError):
            dialect.literal(value)
    minus = Infix(Value(1), Operator.MINUS, Value(-1))
    statement = Statement((), Select(columns=(("x", minus), ("y", Value(0.1)), ("z", Value(-1e-300)))))
    assert duckdb.execute(DUCKDB.print(statement)).fetchall() == [(2, 0.1, -1e-300)]


def test_empty_conditions_are_true_and_false() -> None:
    statement = Statement((), Select(columns=(("a", AllOf(())), ("b", AnyOf(())))))
    assert duckdb.execute(DUCKDB.print(statement)).fetchall() == [(True, False)]


def test_only_a_combination_has_an_order() -> None:
    part = Select(columns=(("x", Ref("t", "x")),), source=Source("t", "t"), order_by=(Ref("t", "x"),))
    with pytest.raises(InputError, match="order"):
        DUCKDB.print(Statement((), Combined(SetOperator.UNION, (part, part))))
