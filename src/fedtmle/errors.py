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

No message quotes a record's value: a silo's errors may reach the server's log.
"""

from __future__ import annotations


class FedTMLEError(Exception):
    """Base of all errors raised on purpose."""


class InputError(FedTMLEError, ValueError):
    """An argument is wrong; the message names it, and says what was expected."""


class DataError(InputError):
    """Rows cannot be used; the message names the silo and, where it can, the column."""

    def __init__(self, message: str, *, silo: str | None = None) -> None:
        self.message = message
        self.silo = silo
        super().__init__(message if silo is None else f"silo '{silo}': {message}")

    def at(self, silo: str) -> DataError:
        """The same error, with the silo's name put in front."""
        return type(self)(self.message, silo=silo)


class ContributionError(DataError):
    """A row's contribution is beyond the bound that the plan declares for exact sums."""


class ChangedDataError(DataError):
    """A silo's rows are not those for which its owner approved a plan."""


class FitError(InputError):
    """A model cannot be fitted to the rows; ``reason`` is coarse enough to be sent.

    It is "separation", "collinear", "convergence", "arm" (an arm, a stratum or all of an outcome is absent),
    "overlap" or "few".
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)

    def __reduce__(self) -> tuple[type[FitError], tuple[str, str]]:
        return (FitError, (self.reason, str(self)))


class PrecisionError(InputError):
    """A tolerance is finer than the exact sums or the quadrature can certify."""


class CheckFailedError(FedTMLEError):
    """A problem failed `check_problem`; the message lists the checks."""


class NumericalError(FedTMLEError, ArithmeticError):
    """A computation left the model: a non-finite loss, an inadmissible eps, not a density."""


class ProtocolError(FedTMLEError):
    """A message is out of order, or a party did not do its part."""


class DecodeError(ProtocolError):
    """Bytes that are not a canonical message."""


class RefusedError(ProtocolError):
    """A silo refused a request; ``code`` says why, in words that carry no data."""

    def __init__(self, silo: str, code: str) -> None:
        self.silo = silo
        self.code = code
        super().__init__(f"silo '{silo}' refused: {code}")


class DeadlineError(ProtocolError):
    """Silos did not answer in time; their names are in ``silos``."""

    def __init__(self, silos: tuple[str, ...], seconds: float) -> None:
        self.silos = silos
        super().__init__(
            f"no answer from {', '.join(map(repr, silos))} within {seconds:g} s; the run can be resumed"
        )


class JournalError(ProtocolError):
    """A journal or ledger was changed, does not fit its plan, or cannot be written; the message names it."""
