"""Memory of a rehearsed rank beside the plan: by kind, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.planner.plan import JobPlan
from pipeline.rehearsal.memory import BETWEEN
from pipeline.rehearsal.rehearse import Rehearsal

#: Share of the rehearsed memory of a kind from which on a difference of the plan is told.
TOLERANCE = 0.03
#: Likewise of the whole peak: kinds with less need no attention.
NOTICED = 0.01
#: The kinds whose differences are told; the others are their sums, or depend on the allocator.
_KINDS = ("weights", "optimizer", "passes")
_GB = 1e9


@dataclass(frozen=True)
class Compared:
    """Memory as rehearsed and as planned, bytes."""

    rehearsed: float
    planned: float

    @property
    def difference(self) -> float | None:
        """The plan over the rehearsal, as a share of the rehearsal; None for nothing."""
        return self.planned / self.rehearsed - 1 if self.rehearsed else None

    def differs(self, peak: float) -> bool:
        """Whether the difference is to be told, with a peak of so many bytes."""
        return abs(self.planned - self.rehearsed) > max(TOLERANCE * self.rehearsed, NOTICED * peak)

    def __str__(self) -> str:
        more = f" ({self.rehearsed / self.planned - 1:+.1%})" if self.planned else ""
        return f"{self.rehearsed / _GB:.3f} GB, planned {self.planned / _GB:.3f} GB{more}"


def compared(found: Rehearsal, planned: JobPlan) -> dict[str, Compared]:
    """Return each kind of memory as rehearsed and as planned for this rank.

    `passes` are gradients, activations, gathered weights and temporary tensors, `peak` all tensors without the workspaces of libraries,
    `overhead` these, CUDA, NCCL and fragmentation.
    """
    kinds, memory = found.kinds, planned.estimate.memories[found.mesh.coordinates.pipeline]
    peak = kinds.weights + kinds.optimizer + kinds.passes
    return {
        "weights": Compared(kinds.weights, memory.weights + memory.frozen),
        "optimizer": Compared(kinds.optimizer, memory.optimizer),
        "passes": Compared(kinds.passes, max(memory.passes, memory.update)),
        "peak": Compared(peak, memory.total - memory.overhead),
        "overhead": Compared(kinds.libraries + kinds.fragmentation + kinds.outside, memory.overhead),
        "total": Compared(kinds.total, memory.total),
    }


def blocks(found: Rehearsal, planned: JobPlan) -> Compared:
    """Return what the forward pass of a micro-batch leaves allocated in the blocks, without the last one of a pipeline stage."""
    kept = found.seen.kept
    return Compared(sum(kept.values()), sum(planned.trace.block(index).saved for index in kept))


def difference_lines(found: Rehearsal, planned: JobPlan) -> Iterator[str]:
    """Yield the kinds whose plan differs, the part of a step with the most memory, and whether blocks keep what is planned."""
    kinds = compared(found, planned)
    peak = kinds["peak"].rehearsed
    fullest = max((moment for moment in found.moments.found if moment.name != BETWEEN), key=lambda moment: moment.peak)
    for name in _KINDS:
        if kinds[name].differs(peak):
            where = f", most in the {fullest.name}" if name == "passes" else ""
            yield f"  the plan differs: {name} {kinds[name]}{where}"
    kept = blocks(found, planned)
    if found.seen.kept and kept.differs(peak):
        yield f"  the plan differs: in a forward pass, {len(found.seen.kept)} blocks keep {kept}"
