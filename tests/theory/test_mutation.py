"""A wrong constant is caught: each named constant is replaced, and the second transcription disagrees."""

from __future__ import annotations

import ast
import copy
import inspect
from collections import Counter
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedtmle.theory import personalized
from fedtmle_paper import lemmas as lem
from tests.theory.arguments import MODULES, bounds
from tests.theory.test_transcription import NAMES, disagreement


def named_constants() -> list[tuple[ModuleType, str]]:
    return [
        (module, name)
        for module in MODULES
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | Fraction)
    ]


# Used by no bound's function: the protocol's own threshold, checked by exact fractions, and the bits of a
# double, checked by test_remainder.
STATED_ONLY = {"THRESHOLD", "DOUBLE"}


@pytest.mark.parametrize("factor", [Fraction(1, 2), Fraction(101, 100)])
@pytest.mark.parametrize(
    ("module", "name"), named_constants(), ids=lambda value: getattr(value, "__name__", value)
)
def test_a_replaced_constant_is_caught(
    module: ModuleType, name: str, factor: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = getattr(module, name)
    changed = Fraction(value) * factor
    monkeypatch.setattr(module, name, float(changed) if isinstance(value, int) else changed)
    caught = [bound for bound in NAMES if disagreement(bound) > 1e-12]
    assert bool(caught) is (name not in STATED_ONLY)


class Literal(ast.NodeTransformer):
    """Replaces the ``at``-th numeric literal of a module's functions by its double, or zero by one."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.inside = at, 0, ""
        self.where = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.inside = node.name
        node.body = [self.visit(child) for child in node.body]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not self.inside or isinstance(node.value, bool) or not isinstance(node.value, int | float):
            return node
        self.seen += 1
        if self.seen != self.at:
            return node
        self.where = self.inside
        return ast.copy_location(ast.Constant(2 * node.value or 1), node)


# Literals of guards, for arguments that the transcription does not cover: how many in each function, and
# the test that checks them.
GUARDS = Counter(
    {
        "_difference_bits": 2,  # R = 1: test_no_later_bits_in_a_run_of_one_round
        "bits_at_spacing": 2,
        "history_bits_bound": 2,  # K = 0: test_history_code_length
        "history_bits_rate": 2,
        "history_bits_ceiling": 2,
        "chi_uniform": 1,  # nobody is active: test_nobody_active
        "chi_size": 1,
        "disagreement": 2,
    }
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_replaced_literal_is_caught(module: ModuleType) -> None:
    """Every number written inside a bound's function: doubled, and the second transcription disagrees."""
    tree = ast.parse(inspect.getsource(module))
    survivors: list[str] = []
    at = 1
    while True:
        mutant = Literal(at)
        changed = ast.fix_missing_locations(mutant.visit(copy.deepcopy(tree)))
        if not mutant.where:
            break
        namespace: dict[str, Any] = {"__name__": module.__name__}
        exec(compile(changed, module.__name__, "exec"), namespace)  # noqa: S102 - our own source, mutated
        names = [name for name in NAMES if name in namespace and bounds()[name].__module__ == module.__name__]
        names.sort(key=lambda name: name != mutant.where)  # the function itself first
        in_a_bound = mutant.where in names or mutant.where[0] == "_"
        if in_a_bound and not any(differs(name, namespace[name]) for name in names):
            survivors.append(mutant.where)
        at += 1
    assert at > 5
    assert Counter(survivors) <= GUARDS


def differs(name: str, function: Any) -> bool:
    try:
        return disagreement(name, function) > 1e-12
    except (ArithmeticError, ValueError, AssertionError, IndexError):
        return True


def test_nobody_active() -> None:
    assert lem.chi_uniform([], 5) == lem.chi_size(0, 10) == personalized.chi([], []) == 0
    assert personalized.disagreement(2, [], np.zeros((0, 2))) == 0


def test_there_are_constants_to_replace() -> None:
    assert len(named_constants()) >= 25
