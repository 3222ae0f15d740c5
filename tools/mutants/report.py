"""The table of the mutants, for readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tools.mutants import effect
from tools.mutants.mutation import Mutant
from tools.mutants.public import BUGS
from tools.mutants.trial import FAILED, INEFFECTIVE, KILLED, STOPPED, SURVIVED, Result

#: Share of the mutants that must be found.
REQUIRED = 0.95
HEADER = f"{'bug':>3} {'mutant':<34}{'effect':<22}{'verdict':<10}{'seconds':>7}  found by"


def line(row: Result) -> str:
    """A row of the table."""
    changed = effect.largest(row.effect) if row.effect else ""
    return f"{row.bug:>3} {row.name:<34}{changed:<22}{row.verdict:<10}{row.seconds:>7.1f}  {row.found_by:.110}"


def description(mutant: Mutant) -> str:
    """A mutant, its source and its job."""
    bug = BUGS[mutant.bug]
    source = bug.source if mutant.exact else f"nearest form of {bug.source}"
    return f"{mutant.bug:>3} {mutant.name}: {mutant.what} ({source}); {mutant.ranks} ranks, {' '.join(mutant.words)}"


def summary(rows: Sequence[Result], seconds: float) -> str:
    """The last lines: how many were found, and the names of the others."""
    counts = Counter(row.verdict for row in rows)
    effective = sum(counts[verdict] for verdict in (KILLED, STOPPED, SURVIVED))
    found = counts[KILLED] + counts[STOPPED]
    lines = [
        f"{found} of {effective} mutants found ({found / max(1, effective):.0%}): {counts[KILLED]} by a certificate or a run-time check, "
        f"{counts[STOPPED]} stopped their training; {seconds:.0f} s"
    ]
    for verdict in (SURVIVED, INEFFECTIVE, FAILED):
        if names := [row.name for row in rows if row.verdict == verdict]:
            lines.append(f"{verdict}: {', '.join(names)}")
    return "\n".join(lines)


def is_failure(rows: Sequence[Result]) -> bool:
    """Whether a mutant has no effect or no verdict, or too many survive."""
    counts = Counter(row.verdict for row in rows)
    return bool(counts[INEFFECTIVE] or counts[FAILED]) or counts[SURVIVED] > (1 - REQUIRED) * len(rows)
