"""Settings of property tests, and the option --premises: print how often the premise of each held."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.premise import COUNTS

settings.register_profile("fedtmle", deadline=None)  # a busy machine is no defect
settings.load_profile("fedtmle")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--premises", action="store_true", help="print how often each premise held")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--premises"):
        terminalreporter.section("premises")
        for count in sorted(COUNTS, key=lambda count: count.test):
            share = f"{count.share:6.1%} (at least {count.at_least:4.0%}) of {count.draws:5}"
            terminalreporter.write_line(f"{share}  {count.test}: {count.statement}")
