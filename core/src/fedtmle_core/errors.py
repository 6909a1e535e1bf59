"""Every error that the core raises on purpose.

    FedTMLEError
    |-- InputError (also a ValueError)   an argument is wrong: the message names it
    |   `-- DataError                    rows are wrong: the message names the silo
    |       `-- ContributionError        a row exceeds the declared contribution bound
    |-- NumericalError                   a computation left the model: a non-finite loss, not a density
    `-- ProtocolError                    a message is out of order, or a party did not do its part
        |-- DecodeError                  bytes that are not a canonical message
        `-- JournalError                 a journal or ledger was changed, or cannot be written

No message quotes a record's value: a silo's errors may reach the server's log.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reached:
    """How far a run got before it ended with an error; `str` gives it as sentences.

    Parameters
    ----------
    rounds
        The number of completed rounds.
    phase
        The phase of the last of them.
    names
        The names of the numbers below.
    estimate
        The last pooled estimate; None if none was pooled.
    is_initial
        Whether that is the estimate before targeting.
    covariance
        Its covariance.
    bounds
        Bounds on the distance between each number now and its value at convergence. Without an estimate, the
        numbers are those of the fit that the run had reached, which nobody knows yet.
    reason
        Why there are no bounds.

    Examples
    --------
    >>> print(ft.Reached(rounds=4, phase="nuisance", reason="targeting had not begun"))
    After round 4 (nuisance) no estimate was pooled: targeting had not begun.
    """

    rounds: int
    phase: str
    names: tuple[str, ...] = ()
    estimate: tuple[float, ...] | None = None
    is_initial: bool = False
    covariance: tuple[tuple[float, ...], ...] = ()
    bounds: tuple[float | None, ...] | None = None
    reason: str = ""

    def __str__(self) -> str:
        when = f"After round {self.rounds} ({self.phase})" if self.rounds else "Before the first round"
        known = [] if self.bounds is None else [bound for bound in self.bounds if bound is not None]
        if self.estimate is None and not known:
            return f"{when} no estimate was pooled: {self.reason}."
        if self.estimate is None:
            return (
                f"{when} no estimate was pooled. The fit was within {max(known):.2g} of its value at "
                "convergence in every mean."
            )
        errors = (row[k] ** 0.5 for k, row in enumerate(self.covariance))
        stated = zip(self.names, self.estimate, errors, strict=True)
        numbers = ", ".join(f"{name} {value:.6g} (SE {error:.3g})" for name, value, error in stated)
        if self.bounds is None or len(known) < len(self.bounds):
            why = self.reason or "a ratio is too close to zero or infinity"
            distance = f"Its distance from convergence has no bound: {why}"
        else:
            subject = "It is" if len(known) == 1 else "Each is"
            distance = f"{subject} within {max(known):.2g} of its value at convergence"
        which = "estimate before targeting" if self.is_initial else "estimate"
        return f"{when} the pooled {which} was {numbers}. {distance}."


class FedTMLEError(Exception):
    """Base of all errors that the package raises on purpose.

    If a run ended with the error, ``reached`` says how far it got.

    Examples
    --------
    >>> issubclass(ft.RefusedError, ft.FedTMLEError)
    True
    """

    reached: Reached | None = None

    @property
    def full_text(self) -> str:
        """The message, and how far the run got; without a full stop."""
        return str(self) if self.reached is None else f"{self}. {self.reached}".rstrip(".")


class InputError(FedTMLEError, ValueError):
    """An argument is wrong. The message names it and says what was expected.

    Examples
    --------
    >>> try:
    ...     ft.ATE(outcome="died")
    ... except ft.InputError as error:
    ...     print(error)
    treatment: ATE needs the name of a column
    """


class DataError(InputError):
    """Rows cannot be used. The message names the silo and, where it can, the column; it quotes no value.

    Parameters
    ----------
    message
        What is wrong.
    silo
        The silo's name, which is put in front of the message.

    Examples
    --------
    >>> print(ft.DataError("column 'age' is empty", silo="north"))
    silo 'north': column 'age' is empty
    """

    def __init__(self, message: str, *, silo: str | None = None) -> None:
        self.message = message
        self.silo = silo
        super().__init__(message if silo is None else f"silo '{silo}': {message}")

    def at(self, silo: str) -> DataError:
        """The same error, with the silo's name put in front."""
        return type(self)(self.message, silo=silo)


class ContributionError(DataError):
    """A row's contribution is beyond the bound that the plan declares for exact sums.

    Examples
    --------
    >>> issubclass(ft.ContributionError, ft.DataError)
    True
    """


class NumericalError(FedTMLEError, ArithmeticError):
    """A computation left the model: a loss that is not finite, or a fluctuation that is not admitted.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> try:
    ...     problem.move(problem.start(5.0), [100.0])
    ... except ft.NumericalError:
    ...     print("outside the bounds")
    outside the bounds
    """


class ProtocolError(FedTMLEError):
    """A message is out of order, or a party did not do its part.

    Examples
    --------
    >>> issubclass(ft.RefusedError, ft.ProtocolError)
    True
    """


class DecodeError(ProtocolError):
    """Bytes that are not a canonical message.

    Examples
    --------
    >>> try:
    ...     ft.Transcript.decode(b"no transcript")
    ... except ft.DecodeError:
    ...     print("not a transcript")
    not a transcript
    """


class JournalError(ProtocolError):
    """A journal or ledger was changed, does not fit its plan, or cannot be written. The message names it.

    Examples
    --------
    >>> issubclass(ft.JournalError, ft.FedTMLEError)
    True
    """
