"""The layout: ranks and coordinates are one-to-one, each layer is in one stage, and each element of a weight in one piece."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.layout import Layout
from pipeline.models.tensor_parallel_roles import SPLITS
from pipeline.parallel.pieces import slice_weight

SIZES = st.integers(1, 6)
#: Layouts have up to thousands of ranks, and the machine may be busy.
UNTIMED = settings(deadline=None)


@UNTIMED
@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_ranks_and_coordinates_are_one_to_one(pipeline, data, tensor, expert, context):
    layout = Layout(pipeline, data, tensor, expert, context)
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(coordinates)) == layout.world_size
    assert [layout.rank(c) for c in coordinates] == list(range(layout.world_size))
    assert {layout.batch_shard(c) for c in coordinates} == set(range(layout.batch_shards))


@UNTIMED
@given(st.integers(2, 8), st.sampled_from(["1f1b", "interleaved", "zbv"]), st.integers(2, 4), st.integers(0, 40))
def test_every_layer_is_in_one_stage_and_every_stage_on_one_rank(pipeline, schedule, turns, more):
    turns = {"1f1b": 1, "zbv": 2}.get(schedule, turns)
    layout = Layout(pipeline, 1, 1, schedule=schedule, stages_per_rank=turns)
    layers = layout.stage_count + more
    placed = [layer for stage in range(layout.stage_count) for layer in layout.layers(stage, layers)]
    assert placed == list(range(layers))
    sizes = [len(layout.layers(stage, layers)) for stage in range(layout.stage_count)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes), "the first stage also holds the embedding"
    assert sorted(s for rank in range(pipeline) for s in layout.stages(rank)) == list(range(layout.stage_count))
    assert all(stage in layout.stages(layout.holder(stage)) for stage in range(layout.stage_count))


def test_zbv_has_the_first_and_last_stage_on_the_first_rank():
    layout = Layout(4, 1, 1, schedule="zbv", stages_per_rank=2)
    assert [layout.stages(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


ROLES = st.sampled_from(sorted(SPLITS))


@UNTIMED
@given(SIZES, SIZES, st.integers(1, 20), ROLES, st.booleans())
def test_pieces_cover_a_weight_without_overlap(tensor, expert, width, role, folded):
    shapes = {"vocab": (width, width), "expert": (expert * tensor, width * tensor, width * tensor)}
    shape = shapes.get(role.partition("_")[0], (width * tensor, width * tensor))
    full = torch.arange(math.prod(shape)).view(shape)
    ranks = [{"tensor": (tensor, t), "expert": (expert, e)} for t in range(tensor) for e in range(expert)]
    pieces = [slice_weight("w", shape, role, axes, folded=folded) for axes in ranks]
    assert all(tuple(piece.narrow(full).shape) == piece.shape for piece in pieces)
    counted = [
        p for p, axes in zip(pieces, ranks, strict=True) if all(p.is_sliced_along(axis) or at == 0 for axis, (_, at) in axes.items())
    ]
    assert sorted(torch.cat([piece.narrow(full).flatten() for piece in counted]).tolist()) == full.flatten().tolist()
    if folded and role.startswith("expert"):
        in_order = sorted(pieces, key=lambda piece: piece.start(0))
        assert in_order == sorted(pieces, key=lambda piece: [s.start for s in piece.slices]), "expert ranks first"
        assert all(piece.shape == (1, *shape[1:]) for piece in pieces), "whole experts"
