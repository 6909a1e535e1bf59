"""A silo's side of a study: its own table, read once, behind `Silo.step`."""

from __future__ import annotations

from fedtmle.data import load
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.silo import Silo
from fedtmle.studies.plan import study_of
from fedtmle.studies.schema import schema_of
from fedtmle.studies.streams import check_streams


def open_party(plan: Plan, name: str, source: object, *, keeper: Keeper | None = None) -> Silo:
    """The silo ``name`` of a study's plan over its own ``source`` (a silo file's path, as a rule)."""
    table = load(source, schema_of(study_of(plan)), silo=name)
    check_streams(study_of(plan), {name: table})
    return Silo(name, plan, table, keeper=keeper)
