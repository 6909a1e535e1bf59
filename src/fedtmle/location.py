"""Where a hospital's home is: the folder with its key, its records of studies and its memory of people.

The silo file may state it (`home` in [silo]); otherwise it is one folder for the account on this machine,
whatever silo file is read: $FEDTMLE_HOME, or `fedtmle/home` among the account's data.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "FEDTMLE_HOME"


def home_of(stated: str, folder: Path) -> Path:
    """Return the home that a silo file in ``folder`` states, or the account's own if it states none."""
    if stated:
        return folder.absolute() / Path(stated).expanduser()
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "fedtmle" / "home"


@dataclass(frozen=True, kw_only=True)
class Located:
    """The home of a silo file, and the hospital's name in it."""

    home: Path
    hospital: str


def locate(silo_file: Path) -> Located:
    """Return the home and the hospital of a silo file, of which nothing else is read.

    Raise `ValueError`, `KeyError` or `OSError` if the file does not say.
    """
    section = tomllib.loads(silo_file.read_text(encoding="utf-8"))["silo"]
    name, stated = section["name"], section.get("home", "")
    if not (isinstance(name, str) and name and isinstance(stated, str)):
        raise ValueError(f"{silo_file}: [silo] has no name, or its home is not text")
    return Located(home=home_of(stated, silo_file.parent), hospital=name)
