"""The mapping between our weights and Hugging Face tensors, in both directions."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models import registry
from pipeline.models.config_classes import CONFIG_CLASSES
from pipeline.models.stock_tensors import BlockTensors, StockTensor, expand, tensors

SIZES = st.integers(1, 4)


class Sizes:
    """The fields of a configuration that a table uses."""

    layers, heads, experts, encoder_blocks, decoder_blocks = 3, 2, 2, 1, 2


@given(parts=st.integers(1, 3), groups=st.integers(1, 3), width=SIZES, inputs=SIZES, transposed=st.booleans())
def test_from_hf_is_the_inverse_of_to_hf(parts, groups, width, inputs, transposed):
    entry = StockTensor("w", tuple("abc"[:parts]), transposed, groups=groups)
    ours = [torch.randn(groups * width, inputs) for _ in range(parts)]
    shapes = [tuple(weight.shape) for weight in ours]
    theirs = entry.to_hf(ours)
    assert tuple(theirs.shape) == entry.shape(shapes)
    assert all(torch.equal(back, weight) for back, weight in zip(entry.from_hf(theirs, shapes), ours, strict=True))


def test_fused_parts_may_have_different_sizes():
    entry = StockTensor("qkv", ("q", "k", "v"), transposed=True)
    ours = [torch.randn(rows, 3) for rows in (8, 2, 2)]
    theirs = entry.to_hf(ours)
    assert theirs.shape == (3, 12)
    assert all(torch.equal(back, weight) for back, weight in zip(entry.from_hf(theirs, [(8, 3), (2, 3), (2, 3)]), ours, strict=True))


def test_interleaved_heads():
    """The Hugging Face tensor is (heads, 3, head_dim, hidden): the first head of q, of k, of v, then the second of each."""
    entry = StockTensor("qkv", ("q", "k", "v"), interleaved="heads").for_config(Sizes)
    q, k, v = (torch.tensor([[10.0 * n + 1], [10.0 * n + 2]]) for n in (1, 2, 3))
    assert entry.to_hf([q, k, v]).flatten().tolist() == [11, 21, 31, 12, 22, 32]


def test_experts_are_slices():
    stack = torch.randn(2, 3, 4)
    entry = StockTensor("experts.{e}.w", ("up",), transposed=True).for_expert(1)
    assert entry.hf_name == "experts.1.w"
    assert entry.shape([(2, 3, 4)]) == (4, 3)
    assert torch.equal(entry.to_hf([stack]), stack[1].t())
    assert torch.equal(entry.from_hf(stack[1].t(), [(2, 3, 4)])[0], stack[1])


def test_a_constant_has_no_weight_of_ours():
    entry = StockTensor("h.{i}.act.beta", (), constant=0.5).for_block(1, 1)
    assert (entry.hf_name, entry.shape([]), prod(entry.shape([]))) == ("h.1.act.beta", (), 1)
    assert entry.to_hf([]).item() == 0.5


def test_a_table_is_expanded_in_order():
    table = (
        *tensors("first", "embed"),
        *tensors("h.{i}.a", "blocks.{i}.x"),
        *tensors("h.{i}.b", "blocks.{i}.y"),
        *tensors("enc.{encoder}", "blocks.{encoder}.z"),
        *tensors("dec.{decoder}", "blocks.{decoder}.z"),
        BlockTensors(tensors("h.{i}.e.{e}", "blocks.{i}.up"), lambda _: [(1, 1)], experts="experts"),
        *tensors("last", "head"),
    )
    found = [
        (entry.hf_name.removesuffix(".weight"), entry.names[0].removesuffix(".weight"), entry.expert) for entry in expand(table, Sizes)
    ]
    assert found == [
        ("first", "embed", None),
        *[(f"h.{i}.{a}", f"blocks.{i}.{x}", None) for i in range(3) for a, x in ("ax", "by")],
        ("enc.0", "blocks.0.z", None),
        ("dec.0", "blocks.1.z", None),
        ("dec.1", "blocks.2.z", None),
        ("h.1.e.0", "blocks.1.up", 0),
        ("h.1.e.1", "blocks.1.up", 1),
        ("last", "head", None),
    ]


def test_both_lists_of_families_agree():
    """One loads torch, the other does not."""
    assert {name: family.config for name, family in registry.FAMILIES.items()} == CONFIG_CLASSES
