"""The tables of docs/threats.md, made by running all attacks: ``python -m tests.attacks.threats``."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from fedtmle.errors import DecodeError, InputError
from fedtmle.protocol.messages import Reason
from fedtmle.runtime.records import Keeper
from tests.attacks.base import AbstractAttack
from tests.attacks.settings import RefusedBySiloError, Setting
from tests.attacks.test_attacks import ATTACKS, SUPPRESSED, WORKING
from tests.attacks.test_attacks import HIDDEN as HIDDEN_ATTACKS

PAGE = Path(__file__).parents[2] / "docs" / "threats.md"
START, STOP = "<!-- attacks -->\n", "<!-- end of attacks -->\n"
HIDDEN = "totals"
WORKS = "**works**"


def ended(attack: AbstractAttack, keeper: Keeper) -> str:
    """How an attack ends: `WORKS`, `HIDDEN`, or what stopped it."""
    try:
        victim = attack.victim(keeper)
        learned = attack.run(victim)
    except RefusedBySiloError as refused:
        key = victim.refused_by
        return f"`{key}`" if key and refused.reason is not Reason.RELAY else f"`{refused.reason.name}`"
    except InputError:
        return "needs open sums"
    except DecodeError:  # masks that do not cancel
        return "noise"
    return WORKS if attack.works(learned) else HIDDEN


def cell(attack: AbstractAttack, setting: Setting) -> str:
    """What stops an attack in a setting, or that it works; a guarded silo has the default policy."""
    if setting is Setting.OPEN and attack.only_masked:
        return attack.in_open
    if setting is Setting.OPEN and (attack.keys or attack.check):
        stops = ", ".join(f"`{key}`" for key in attack.keys) or attack.check
        return f"{stops} (`{attack.reason.name}`)"
    if not attack.has_settings:
        return "-"
    met = copy.copy(attack)
    met.setting = setting
    with pytest.MonkeyPatch.context() as patch:
        met.disarm(patch)
        bare = ended(met, met.open_keeper())
    guarded = ended(met, met.keeper(met.guarded()))
    if bare == WORKS and guarded == HIDDEN and attack.hidden_by:
        return f"hidden ({', '.join(f'`{key}`' for key in attack.hidden_by)})"
    if bare in (WORKS, guarded):
        return guarded
    return bare if guarded == HIDDEN else f"{bare}, {guarded}"


def words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower()


def table() -> str:
    settings = " | ".join(setting.value for setting in Setting)
    lines = [
        f"| attack | what the server does | what it would get | {settings} |",
        "|---|---|---|---|---|---|",
    ]
    for name, attack in (ATTACKS | SUPPRESSED | HIDDEN_ATTACKS | WORKING).items():
        does = (type(attack).__doc__ or "").strip().splitlines()[0].removesuffix(".")
        cells = " | ".join(cell(attack, setting) for setting in Setting)
        lines.append(f"| {words(name)} | {does} | {attack.yields} | {cells} |")
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    head, rest = page.split(START)
    return head + START + table() + STOP + rest.split(STOP)[1]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
