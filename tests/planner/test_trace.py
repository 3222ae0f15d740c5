"""The trace of the planner: equal to the whole model, and to the model's parameters. Collectives of a real run: test_real_run.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pipeline.config.hardware import load
from pipeline.config.layout import Layout
from pipeline.planner.flops import count_model_parameters
from pipeline.planner.operations import AttentionCall, Collective, Product
from pipeline.planner.plan import plan
from pipeline.planner.trace import hidden_bytes, trace
from tests.helpers import one_in
from tests.world import configured

FAMILIES = (
    *("gpt-tiny", "llama-tiny", "mixtral-tiny", "bert-tiny", "t5-tiny", "bloom-tiny", "gemma3-tiny", "deepseek-tiny", "olmo2-tiny"),
    *("qwen3-moe-tiny", "gpt-neox-tiny", "gemma2-tiny", "glm4-moe-tiny", "qwen3-next-tiny", "gpt-oss-tiny", "nemotron-h-tiny"),
    "gemma4-tiny",
)
ONE = ("stage=pretrain", "training.sequence_length=64", "training.micro_batch_size=2")


def sums(parts: list[Any]) -> tuple[float, int, Counter[tuple[str, str, float]]]:
    """FLOPs, saved bytes and collectives of some parts."""
    collectives = Counter((o.kind, o.axis, o.bytes) for part in parts for o in part.operations if isinstance(o, Collective))
    return sum(part.flops for part in parts), sum(part.saved for part in parts), collectives


#: The kinds of blocks: dense, with experts, of an encoder and a decoder.
KINDS = {"mixtral-tiny", "t5-tiny"}


@pytest.mark.parametrize("family", [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_one_block_of_a_kind_composes_to_the_whole_model(family):
    config = configured(f"model={family}", *ONE)
    composed, whole = trace(config), trace(config, every_block=True)
    layout = Layout.of(config, 1)
    assert len(composed.parts) < len(whole.parts) or config.model.layers == len(composed.parts) - 2
    (flops, saved, collectives), expected = sums(composed.stage_parts(layout, 0)), sums(whole.stage_parts(layout, 0))
    assert (flops, collectives) == (expected[0], expected[2])
    # The output of an encoder is saved once for all decoder blocks, and composed once for each.
    assert saved == (pytest.approx(expected[1], rel=0.01) if family == "t5-tiny" else expected[1])


@pytest.mark.parametrize("family", one_in(3, FAMILIES))
def test_parameters_are_those_of_the_model(family):
    config = configured(f"model={family}", *ONE)
    parts = trace(config).stage_parts(Layout.of(config, 1), 0)
    assert sum(part.parameters for part in parts) == count_model_parameters(config.model)


def test_products_of_a_llama_block_by_hand():
    config = configured(
        "model=llama3-8b", "stage=pretrain", "training.sequence_length=4096", "training.micro_batch_size=1", "parallel.tensor=4"
    )
    block = trace(config).parts["0"]
    forward = {p.name.removeprefix("blocks.0."): (p.m, p.n, p.k) for p in block.products if p.phase == "forward"}
    assert forward == {
        "attention.query+key+value.weight": (4096, 1536, 4096),
        "attention.output.weight": (4096, 4096, 1024),
        "mlp.gate+up.weight": (4096, 7168, 4096),
        "mlp.down.weight": (4096, 4096, 3584),
    }
    backward = [p for p in block.products if p.phase == "backward"]
    assert sum(p.flops for p in backward) == 2 * sum(p.flops for p in block.products if p.phase == "forward")
    (attention,) = (o for o in block.operations if isinstance(o, AttentionCall) and o.phase == "forward")
    assert (attention.heads, attention.kv_heads, attention.queries, attention.head_dim) == (8, 2, 4096, 128)


def test_full_recomputation_repeats_the_forward_pass_and_saves_the_input_only():
    config = configured("model=llama-tiny", *ONE, "training.activation_checkpointing=full")
    block, plain = (trace(c).parts["0"] for c in (config, configured("model=llama-tiny", *ONE)))
    assert block.saved == 2 * 64 * config.model.hidden * 2 < plain.saved  # 2 sequences of 64 tokens, 2 bytes each
    again = {p.name for p in block.products if p.phase == "recompute"}
    assert {"blocks.0.attention.query.weight", "blocks.0.mlp.up.weight"} <= again


EXPERTS = ("model=mixtral-tiny", *ONE, "precision=bf16", "parallel.expert=2")


def test_offloaded_inputs_are_in_host_memory_and_shortly_on_the_device():
    words = ("model=llama-tiny", *ONE, "parallel.pipeline=2", "training.global_batch_size=8", "training.steps=10")
    full, offload = (configured(*words, f"training.activation_checkpointing={mode}") for mode in ("full", "offload"))
    size = hidden_bytes(full)
    before, after = (trace(config).block(1) for config in (full, offload))
    assert (before.saved - after.saved, after.offloaded) == (size, size)
    assert (after.peaks[0] - before.peaks[0], after.peaks[1] - before.peaks[1]) == (size, 2 * size)
    kept, moved = (plan(config, 2, load("h100")).estimate for config in (full, offload))
    blocks = 2 * len(Layout.of(full, 2).layers(0, full.model.layers))  # two micro-batches are in flight on the first stage
    assert moved.memories[0].host == blocks * 65536, "pinned memory comes in powers of two"
    assert kept.memories[0].activations - moved.memories[0].activations == blocks * size
    assert moved.host_rate > 0
    frozen = configured(*words, "training.activation_checkpointing=offload", "training.frozen=[embed.*,blocks.0.*]")
    assert trace(frozen).block(0).offloaded == 0


def test_the_experts_of_other_ranks_are_not_compiled():
    """Their dispatch breaks the graph: the activation is kept for the backward pass, as eager blocks do; the norms' results are not."""
    config = configured(*EXPERTS, "training.compile=auto")
    compiled, eager, whole = (trace(config, **options).parts["0"] for options in ({}, {"fused": False}, {"breaks": False}))
    activation = "elementwise (silu)"
    assert compiled.producers[activation] == eager.producers[activation] > 0
    assert activation not in whole.producers
    assert whole.saved + eager.producers[activation] <= compiled.saved < eager.saved
    assert len(whole.operations) < len(compiled.operations) < len(eager.operations)


def test_selective_recomputation_leaves_blocks_with_experts_uncompiled():
    """As of `checkpoint_and_compile`; dense blocks of the same model are compiled."""
    settings = ("model=deepseek-tiny", *ONE, "training.activation_checkpointing=selective")
    compiled, eager = (trace(configured(*settings, f"training.compile={mode}")).parts for mode in ("auto", "off"))
    assert compiled["1"].operations == eager["1"].operations
    assert compiled["0"].operations != eager["0"].operations


@pytest.mark.parametrize("experts", [("model.capacity_factor=2", "parallel.expert_padding=true"), ()], ids=["padded", "any number of rows"])
def test_products_of_experts_in_fp8(experts):
    """All but those of the first and the last block are in 8 bits, with the names, sizes and numbers that they have in bf16."""
    job = ("model=mixtral-tiny", "training.sequence_length=64", "parallel.expert=2", *experts)
    found = trace(configured(*job, "precision=fp8", "precision.fp8_experts=true"))
    assert found.kinds == ("0", "1", "1", "0")
    bf16 = trace(configured(*job, "precision=bf16")).parts["0"].products
    assert found.parts["0"].products == bf16
    expected = [replace(product, name=product.name.replace("blocks.0", "blocks.1")) for product in bf16]
    expected = [replace(product, bytes_per_element=1) if "experts" in product.name else product for product in expected]

    def work(products: list[Product]) -> Counter[Any]:
        """The products in any order, without which of their two operands comes first."""
        return Counter((p.name, p.phase, p.batch, *sorted((p.m, p.n, p.k)), p.bytes_per_element) for p in products)

    assert work(found.parts["1"].products) == work(expected)
    assert sum(product.bytes_per_element == 1 for product in expected) == 9


def test_padded_experts_are_planned_with_the_rows_of_their_capacity():
    """In FLOPs, bytes of the network, and memory; blocks are one compiled graph. A capacity factor of 1 is an even load.

    Rows of buffers that belong to no token are sent, and not computed.
    """
    even, once, twice = (
        trace(configured(*EXPERTS, *padding)).parts["0"]
        for padding in ((), *(("parallel.expert_padding=true", f"model.capacity_factor={factor}") for factor in (1, 2)))
    )

    def flops(part):
        return sum(product.flops for product in part.products if "experts" in product.name)

    def sent(part):
        rows = [o.bytes for o in part.operations if isinstance(o, Collective) and o.kind == "all_to_all"]
        return sum(size for size in rows if size > max(rows) / 8)  # without the numbers of rows, and their weights

    assert 0 < flops(even) == flops(once) == flops(twice) / 2
    assert 0 < sent(even) == sent(once) == sent(twice) / 2
    assert twice.saved > once.saved
    assert "elementwise (silu)" not in once.producers
    assert len(once.operations) < len(even.operations)
    padding = "parallel.expert_padding=true"
    one, two = (trace(configured(*EXPERTS, padding, f"parallel.expert_buffer={factor}")).parts["0"] for factor in (1, 2))
    assert flops(one) == flops(two) == flops(even)
    assert sent(one) == sent(two) / 2 == sent(even)
    assert two.saved > one.saved
    assert "elementwise (silu)" not in two.producers
