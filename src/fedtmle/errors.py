"""Every error this package raises on purpose.

    FedTMLEError
    |-- InputError (also a ValueError)   an argument is wrong: the message names it
    |   |-- DataError                    rows are wrong: the message names the silo
    |   |   `-- ContributionError        a row exceeds the declared contribution bound
    |   |-- FitError                     a model cannot be fitted to these rows, with a coarse reason
    |   `-- PrecisionError               the tolerance asks for more than exact sums or quadrature hold
    |-- CheckFailedError                 a problem does not hold together (`check_problem`)
    |-- NumericalError                   a computation left the model: a non-finite loss, not a density
    `-- ProtocolError                    a message is out of order, or a party did not do its part
        |-- DecodeError                  bytes that are not a canonical message
        |-- RefusedError                 a silo refused, with a reason code
        |-- DeadlineError                a silo did not answer in time
        `-- JournalError                 a journal or ledger was changed, or cannot be written

Those that the core raises too are defined there. No message quotes a record's value: a silo's errors may
reach the server's log.
"""

from __future__ import annotations

from fedtmle_core.errors import (
    ContributionError,
    DataError,
    DecodeError,
    FedTMLEError,
    InputError,
    JournalError,
    NumericalError,
    ProtocolError,
    Reached,
)

__all__ = [
    "ChangedDataError",
    "CheckFailedError",
    "ContributionError",
    "DataError",
    "DeadlineError",
    "DecodeError",
    "FedTMLEError",
    "FitError",
    "InputError",
    "JournalError",
    "NumericalError",
    "PrecisionError",
    "ProtocolError",
    "Reached",
    "RefusedError",
]


class ChangedDataError(DataError):
    """A silo's rows are not those for which its owner approved a plan.

    Examples
    --------
    >>> issubclass(ft.ChangedDataError, ft.DataError)
    True
    """


class FitError(InputError):
    """A model cannot be fitted to the rows.

    Parameters
    ----------
    reason
        "separation", "collinear", "convergence", "arm" (an arm, a stratum or an outcome is absent),
        "overlap" or "few". It is coarse enough to be sent.
    message
        What to do about it.

    Examples
    --------
    >>> ft.FitError("separation", "leave a column out").reason
    'separation'
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)

    def __reduce__(self) -> tuple[type[FitError], tuple[str, str]]:
        return (FitError, (self.reason, str(self)))


class PrecisionError(InputError):
    """A tolerance is finer than the exact sums or the quadrature can certify.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> try:
    ...     ft.solve(problem, problem.start(5.0), {"a": [1.0], "b": [2.0]}, ft.Coded(tolerance=1e-15))
    ... except ft.PrecisionError:
    ...     print("too fine")
    too fine
    """


class CheckFailedError(FedTMLEError):
    """A target failed `check_problem`. The message lists the checks that failed.

    Examples
    --------
    >>> issubclass(ft.CheckFailedError, ft.FedTMLEError)
    True
    """


class RefusedError(ProtocolError):
    """A silo refused a request.

    Parameters
    ----------
    silo
        The silo.
    code
        Why, in words that carry no data.

    Examples
    --------
    >>> strict = ft.Policy(min_rows=1000)
    >>> try:
    ...     ft.run(study, silos, policy=strict)
    ... except ft.RefusedError as error:
    ...     print(error.silo)
    north
    """

    def __init__(self, silo: str, code: str) -> None:
        self.silo = silo
        self.code = code
        super().__init__(f"silo '{silo}' refused: {code}")


class DeadlineError(ProtocolError):
    """Silos did not answer in time.

    Parameters
    ----------
    silos
        Their names.
    seconds
        How long was waited.

    Examples
    --------
    >>> ft.DeadlineError(("north",), 30.0).silos
    ('north',)
    """

    def __init__(self, silos: tuple[str, ...], seconds: float) -> None:
        self.silos = silos
        super().__init__(
            f"no answer from {', '.join(map(repr, silos))} within {seconds:g} s; the run can be resumed"
        )
