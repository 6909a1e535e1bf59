"""The worked studies of the documentation: each starts from a question, and runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
PAGES = sorted(path.name for path in GALLERY.glob("*.py"))


def test_there_are_ten_pages_in_order() -> None:
    assert [name[:2] for name in PAGES] == [f"{number:02}" for number in range(1, 11)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_question_for_its_title(name: str) -> None:
    text = (GALLERY / name).read_text(encoding="utf-8")
    title = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    assert "?" in title
    assert text.count("# %%") >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str) -> None:
    done = subprocess.run(  # noqa: S603 - the documentation's own script
        [sys.executable, "-W", "error::UserWarning", name],
        cwd=GALLERY,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
