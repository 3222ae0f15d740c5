"""What every rank of a large job holds of each weight, and the checkpoint that they would write, by arithmetic: no tensor, no file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.checkpoint import fragments
from pipeline.checkpoint.contents import Contents
from pipeline.checkpoint.data_file import FileEntry
from pipeline.checkpoint.fragments import Held
from pipeline.checkpoint.native import Index, TensorEntry, TrainState
from pipeline.checkpoint.parts import ITEM_SIZE, count_blocks, padded, row_dtype, sort_rows
from pipeline.config.layout import Coordinates, Layout
from pipeline.models.tensor_parallel_roles import SPLITS
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import parallelize
from pipeline.parallel.pieces import Piece, slice_weight
from pipeline.training.buckets import build_buckets, padded_elements, replica_of

KINDS = ("weight", "exp_avg", "exp_avg_sq")
DTYPES = dict.fromkeys(KINDS, "F32")
#: Bytes of a header for each tensor of a file, about.
_HEADER = 128


@dataclass(frozen=True)
class _Bucket:
    """A bucket of a pipeline rank: its pieces on tensor and expert rank 0, and whether they are of experts."""

    pieces: tuple[Piece, ...]
    experts: bool


@dataclass(frozen=True)
class Job:
    """A job that trains with ZeRO 1 to 3.

    Attributes:
        config: its checked configuration.
        layout: its layout.
    """

    config: Any
    layout: Layout

    @cached_property
    def _buckets(self) -> list[list[_Bucket]]:
        """The buckets of each pipeline rank, from the engine's own code on a fake process group."""
        found = []
        for pipeline in range(self.layout.pipeline):
            device = meshes.init_fake(self.layout.rank(Coordinates(pipeline, 0, 0, 0, 0)), self.layout.world_size)
            try:
                mesh = meshes.build_mesh(self.layout, device)
                buckets = build_buckets(parallelize(self.config, mesh), mesh, sequence_parallel=self.config.parallel.sequence_parallel)
                found.append([_Bucket(tuple(b.pieces.values()), b.group == mesh.data != mesh.dense) for b in buckets])
            finally:
                meshes.destroy_process_group()
        return found

    def held(self, rank: int) -> list[Held]:
        """What a rank holds: a run of each weight in its partitions."""
        where, layout = self.layout.coordinates(rank), self.layout
        axes = {"tensor": (layout.tensor, where.tensor), "expert": (layout.expert, where.expert)}
        mesh: Any = SimpleNamespace(layout=layout, coordinates=where)
        held = []
        for bucket in self._buckets[where.pipeline]:
            ranks, index = layout.data * layout.context, where.data * layout.context + where.context
            if not bucket.experts:
                ranks, index = ranks * layout.expert, (where.data * layout.expert + where.expert) * layout.context + where.context
            pieces = [self._piece(piece, axes, folded=layout.folded) for piece in bucket.pieces]
            partition, offset = padded_elements(sum(piece.elements for piece in pieces), ranks) // ranks, 0
            members: Any = SimpleNamespace(pieces=dict(enumerate(pieces)), replicas=None, replica=0)
            for own in pieces:
                first, last = (min(max(border * partition - offset, 0), own.elements) for border in (index, index + 1))
                offset += own.elements
                if first < last:
                    sliced = SPLITS[own.role].get("tensor", 0)
                    replica, replicas, group = replica_of(own, mesh, members)
                    held.append(Held(own.name, own.full_shape, own.box, first, last - first, DTYPES, sliced, replicas, replica, group))
        return held

    @staticmethod
    def _piece(piece: Piece, axes: dict[str, tuple[int, int]], *, folded: bool) -> Piece:
        """The piece of another tensor and expert rank."""
        own = slice_weight(piece.name, piece.full_shape, piece.role, axes, folded=folded)
        return replace(own, shared=piece.shared, copy=piece.copy)


def store(job: Job) -> Contents:
    """The checkpoint that all ranks of a job write."""
    names: dict[str, int] = {}
    rows, files, shapes = [], [], {}
    for rank in range(job.layout.world_size):
        parts = [share.part for share in fragments.plan(job.held(rank))]
        own = np.zeros(len(parts), row_dtype(len(KINDS)))
        end, blocks = 8 + _HEADER * len(parts) * len(KINDS), 0
        for column, kind in enumerate(KINDS):
            for row, part in zip(own, parts, strict=True):
                row["offset"][column], row["block"][column] = end, blocks
                end += part.bytes(kind)
                blocks += count_blocks(part.bytes(kind), part.block_bytes, part.before(kind))
        for row, part in zip(own, parts, strict=True):
            row["tensor"], row["file"] = names.setdefault(part.name, len(names)), rank
            row["box_start"], row["box_stop"] = padded(part.box)
            row["start"], row["count"] = part.start, part.count
            shapes[part.name] = part.shape, part.block_bytes
        rows.append(own)
        files.append(FileEntry(f"rank-{rank:05d}.safetensors", end + 8 * blocks, "", blocks))
    every = sort_rows(np.concatenate(rows))
    ends = np.searchsorted(every["tensor"], np.arange(len(names)), side="right").tolist()
    spans = zip([0, *ends], ends, strict=False)
    tensors = {
        name: TensorEntry(shapes[name][0], DTYPES, shapes[name][1], span, "0" * 16, {}) for name, span in zip(names, spans, strict=True)
    }
    return Contents(Index(TrainState(), {}, kinds=list(KINDS), files=files, tensors=tensors), every)


def state_bytes(held: list[Held]) -> int:
    """Bytes of what a rank holds."""
    return sum(each.count * ITEM_SIZE[dtype] for each in held for dtype in each.dtypes.values())
