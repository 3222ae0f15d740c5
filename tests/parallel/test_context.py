"""Context-parallel attention: ring, ulysses and linear attention on several ranks equal the reference formula on one."""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers import document_segments
from pipeline.layers.attention import AttentionContext, plain, sdpa
from pipeline.layers.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from pipeline.layers.mamba2 import Mamba2
from pipeline.layers.mask import Mask
from pipeline.layers.position_bias import AlibiSlopes
from pipeline.layers.recurrent import RecurrentLayer
from pipeline.parallel import mesh as meshes
from tests.helpers import one_in
from tests.world import Observed


@cache
def _context(ranks: int):
    """The context group of this rank, for groups of size `ranks`."""
    from pipeline.config.layout import Layout

    layout = Layout(1, dist.get_world_size() // ranks, 1, context=ranks)
    return meshes.build_mesh(layout, torch.device("cpu")).context


def _own(kind: str, group, tokens: int) -> torch.Tensor:
    """The positions of this rank's tokens."""
    from pipeline.parallel.ring_layout import token_positions

    if kind == "ring":
        return token_positions(group.rank(), group.size(), tokens // group.size(), torch.device("cpu"))
    return torch.arange(tokens).chunk(group.size())[group.rank()]


def _whole(case: dict) -> tuple[list[torch.Tensor], Mask, torch.Tensor]:
    """Queries, keys and values of full sequences, the mask, and the gradient of the output."""
    chance = torch.Generator().manual_seed(case["tokens"])
    batch, tokens, heads = 2, case["tokens"], case["kv_heads"] * case["groups"]
    shapes = (heads, case["width"]), (case["kv_heads"], case["width"]), (case["kv_heads"], case["value_width"])
    inputs = [torch.randn(batch, h, tokens, d, generator=chance, dtype=torch.float64) for h, d in shapes]
    grad = torch.randn(batch, heads, tokens, case["value_width"], generator=chance, dtype=torch.float64)
    ends = torch.rand(batch, tokens, generator=chance) < 0.2
    mask = Mask(
        documents=ends.int().cumsum(1) if case["documents"] else None,
        slopes=AlibiSlopes(heads)() if case["scores"] == "slopes" else None,
        softcap=0.7 if case["scores"] == "softcap" else None,
        prefix=torch.tensor([tokens // 3, tokens // 2]) if case["prefix"] else None,
    )
    return inputs, mask, grad


def _gaps(kind: str, ranks: int, case: dict) -> list[float]:
    """Largest differences of the output and of the gradients of q, k, v from the reference, at this rank's tokens."""
    from pipeline.parallel.context_parallel import UlyssesCore
    from pipeline.parallel.ring_attention import RingCore

    group = _context(ranks)
    inputs, mask, grad = _whole(case)
    options = {"window": case["window"], "scale": case["scale"]}
    core = RingCore(group) if kind == "ring" else UlyssesCore(sdpa, group)
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = plain(*whole, mask, **options)
    wanted = (expected, *torch.autograd.grad(expected, whole, grad))

    rows = _own(kind, group, case["tokens"])
    mine = [x[:, :, rows].requires_grad_() for x in inputs]
    documents = None if mask.documents is None else mask.documents[:, rows]
    positions = rows.expand(2, -1)
    with mock.patch.object(document_segments, "SHORT", case["short"]):
        out = core(*mine, mask.replace(documents=documents, positions=positions), **options)
        found = (out, *torch.autograd.grad(out, mine, grad[:, :, rows]))
    return [float((a - b[:, :, rows]).detach().abs().max()) for a, b in zip(found, wanted, strict=True)]


CASES = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([8, 24, 40]),
        "kv_heads": st.sampled_from([4, 8]),
        "groups": st.sampled_from([1, 2]),
        "width": st.sampled_from([4, 8]),
        "value_width": st.sampled_from([4, 8]),
        "window": st.sampled_from([None, None, 1, 3, 7, 64]),
        "scale": st.sampled_from([None, 0.3]),
        "documents": st.booleans(),
        "short": st.sampled_from([1, 3, 128]),  # of documents, those that the unfused formula computes
        "scores": st.sampled_from([None, None, "slopes", "slopes", "softcap"]),
        "prefix": st.sampled_from([False, False, True]),
    }
)


@pytest.mark.parametrize("kind, ranks", one_in(2, [("ring", 4), ("ring", 2), ("ulysses", 2), ("ulysses", 4)]))
@settings(deadline=None, max_examples=8)
@given(case=CASES)
def test_attention_over_sharded_sequences_equals_the_reference(world, kind, ranks, case):
    for gaps in world.run(_gaps, kind, ranks, case):
        assert max(gaps) < 1e-12


def _linear(kernel: int, dtype: torch.dtype = torch.float64, kind: str = "delta rule") -> RecurrentLayer:
    """A layer with linear attention, of one decay for each head or several, or Mamba-2."""
    layer: RecurrentLayer = GatedDeltaNet(12, 2, 4, key_dim=5, value_dim=3, kernel=kernel)
    if kind == "kimi":
        layer = KimiDeltaAttention(12, 3, 4, kernel=kernel)
    if kind == "mamba":
        layer = Mamba2(12, 4, 2, head_dim=3, state=5, kernel=kernel)
    layer = layer.to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return layer


def _linear_gaps(kind: str, ranks: int, case: dict) -> list[float]:
    """Largest differences of the output, of the gradient of the input, and of the gradients of the weights summed over the ranks."""
    from pipeline.parallel import context_parallel

    group, chance = _context(ranks), torch.Generator().manual_seed(case["seed"])
    tokens, layer = 2 * ranks * case["half"], _linear(case["kernel"], kind=case["layer"])
    x, grad = (torch.randn(2, tokens, 12, generator=chance, dtype=torch.float64) for _ in range(2))
    documents = (torch.rand(2, tokens, generator=chance) < case["ends"]).int().cumsum(1) if case["ends"] else None
    if documents is not None:
        documents[1, tokens - case["padding"] :] = -1
    whole = x.clone().requires_grad_()
    expected = layer(whole, None, AttentionContext(Mask(documents=documents)))
    wanted = torch.autograd.grad(expected, [whole, *layer.parameters()], grad)

    rows = _own(kind, group, tokens)
    context_parallel.apply(layer, group, kind)
    mine = x[:, rows].requires_grad_()
    mask = Mask(documents=None if documents is None else documents[:, rows])
    out = layer(mine, None, AttentionContext(mask))
    found = torch.autograd.grad(out, [mine, *layer.parameters()], grad[:, rows])
    for weight in found[1:]:
        dist.all_reduce(weight, group=group)
    pairs = [(out, expected[:, rows]), (found[0], wanted[0][:, rows]), *zip(found[1:], wanted[1:], strict=True)]
    return [float((a - b).detach().abs().max()) for a, b in pairs]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", one_in(2, ["ring", "ulysses"]))
@settings(deadline=None, max_examples=12)
@given(
    case=st.fixed_dictionaries(
        {
            "layer": st.sampled_from(["delta rule", "kimi", "mamba"]),
            "half": st.sampled_from([1, 2, 3, 9, 70]),  # parts that are shorter than the convolution, and longer than a chunk
            "kernel": st.sampled_from([1, 2, 4]),
            "ends": st.sampled_from([0.0, 0.02, 0.2, 0.6]),
            "padding": st.sampled_from([0, 2, 5]),
            "seed": st.integers(0, 1000),
        }
    )
)
def test_linear_attention_over_sharded_sequences_equals_one_process(world, kind, ranks, case):
    """The convolution, the state and the documents go on over the ends of the parts, as do the gradients."""
    for gaps in world.run(_linear_gaps, kind, ranks, case):
        assert max(gaps) < 1e-9


def _sent(kind: str, tokens: int) -> dict[str, list[int]]:
    """What a rank of four passes to the collectives of a forward and a backward pass of two sequences with documents."""
    from pipeline.parallel import context_parallel

    group, layer = _context(4), _linear(4, torch.bfloat16)
    context_parallel.apply(layer, group, kind)
    x = torch.ones(2, tokens // 4, 12, dtype=torch.bfloat16, requires_grad=True)
    sent: dict[str, list[int]] = {}

    def note(operator: Any, args: Any, _result: Any) -> None:
        name = operator.name().partition("::")
        if name[0] == "_c10d_functional" and not name[2].startswith("wait"):
            sent.setdefault(name[2], []).append(args[0].nbytes)

    with Observed(note):
        layer(x, None, AttentionContext(Mask(documents=torch.zeros(2, tokens // 4, dtype=torch.int32)))).sum().backward()
    return sent


@pytest.mark.parametrize("kind, parts", [("ring", 2), ("ulysses", 1)])
def test_what_linear_attention_sends_does_not_depend_on_the_length(world, kind, parts):
    """The last inputs and documents of the parts, and for each of 4 heads a map in fp32; the gradients are those of all ranks."""
    inputs = 2 * parts * 3 * (2 * 10 + 12) * 2
    documents, maps = 2 * parts * 4 * 4, 2 * parts * 4 * 5 * (5 + 3) * 4
    expected = {"all_gather_into_tensor": sorted([inputs, documents, maps]), "reduce_scatter_tensor": sorted([4 * inputs, 4 * maps])}
    for tokens in (64, 512):
        for found in world.run(_sent, kind, tokens):
            assert {name: sorted(sizes) for name, sizes in found.items()} == expected
