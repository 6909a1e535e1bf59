"""A plan's digest identifies the code of its classes, not only their names."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections import namedtuple
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol import plan as module
from fedtmle.protocol.plan import Plan, canonical, provenance, roster

SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Target:
    level: float = 0.5

    def psi(self) -> float:
        return {factor} * self.level
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    provenance.cache_clear()
    module._distribution.cache_clear()
    sys.modules.pop("own_target", None)


def load(path: Path, name: str = "own_target") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def digest(subject: Any) -> bytes:
    return Plan(
        program=TargetingProgram(problem=subject, law=None, algorithm=ft.Gradient()), roster=roster(["a"])
    ).digest


def written(folder: Path, factor: int) -> Path:
    folder.mkdir()
    path = folder / "own_target.py"
    path.write_text(SOURCE.format(factor=factor))
    return path


def test_a_class_is_in_the_plan_by_module_name_distribution_and_version() -> None:
    plan = Plan(
        program=TargetingProgram(problem=ft.Mean(bounds=(0.0, 1.0)), law=None, algorithm=ft.Gradient()),
        roster=roster(["a"]),
    )
    document = msgspec.msgpack.decode(plan.document)
    program = document["program"][1]
    assert program["problem"][0] == ["fedtmle.targets.mean", "Mean", "fedtmle", ft.__version__, None]
    assert program["algorithm"][0][:2] == ["fedtmle.algorithms.gradient", "Gradient"]


def test_two_classes_of_one_name_with_different_code_have_different_digests(tmp_path: Path) -> None:
    one, same, other = (
        load(written(tmp_path / folder, factor)).Target()
        for folder, factor in (("one", 1), ("same", 1), ("other", 2))
    )
    assert type(one).__name__ == type(other).__name__
    assert type(one).__module__ == type(other).__module__
    assert digest(one) == digest(same) != digest(other)


def test_a_class_of_another_module_has_another_digest(tmp_path: Path) -> None:
    path = written(tmp_path / "one", 1)
    one, other = load(path).Target(), load(path, "another_target").Target()
    del sys.modules["another_target"]
    assert digest(one) != digest(other)


def test_a_change_of_a_base_class_shows(tmp_path: Path) -> None:
    derived = tmp_path / "derived.py"
    derived.write_text("from own_target import Target\n\nclass Derived(Target):\n    pass\n")
    digests = set()
    for folder, factor in (("one", 1), ("other", 2)):
        load(written(tmp_path / folder, factor))
        digests.add(digest(load(derived, "derived").Derived()))
        del sys.modules["derived"]
    assert len(digests) == 2


def test_a_class_that_was_not_installed_says_so(tmp_path: Path) -> None:
    name, qualified, distribution, version, source = provenance(load(written(tmp_path / "one", 1)).Target)
    assert (name, qualified, distribution, version) == ("own_target", "Target", None, None)
    assert source is not None
    assert len(source) == 64


def test_a_class_of_the_prompt_has_no_source_and_still_a_digest() -> None:
    @dataclass(frozen=True)
    class Here:
        x: int = 1

    Here.__module__ = "__main__"
    unread = type(sys.modules["__main__"])("__main__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", unread)
        assert provenance(Here)[2:] == (None, None, None)
        assert digest(Here()) != digest(None)


def test_two_classes_of_one_name_in_two_cells_of_a_notebook_differ() -> None:
    """A notebook has no file: its cells are in `linecache` under the name of their code."""
    targets: list[Any] = []
    for cell, factor in (("<cell 1>", 1), ("<cell 2>", 2)):
        text = SOURCE.format(factor=factor)
        linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
        notebook = ModuleType("notebook_main")
        sys.modules["notebook_main"] = notebook
        exec(compile(text, cell, "exec"), vars(notebook))  # noqa: S102
        targets.append(notebook.Target())
    del sys.modules["notebook_main"]
    assert provenance(cast(Hashable, type(targets[0])))[4] is not None
    assert digest(targets[0]) != digest(targets[1])


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (__import__("hypothesis").settings, "hypothesis"),  # a distribution of the module's name
        (__import__("rich.text").text.Text, "rich"),
        (__import__("dateutil.tz").tz.tzutc, "python-dateutil"),  # a distribution of another name
    ],
    ids=["hypothesis", "rich", "dateutil"],
)
def test_an_installed_class_has_its_distribution_and_version(cls: type, name: str) -> None:
    assert provenance(cls)[2:4] == (name, metadata.version(name))


def test_a_distribution_in_development_mode_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "own_target-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-target\nVersion: 1.2\n")
    (info / "RECORD").write_text("own_target.pth,,\n")
    path = written(tmp_path / "src with blank", 1)
    origin = {"url": path.parent.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_bytes(msgspec.json.encode(origin))
    monkeypatch.syspath_prepend(str(info.parent))
    assert provenance(load(path).Target)[2:4] == ("own-target", "1.2")
    beside = path.parent / "beside.py"
    beside.write_text(SOURCE.format(factor=1))
    assert provenance(load(beside, "beside").Target)[2:4] == (None, None)
    del sys.modules["beside"]


def test_named_tuples_keep_their_class() -> None:
    Pair = namedtuple("Pair", "a b")
    Pear = namedtuple("Pear", "a b")
    assert canonical(Pair(1, 2)) != canonical(Pear(1, 2))
    assert canonical((1, 2)) == [1, 2] == canonical(np.array([1, 2]).tolist())
