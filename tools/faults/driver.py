"""The driver of tools/chaos and tools/chaos_checkpoint: draws faults, runs a job for each, and prints the table."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.faults.jobs import cases, row
from tools.faults.jobs.cases import Case, Layout
from tools.faults.jobs.kind import OTHER, Kind
from tools.faults.jobs.scene import Scene

#: (case or None, layout, an empty folder) -> the jobs of a run.
MakeScene = Callable[[Case | None, Layout, Path], Scene]
HEADER = f"{'fault':<22}{'moment':<62}{'layout':<20}{'then':<20}{'step':>4} {'lost':>4} {'seconds':>7}  {'seen':<42}verdict"


def describe(found: row.Row) -> str:
    case = found.case
    after = (case.other.name if case.after == OTHER else case.after) + " (again)" * found.again
    seconds = "-" if found.seconds is None else f"{found.seconds:.1f}"
    verdict = "OK" if not found.problems else "FAILED: " + "; ".join(found.problems)
    if not found.seen:
        verdict = "not counted: " + ("the fault was not seen" if not found.problems else "; ".join(found.problems))
    left = f"{case.fault:<22}{case.where:<61.61} {case.layout.name:<20}{after:<20}{found.step:>4}"
    return f"{left} {found.lost:>4} {seconds:>7}  {found.seen:<41.41} {verdict}"


def summary(rows: Sequence[row.Row], missed: int, seconds: float) -> str:
    """The last line."""
    failed = sum(bool(found.problems) for found in rows)
    times = sorted(found.seconds for found in rows if found.seconds is not None)
    recovery = f"recovery {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s (longest)" if times else "no recovery"
    kinds = ", ".join(f"{fault} {count}" for fault, count in sorted(Counter(found.case.fault for found in rows).items()))
    lost = max((found.lost for found in rows), default=0)
    counts = f"{len(rows)} faults ({kinds}): {len(rows) - failed} OK, {failed} failed"
    return f"{counts}; {missed} more were not seen to happen; at most {lost} steps lost; {recovery}; {seconds:.0f} s in all"


def rows(
    make: MakeScene, kinds: dict[str, type[Kind]], layouts: Sequence[Layout], moments: tuple[str, ...], faults: int, seed: int, work: Path
) -> Iterator[row.Row]:
    """Yield a row for each fault that was tried, until so many were seen to happen, or too many were not.

    Args:
        make: the jobs of a run, on a cluster or on this machine.
        kinds: the faults.
        layouts: of the runs.
        moments: at which they may happen.
        faults: how many.
        seed: of the random choices.
        work: folder for the runs; those that failed remain in it.
    """
    drawn = cases.Cases(random.Random(seed), kinds, layouts, moments)
    references = {layout.name: row.undisturbed(make(None, layout, work / f"undisturbed-{n}")) for n, layout in enumerate(layouts)}
    seen = missed = 0
    while seen < faults and missed <= 10 + 2 * faults:
        case = drawn.draw({name: scene.traced for name, scene in references.items()})
        found = row.run(make(case, case.layout, work / str(seen + missed)), references[case.layout.name])
        seen, missed = (seen + 1, missed) if found.seen else (seen, missed + 1)
        yield found


def run(
    make: MakeScene, kinds: dict[str, type[Kind]], layouts: Sequence[Layout], moments: tuple[str, ...], faults: int, seed: int, work: Path
) -> int:
    """Print the rows as they come, and the summary; returns the exit code. Arguments as of `rows`."""
    started, every = time.monotonic(), []
    print(HEADER)
    for found in rows(make, kinds, layouts, moments, faults, seed, work):
        every.append(found)
        print(describe(found), flush=True)
    counted = [found for found in every if found.seen]
    if len(counted) < faults:
        print("too many faults were not seen to happen", file=sys.stderr)
        return 1
    print(summary(counted, len(every) - len(counted), time.monotonic() - started))
    failed = any(found.problems for found in counted)
    if failed:
        print(f"the runs that failed are kept in {work}")
    return int(failed)
