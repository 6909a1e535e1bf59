"""Homes of silos under test: made once for each silo file, in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

from fedtmle.studies.home import Home


def home_at(silo_file: str | Path) -> Home:
    """The home that a silo file states, or that of this test; it is made if it is not there."""
    home = Home.of(silo_file)
    return home if home.has_key else Home.create(silo_file)


def homes_in(folder: Path) -> None:
    """Make the home of every silo file in a folder."""
    for path in folder.rglob("*.toml"):
        if "[silo]" in path.read_text(encoding="utf-8"):
            home_at(path)
