"""Exit codes of the commands that work on a study, and how an error becomes one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from fedtmle.studies.validate import Complaint

CODES = (
    "Exit codes: 0 fine; 1 the study, the data or a ledger has mistakes; 2 the command was called wrongly; "
    "3 the run did not converge or is not supported; 4 a silo refused."
)


class Exit(IntEnum):
    """What a script can tell from the exit code."""

    FINE = 0
    MISTAKES = 1
    USAGE = 2
    NOT_CONVERGED = 3
    REFUSED = 4


def require_flare() -> None:
    """Leaves with a sentence where the engine is not installed."""
    import importlib.util

    if importlib.util.find_spec("nvflare") is None:
        typer.echo("Deployment needs NVIDIA FLARE: pip install 'fedtmle[flare]'", err=True)
        raise typer.Exit(int(Exit.MISTAKES))


@contextmanager
def reporting(*, as_json: bool) -> Iterator[None]:
    """Turns an error raised on purpose into its lines and its exit code, without a traceback."""
    import warnings

    from fedtmle.errors import FedTMLEError, InputError, JournalError, RefusedError
    from fedtmle.studies.validate import Complaint, complaints

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
        return
    except FedTMLEError as error:
        found, code = complaints(error), Exit.NOT_CONVERGED
        if isinstance(error, InputError | JournalError):
            code = Exit.MISTAKES
        elif isinstance(error, RefusedError):
            code = Exit.REFUSED
    except OSError as error:
        found, code = [Complaint(message=str(error.strerror), file=error.filename)], Exit.MISTAKES
    fail(found, code, as_json=as_json)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the place in the source that Python would add."""
    typer.echo(f"Warning: {message}", err=True)


def fail(found: Sequence[Complaint], code: Exit, *, as_json: bool) -> NoReturn:
    """Prints complaints, on standard error unless they are asked as JSON, and leaves."""
    import json
    from dataclasses import asdict

    if as_json:
        typer.echo(json.dumps({"problems": [asdict(complaint) for complaint in found]}))
    else:
        for complaint in found:
            typer.echo(str(complaint), err=True)
    raise typer.Exit(int(code))
