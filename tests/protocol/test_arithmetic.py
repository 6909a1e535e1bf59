"""What every party must hold to the last bit is computed without BLAS and LAPACK."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle_paper.benchmark import gaussian_mixture
from fedtmle_paper.optimal_transport import OptimalTransport
from tests.cases import two_arm_case

PACKAGE = Path(ft.__file__).parent
ROOMS = ("protocol", "algorithms", "programs")
# Only the silo itself uses these values; they are sent, if at all, as its answer.
LOCAL = {
    ("fits.py", "is_noise"),
    ("fits.py", "row_means"),
    ("fits.py", "gap_bound"),
    ("masked.py", "space"),
    ("masked.py", "spaces"),
    ("masked.py", "_own_gram"),
    ("masked.py", "share_of"),
    ("masked.py", "gains_of"),
    ("masked.py", "spaces_without_one"),
    ("subjects.py", "people"),
}
PRODUCTS = ("dot", "vdot", "inner", "matmul", "tensordot", "einsum", "matvec", "vecdot", "vecmat", "convolve")


@pytest.fixture
def no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every function of `numpy.linalg` and every product that may call BLAS raise."""

    def ban(module: ModuleType, name: str) -> None:
        def banned(*_: object, **__: object) -> None:
            raise AssertionError(f"{name} was called")

        monkeypatch.setattr(module, name, banned)

    for name in np.linalg.__all__:
        if callable(getattr(np.linalg, name)) and name != "LinAlgError":
            ban(np.linalg, name)
    for name in PRODUCTS:
        if hasattr(np, name):
            ban(np, name)


@pytest.mark.usefixtures("no_blas")
def test_the_ban_holds() -> None:
    banned: list[Callable[..., object]] = [np.linalg.eigvalsh, np.linalg.cholesky, np.linalg.norm, np.dot]
    for call in banned:
        with pytest.raises(AssertionError, match="was called"):
            call(np.eye(2), np.eye(2))


ALGORITHMS: dict[str, Callable[[], AbstractAlgorithm]] = {
    "estimated": lambda: ft.Coded(tolerance=1e-2),
    "pooled": lambda: ft.Coded(tolerance=1e-2, smoothness=ft.Estimated(over="pooled")),
    "certified": lambda: ft.Coded(tolerance=1e-2, smoothness=ft.Certified(), max_rounds=5),
    "raw": lambda: ft.Coded(tolerance=1e-2, coordinates="raw", max_rounds=5),
    "by the standard errors": lambda: ft.Coded(tolerance="negligible", max_rounds=5),
    "gradient": lambda: ft.Gradient(tolerance=1e-2),
    "newton": lambda: ft.Gradient(tolerance=1e-2, optimizer=ft.Newton()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("target", ["transport", "two arms"])
def test_a_run_needs_neither(name: str, target: str, request: pytest.FixtureRequest) -> None:
    """All parties, from the pilot sample to the estimate; transport knows its C, two arms pool it."""
    if target == "transport":
        rng = np.random.default_rng(1)
        pilot, rows = gaussian_mixture(150, rng), gaussian_mixture(200, rng)
        request.getfixturevalue("no_blas")
        problem = OptimalTransport()
        silos = {"a": rows[:80], "b": rows[80:]}
        result = ft.solve(problem, problem.start(pilot), silos, ALGORITHMS[name]())
    else:
        case = two_arm_case()
        request.getfixturevalue("no_blas")
        result = ft.solve(case.problem, case.law, case.silos(case.split(2)), ALGORITHMS[name]())
    assert result.psi is not None


SOURCES = [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]


def uses(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """Yield (function, line) for each matrix product by `@` and each use of `linalg`."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield inside, node.lineno
        is_numpy = (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np"
        )
        if isinstance(node, ast.Attribute) and is_numpy and node.attr in ("linalg", *PRODUCTS):
            yield inside, node.lineno
        yield from uses(node, inside)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_product_and_no_linalg_in_what_all_parties_compute(path: Path) -> None:
    found = {
        f"{path.name}:{line} in {function}"
        for function, line in uses(ast.parse(path.read_text()))
        if (path.name, function) not in LOCAL
    }
    assert not found


def test_the_static_check_sees_each_kind() -> None:
    text = "def f(a, b):\n    return a @ b\n\ndef g(a):\n    return np.linalg.norm(a) + np.dot(a, a)\n"
    assert sorted(uses(ast.parse(text))) == [("f", 2), ("g", 5), ("g", 5)]


def test_the_exceptions_are_used() -> None:
    found = {
        (name, function)
        for name in {name for name, _ in LOCAL}
        for function, _ in uses(ast.parse((PACKAGE / "protocol" / name).read_text()))
    }
    assert found == LOCAL
