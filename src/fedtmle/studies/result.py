"""The result of a study: a document that can be saved, and, fresh from a run, the run itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtmle.errors import InputError
from fedtmle.runtime.result import Result

if TYPE_CHECKING:
    import pandas as pd

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
        return json.dumps(self.document, allow_nan=False, indent=1)

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


def load(path: str | Path) -> StudyResult:
    """A saved result."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{path}: cannot be read as a saved result") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path}: not a saved study result of this version")
    return StudyResult(document=document)
