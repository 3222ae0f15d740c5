"""Context-parallel attention: ring and ulysses on several ranks equal the reference formula on one."""

from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers import document_segments
from pipeline.layers.attention import plain, sdpa
from pipeline.layers.mask import Mask
from pipeline.layers.position_bias import AlibiSlopes
from pipeline.parallel import mesh as meshes


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
    from pipeline.parallel.ring_attention import RingCore
    from pipeline.parallel.ulysses import UlyssesCore

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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@settings(deadline=None, max_examples=8)
@given(case=CASES)
def test_attention_over_sharded_sequences_equals_the_reference(world, kind, ranks, case):
    for gaps in world.run(_gaps, kind, ranks, case):
        assert max(gaps) < 1e-12
