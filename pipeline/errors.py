"""What a user can mend, said once and without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One broken rule: the configuration key, the value it has, the rule it breaks, and what to do."""

    key: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.rule}\n    fix: {self.fix}"


class UserError(Exception):
    """A mistake of the user's, or of a file that the user gave. The entry prints it and exits with 2."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        assert violations, "a user error names at least one violation"
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{head}:", *(f"  - {v}" for v in self.violations)]))

    @classmethod
    def of(cls, key: str, value: object, rule: str, fix: str) -> UserError:
        """The error of a single violation."""
        return cls([Violation(key, value, rule, fix)])


def collect_errors(*checks: Callable[[], Any]) -> list[Any]:
    """The result of every check.

    Raises:
        UserError: with the violations of all checks that raised one.
    """
    results: list[Any] = []
    violations: list[Violation] = []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            violations.extend(error.violations)
    if violations:
        raise UserError(violations)
    return results
