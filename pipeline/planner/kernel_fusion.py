"""The operations and the memory of each part of a model, from a recording: memory-bound kernels are fused as a compiler does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from pipeline.planner.operations import AttentionCall, Collective, Elementwise, Operation, Phase, Product
from pipeline.planner.recorder import Kernel, Recording

#: Parts that are not compiled: torch.compile is applied to blocks.
UNCOMPILED = ("embed", "head")


@dataclass(frozen=True)
class Fused:
    """By part: operations in order, bytes saved by their producer, and the most that is allocated besides in both passes."""

    operations: dict[str, list[Operation]]
    saved: dict[str, dict[str, int]]
    peak: dict[str, tuple[int, int]]


def fuse(recording: Recording, *, fused: bool, copies: bool = True) -> Fused:
    """Turn a recording into the operations and the memory of each part.

    Args:
        fused: fuse memory-bound kernels between two other kernels into one, as a compiler does: a tensor that is only used inside is never
            written, and one that follows from saved tensors is computed again in the backward pass instead of being saved.
        copies: count the copies beside collectives, which engines do not make that keep the sequence in the first dimension. Weights that
            are concatenated are one in memory.
    """
    kernels, storages = recording.kernels, recording.storages
    dropped = _layout_copies(recording, of_collectives=not copies)
    kernels = [replace(k, reads={}, writes={}) if index in dropped else k for index, k in enumerate(kernels)]
    groups = _groups(kernels, fused=fused)
    readers: dict[int, set[int]] = {}
    for index, kernel in enumerate(kernels):
        for key in kernel.reads:
            readers.setdefault(key, set()).add(groups[index])
    recomputed = _recomputed(recording) if fused else {}
    saved_keys: dict[int, str] = {}
    saved: dict[str, dict[str, int]] = {}
    for key, parts in _backward_readers(recording).items():
        storage = storages[key]
        if storage.part and storage.phase == "forward" and key not in recomputed:
            saved_keys[key] = part = storage.part if storage.part in parts else parts[0]
            # The input of a block may be a slice of a larger tensor, which other blocks of the same kind do not have.
            read = storage.bytes if part == storage.part else min(storage.bytes, _most_read(recording, key, part))
            producer = "input" if storage.kernel is None else _label(kernels[storage.kernel])
            for holder, size in ((part, read), (storage.part, storage.bytes - read)):
                if size:
                    producers = saved.setdefault(holder, {})
                    producers[producer] = producers.get(producer, 0) + size
    inside = {
        key
        for key, storage in storages.items()
        if fused
        and storage.kernel is not None
        and kernels[storage.kernel].operation is None
        and readers.get(key) == {groups[storage.kernel]}
    }
    absent = inside | {key for key in recomputed if storages[key].phase == "forward"}
    return Fused(_operations(kernels, groups, readers, recomputed), saved, _peaks(recording, saved_keys, absent))


def _label(kernel: Kernel) -> str:
    """What a kernel is called in a table of memory: the weight of a product, or the operator."""
    match kernel.operation:
        case Product(name=name) if name:
            return name
        case Collective(kind=kind, axis=axis):
            return f"{kind} ({axis})"
        case AttentionCall():
            return "attention"
    return f"elementwise ({kernel.name.partition('.')[0].strip('_')})"


def _layout_copies(recording: Recording, *, of_collectives: bool) -> set[int]:
    """Indices of the kernels that concatenate only weights, or also results of collectives, or whose result only collectives read."""
    kernels, storages = recording.kernels, recording.storages
    readers: dict[int, list[Operation | None]] = {}
    for kernel in kernels:
        for key in kernel.reads:
            readers.setdefault(key, []).append(kernel.operation)

    def from_elsewhere(key: int) -> bool:
        """Whether a storage is a weight or the result of a collective."""
        made = storages[key].kernel
        return not storages[key].part or (of_collectives and made is not None and isinstance(kernels[made].operation, Collective))

    copies = set()
    for index, kernel in enumerate(kernels):
        if kernel.name.partition(".")[0] == "cat":
            sent = [operation for key in kernel.writes for operation in readers.get(key, [])] if of_collectives else []
            if all(map(from_elsewhere, kernel.reads)) or (sent and all(isinstance(operation, Collective) for operation in sent)):
                copies.add(index)
    return copies


def _operations(
    kernels: list[Kernel], groups: list[int], readers: dict[int, set[int]], recomputed: dict[int, dict[int, int]]
) -> dict[str, list[Operation]]:
    """The operations of each part: calls, and memory-bound kernels of the groups."""
    operations: dict[str, list[Operation]] = {}
    start = 0
    while start < len(kernels):
        stop = start + 1
        while stop < len(kernels) and groups[stop] == groups[start]:
            stop += 1
        first = kernels[start]
        if first.operation is not None:
            operations.setdefault(first.part, []).append(first.operation)
        else:
            moved = _moved(kernels[start:stop], groups[start], readers, recomputed)
            names = list(dict.fromkeys(kernel.name for kernel in kernels[start:stop]))
            label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more, fused"
            if moved:
                operations.setdefault(first.part, []).append(Elementwise(label, first.phase, moved))
        start = stop
    return operations


def _peaks(recording: Recording, saved: dict[int, str], absent: set[int]) -> dict[str, tuple[int, int]]:
    """The most bytes of the forward and the backward pass of a part, beyond what all parts have saved between its passes.

    Args:
        saved: storages that are saved for the backward pass.
        absent: storages that fused kernels never write.
    """
    kernels = recording.kernels
    changes, saved_changes = [0] * (len(kernels) + 2), [0] * (len(kernels) + 2)
    for key, storage in recording.storages.items():
        if storage.part and key not in absent:
            died = len(kernels) + 1 if storage.died is None else storage.died
            for counter in (changes, saved_changes) if key in saved else (changes,):
                counter[storage.born] += storage.bytes
                counter[died] -= storage.bytes
    alive = list(accumulate(changes))
    saved_alive = list(accumulate(saved_changes))
    peaks: dict[str, tuple[int, int]] = {}
    for (part, backward), run in groupby(range(len(kernels)), lambda index: (kernels[index].part, kernels[index].phase != "forward")):
        indices = list(run)
        before, after = indices[0] - 1, indices[-1]
        base = saved_alive[before if backward else after] if after else 0
        most, (forward_peak, backward_peak) = max(alive[index] - base for index in indices), peaks.get(part, (0, 0))
        peaks[part] = (forward_peak, max(backward_peak, most)) if backward else (max(forward_peak, most), backward_peak)
    return peaks


def _most_read(recording: Recording, key: int, part: str) -> int:
    """The most bytes of a storage that a kernel of the backward pass of a part reads."""
    return max(kernel.reads.get(key, 0) for kernel in recording.kernels if kernel.part == part and kernel.phase != "forward")


def _backward_readers(recording: Recording) -> dict[int, list[str]]:
    """The parts whose backward pass reads a storage: the input of a block is saved for that block."""
    readers: dict[int, list[str]] = {}
    for kernel in recording.kernels:
        if kernel.phase != "forward":
            for key in kernel.reads:
                readers.setdefault(key, []).append(kernel.part)
    return readers


def _groups(kernels: list[Kernel], *, fused: bool) -> list[int]:
    """The number of the fused kernel of each call: consecutive memory-bound calls of one graph and phase share one."""
    groups, current = [], 0
    for index, kernel in enumerate(kernels):
        previous = kernels[index - 1] if index else None
        joins = previous is not None and previous.operation is None and kernel.operation is None and _is_compiled(kernel)
        if not (fused and joins and previous is not None and _place(previous) == _place(kernel)):
            current += 1
        groups.append(current)
    return groups


def _is_compiled(kernel: Kernel) -> bool:
    """Whether a kernel is in a graph, if the blocks are compiled."""
    return kernel.part not in UNCOMPILED and kernel.graph is not None


def _place(kernel: Kernel) -> tuple[str, Phase, int | None]:
    """The part, phase and graph of a kernel."""
    return kernel.part, kernel.phase, kernel.graph


def _recomputed(recording: Recording) -> dict[int, dict[int, int]]:
    """Storages that the fused backward pass computes again, each with the saved storages (and bytes) that it follows from.

    It must be the result of a memory-bound kernel of the forward pass, follow from saved tensors, and be read by memory-bound kernels of
    the same graph only: a matrix product needs its operands in memory, and each graph is compiled by itself. What an
    operation reads that is repeated in the backward pass, such as a gathering, may be computed again, too.
    """
    kernels, storages = recording.kernels, recording.storages
    used: dict[int, set[tuple[str, int | None]]] = {}
    needed: set[int] = set()
    forward = {(kernel.name, frozenset(kernel.reads)) for kernel in kernels if kernel.phase == "forward"}
    for kernel in kernels:
        if kernel.phase != "forward":
            for key in kernel.reads:
                used.setdefault(key, set()).add((kernel.part, kernel.graph))
            if kernel.operation is not None and (kernel.name, frozenset(kernel.reads)) not in forward:
                needed |= kernel.reads.keys()
    recomputed: dict[int, dict[int, int]] = {}
    for key in sorted(used):
        storage = storages[key]
        if storage.kernel is None or storage.phase != "forward" or key in needed:
            continue
        kernel = kernels[storage.kernel]
        if used[key] != {(kernel.part, kernel.graph)} or not _is_compiled(kernel):
            continue
        # What another graph computes again is not there.
        elsewhere = any(used[source] != {(kernel.part, kernel.graph)} for source in recomputed.keys() & kernel.reads)
        sources_stay = all(source in used or not storages[source].part for source in kernel.reads) and not elsewhere
        if kernel.operation is None and kernel.reads and sources_stay:
            sources: dict[int, int] = {}
            for source, size in kernel.reads.items():
                sources.update(recomputed.get(source, {source: size}))
            recomputed[key] = sources
    return recomputed


def _moved(kernels: list[Kernel], group: int, readers: dict[int, set[int]], recomputed: dict[int, dict[int, int]]) -> float:
    """Bytes that a group of memory-bound calls reads and writes."""
    if len(kernels) == 1:
        kernel = kernels[0]
        return float(sum(kernel.reads.values()) + sum(kernel.writes.values()))
    written: set[int] = set()
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for kernel in kernels:
        for key, size in kernel.reads.items():
            for source, amount in recomputed.get(key, {key: size}).items() if kernel.phase == "backward" else [(key, size)]:
                if source not in written:
                    reads[source] = max(reads.get(source, 0), amount)
        for key, size in kernel.writes.items():
            written.add(key)
            outside = readers.get(key, set()) - {group}
            if outside or not readers.get(key):
                writes[key] = max(writes.get(key, 0), size)
    return float(sum(reads.values()) + sum(size for key, size in writes.items() if key not in recomputed or kernels[0].phase != "forward"))
