"""tools/audit_scale: its bytes by independent arithmetic, and the parts of the model that they follow from."""

import json

import pytest

from pipeline.config.layout import Coordinates, Layout
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import parallelize
from pipeline.planner.state_memory import rank_state
from pipeline.planner.trace import trace
from tests.helpers import ROOT, python
from tests.world import configured
from tools.audit import scale

#: Published numbers of parameters.
LLAMA3_70B = 70_553_706_496
GIB = 2**30


def test_a_table_of_one_case(tmp_path):
    code, printed = python(ROOT / "tools" / "audit_scale", "--case=llama3-70b 64 zero", f"--json={tmp_path}/rows.json")
    assert code == 0, printed
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["parameters"] == LLAMA3_70B
    assert row["fsdp2"] == 16 * LLAMA3_70B / 64
    assert row["megatron"] == 6 * LLAMA3_70B + 12 * LLAMA3_70B / 64
    assert row["total"] == row["weights"] + row["gradients"] + row["optimizer"]
    assert row["groups"] <= 8
    # In each of 16 micro-batches, fp32 gradients are reduced and bf16 weights gathered twice; head and embedding once, vectors once a step.
    tables = 128_256 * 8192
    vectors = (2 * 80 + 1) * 8192
    blocks = LLAMA3_70B - 2 * tables - vectors
    sent = 63 / 64 * (16 * 4 * LLAMA3_70B + 16 * 2 * (2 * blocks + 2 * tables) + 2 * vectors)
    assert row["data"] == pytest.approx(sent, rel=1e-6)
    assert row["tensor"] == row["context"] == row["expert"] == row["pipeline"] == 0
    assert f"{row['total'] / GIB:9.2f}" in printed
    assert python(ROOT / "tools" / "audit_scale", "--case=nothing")[0] == 2


def test_the_fullest_rank_of_a_pipeline_and_its_experts():
    words = ("model=mixtral-8x22b", "parallel.expert=8", "parallel.pipeline=4", "parallel.tensor=2", "training.sequence_length=4096")
    config = configured("stage=pretrain", *words, "training.micro_batch_size=1", "training.global_batch_size=128")
    layout = Layout.of(config, 128)
    traced = trace(config)
    rank, held = scale.fullest_rank(traced, layout)
    assert layout.coordinates(rank).pipeline == 0 or layout.coordinates(rank).pipeline == 3  # with the embedding, or norm and head
    hidden, width = 6144, 16384
    assert held.experts == 14 * 3 * hidden * width // 2  # of 56 layers and 8 experts, with half of each matrix
    attention = (2 * hidden * hidden + 2 * hidden * 8 * 128) // 2  # eight key and value heads of width 128
    assert held.dense == pytest.approx(14 * (attention + 8 * hidden + 2 * hidden) + 32000 * hidden // 2, abs=hidden)
    assert scale.megatron_bytes(config, layout, held) == 6 * held.total + 12 * (held.dense / 16 + held.experts / 2)
    assert scale.fsdp2_bytes(layout, held) == 16 * (held.dense / 16 + held.experts / 2)


@pytest.mark.parametrize(
    "words",
    [
        ("model=mixtral-tiny", "parallel.expert=2", "parallel.pipeline=2", "parallel.zero_stage=1"),
        ("model=gpt-tiny", "parallel.tensor=2", "parallel.pipeline=2", "parallel.zero_stage=3"),  # a tied embedding
        ("model=t5-tiny", "parallel.pipeline=2", "parallel.zero_stage=0"),  # biases of all stages
    ],
)
def test_the_traced_state_of_every_pipeline_rank_is_that_of_its_part_of_the_model(words):
    config = configured("stage=pretrain", *words, "training.sequence_length=64", "training.micro_batch_size=1", "precision=bf16")
    layout = Layout.of(config, 8)
    traced = trace(config)
    for pipeline in range(2):
        rank = layout.rank(Coordinates(pipeline, 0, 0, 0, 0))
        device = meshes.init_fake(rank, layout.world_size)
        try:
            mesh = meshes.build_mesh(layout, device)
            real = rank_state(config, parallelize(config, mesh), mesh)
        finally:
            meshes.destroy_process_group()
        planned = scale.planned_state(config, traced, layout, rank)
        assert planned == real
