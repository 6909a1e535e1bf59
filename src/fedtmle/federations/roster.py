"""The roster: the study's silos in their order, and the engine's name of each."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedtmle.errors import InputError


def site_name(silo: str) -> str:
    """The engine's name of a silo: lower case letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^a-z0-9_-]+", "-", silo.lower()).strip("-")


def sites(silos: Iterable[str]) -> dict[str, str]:
    """Engine's name by silo; raises where two would share one."""
    named: dict[str, str] = {}
    for silo in silos:
        site = site_name(silo)
        if not site:
            raise InputError(f"silos: '{silo}' has no letter or digit; choose another name")
        if site in named.values() or site in ("server", "admin"):
            raise InputError(
                f"silos: '{silo}' is '{site}' on the network, which is taken; choose another name"
            )
        named[silo] = site
    return named
