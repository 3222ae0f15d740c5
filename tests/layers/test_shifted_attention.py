"""Shifted sparse attention equals attention with a dense mask for each head."""

import pytest
import torch

from pipeline.layers.attention import plain, sdpa
from pipeline.layers.mask import Mask
from pipeline.layers.position_bias import AlibiSlopes
from pipeline.layers.shifted_attention import ShiftedSparseAttention

BATCH, HEADS, TOKENS, GROUP, WIDTH = 2, 4, 24, 6, 8


def dense(q, k, v, mask, window, plain_heads):
    """The formula with a mask for each head, built from the definition: same group, no later token, same document."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    place = torch.arange(TOKENS)
    positions = place.expand(BATCH, -1) if mask.positions is None else mask.positions
    distance = positions[:, :, None] - positions[:, None, :]
    allowed = torch.stack([(place + shift)[:, None] // GROUP == (place + shift)[None] // GROUP for shift in (0, GROUP // 2)])
    allowed = torch.cat([allowed[:1].expand(plain_heads, -1, -1), allowed[1:].expand(HEADS - plain_heads, -1, -1)])
    allowed = allowed[None] & (distance >= 0)[:, None]
    if mask.documents is not None:
        allowed = allowed & (mask.documents[:, :, None] == mask.documents[:, None, :])[:, None]
    if window is not None:
        allowed = allowed & (distance < window)[:, None]
    scores = q @ k.transpose(2, 3) / WIDTH**0.5
    if mask.slopes is not None:
        scores = scores - mask.slopes[None, :, None, None] * distance[:, None].abs()
    return scores.masked_fill(~allowed, -torch.inf).softmax(dim=3) @ v


@pytest.mark.parametrize("core", [sdpa, plain])
@pytest.mark.parametrize("kv_heads, plain_heads", [(4, 2), (2, 2), (1, 2), (2, 1), (4, 0), (4, 4)])
@pytest.mark.parametrize("kind", ["causal", "packed", "window", "alibi"])
def test_groups_equal_a_dense_mask(core, kv_heads, plain_heads, kind):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, heads, TOKENS, WIDTH, generator=generator, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads))
    mask, window = Mask(), 3 if kind == "window" else None
    if kind == "packed":  # examples that do not end with groups, and padding
        documents = torch.tensor([[0] * 10 + [1] * 14, [0] * 5 + [1] * 8 + [-1] * 11])
        positions = torch.cat([torch.arange(n) for n in (10, 14, 5, 8, 11)]).view(BATCH, TOKENS)
        mask = Mask(documents=documents, positions=positions)
    if kind == "alibi":
        mask = Mask(slopes=AlibiSlopes(HEADS)())
    shifted = ShiftedSparseAttention(core, GROUP, plain_heads)
    found, expected = shifted(q, k, v, mask, window=window), dense(q, k, v, mask, window, plain_heads)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_short_sequences_and_validation_have_full_attention():
    q = k = v = torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    shifted, full = ShiftedSparseAttention(sdpa, GROUP, 2), sdpa(q, k, v, Mask())
    assert not torch.allclose(shifted(q, k, v, Mask()), full)
    short = slice(0, GROUP)
    torch.testing.assert_close(shifted(q[:, :, short], k[:, :, short], v[:, :, short], Mask()), full[:, :, short])
    shifted.enabled = False
    assert torch.equal(shifted(q, k, v, Mask()), full)
