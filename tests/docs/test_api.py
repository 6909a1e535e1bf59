"""Every public name explains its parameters, what it returns and raises, and has an example that runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.document.docstrings import parameters, sections, signature

import fedtmle as ft

NAMES = [
    name for name in ft.__all__ if inspect.isclass(getattr(ft, name)) or inspect.isroutine(getattr(ft, name))
]
FUNCTIONS = [name for name in NAMES if inspect.isroutine(getattr(ft, name))]
CLASSES = [name for name in NAMES if name not in FUNCTIONS and not issubclass(getattr(ft, name), Exception)]


def own(name: str) -> dict[str, list[str]]:
    """Return the sections that the name's own docstring has."""
    return sections(inspect.cleandoc(getattr(ft, name).__doc__ or ""))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name: str) -> None:
    thing = getattr(ft, name)
    explained = parameters(thing)
    assert list(explained) == list(signature(thing))
    assert all(any(line.strip() for line in text) for text in explained.values())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_returns(name: str) -> None:
    assert own(name)["Returns"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_raises(name: str) -> None:
    assert own(name).get("Raises") or name == "validate"  # it returns every defect instead


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_that_checks_its_arguments_says_what_it_raises(name: str) -> None:
    assert bool(own(name).get("Raises")) or not checks_arguments(getattr(ft, name))


def checks_arguments(kind: type) -> bool:
    """Return whether a constructor of the class or of its bases raises, or calls a function that checks."""
    for base in kind.__mro__:
        for method in ("__init__", "__post_init__"):
            written = base.__dict__.get(method)
            if not base.__module__.startswith("fedtmle.") or not inspect.isfunction(written):
                continue
            if written.__code__.co_filename.startswith("<"):
                continue  # made by `dataclass`
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(written)))):
                if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and is_check(node)):
                    return True
    return False


def is_check(call: ast.Call) -> bool:
    return any(word in ast.unparse(call.func) for word in ("require", "check", "expect", "refuse", "_read"))


def test_constructors_that_check_are_found() -> None:
    assert checks_arguments(ft.Coded)
    assert checks_arguments(ft.RMST)
    assert not checks_arguments(ft.OneStep)
    assert sum(checks_arguments(getattr(ft, name)) for name in CLASSES) > 50


def test_every_name_has_an_example() -> None:
    assert [
        name for name in NAMES if not any(line.startswith(">>>") for line in own(name).get("Examples", []))
    ] == []


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the examples may use, as the page of the reference says."""
    rng = np.random.default_rng(0)

    def hospital(n: int) -> dict[str, Any]:
        age = rng.uniform(30, 85, n)
        treated = rng.binomial(1, 1 / (1 + np.exp(-(age - 57) / 30)))
        died = rng.binomial(1, 1 / (1 + np.exp(-((age - 60) / 20 - 0.7 * treated)))).astype(float)
        return {"age": age, "treated": treated, "died": died}

    silos = {"north": hospital(200), "south": hospital(150)}
    study = ft.Study(
        target=ft.ATE(outcome="died", treatment="treated"),
        outcome_model=ft.GLM("treated + age"),
        treatment_model=ft.GLM("age"),
        variables=ft.Variables(
            {
                "died": {"kind": "binary"},
                "treated": {"kind": "binary"},
                "age": {"kind": "number", "range": (18, 110), "unit": "years"},
            }
        ),
    )
    folder = tmp_path_factory.mktemp("examples")
    init = [sys.executable, "-m", "fedtmle", "init", "example"]
    subprocess.run(init, cwd=folder, check=True, capture_output=True, timeout=300)  # noqa: S603
    return {
        "ft": ft,
        "np": np,
        "silos": silos,
        "study": study,
        "result": ft.run(study, silos),
        "folder": folder,
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = names["folder"]
    monkeypatch.chdir(folder)
    text = "\n".join(own(name).get("Examples", []))
    example = doctest.DocTestParser().get_doctest(text, dict(names), name, None, 0)
    shown: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    runner.run(example, out=shown.append)
    assert not runner.failures, "".join(shown)
