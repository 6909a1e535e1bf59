"""Settings of property tests, and the option --premises: print how often the premise of each held."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fedtmle.location import VARIABLE
from tests.premise import COUNTS

settings.register_profile("fedtmle", deadline=None)  # a busy machine is no defect
settings.load_profile("fedtmle")
_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="session")
def _homes_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test reads or makes the home of the account that runs it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp() / "homes"
        patch.setenv(VARIABLE, str(folder / "shared"))
        yield folder


@pytest.fixture(autouse=True)
def _home_of_the_test(_homes_of_tests: Path) -> None:
    os.environ[VARIABLE] = str(_homes_of_tests / str(next(_numbers)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--premises", action="store_true", help="print how often each premise held")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--premises"):
        terminalreporter.section("premises")
        for count in sorted(COUNTS, key=lambda count: count.test):
            share = f"{count.share:6.1%} (at least {count.at_least:4.0%}) of {count.draws:5}"
            terminalreporter.write_line(f"{share}  {count.test}: {count.statement}")
