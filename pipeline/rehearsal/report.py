"""What stage=rehearse prints, and the content of rehearsal.json."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.common.git_commit import commit
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.rehearsed_group import Call
from pipeline.planner.plan import JobPlan
from pipeline.rehearsal.analysis import axis_names
from pipeline.rehearsal.compiled_kernels import GeneratedKernel
from pipeline.rehearsal.memory import BETWEEN, Moments
from pipeline.rehearsal.rehearse import Rehearsal

GB = 1e9
#: A step is called host-bound if the host needs more than this share of its planned time.
HOST_BOUND = 0.8
#: Most lines of host waits, and of kernels.
LINES = 8
#: Generated kernels that are printed, besides those that spill.
WORST = 3


def collectives(calls: list[Call], mesh: Mesh) -> dict[tuple[str, str, bool], tuple[int, int]]:
    """Return (axis, name, whether it runs on a stream of its own) -> (count, bytes), in the order of their first occurrence."""
    names = axis_names(mesh)
    current = torch.cuda.current_stream().cuda_stream
    counts: Counter[tuple[str, str, bool]] = Counter()
    sizes: Counter[tuple[str, str, bool]] = Counter()
    for call in calls:
        key = names.get(call.ranks, "world"), call.name, call.stream not in (None, current)
        counts[key] += 1
        sizes[key] += call.size
    return {key: (count, sizes[key]) for key, count in counts.items()}


def lines(rehearsal: Rehearsal, planned: JobPlan) -> Iterator[str]:
    """Yield what is printed."""
    hardware, where = planned.hardware, rehearsal.mesh.coordinates
    random = ", random tokens" if rehearsal.random else ""
    places = ", ".join(f"{axis} {getattr(where, axis)}" for axis in ("pipeline", "data", "expert", "context", "tensor"))
    yield f"rank {rehearsal.mesh.rank} of {planned.layout.world_size:,} ({places}) on {hardware.name}{random}"
    yield from memory_lines(rehearsal, planned)
    yield from host_lines(rehearsal, planned)
    yield "collectives of a step"
    for (axis, name, beside), (count, size) in collectives(rehearsal.seen.calls, rehearsal.mesh).items():
        yield f"  {axis:<16}{name:<16}{count:7,} {size / GB:10.3f} GB{'  beside other work' if beside else ''}"
    if rehearsal.unknown:
        yield f"functions of CUDA without an answer, whose calls failed: {', '.join(rehearsal.unknown)}"


def memory_lines(rehearsal: Rehearsal, planned: JobPlan) -> Iterator[str]:
    """Yield the memory at the parts of a step, and by kind beside the plan."""
    yield f"{'memory, GB':<16}{'allocated':>10}{'peak':>10}{'reserved':>10}{'fragments':>10}{'retries':>9}"
    for name in parts(rehearsal.moments):
        moment = rehearsal.moments.last(name)
        sizes = (moment.allocated, moment.peak, moment.reserved, moment.fragmented)
        yield f"  {name:<14}{''.join(f'{size / GB:10.2f}' for size in sizes)}{moment.retries:9}"
    yield f"{'by kind, GB':<16}{'rehearsed':>10}{'planned':>10}"
    for name, both in compared(rehearsal, planned).items():
        percent = "" if both.difference is None or name == "overhead" else f"  {100 * both.difference:+.1f} %"
        yield f"  {name:<14}{both.rehearsed / GB:10.2f}{both.planned / GB:10.2f}{percent}"
    yield from difference_lines(rehearsal, planned)
    capacity = planned.hardware.memory_gb
    outside = rehearsal.kinds.outside / GB
    yield f"  headroom {capacity - rehearsal.kinds.total / GB:.1f} of {capacity:.1f} GB ({outside:.1f} GB are assumed for CUDA and NCCL)"


def host_lines(rehearsal: Rehearsal, planned: JobPlan) -> Iterator[str]:
    """Yield seconds of the host beside the planned step, launches, and waits."""
    seen, step = rehearsal.seen, planned.estimate.step_time
    seconds = host_seconds(rehearsal)
    verdict = "host-bound" if seconds > HOST_BOUND * step else "not host-bound"
    yield f"host: {seconds:.2f} s a step, the GPU {step:.2f} s as planned: {verdict} (this machine)"
    yield from rehearsal.start_up.lines()
    per_block = "" if seen.block is None else f"; forward pass of a block: {seen.block.kernels:,} kernels, {seen.block.products:,} products"
    made = seen.launches
    counts = f"{made.kernels:,} kernels, {made.products:,} products, {made.copies:,} copies, {made.events:,} events"
    yield f"launches a step: {counts}{per_block}"
    if (graphs := compiled_graphs()) or rehearsal.breaks:
        yield f"compiled: {graphs} graphs, {rehearsal.breaks.total()} breaks"
        yield from (f"  {count:5} x {where}" for where, count in rehearsal.breaks.most_common())
    yield from generated_lines(seen.generated.found())
    yield f"waits of the host for the device in a step: {sum(seen.waits.values())}"
    for (name, line), count in seen.waits.most_common(LINES):
        yield f"  {count:5} x {line or '(no line of this package)'}  {name}"
    yield f"host memory: {rehearsal.host_peak / GB:.2f} GB; a save copies {rehearsal.saved / GB:.2f} GB to the host"


def generated_lines(kernels: list[GeneratedKernel]) -> Iterator[str]:
    """Yield the generated kernels with the most registers, and all that spill."""
    if not kernels:
        return
    spilled = [kernel for kernel in kernels if kernel.spills]
    launches = sum(kernel.launches for kernel in kernels)
    yield f"generated kernels: {len(kernels)}, {launches:,} launches a step, {len(spilled) or 'none'} with spills"
    most = sorted(kernels, key=lambda kernel: -kernel.registers)[:WORST]
    for kernel in dict.fromkeys((*spilled, *most)):
        where = f"{kernel.registers} registers, {kernel.spills} spilled, {kernel.shared:,} bytes of shared memory, {kernel.warps} warps"
        yield f"  {kernel.name}: {where}; {kernel.launches:,} launches of {kernel.bytes / 1e6:,.1f} MB"


def compiled_graphs() -> int:
    """The number of graphs that torch.compile has made."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def host_seconds(rehearsal: Rehearsal) -> float:
    """Seconds of the host in the last step without a record or a save."""
    return rehearsal.seen.seconds[-2]


def parts(moments: Moments) -> list[str]:
    """The names of the parts of a step that were seen, in order."""
    return [name for name in dict.fromkeys(moment.name for moment in moments.entries) if name != BETWEEN]


def content(rehearsal: Rehearsal, planned: JobPlan, overrides: list[str], seconds: float) -> dict[str, Any]:
    """Return rehearsal.json as values of JSON. Sizes are bytes, times are seconds."""
    seen, step = rehearsal.seen, planned.estimate.step_time
    return {
        "job": {**_job(planned, rehearsal.mesh.rank, overrides), "random_tokens": rehearsal.random},
        "memory": {
            "fits": True,
            "capacity": planned.hardware.memory_gb * GB,
            "moments": [dataclasses.asdict(rehearsal.moments.last(name)) for name in parts(rehearsal.moments)],
            "kinds": {
                name: {"rehearsed": both.rehearsed, "planned": both.planned, "difference": both.difference}
                for name, both in compared(rehearsal, planned).items()
            },
            "blocks": dataclasses.asdict(blocks(rehearsal, planned)),
            "outside": rehearsal.kinds.outside,
            "saved": rehearsal.saved,
            "host_peak": rehearsal.host_peak,
        },
        "steps": {
            "step_seconds": seen.seconds,
            "seconds": host_seconds(rehearsal),
            "planned_step_seconds": step,
            "is_bound": host_seconds(rehearsal) > HOST_BOUND * step,
            "waits": [{"call": name, "line": line, "count": count} for (name, line), count in seen.waits.most_common()],
        },
        "start_up": {**dataclasses.asdict(rehearsal.start_up), "until_first_step": rehearsal.start_up.until_first_step},
        "launches": {
            "step": dataclasses.asdict(seen.launches),
            "block_forward": None if seen.block is None else dataclasses.asdict(seen.block),
            "kernels": dict(seen.kernels.most_common()),
            "compiled": {
                "graphs": compiled_graphs(),
                "breaks": [{**dataclasses.asdict(place), "count": count} for place, count in rehearsal.breaks.most_common()],
            },
            "generated": [dataclasses.asdict(kernel) for kernel in seen.generated.found()],
        },
        "collectives": [
            {"axis": axis, "name": name, "beside": beside, "count": count, "bytes": size}
            for (axis, name, beside), (count, size) in collectives(seen.calls, rehearsal.mesh).items()
        ],
        "replay": None if seen.findings is None else seen.findings.content(),
        "unknown_functions": rehearsal.unknown,
        **_made_by(),
        "seconds": round(seconds, 1),
    }


def without_memory(planned: JobPlan, rank: int, moments: Moments, reason: str, overrides: list[str]) -> dict[str, Any]:
    """Return rehearsal.json of a rank that does not fit on the device."""
    return {
        "job": _job(planned, rank, overrides),
        "memory": {
            "fits": False,
            "capacity": planned.hardware.memory_gb * GB,
            "reason": reason,
            "moments": [dataclasses.asdict(moments.last(name)) for name in parts(moments)],
            "planned": dataclasses.asdict(planned.estimate.memories[planned.layout.coordinates(rank).pipeline]),
        },
        **_made_by(),
    }


def _job(planned: JobPlan, rank: int, overrides: list[str]) -> dict[str, Any]:
    """The job and the rank."""
    return {
        "world_size": planned.layout.world_size,
        "rank": rank,
        "layout": dataclasses.asdict(planned.layout),
        "coordinates": dataclasses.asdict(planned.layout.coordinates(rank)),
        "hardware": planned.hardware.name,
        "overrides": overrides,
    }


def _made_by() -> dict[str, Any]:
    """Versions and host."""
    return {
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "commit": commit(),
        "host": os.uname().nodename,
    }


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


def compared(rehearsal: Rehearsal, planned: JobPlan) -> dict[str, Compared]:
    """Return each kind of memory as rehearsed and as planned for this rank.

    `passes` are gradients, activations, gathered weights and temporary tensors, `peak` all tensors without the workspaces of libraries,
    `overhead` these, CUDA, NCCL and fragmentation.
    """
    kinds, memory = rehearsal.kinds, planned.estimate.memories[rehearsal.mesh.coordinates.pipeline]
    peak = kinds.weights + kinds.optimizer + kinds.passes
    return {
        "weights": Compared(kinds.weights, memory.weights + memory.frozen),
        "optimizer": Compared(kinds.optimizer, memory.optimizer),
        "passes": Compared(kinds.passes, max(memory.passes, memory.update)),
        "peak": Compared(peak, memory.total - memory.overhead),
        "overhead": Compared(kinds.libraries + kinds.fragmentation + kinds.outside, memory.overhead),
        "total": Compared(kinds.total, memory.total),
    }


def blocks(rehearsal: Rehearsal, planned: JobPlan) -> Compared:
    """Return what the forward pass of a micro-batch leaves allocated in the blocks, without the last one of a pipeline stage."""
    kept = rehearsal.seen.kept
    return Compared(sum(kept.values()), sum(planned.trace.block(index).saved for index in kept))


def difference_lines(rehearsal: Rehearsal, planned: JobPlan) -> Iterator[str]:
    """Yield the kinds whose plan differs, the part of a step with the most memory, and whether blocks keep what is planned."""
    kinds = compared(rehearsal, planned)
    peak = kinds["peak"].rehearsed
    fullest = max((moment for moment in rehearsal.moments.entries if moment.name != BETWEEN), key=lambda moment: moment.peak)
    for name in _KINDS:
        if kinds[name].differs(peak):
            where = f", most in the {fullest.name}" if name == "passes" else ""
            yield f"  the plan differs: {name} {kinds[name]}{where}"
    kept = blocks(rehearsal, planned)
    if rehearsal.seen.kept and kept.differs(peak):
        yield f"  the plan differs: in a forward pass, {len(rehearsal.seen.kept)} blocks keep {kept}"
