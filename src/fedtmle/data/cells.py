"""A hospital's column as it was found, before the study's reading of it, and who reads it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.table import Factor
from fedtmle.model.types import Array, IntArray


@dataclass(frozen=True)
class Numbers:
    """Numbers and booleans (0 and 1); NaN is missing."""

    values: Array

    @cached_property
    def reach(self) -> float:
        """The largest magnitude; not finite where a value is missing or infinite."""
        return kernels.largest(self.values)


@dataclass(frozen=True)
class Unusable:
    """Cells that are neither numbers nor text, and what they are instead."""

    what: str


Cells = Numbers | Factor | Unusable  # text is a factor of all its distinct labels

DATES = Unusable("dates or times")
OTHER = Unusable("values that are neither numbers nor text")


class AbstractReader(ABC):
    """An opened source: the hospital's column names, then the cells of those that are needed."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """All column names as the source has them, repeated ones too."""

    @property
    def quotable(self) -> tuple[str, ...]:
        """The names that are certainly names and no record's values, so that a message may hold them."""
        return self.names

    @abstractmethod
    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        """The number of rows, and the cells of the named columns in the same row order."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How named columns are read batch by batch: settled once, from the whole columns."""

    numbers: Mapping[str, str]  # the SQL expression of each
    texts: Mapping[str, str]
    labels: Mapping[str, tuple[str, ...]]  # all the labels of each text
    others: Mapping[str, Unusable]


class AbstractStreamReader(AbstractReader):
    """A source that can also be read batch by batch, again and again."""

    @abstractmethod
    def settle(self, names: Sequence[str]) -> Reading:
        """How to read the named columns."""

    @abstractmethod
    def batches(self, reading: Reading) -> Iterator[tuple[int, Mapping[str, Cells]]]:
        """One pass in the order of the rows: the number of rows and the cells of each batch."""


class UnreadableError(Exception):
    """A source cannot be read: what is wrong and what to do, free of values.

    Raise it outside the handler of a library's exception: that one may quote a record, and would
    stay reachable as ``__context__`` even after ``from None``.
    """

    def __init__(self, what: str, fix: str, *, line: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.line = line


NUMERAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def number(label: str) -> float | None:
    """The number a label writes, None if it writes none: True and false are 1 and 0."""
    written = label.strip().lower()
    if written in ("true", "false"):
        return float(written == "true")
    return float(written) if NUMERAL.fullmatch(written) else None


def canonical(value: float) -> str:
    """The one label of a number, so that 1, 1.0 and 01 are the same level at every silo."""
    return str(int(value)) if value.is_integer() else repr(float(value))


def relabel(codes: IntArray, labels: Sequence[str | None]) -> Factor:
    """The factor of ``labels[codes]`` (None: missing); equal labels merge, absent ones go.

    Levels are in numeric order when all are numbers, else in text order.
    """
    missing = len(codes) > 0 and codes.min() < 0
    counts = np.bincount(codes[codes >= 0] if missing else codes, minlength=len(labels))
    used = counts > 0
    levels = in_order(label for label, seen in zip(labels, used, strict=True) if seen and label is not None)
    if tuple(labels) == levels:
        return Factor(codes, levels).counted(counts.tolist())
    lookup = _lookup(labels, levels)
    merged = np.zeros(len(levels) + 1, dtype=np.int64)
    np.add.at(merged, lookup[:-1], counts)  # what is no level goes to the last
    return Factor(np.asarray(lookup[codes]), levels).counted(merged[:-1].tolist())


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels as levels, each once."""
    present = set(labels)
    if all(NUMERAL.fullmatch(label) for label in present):
        return tuple(sorted(present, key=lambda label: (float(label), label)))
    return tuple(sorted(present))


def recode(codes: IntArray, labels: Sequence[str | None], levels: tuple[str, ...]) -> IntArray:
    """Codes into ``levels`` of the labels ``labels[codes]``; -1 for a label that is none of them."""
    return codes if tuple(labels) == levels else np.asarray(_lookup(labels, levels)[codes])


def _lookup(labels: Sequence[str | None], levels: tuple[str, ...]) -> IntArray:
    """The place of each label among the levels, -1 if it is none of them; a last -1 is for code -1."""
    position: dict[str | None, int] = {level: code for code, level in enumerate(levels)}
    return np.array([position.get(label, -1) for label in labels] + [-1], dtype=np.int64)
