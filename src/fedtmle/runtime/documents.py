"""JSON files of runs, kits and parties: a reader sees the old document or the new one, whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeAlias

Document: TypeAlias = dict[str, Any]  # a decoded JSON object


def read_document(path: Path) -> Document:
    """Return the JSON object in a file; raise `ValueError` or `OSError` if there is none."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return document


def write_document(path: Path, document: object) -> None:
    """Write plain data to a file, in one step."""
    scratch = path.with_suffix(f".{os.getpid()}.new")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
