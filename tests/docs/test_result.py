"""The pages of the saved result and of its certificate name every key that the package writes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from fedtmle.lowered import LoweredLimit
from fedtmle.protocol.outcome import ActiveSilos, Smoothness, Visit
from fedtmle.results import document, inference, over_time, result, sensitivity
from fedtmle.runtime.result import BoundCheck, Result, RunCertificate, Trajectory
from fedtmle.runtime.session import Account
from fedtmle.theory.averaging import Averaging
from fedtmle.theory.path import Constant
from fedtmle.theory.statistical import Distance, Remainder
from fedtmle.trials import cohort, trial

DOCS = Path(__file__).parents[2] / "docs"
Source = ModuleType | Callable[..., object]
SOURCES: list[Source] = [document, inference, over_time, result, sensitivity]
SOURCES += [Account.to_dict, Result.to_dict, cohort.document_of]
RECORDS: list[type] = [
    inference.Row,
    inference.RandomEffects,
    Trajectory,
    Visit,
    ActiveSilos,
    cohort.ArmCounts,
    trial.ProtocolElement,
]
NOT_WRITTEN = {"noise", "gap", "lattice", "Q_p_value"}  # words of a warning, and a field that is left out
CERTIFICATE: list[type] = [RunCertificate, Smoothness, BoundCheck, Constant, Averaging, Distance, Remainder]


def text_keys(shown: ast.Dict) -> Iterator[str]:
    """Yield the keys of a dict display that are written out."""
    for key in shown.keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def keys_of(source: Source) -> Iterator[str]:
    """Yield the keys of all dict displays in a piece of source."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(source)))):
        if isinstance(node, ast.Dict):
            yield from text_keys(node)


def columns(page: str, first: int, last: int) -> set[str]:
    """Return the words between backticks in these columns of the page's tables, dotted ones in parts."""
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ")[first:last] for line in text.splitlines() if line.startswith("|")]
    quoted = [each for row in rows for cell in row for each in re.findall(r"`([^`]+)`", cell)]
    return {part for each in quoted for part in each.split(".")}


def top_level() -> set[str]:
    """Return the keys of the document itself: those of `document`'s own dict, and of what it spreads."""
    body = ast.parse(textwrap.dedent(inspect.getsource(document.document)))
    (whole,) = [
        n.value for n in ast.walk(body) if isinstance(n, ast.Return) and isinstance(n.value, ast.Dict)
    ]
    spread = [value for key, value in zip(whole.keys, whole.values, strict=True) if key is None]
    inner = [node for value in spread for node in ast.walk(value) if isinstance(node, ast.Dict)]
    return {key for shown in (whole, *inner) for key in text_keys(shown)}


KEYS = {key for source in SOURCES for key in keys_of(source)}
KEYS |= {field.name for record in RECORDS for field in fields(record)}
KEYS |= {field.name for field in msgspec.structs.fields(LoweredLimit)}
KEYS -= NOT_WRITTEN


def test_the_keys_are_found() -> None:
    assert len(KEYS) > 150
    assert len(top_level()) > 30
    assert {"missing", "imputation", "lowered", "privacy"} <= top_level()


@pytest.mark.parametrize("key", sorted(KEYS))
def test_the_page_of_the_result_names_every_key(key: str) -> None:
    assert key in columns("result.md", 0, 2)


@pytest.mark.parametrize("key", sorted(top_level() | set(keys_of(Result.to_dict))))
def test_every_key_of_the_document_has_a_row(key: str) -> None:
    assert key in columns("result.md", 0, 1)


@pytest.mark.parametrize("name", sorted({field.name for record in CERTIFICATE for field in fields(record)}))
def test_the_page_of_the_certificate_names_every_field(name: str) -> None:
    assert name in columns("certificate.md", 0, 2)
