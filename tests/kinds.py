"""Enumerate the kinds of a thing: the concrete subclasses of a base class in the whole package.

A test that claims "every kind of X" takes its kinds from here, or compares its examples with them by
`without_example`, so that a new subclass without an example fails the test.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
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


def concrete(base: type[T], *, package: str = "fedtmle") -> frozenset[type[T]]:
    """Return the classes of a package that derive from ``base``, at any depth, and can be instantiated.

    A class counts as abstract if a method of it is, or if its name starts with "Abstract".
    """
    import_everything()
    return frozenset(
        kind
        for kind in (base, *_below(base))
        if kind.__module__.split(".")[0] == package
        and not inspect.isabstract(kind)
        and not kind.__name__.lstrip("_").startswith("Abstract")
    )


def concrete_names(base: type[Any]) -> set[str]:
    """Return the names of the `concrete` classes."""
    return {kind.__name__ for kind in concrete(base)}


def without_example(base: type[Any], examples: Iterable[object], **options: str) -> set[str]:
    """Return the names of the `concrete` classes that are not in ``examples``, nor an instance of them."""
    kinds = {example if isinstance(example, type) else type(example) for example in examples}
    return {kind.__name__ for kind in concrete(base, **options) - kinds}


def parts(value: object) -> Iterator[object]:
    """Yield a value and everything in it: the fields of dataclasses and the entries of containers."""
    yield value
    inside: Iterable[object] = ()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        inside = value
    for each in inside:
        yield from parts(each)


def _below(base: type[T]) -> Iterator[type[T]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
