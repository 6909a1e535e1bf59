"""Whose policy holds for a source of data: the silo file's own, never the study's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedtmle.data import SiloFile, read_silo_file
from fedtmle.errors import InputError
from fedtmle.protocol.policy import Policy


def policy_of(source: object) -> Policy | None:
    """What the silo file that ``source`` is, or names, states; None where there is no silo file."""
    file = silo_file(source)
    return None if file is None else file.policy


def silo_file(source: object) -> SiloFile | None:
    """The silo file that ``source`` is, or names; None where it is no such file."""
    if isinstance(source, str | os.PathLike) and Path(source).suffix.lower() == ".toml":
        source = read_silo_file(Path(source))
    return source if isinstance(source, SiloFile) else None


def session_policy() -> Policy:
    """For data without a silo file, in one's own session: no limit but on the cells that are shown."""
    return replace(Policy.unguarded(), min_cell=Policy().min_cell)


def released(policies: Mapping[str, Policy | None], named: Sequence[str]) -> tuple[str, ...]:
    """The silos whose own estimate may be shown: by their silo file, or ``named`` and without one."""
    for name in named:
        policy = policies[name]
        if policy is not None and not policy.release:
            raise InputError(
                f"release: the silo file of '{name}' does not allow it; its owner may, with release = true "
                "in [policy]"
            )
    return tuple(name for name, policy in policies.items() if name in named or (policy and policy.release))
