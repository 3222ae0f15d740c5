"""Errors that a user can fix. They are printed without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Violation:
    """One violated rule: the configuration key, its value, the rule, and the fix."""

    key: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.rule}\n    fix: {self.fix}"


class UserError(Exception):
    """An invalid configuration or input file. The entry point prints it and exits with code 2."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        assert violations, "a UserError requires at least one violation"
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{head}:", *(f"  - {v}" for v in self.violations)]))

    @classmethod
    def of(cls, key: str, value: object, rule: str, fix: str) -> Self:
        """Create an error with a single violation."""
        return cls([Violation(key, value, rule, fix)])

    @classmethod
    def raise_for(cls, violations: Iterable[Violation]) -> None:
        """Raise an error with the violations, each once; return if there are none."""
        if once := list({str(violation): violation for violation in violations}.values()):
            raise cls(once)


class DamagedCheckpointError(UserError):
    """A checkpoint whose files are missing, unreadable or changed; an older one may be complete."""


class CheckFailed(Exception):  # noqa: N818 - a result
    """A check that a stage was asked for has failed. The entry point prints the message and exits with code 1."""


class RunFailed(Exception):  # noqa: N818 - a result
    """A run that failed for a reason outside of program and configuration, which may pass: another start may succeed.

    The entry point prints the message, without a traceback, and exits with code 1.

    Args:
        message: its first line is what the job records as the reason.
        where: file and line of the error; empty if it says nothing.
        details: yields further lines of the message, which take time to find: called after the reason is recorded.
    """

    def __init__(self, message: str, where: str = "", details: Callable[[], Iterable[str]] = tuple) -> None:
        super().__init__(message)
        self.where, self.details = where, details


class ToBeContinued(Exception):  # noqa: N818 - not an error
    """A run that was asked to stop and has written a checkpoint: the same command continues it.

    Attributes:
        code: exit code of the process, one of STOPPED.
        reason: phase if the run needs another number of nodes, NEXT_PHASE if its next phase has other settings, stop if the file `stop`
            asked it to stop; empty if a signal did.
    """

    def __init__(self, code: int, reason: str = "") -> None:
        self.code, self.reason = code, reason
        super().__init__(f"exit code {code}")


#: The next phase of training.phases begins: the same processes continue the run.
NEXT_PHASE = "next phase"
#: Exit code of a run that stopped because its time ends (SIGUSR1), a user asked for it, or it needs other nodes, EX_TEMPFAIL of sysexits.h:
#: slurm/pretrain.sbatch requeues the job.
CONTINUE = 75
#: Exit code of a run that stopped because it was canceled or preempted (SIGTERM), as of a process that the signal ends.
TERMINATED = 143
#: Exit code after Ctrl-C (SIGINT), as that of a shell.
INTERRUPTED = 130
#: Exit codes of runs that a signal or a phase stopped, and not an error.
STOPPED = (CONTINUE, TERMINATED, INTERRUPTED)


def collect_errors(*checks: Callable[[], Any]) -> list[Any]:
    """Run all checks and return their results in order.

    Raises:
        UserError: at least one check raised it; contains the violations of all checks.
    """
    results: list[Any] = []
    violations: list[Violation] = []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            violations.extend(error.violations)
    UserError.raise_for(violations)
    return results
