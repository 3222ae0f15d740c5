"""The runs of a sweep on this machine, one after the other: what is printed before each of them, and what follows a failure."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.core.utils import JobReturn, JobStatus

from pipeline.common.errors import ToBeContinued, UserError
from pipeline.common.ranks import Ranks
from pipeline.launch.sweep_table import Point


@dataclass(frozen=True)
class _Ending:
    """How a run ended.

    Attributes:
        reason: why it failed; empty if it did not.
        code: its exit code, 0 for success.
        goes_on: whether the next run may start.
    """

    reason: str = ""
    code: int = 0
    goes_on: bool = True


def execute(
    points: Sequence[Point], runs: Sequence[Callable[[], JobReturn]], ranks: Ranks, record: Callable[[int, str], None]
) -> tuple[list[Point], int]:
    """Execute runs, and return their points with the reason of each failure, and the exit code of the first one, 0 for none.

    A run that fails does not end the sweep of a single process; several ranks could disagree on whether one has failed. A run that was
    asked to stop ends the sweep.

    Args:
        points: of the runs.
        runs: execute one each.
        ranks: of this process; rank 0 prints.
        record: gets the place of each run when it begins, with an empty text, and when it ends, with its state.
    """
    done: list[Point] = []
    code, goes_on = 0, True
    for number, (point, run) in enumerate(zip(points, runs, strict=True), start=1):
        if not goes_on:
            done.append(point)
            continue
        if ranks.rank == 0:
            shown = f"sweep, {number} of {len(points)}: {' '.join(point.values)}".rstrip()
            print(f"{shown} ({point.run_dir})", file=sys.stderr, flush=True)
        record(number - 1, "")
        ending = _ending_of(run)
        code = code or ending.code
        goes_on = not ending.code or (ending.goes_on and ranks.world_size == 1)
        finished = "finished" if point.steps is None and not ending.code else ""  # the files of a training run say how far it is
        done.append(dataclasses.replace(point, state=ending.reason or finished))
        record(number - 1, done[-1].state)
    return done, code


def _ending_of(run: Callable[[], JobReturn]) -> _Ending:
    """Execute a run. The entry point has printed the errors of users, and this function prints others."""
    try:
        result = run()
    except SystemExit as end:
        if isinstance(end.__context__, ToBeContinued):
            return _Ending(code=end.__context__.code, goes_on=False)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return _Ending(f"failed: {_reason(end.__context__)}", code) if code else _Ending()
    if result.status is not JobStatus.FAILED:
        return _Ending()
    error = result._return_value  # the property raises it
    traceback.print_exception(error)
    return _Ending(f"failed: {_reason(error)}", 1)


def _reason(error: BaseException | None) -> str:
    """The first problem of an error on one line."""
    if isinstance(error, UserError):
        first = error.violations[0]
        return f"{first.key}={first.value}: {first.rule}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]
