"""Digests of everything that several ranks hold a copy of: weights as the forward pass reads them, master weights and optimizer state.

A digest is a sum over elements, so that the digests of the partitions of a weight (ZeRO) add up to that of the weight, however it is
divided. Copies are equal exactly if their digests are, up to a chance of 2**-64 for copies that differ at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.layout import Layout
from pipeline.layers.nf4 import NF4Weight
from pipeline.parallel.mesh import Mesh, gather_objects, reduce_over
from pipeline.training.engine import Engine

#: Integer type of the same size as a number, whose value is its bits.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Odd constants of a multiplicative hash, as signed 64-bit numbers (SplitMix64: Steele et al. 2014, https://doi.org/10.1145/2660193.2660195).
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

#: Elements that are hashed at once: three times their number in int64 is all the memory that a digest takes (100 MB).
_CHUNK = 1 << 22

#: Kinds of digests besides those of the optimizer state: weights as the forward pass reads them, and the master weights rounded to them.
FORWARD, ROUNDED = "forward weight", "rounded master weight"


@dataclass(frozen=True)
class PieceDigest:
    """The digest of a run of elements of a piece that this rank holds.

    Attributes:
        kind: "weight" (master weight), a key of the optimizer state, FORWARD or ROUNDED; "scalar" for a number of the step.
        box: Piece.box: ranks with another box hold other elements.
        elements: of the piece.
        count: of the run.
        digest: int64, 0-dim on the device of the values; its bits as a Python int after `on_host`.
    """

    kind: str
    name: str
    box: tuple[tuple[int, int], ...]
    elements: int
    count: int
    digest: Tensor | int


@dataclass(frozen=True)
class Disagreement:
    """Copies that should be equal and are not.

    Attributes:
        kinds: as in PieceDigest, of those that differ.
        axis: the mesh axis along which they differ; several joined by "+" if no two copies differ along one axis only; empty if a rank's
            weights are not its rounded master weights.
        ranks: of one copy and of another one; of a divided copy, its first rank.
    """

    kinds: tuple[str, ...]
    name: str
    axis: str
    ranks: tuple[int, int]

    def __str__(self) -> str:
        if not self.axis:
            return f"{self.name}: the forward pass of rank {self.ranks[0]} does not read the rounded master weight"
        return f"{self.name} ({', '.join(self.kinds)}) differs along the {self.axis} axis: ranks {self.ranks[0]} and {self.ranks[1]}"


def digest(values: Tensor, first: int = 0) -> Tensor:
    """Return the sum of the hashes of the elements' bits and positions, modulo 2**64: int64, 0-dim, without waiting for the device.

    Args:
        values: floating-point numbers.
        first: position of the first one.
    """
    flat = values.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        state = chunk.view(_BITS[chunk.element_size()]).long() * _GOLDEN  # not in place: numbers of 64 bits are not copied
        state += torch.arange(first + start + 1, first + start + 1 + len(chunk), device=flat.device).mul_(_FIRST)
        state.bitwise_xor_(state >> 30).mul_(_FIRST)
        state.bitwise_xor_(state >> 27).mul_(_SECOND)
        total += state.bitwise_xor_(state >> 31).sum()
    return total


def parts_of(engine: Engine, *, state: bool = True) -> Iterator[PieceDigest]:
    """Yield the digests of what this rank holds of the weights and of the optimizer state. Collective: ZeRO 3 gathers the weights.

    Args:
        state: with the master weights and the state of the optimizer; otherwise only of the weights that the forward pass reads.
    """
    dtypes: dict[str, torch.dtype] = {}
    for piece, weight in engine.forward_weights():
        dtypes[piece.name] = weight.dtype
        yield PieceDigest(FORWARD, piece.name, piece.box, piece.elements, piece.elements, digest(weight))
    for fragment in engine.fragments():
        piece = fragment.piece
        if not state and piece.name in dtypes:
            continue
        tensors = {kind: values for kind, values in fragment.tensors.items() if not isinstance(values, NF4Weight)}  # frozen
        for kind, values in tensors.items():
            yield PieceDigest(kind, piece.name, piece.box, piece.elements, values.numel(), digest(values, fragment.start))
            if kind == "weight" and piece.name in dtypes:
                rounded = digest(engine.gradient_point(tensors).to(dtypes[piece.name]), fragment.start)
                yield PieceDigest(ROUNDED, piece.name, piece.box, piece.elements, values.numel(), rounded)


def scalars(values: Mapping[str, Tensor]) -> Iterator[PieceDigest]:
    """Yield the digests of numbers that are the same on every rank."""
    for name, value in values.items():
        yield PieceDigest("scalar", name, (), value.numel(), value.numel(), digest(value))


def on_host(parts: Iterable[PieceDigest]) -> list[PieceDigest]:
    """Return the parts with their digests as Python numbers; waits for each device once."""
    listed = list(parts)
    digests = [torch.as_tensor(part.digest) for part in listed]
    values: dict[int, int] = {}
    for device in {value.device for value in digests}:  # the state of an offloaded optimizer is on the host
        here = [index for index, value in enumerate(digests) if value.device == device]
        values |= zip(here, torch.stack([digests[index] for index in here]).tolist(), strict=True)
    return [PieceDigest(p.kind, p.name, p.box, p.elements, p.count, values[index]) for index, p in enumerate(listed)]


def disagreements(layout: Layout, ranks: list[list[PieceDigest]]) -> list[Disagreement]:
    """Return what differs between copies, the first weights of the model first, from the parts of every rank after `on_host`."""
    held: dict[tuple[str, str, tuple[tuple[int, int], ...]], dict[int, tuple[int, int]]] = {}
    elements: dict[tuple[str, str, tuple[tuple[int, int], ...]], int] = {}
    for rank, parts in enumerate(ranks):
        for part in parts:
            key = (part.kind, part.name, part.box)
            elements[key] = part.elements
            count, value = held.setdefault(key, {}).get(rank, (0, 0))
            held[key][rank] = (count + part.count, _wrap(value + int(part.digest)))
    copies = {key: _copies(layout, elements[key], by_rank) for key, by_rank in held.items()}
    differing = []
    for (kind, name, box), here in copies.items():
        if kind == ROUNDED:
            forward = copies.get((FORWARD, name, box), {})
            if here and forward and not set(here.values()) & set(forward.values()):
                rank = next(iter(forward))
                differing.append(Disagreement((ROUNDED,), name, "", (rank, rank)))
        elif len(set(here.values())) > 1:
            differing.append(_pair(layout, kind, name, here))
    return _by_weight(differing)


def on_any_rank(mesh: Mesh, flags: Tensor) -> list[bool]:
    """Return which flags are set on any rank of the job, bool (flags,). Collective; waits for the device."""
    raised = flags.long()
    reduce_over(mesh.all_ranks, raised, dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def gathered(lines: list[str]) -> list[str]:
    """Return the lines of all ranks, each once. Collective."""
    return list(dict.fromkeys(line for rank in gather_objects(lines) for line in rank))


def _copies(layout: Layout, elements: int, by_rank: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Return the digests of the copies by rank; of copies that ZeRO divides among ranks, by the first of these."""
    if all(count == elements for count, _ in by_rank.values()):
        return {rank: value for rank, (_, value) in by_rank.items()}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in by_rank:
        where = layout.coordinates(rank)
        groups.setdefault((where.pipeline, where.tensor, *layout.zero_group_of(where)), []).append(rank)
    digests = {}
    for members in groups.values():
        complete = sum(by_rank[rank][0] for rank in members) == elements
        digests[members[0]] = _wrap(sum(by_rank[rank][1] for rank in members)) if complete else members[0]  # incomplete: equal to no other
    return digests


def _pair(layout: Layout, kind: str, name: str, copies: dict[int, int]) -> Disagreement:
    """Name the axis of two copies that differ, if possible one axis only."""
    best: tuple[list[str], tuple[int, int]] | None = None
    for left, right in combinations(sorted(copies), 2):
        if copies[left] != copies[right]:
            here, there = asdict(layout.coordinates(left)), asdict(layout.coordinates(right))
            axes = [axis for axis in here if here[axis] != there[axis]]
            if best is None or len(axes) < len(best[0]):
                best = axes, (left, right)
    assert best is not None
    return Disagreement((kind,), name, "+".join(best[0]), best[1])


def _by_weight(disagreements: list[Disagreement]) -> list[Disagreement]:
    """Join the disagreements of a weight along the same axis."""
    joined: dict[tuple[str, str, tuple[int, int]], tuple[str, ...]] = {}
    for item in disagreements:
        key = (item.name, item.axis, item.ranks)
        joined[key] = (*joined.get(key, ()), *item.kinds)
    return [Disagreement(kinds, *key) for key, kinds in joined.items()]


def _wrap(value: int) -> int:
    """Return a sum of digests modulo 2**64, as a signed number."""
    return (value + 2**63) % 2**64 - 2**63
