"""Enumerate the kinds of a thing: the concrete subclasses of a base class in the whole package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import fedtmle

T = TypeVar("T")


@cache
def import_everything() -> None:
    """Import every module of the package, so that every subclass is defined."""
    for module in pkgutil.walk_packages(fedtmle.__path__, "fedtmle."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def concrete(base: type[T]) -> frozenset[type[T]]:
    """Return the classes of the package that derive from ``base``, at any depth, and can be instantiated.

    A class counts as abstract if a method of it is, or if its name starts with "Abstract".
    """
    import_everything()
    return frozenset(
        kind
        for kind in (base, *_below(base))
        if kind.__module__.split(".")[0] == "fedtmle"
        and not inspect.isabstract(kind)
        and not kind.__name__.lstrip("_").startswith("Abstract")
    )


def concrete_names(base: type[Any]) -> set[str]:
    """Return the names of the `concrete` classes."""
    return {kind.__name__ for kind in concrete(base)}


def _below(base: type[T]) -> Iterator[type[T]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
