"""The result of a study: a document that can be saved, and, fresh from a run, the run itself."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtmle.errors import InputError
from fedtmle.protocol.messages import WIRE_FORMAT
from fedtmle.runtime.markup import element, table, text
from fedtmle.runtime.result import Result
from fedtmle.version import __version__

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = re.compile(r"\[\n[-+.eE\d,\s]*\]")
FORMAT = "fedtmle study result 1"


@dataclass(frozen=True, kw_only=True, repr=False)
class StudyResult:
    """``document`` is plain data; ``run`` is the core's result, None after `load`."""

    document: dict[str, Any]
    run: Result | None = field(default=None, compare=False)

    def table(self, *, simultaneous: bool = False) -> pd.DataFrame:
        """One row per estimand: estimate, std_error, conf_low, conf_high, p_value."""
        import pandas as pd

        return pd.DataFrame(self.document["simultaneous" if simultaneous else "estimates"])

    def to_dict(self) -> dict[str, Any]:
        return self.document

    def to_json(self) -> str:
        """Indented, but for lists of numbers: a long run has many."""
        text = json.dumps(self.document, allow_nan=False, indent=1)
        # A JSON string holds no line break, so that only lists can match.
        return NUMBERS.sub(lambda found: " ".join(found[0].split()), text)

    def save(self, path: str | Path) -> None:
        """Writes the document as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self.document["warnings"])

    def __repr__(self) -> str:
        lines = [self.document["question"], self.document["status_text"]]
        for row in self.document["estimates"]:
            lines.append(
                f"  {row['estimand']}: {row['estimate']:.6g} "
                f"({row['conf_low']:.6g} to {row['conf_high']:.6g})"
                + ("" if row["p_value"] is None else f", p = {row['p_value']:.3g}")
            )
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    def _repr_html_(self) -> str:
        """What a notebook shows: the question, the table, the ending and the warnings."""
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
        parts = [text("p", self.document["question"]), table(head, rows) if rows else ""]
        parts.append(text("p", self.document["status_text"]))
        parts += [text("p", f"Warning: {warning}") for warning in self.warnings]
        return element("div", "".join(parts))


def load(path: str | Path) -> StudyResult:
    """A saved result."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{path}: cannot be read as a saved result") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path}: not a saved study result of this version")
    return StudyResult(document=document)


# What a run was made with: it belongs to whatever is to be reproduced.


NUMERICAL = ("numpy", "numba", "llvmlite", "duckdb")


def versions() -> dict[str, str]:
    """This package, its wire format, the interpreter, the machine and the libraries that compute."""
    return {
        "fedtmle": __version__,
        "wire format": str(WIRE_FORMAT),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **{name: version(name) for name in NUMERICAL},
    }
