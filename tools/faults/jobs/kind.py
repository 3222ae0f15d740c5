"""What every fault of tools/chaos has."""

from __future__ import annotations

from typing import Any

#: What the run continues in. "spare": the same layout, on a node that the job has beside those that it needs.
SAME, OTHER, FEWER, SPARE = "same", "other", "fewer nodes", "spare"

#: Moments at which a process waits at a line.
LINES = ("start-up", "first step", "mid-step", "staging", "writing", "committing", "validation", "finishing", "after the manifest")
ANY_TIME, SUBMISSION = "any time", "submission"
MOMENTS = (*LINES, ANY_TIME, SUBMISSION)


class Kind:
    """A fault.

    Args:
        scene: where it happens.

    Attributes:
        moments: at which it may happen.
        after: the layouts in which the run may continue.
        ends: (state, exit code) of a job that ends, after which a person submits the same command again; empty if nobody has to. The exit
            code of a state that has several is empty.
        saves: the run writes a checkpoint before it ends.
        ends_job: the job does not start its ranks again.
        late: it needs checkpoints: it happens in the second half of a run.
        ranks: it happens while a rank waits, which reports the signal that it gets.
        settings: of the run.
        options: of sbatch.
        evidence: what shows that it happened; empty as long as nothing does.
    """

    moments: tuple[str, ...] = (*LINES, ANY_TIME)
    after: tuple[str, ...] = (SAME,)
    ends: tuple[tuple[str, str], ...] = ()
    saves = False
    ends_job = False
    late = False
    ranks = False
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __init__(self, scene: Any) -> None:
        self.scene = scene
        self.evidence = ""
        self.prepare()

    def prepare(self) -> None:
        """Prepare the folder of the run."""

    def submitted(self) -> None:
        """Do what must be done before the job starts, which waits for it."""

    def strike(self) -> None:
        """Let it happen. A process waits at the line of the case; it goes on afterwards."""

    def look(self) -> None:
        """Look for evidence; called again and again after it happened, with or without."""

    def may_end(self, state: str, code: str) -> bool:
        """Whether a person submits the same command again after a job with this state and exit code."""
        return bool(self.evidence) and any(state == end and own in ("", code) for end, own in self.ends)

    def completed(self) -> None:
        """Look once more when the run is complete."""

    def undo(self) -> None:
        """Restore what it has changed, at the end of the row."""
