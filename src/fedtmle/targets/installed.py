"""Targets that installed distributions bring, by the entry point group ``fedtmle.targets``.

    [project.entry-points."fedtmle.targets"]
    LATE = "fedtmle_late:LATE"

The name is the kind of the study file's [target] and the name of the class. Entry points are read only when a
study names a kind that this package does not have, because reading them takes about 30 ms.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from fedtmle.errors import InputError
from fedtmle.targets.effects.estimands import AbstractEffect

GROUP = "fedtmle.targets"


def installed_targets() -> tuple[str, ...]:
    """Return the names of the targets that installed distributions bring; none is imported."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def installed_target(name: str) -> type[AbstractEffect] | None:
    """Return the target that an installed distribution brings as ``name``, or None; import its module."""
    points = sorted(entry_points(group=GROUP, name=name), key=_distribution)
    if not points:
        return None
    if len({_distribution(point) for point in points}) > 1:
        both = " and ".join(map(_distribution, points))
        raise InputError(f"kind: {both} both bring a target '{name}'; uninstall one of them")
    source = _distribution(points[0])
    try:
        target = points[0].load()
    except Exception as error:  # whatever the module of another distribution raises
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"kind: '{name}' of {source} cannot be imported ({reason})") from None
    if not (isinstance(target, type) and issubclass(target, AbstractEffect) and target.__name__ == name):
        raise InputError(
            f"kind: {source} declares '{name}', and {points[0].value} is no target of that "
            "name; expected a subclass of AbstractEffect"
        )
    return target


def _distribution(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else point.dist.name
