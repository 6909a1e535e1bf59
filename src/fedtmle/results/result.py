"""The result of a study: a document that can be saved and loaded and, after a run, the run itself."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from fedtmle.errors import InputError
from fedtmle.layout import POOR_OVERLAP, Document, element, is_poor, silo_count, table, text
from fedtmle.protocol.messages import WIRE_FORMAT
from fedtmle.runtime.result import Result
from fedtmle.version import __version__
from fedtmle_core.publish import published_result

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "fedtmle study result 1"
NUMERICAL = ("numpy", "numba", "llvmlite", "duckdb")  # libraries that compute
_NUMBER_LIST = re.compile(r"\[\n[-+.eE\d,\s]*\]")


@dataclass(frozen=True, kw_only=True, repr=False)
class StudyResult:
    """The result of a study.

    Parameters
    ----------
    document
        Plain data: the study, estimates with intervals, diagnostics, certificate, cost and warnings. The
        reference of the saved result lists its keys.
    run
        The result of the algorithm. None if the result was read from a file.

    Examples
    --------
    >>> list(result.table().columns)
    ['estimand', 'estimate', 'std_error', 'conf_low', 'conf_high', 'p_value', 'scale']
    """

    document: Document
    run: Result | None = field(default=None, compare=False)

    def table(self, *, simultaneous: bool = False) -> pd.DataFrame:
        """Return one row per estimand: estimate, std_error, conf_low, conf_high, p_value, scale."""
        import pandas as pd

        return pd.DataFrame(self.document["simultaneous" if simultaneous else "estimates"])

    def to_dict(self) -> Document:
        """Return the document."""
        return self.document

    def to_json(self) -> str:
        """Return the document as indented JSON, with each list of numbers on one line."""
        text = json.dumps(self.document, allow_nan=False, indent=1)
        # A JSON string has no line break, so only lists can match.
        return _NUMBER_LIST.sub(lambda match: " ".join(match[0].split()), text)

    def published(self, floor: int) -> StudyResult:
        """Return the result as everybody may read it: nothing of it is about 1 to ``floor`` - 1 people.

        Counts are rounded, estimates too, to a hundredth of their standard errors, and what tells of single
        rounds or silos is left out: the page of what is published lists every key with its rule. A result
        that is published already is returned as it is.

        Raises
        ------
        InputError
            Fewer people were analysed, or are in an arm, than the floor says.

        Examples
        --------
        >>> result.published(11).document["published"]
        {'floor': 11}
        """
        if "published" in self.document:
            return self
        return StudyResult(document=published_result(self.document, floor))

    def save(self, path: str | Path) -> None:
        """Write the document as JSON; `load` reads it."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @property
    def headline(self) -> tuple[str, ...]:
        """Caveats to read before the estimates: absent silos and poor overlap."""
        absent = self.document["absent"]
        return (
            *([f"{silo_count(self.document)} took part."] if absent else []),
            *([POOR_OVERLAP] if is_poor(self.document) else []),
        )

    @property
    def title(self) -> str:
        """The study's title, or its question."""
        return str(self.document["study"]["title"] or self.document["question"])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that may bias the estimates, or change what they estimate."""
        return tuple(self.document["warnings"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Further information about the run that casts no doubt on the estimates."""
        return tuple(self.document["notes"])

    def __repr__(self) -> str:
        lines = [self.title, self.document["status_text"], *self.headline]
        for row in self.document["estimates"]:
            lines.append(
                f"  {row['estimand']}: {row['estimate']:.6g} "
                f"({row['conf_low']:.6g} to {row['conf_high']:.6g})"
                + ("" if row["p_value"] is None else f", p = {row['p_value']:.3g}")
            )
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: question, table, how the run ended, and warnings."""
        confidence = 100 * self.document["study"]["options"]["confidence"]
        rows = [
            [
                row["estimand"],
                *(f"{row[key]:.6g}" for key in ("estimate", "std_error", "conf_low", "conf_high")),
                "" if row["p_value"] is None else f"{row['p_value']:.3g}",
            ]
            for row in self.document["estimates"]
        ]
        head = ["estimand", "estimate", "std. error", f"{confidence:.4g}% from", "to", "p"]
        parts = [text("p", self.title), *(text("p", line) for line in self.headline)]
        parts.append(table(head, rows) if rows else "")
        parts.append(text("p", self.document["status_text"]))
        parts += [text("p", f"Warning: {warning}") for warning in self.warnings]
        parts += [text("p", f"Note: {note}") for note in self.notes]
        return element("div", "".join(parts))


def load(path: str | Path) -> StudyResult:
    """Return the result that `StudyResult.save` wrote.

    Parameters
    ----------
    path
        The JSON file.

    Returns
    -------
    StudyResult
        The result. Its ``run`` is None.

    Raises
    ------
    InputError
        The file is not a saved result.

    Examples
    --------
    >>> result.save("result.json")
    >>> ft.load("result.json").title == result.title
    True
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{path}: the file cannot be read as a saved result") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path}: not a saved study result of this version")
    return StudyResult(document=document)


def versions() -> dict[str, str]:
    """Return the versions of the package, its wire format, the interpreter, machine and libraries."""
    return {
        "fedtmle": __version__,
        "wire format": str(WIRE_FORMAT),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **{name: _installed(name) for name in NUMERICAL},
    }


@cache
def _installed(distribution: str) -> str:
    """Return the version of a distribution, whose metadata is read once."""
    return version(distribution)
