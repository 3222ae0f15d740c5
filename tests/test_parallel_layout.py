"""The layout's arithmetic: every rank has one place, every layer one stage, every element of a weight one piece."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.layout import Layout
from pipeline.parallel.pieces import cut

SIZES = st.integers(1, 6)


@given(SIZES, SIZES, SIZES)
def test_ranks_and_coordinates_are_one_to_one(pipeline, data, tensor):
    layout = Layout(pipeline, data, tensor)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))


@given(st.integers(2, 8), st.sampled_from(["1f1b", "interleaved", "zbv"]), st.integers(2, 4), st.integers(0, 40))
def test_every_layer_is_in_one_stage_and_every_stage_on_one_rank(pipeline, schedule, turns, more):
    turns = {"1f1b": 1, "zbv": 2}.get(schedule, turns)
    layout = Layout(pipeline, 1, 1, schedule, turns)
    layers = layout.stage_count + more
    placed = [layer for stage in range(layout.stage_count) for layer in layout.layers(stage, layers)]
    assert placed == list(range(layers))
    sizes = [len(layout.layers(stage, layers)) for stage in range(layout.stage_count)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes), "the first stage has the embedding on top"
    assert sorted(s for rank in range(pipeline) for s in layout.stages(rank)) == list(range(layout.stage_count))
    assert all(stage in layout.stages(layout.holder(stage)) for stage in range(layout.stage_count))


def test_v_shape_has_both_ends_on_the_first_rank():
    layout = Layout(4, 1, 1, "zbv", 2)
    assert [layout.stages(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@given(st.integers(1, 8), st.integers(1, 50), st.sampled_from(["column", "row", "vocab", "replicate"]))
def test_pieces_cover_a_weight_without_overlap(ranks, width, role):
    shape = (width, width) if role == "vocab" else (width * ranks, width * ranks)
    pieces = [cut("w", shape, role, ranks, rank) for rank in range(ranks)]
    if role == "replicate" or ranks == 1:
        assert all(piece.shape == shape for piece in pieces)
        return
    dim = 1 if role == "row" else 0
    covered = [index for piece in pieces for index in range(piece.start, piece.stop)]
    assert covered == list(range(shape[dim]))
    assert all(piece.dim == dim for piece in pieces)
