"""CONTRIBUTING names files that exist and those of one round, and the package keeps its shape."""

from __future__ import annotations

import re
from pathlib import Path

from tools import shape

from fedtmle.protocol.query import AbstractQuery

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WALK = TEXT.split("<!-- walk -->")[1].split("<!-- end -->")[0]

# Named in the walk for other settings than the measured one: across machines, and with records on disk.
ELSEWHERE = {"engine/flare.py", "runtime/records.py"}
EVERYWHERE = {"fedtmle_core/types.py"}  # array types: any step may use them


def named(text: str) -> set[str]:
    return set(re.findall(r"`([\w./]+(?:\.py|/))`", text))


def test_every_file_and_folder_exists() -> None:
    names = named(TEXT)
    assert len(names) > 40
    below = (ROOT, shape.PACKAGE, shape.CORE.parent)
    missing = {n for n in names if not any((folder / n).exists() for folder in below)}
    assert missing == set()


def test_the_walk_has_at_most_twenty_steps() -> None:
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", WALK, flags=re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1))
    assert 10 <= len(steps) <= 20


def test_the_walk_names_the_files_of_a_round() -> None:
    shape.one_round()  # kernels are compiled before anything is counted
    walked, told = shape.one_round(), named(WALK) - ELSEWHERE
    assert told - walked == set()
    assert walked - told <= EVERYWHERE
    assert len(walked) <= 20, sorted(walked)


def test_a_small_run_goes_through_few_files() -> None:
    shape.mean_run()
    with shape.Walk() as walk:
        shape.mean_run()
    assert "targets/mean.py" in walk.seen
    assert len(walk.seen) <= 24, sorted(walk.seen)


def test_the_capabilities_have_modules_of_their_own() -> None:
    places = [place for listed in shape.CAPABILITIES.values() for place in listed.split()]
    assert [place for place in places if not (shape.PACKAGE / place).exists()] == []
    modules = [path for name in shape.CAPABILITIES for path in shape.modules_of(name)]
    assert len(modules) == len(set(modules)) > 70


def test_lines_are_counted_by_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        '"""Two lines,\n\n# of a docstring."""\n\nx = """\n# code\n"""  # code\n    # a comment\n'
    )
    assert shape.lines([path]) == {"docstring": 3, "blank": 1, "code": 3, "comment": 1}


def test_the_shape_of_the_package() -> None:
    # The old programs stand beside those over questions until these have taken over every kind of study.
    assert len(shape.repeated_class_names()) <= 15
    assert shape.uses_of_any() <= 140
    assert len(AbstractQuery.__abstractmethods__) <= 5
