"""The deployment that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.rig import Rig, deployed


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with deployed(tmp_path_factory.mktemp("faults"), spare=("stranger", "spare")) as made:
        yield made
