"""Exit codes of the commands that work on a study, and how an error becomes one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

import typer

from fedtmle.layout import visible

if TYPE_CHECKING:
    from http.server import HTTPServer

    from fedtmle.defects import Defect
    from fedtmle.errors import Reached

CODES = (
    "Exit codes: 0 success; 1 defects in the study, the data or a ledger; 2 wrong usage of the command; "
    "3 the run did not converge or is not supported; 4 a silo refused; 5 the run converged, but overlap is "
    "poor."
)


class Exit(IntEnum):
    """The exit codes of all commands."""

    FINE = 0
    DEFECTS = 1
    USAGE = 2
    NOT_CONVERGED = 3
    REFUSED = 4
    POOR_OVERLAP = 5


def require_flare() -> None:
    """Exit with a message if NVIDIA FLARE is not installed."""
    import importlib.util

    if importlib.util.find_spec("nvflare") is None:
        say("Deployment needs NVIDIA FLARE: pip install 'fedtmle[flare]'", err=True)
        raise typer.Exit(int(Exit.DEFECTS))


@contextmanager
def reporting(*, as_json: bool) -> Iterator[None]:
    """Turn an error of the package into its message and exit code, without a traceback."""
    import warnings

    from fedtmle.defects import Defect
    from fedtmle.errors import FedTMLEError, InputError, JournalError, RefusedError
    from fedtmle.studies.validate import defects_of

    reached = None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
        return
    except FedTMLEError as error:
        defects, code, reached = defects_of(error), Exit.NOT_CONVERGED, error.reached
        if isinstance(error, InputError | JournalError):
            code = Exit.DEFECTS
        elif isinstance(error, RefusedError):
            code = Exit.REFUSED
    except OSError as error:
        defects, code = [Defect(message=str(error.strerror), file=error.filename)], Exit.DEFECTS
    fail(defects, code, as_json=as_json, reached=reached)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print lines; characters of a study that would act on the terminal are escaped."""
    typer.echo("\n".join(map(visible, text.split("\n"))), err=err, nl=nl)


def serve_page(server: HTTPServer, line: str, opened: str | None) -> None:
    """Print a line and serve a page until Ctrl-C or SIGTERM; open its address in the browser, if given."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as service managers send it
    try:  # whoever reads the line may send a signal at once
        if line:
            say(line)
        if opened is not None:
            typer.launch(opened)
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the place in the source that Python would add."""
    say(visible(f"Warning: {message}"), err=True)


def fail(defects: Sequence[Defect], code: Exit, *, as_json: bool, reached: Reached | None = None) -> NoReturn:
    """Print defects as lines on standard error, or as JSON on standard output, and exit.

    ``reached`` says how far a run got that ended with them.
    """
    import json
    from dataclasses import asdict

    if as_json:
        document: dict[str, object] = {"defects": [defect.to_dict() for defect in defects]}
        say(json.dumps(document if reached is None else {**document, "reached": asdict(reached)}))
    else:
        for defect in defects:  # indent further lines, which may be a study's own text
            say("\n  ".join(str(defect).split("\n")), err=True)
        if reached is not None:
            say(visible(str(reached)), err=True)
    raise typer.Exit(int(code))
