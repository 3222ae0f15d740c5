"""The traced weights, state and exchanges of a rank, by independent arithmetic and by the real engine."""

import pytest

from pipeline.config.layout import Coordinates, Layout
from pipeline.parallel import mesh as meshes
from pipeline.planner.engine_model import engine_model
from pipeline.planner.plan import hidden_states
from pipeline.planner.planned_buckets import planned_buckets, rank_weights
from pipeline.planner.state_memory import model_state, state_format_of
from pipeline.planner.trace import hidden_bytes, trace
from pipeline.training.trainer import Trainer
from tests.world import configured

#: Published number of parameters.
LLAMA3_70B = 70_553_706_496


def test_the_weights_and_the_exchanges_of_a_job_of_zero_3():
    words = ("model=llama3-70b", "parallel.zero_stage=3", "training.micro_batch_size=1", "training.global_batch_size=1024")
    config = configured("stage=pretrain", *words, "training.sequence_length=4096")
    layout, traced = Layout.of(config, 64), trace(config)
    assert sum(weights.elements for _, weights in rank_weights(traced, layout, layout.stages(0))) == LLAMA3_70B
    state = model_state(planned_buckets(traced, layout, layout.stages(0)), state_format_of(config, layout))
    assert state.total == state.weights + state.gradients + state.optimizer
    # In each of 16 micro-batches, fp32 gradients are reduced and bf16 weights gathered twice; head and embedding once, vectors once a step.
    tables, vectors = 128_256 * 8192, (2 * 80 + 1) * 8192
    blocks = LLAMA3_70B - 2 * tables - vectors
    expected = 16 * 4 * LLAMA3_70B + 16 * 2 * (2 * blocks + 2 * tables) + 2 * vectors
    buckets, sent = planned_buckets(traced, layout, layout.stages(0), 3), (hidden_bytes(config), hidden_states(config))
    exchanges = engine_model(state_format_of(config)).step_exchanges(buckets, layout, 0, 3, *sent, reference=False)
    assert {exchange.collective.axis.partition("_")[0] for exchange in exchanges} == {"dense"}
    whole = sum(exchange.count * exchange.collective.bytes for exchange in exchanges)
    twice = sum(exchange.count * exchange.collective.bytes for exchange in exchanges if exchange.collective.kind == "all_reduce")
    assert whole + twice == pytest.approx(expected, rel=1e-6)


def test_the_weights_of_a_pipeline_rank_and_its_experts():
    words = ("model=mixtral-8x22b", "parallel.expert=8", "parallel.pipeline=4", "parallel.tensor=2", "training.sequence_length=4096")
    config = configured("stage=pretrain", *words, "training.micro_batch_size=1", "training.global_batch_size=128")
    layout = Layout.of(config, 128)
    held = [weights for _, weights in rank_weights(trace(config), layout, layout.stages(0))]
    hidden, width = 6144, 16384
    assert sum(w.elements for w in held if w.axis == "data") == 14 * 3 * hidden * width // 2  # of 8 experts, with half of each matrix
    attention = (2 * hidden * hidden + 2 * hidden * 8 * 128) // 2  # eight key and value heads of width 128
    dense = 14 * (attention + 8 * hidden + 2 * hidden) + 32000 * hidden // 2
    assert sum(w.elements for w in held if w.axis == "dense") == pytest.approx(dense, abs=hidden)


def held_bytes(config, layout, rank):
    """Bytes of the weights and of the optimizer state of a rank's engine, of which no other rank exists."""
    device = meshes.init_rehearsed(rank, layout.world_size)
    try:
        engine = Trainer(config, meshes.build_mesh(layout, device)).engine
        kept = [*engine.model.parameters(), *engine.partitions(), *(t for f in engine.fragments() for t in f.tensors.values())]
    finally:
        meshes.destroy_process_group()
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values())


@pytest.mark.parametrize(
    "words",
    [
        ("model=mixtral-tiny", "parallel.expert=2", "parallel.pipeline=2", "parallel.zero_stage=1"),
        ("model=gpt-tiny", "parallel.tensor=2", "parallel.pipeline=2", "parallel.zero_stage=3"),  # a tied embedding
        ("model=t5-tiny", "parallel.pipeline=2", "parallel.zero_stage=0"),  # biases of all stages
        ("model=llama-tiny", "optimizer=muon", "parallel.pipeline=2", "parallel.zero_stage=2"),
        ("model=llama-tiny", "optimizer.state_dtype=bf16", "parallel.pipeline=2", "parallel.zero_stage=1"),
    ],
    ids=" ".join,
)
def test_the_planned_state_of_every_pipeline_rank_is_what_its_engine_holds(words):
    config = configured("stage=pretrain", *words, "training.sequence_length=64", "training.micro_batch_size=1", "precision=bf16")
    layout, traced = Layout.of(config, 8), trace(config)
    for pipeline in range(2):
        state = model_state(planned_buckets(traced, layout, layout.stages(pipeline)), state_format_of(config, layout))
        assert held_bytes(config, layout, layout.rank(Coordinates(pipeline, 0, 0, 0, 0))) == state.weights + state.optimizer
