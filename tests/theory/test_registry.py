"""Every statement has a function and a test that exist, or a reason; the table in the docs is current."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from functools import cache
from pathlib import Path

import pytest
from tools.document import proved

from fedtmle_paper.registry import STATEMENTS, Statement
from tests.theory.arguments import bounds

ROOT = Path(__file__).parents[2]
BY_LABEL = {statement.label: statement for statement in STATEMENTS}

# The paper's numbered statements: every \label of an equation, definition, assumption, algorithm, lemma,
# theorem or corollary, in the order of paper.tex (which is no part of this repository).
PAPER = """
eq:remainder eq:plugin-expansion eq:eif-equation def:fluctuation eq:local-score eq:fluctuation-objective
alg:centralized-tmle alg:gradient-aggregation eq:local-average alg:local-averaging ass:smooth
eq:loss-budget ass:recentering ass:statistical-code ass:local-regularity eq:personalized-regularity
ass:local-complexity eq:lattice-spacing eq:protocol-action eq:rounding-guarantee alg:coded-gradient
thm:communication eq:main-communication eq:pathwise-bit-bound eq:variation-summary thm:statistical
eq:history-length eq:history-statistical-bound cor:inference eq:inference-cost eq:inference-conditions
eq:canonical-limit eq:history-asymptotic eq:robust-channel thm:reconstruction eq:query-smoothness
eq:collision-pair eq:reconstruction-risk eq:attribute-smoothness eq:disclosure-design thm:disclosure
eq:disclosure-sandwich eq:disclosure-spectrum eq:retirement-weights alg:local-retirement
def:local-stability lem:local-derivatives eq:local-derivative-comparison eq:retirement-sampling-modes
lem:local-fourth-order eq:local-fourth-order-error thm:personalized-convergence
eq:personalized-convergence-bound eq:experiment-target eq:proof-code-length eq:proof-rounding-error
eq:proof-pooled-smoothness eq:proof-energy-and-steps eq:proof-rounds eq:proof-path-length
eq:proof-within-variation eq:proof-recenter-variation eq:proof-total-variation eq:proof-pooled-variation
eq:proof-initial-bits eq:proof-upload-sum eq:proof-broadcast-sum eq:proof-pathwise-bits
eq:proof-integer-kraft eq:proof-history-kraft eq:proof-moment-control eq:proof-vector-concentration
eq:proof-root-n-bound eq:proof-collision-distance eq:proof-level-derivative eq:proof-collision-response
eq:collision-jacobian eq:proof-recovery-modulus eq:proof-recovery-dual eq:proof-design-infimum
eq:proof-quadratic-dual eq:proof-modulus-spectrum eq:proof-query-remainders eq:proof-affine-error
eq:proof-retire-interpolation eq:proof-retire-trapezoid eq:proof-retire-average-identity
eq:proof-retire-sampling-moment eq:proof-retire-second-moment eq:proof-retire-fourth-moment
eq:proof-retire-pair-curvature eq:proof-retire-absorption eq:proof-retire-gap-score
eq:proof-retire-loss-identity eq:retirement-imbalance
""".split()  # noqa: SIM905 - a list of a hundred quoted labels is harder to compare with the paper


@pytest.mark.parametrize("label", PAPER)
def test_a_numbered_statement_has_a_function_or_a_reason(label: str) -> None:
    statement = BY_LABEL[label]
    assert bool(statement.functions) is not bool(statement.reason)
    assert bool(statement.functions) is bool(statement.tests)


def test_labels_are_the_papers_or_have_no_number() -> None:
    assert len(BY_LABEL) == len(STATEMENTS)
    assert {label for label in BY_LABEL if ":" in label} == set(PAPER)


@pytest.mark.skipif("FEDTMLE_PAPER" not in os.environ, reason="FEDTMLE_PAPER names no paper.tex")
def test_the_list_of_labels_is_complete() -> None:
    text = Path(os.environ["FEDTMLE_PAPER"]).read_text()
    labels = re.findall(r"\\label\{((?:eq|def|ass|alg|lem|thm|cor):[^}]+)\}", text)
    assert set(labels) == set(PAPER)


@pytest.mark.parametrize("statement", [s for s in STATEMENTS if s.functions], ids=lambda s: s.label)
def test_functions_and_tests_exist(statement: Statement) -> None:
    for name in statement.functions:
        module, _, attribute = name.rpartition(".")
        function = getattr(importlib.import_module(module), attribute)
        assert inspect.getdoc(function), name
    for test in statement.tests:
        file, _, name = test.partition("::")
        assert name in functions_of(file), test


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_bound_is_in_the_registry() -> None:
    named = {name.rpartition(".")[2] for statement in STATEMENTS for name in statement.functions}
    assert set(bounds()) <= named


def test_docstrings_carry_the_label_of_what_they_compute() -> None:
    """A function that a labelled equation names quotes that label, so a reader can find the paper's line."""
    quoted = " ".join(inspect.getdoc(function) or "" for function in bounds().values())
    for label in ("eq:main-communication", "eq:pathwise-bit-bound", "eq:history-length"):
        assert label in quoted


def test_the_table_in_the_docs_is_current() -> None:
    assert (ROOT / "docs" / "proved.md").read_text() == proved.page()
