"""What is wrong with a silo's data, told without a value: a name, a count, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedtmle.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing to mend: where it is, what is wrong, in how many rows, what to do."""

    what: str
    fix: str
    silo: str | None = None
    file: str | None = None
    line: int | None = None
    column: str | None = None  # the study's name for it
    rows: int | None = None

    def __str__(self) -> str:
        places = (
            self.silo and f"silo '{self.silo}'",
            self.file and f"file '{self.file}'",
            self.line and f"line {self.line}",
            self.column and f"column '{self.column}'",
        )
        where = ", ".join(place for place in places if place)
        rows = "" if self.rows is None else f" in {self.rows} {'row' if self.rows == 1 else 'rows'}"
        return f"{where}: {self.what}{rows}; {self.fix}"


class DataErrors(DataError):  # noqa: N818 (several errors in one)
    """Everything that is wrong with the data of one or more silos, each problem once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        heading = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{heading} with the data:", *(f"  - {p}" for p in self.problems)]))

    def at(self, silo: str) -> DataErrors:
        """The same problems, all of the given silo."""
        return DataErrors(replace(problem, silo=silo) for problem in self.problems)

    def __reduce__(self) -> tuple[type[DataErrors], tuple[tuple[Problem, ...]]]:
        # The default would rebuild from the message, and fail in the parent of a worker process.
        return (DataErrors, (self.problems,))


class Findings:
    """Collects problems that share a place, so that all can be reported together."""

    def __init__(self, *, silo: str | None = None, file: str | None = None) -> None:
        self.problems: list[Problem] = []
        self._place = Problem(what="", fix="", silo=silo, file=file)

    def add(
        self,
        what: str,
        fix: str,
        *,
        column: str | None = None,
        rows: int | None = None,
        line: int | None = None,
    ) -> None:
        """Note a problem."""
        self.problems.append(replace(self._place, what=what, fix=fix, column=column, rows=rows, line=line))

    def merge(self, other: Findings) -> None:
        """Take over what another part of the same table has wrong, adding up rows."""
        for problem in other.problems:
            for at, known in enumerate(self.problems):
                if replace(known, rows=None) == replace(problem, rows=None):
                    if known.rows is not None and problem.rows is not None:
                        self.problems[at] = replace(known, rows=known.rows + problem.rows)
                    break
            else:
                self.problems.append(problem)

    def settle(self) -> None:
        """Raise `DataErrors` if anything was found."""
        if self.problems:
            raise DataErrors(self.problems)
