"""Terms as a graph: their order of computation, their public intervals, and their one encoding as bytes.

Parts come before what is made of them, each term once. Nothing here recurses, so that a deep graph is no
danger, and decoding builds terms of the language alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeAlias

from fedtmle_core import leaves, terms
from fedtmle_core.dictionary import Dictionary, Interval
from fedtmle_core.errors import DecodeError
from fedtmle_core.terms import Term, parameters

LANGUAGE: Mapping[str, type[Term]] = {
    kind.__name__: kind
    for kind in (
        terms.Constant,
        terms.Sum,
        terms.Product,
        terms.Apply,
        terms.Pick,
        terms.Softmax,
        terms.ByCluster,
        terms.Kept,
        leaves.Number,
        leaves.Power,
        leaves.Log,
        leaves.Root,
        leaves.Spline,
        leaves.BSpline,
        leaves.Level,
        leaves.Known,
        leaves.Between,
        leaves.Fold,
        leaves.Draw,
    )
}

Node: TypeAlias = tuple[str, list[object], list[int]]  # kind, parameters, places of the parts


def ordered(roots: Iterable[Term]) -> list[Term]:
    """Return the terms and all that they are made of, each once, parts first."""
    done: dict[bytes, Term] = {}
    waiting: list[tuple[Term, bool]] = [(root, False) for root in roots][::-1]
    while waiting:
        term, is_ready = waiting.pop()
        if is_ready:
            done.setdefault(term.digest, term)
        elif "digest" not in vars(term) or term.digest not in done:
            # The digest of a term needs those of its parts: it is asked for when they are done.
            waiting.append((term, True))
            waiting += [(part, False) for part in reversed(term.parts)]
    return list(done.values())


def intervals(roots: Iterable[Term], dictionary: Dictionary) -> dict[Term, Interval]:
    """Return the public interval of each term and of all its parts; `InputError` if one has none."""
    listed = ordered(roots)
    return {term: _interval(term, dictionary) for term in listed}


def intervals_of(roots: Iterable[Term], dictionary: Dictionary) -> dict[Term, Interval]:
    """Return the public interval of each term, without its parts'; `InputError` if one has none.

    Questions of one study share most of their terms: a term remembers its interval.
    """
    found: dict[Term, Interval] = {}
    for root in roots:
        if root not in found:
            waiting = [root]
            while waiting:
                missing = [part for part in waiting[-1].parts if not _is_known(part, dictionary)]
                if missing:
                    waiting += missing
                else:
                    _interval(waiting.pop(), dictionary)
            found[root] = _interval(root, dictionary)
    return found


def _is_known(term: Term, dictionary: Dictionary) -> bool:
    """Return whether a term remembers its interval, which depends on the dictionary."""
    return vars(term).get("_interval", (None,))[0] is dictionary


def _interval(term: Term, dictionary: Dictionary) -> Interval:
    """Return the interval of a term whose parts remember theirs."""
    known = vars(term).get("_interval")
    if known is None or known[0] is not dictionary:
        known = dictionary, term.interval([_interval(part, dictionary) for part in term.parts], dictionary)
        vars(term)["_interval"] = known  # as cached properties are: nothing else of a term changes
    interval: Interval = known[1]
    return interval


def encode(roots: Sequence[Term]) -> tuple[list[Node], list[int]]:
    """Return the graph as plain data, and the places of the roots."""
    nodes = ordered(roots)
    place = {term: number for number, term in enumerate(nodes)}
    listed: list[Node] = [
        (type(term).__name__, parameters(term), [place[part] for part in term.parts]) for term in nodes
    ]
    return listed, [place[root] for root in roots]


def decode(nodes: Sequence[Node], roots: Sequence[int]) -> list[Term]:
    """Return the roots of an encoded graph; `DecodeError` if it is none, or not in its one form."""
    built: list[Term] = []
    for kind, values, places in nodes:
        if kind not in LANGUAGE or not all(0 <= place < len(built) for place in places):
            raise DecodeError("a question is not in the language of terms")
        built.append(_built(LANGUAGE[kind], values, [built[place] for place in places]))
    if not all(0 <= root < len(built) for root in roots):
        raise DecodeError("a question names a term that is not there")
    found = [built[root] for root in roots]
    if encode(found) != ([(k, list(v), list(p)) for k, v, p in nodes], list(roots)):
        raise DecodeError("a question is not in its canonical form")
    return found


def _built(kind: type[Term], values: Sequence[object], parts: Sequence[Term]) -> Term:
    """Return a term from its parameters, whose types must be those of its fields."""
    given: dict[str, object] = {}
    rest = list(values)
    for field in fields(kind):  # type: ignore[arg-type]  # every kind is a dataclass
        if field.name == "terms":
            given["terms"] = tuple(parts)
        elif field.name == "of":
            if len(parts) != 1:
                raise DecodeError("a question has a term with the wrong number of parts")
            given["of"] = parts[0]
        elif not rest:
            raise DecodeError("a question has a term without a parameter")
        else:
            given[field.name] = _typed(rest.pop(0), str(field.type))
    if rest or (parts and not {"terms", "of"} & given.keys()):
        raise DecodeError("a question has a term with too many parameters")
    return kind(**given)


def _typed(value: object, annotation: str) -> object:
    """Return a parameter as its field's type has it; nothing is converted that is not of that type."""
    match annotation, value:
        case "bool", bool():
            return value
        case "int", int() if not isinstance(value, bool):
            return value
        case "float" | "float | None", float():
            return value
        case "float | None", None:
            return value
        case "str", str():
            return value
        case "tuple[float, ...]", list() if all(isinstance(each, float) for each in value):
            return tuple(value)
    raise DecodeError("a question has a parameter of the wrong type")
