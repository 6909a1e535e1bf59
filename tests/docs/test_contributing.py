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
EVERYWHERE = {"model/types.py"}  # array types: any step may use them


def named(text: str) -> set[str]:
    return set(re.findall(r"`([\w./]+(?:\.py|/))`", text))


def test_every_file_and_folder_exists() -> None:
    names = named(TEXT)
    assert len(names) > 40
    missing = {n for n in names if not (ROOT / n).exists() and not (shape.PACKAGE / n).exists()}
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


def test_the_shape_of_the_package() -> None:
    assert shape.repeated_class_names() == []
    assert shape.uses_of_any() <= 140
    assert len(AbstractQuery.__abstractmethods__) <= 5
