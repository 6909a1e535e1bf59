"""The sections of docstrings, completed by what bases document and by types and defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

SECTIONS = ("Parameters", "Attributes", "Returns", "Raises", "Examples")
Sections = dict[str, list[str]]


def sections(text: str) -> Sections:
    """Return the lines of each section of a docstring; those before the first are under ""."""
    parts: Sections = {"": []}
    current, lines = "", text.splitlines() or [""]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line in SECTIONS and below == "-" * len(line):
            current = line
            parts[current] = []
        elif not (current and line == "-" * len(current) and not parts[current]):
            parts[current].append(line)
    return parts


def entries(lines: list[str]) -> dict[str, list[str]]:
    """Return the text of each entry of a section, by its name."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        if line and not line.startswith(" "):
            name = re.split(r"\s*:\s*", line, maxsplit=1)[0]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def parameters(thing: Any) -> dict[str, list[str]]:
    """Return the documented parameters of a function or a class, those that its bases document included."""
    documented = _from_fields(thing)
    for owner in inspect.getmro(thing) if inspect.isclass(thing) else (thing,):
        own = (
            inspect.cleandoc(vars(owner).get("__doc__") or "")
            if inspect.isclass(thing)
            else inspect.getdoc(owner)
        )
        documented = entries(sections(own or "").get("Parameters", [])) | documented
    return {name: documented[name] for name in signature(thing) if name in documented}


def _from_fields(thing: Any) -> dict[str, list[str]]:
    """Return what the metadata of a dataclass's fields says that they mean."""
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    return {
        field.name: [f"    {field.metadata['meaning']}."] for field in fields if "meaning" in field.metadata
    }


def signature(thing: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters with which a person calls a function or makes an instance."""
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing):
        chosen = {field.name for field in dataclasses.fields(thing) if field.init}
        found = {name: p for name, p in inspect.signature(thing).parameters.items() if name in chosen}
        return found or dict(inspect.signature(thing).parameters)  # a class with an __init__ of its own
    if inspect.isclass(thing) and "__init__" not in vars(thing):
        return {}
    return dict(inspect.signature(thing).parameters)


def completed(thing: Any, lines: list[str]) -> list[str]:
    """Return the docstring with all documented parameters, those of bases too, their types and defaults."""
    parts = sections("\n".join(lines))
    known = parameters(thing)
    if not known:
        return lines
    parts["Parameters"] = []
    for name, text in known.items():
        parameter = signature(thing)[name]
        kind = "" if parameter.annotation is parameter.empty else f" : {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f", default {_shown(parameter.default)}"
        parts["Parameters"] += [f"{name}{kind}{default}", *text]
    written = list(parts[""])
    for title in SECTIONS:
        if title in parts:
            written += ["", title, "-" * len(title), *parts[title]]
    return written


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 and "<" not in text else f"{type(value).__name__}(...)"
