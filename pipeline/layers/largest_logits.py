"""The largest attention logit of every head in the micro-batches of a step, measured beside any attention core."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipeline.layers import attention_kernel
from pipeline.layers.attention import Core, repeat_kv
from pipeline.layers.mask import Mask

#: Queries whose logits are computed at a time: all of them would take memory in proportion to the square of the sequence.
BLOCK = 256


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> Tensor:
    """Return the largest logit of every head over the pairs that attend, at least 0: fp32 (heads,).

    A logit is the scaled product of a query and a key, without biases and without a soft cap, none of which depend on the weights of both.

    Args:
        q, k, mask, window, scale: see Core.
    """
    queries, keys = q.shape[2], k.shape[2]
    k, _ = repeat_kv(q, k, k)
    query_positions, key_positions = mask.token_positions(queries, keys, q.device)
    key_documents = mask.documents if mask.key_documents is None else mask.key_documents
    # Later keys than those of the block need no product.
    triangular = mask.causal and mask.prefix is None and mask.positions is None and mask.key_positions is None and queries == keys
    largest = torch.zeros(q.shape[1], dtype=torch.float32, device=q.device)
    for start in range(0, queries, BLOCK):
        rows, last = slice(start, min(start + BLOCK, queries)), min(start + BLOCK, queries) if triangular else keys
        part = mask.replace(
            positions=query_positions[:, rows],
            key_positions=key_positions[:, :last],
            documents=None if mask.documents is None else mask.documents[:, rows],
            key_documents=None if key_documents is None else key_documents[:, :last],
        )
        logits = q[:, :, rows] @ k[:, :, :last].transpose(2, 3)
        allowed = part.visible(logits.shape[2], last, q.device, window)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, 0.0)
        largest = torch.maximum(largest, logits.amax(dim=(0, 2, 3)).float())
    return largest * (1 / math.sqrt(q.shape[3]) if scale is None else scale)


class MeasuringCore:
    """A core that also measures `largest_logits` of training. See Core for the interface.

    Args:
        core: computes the attention.
        heads: of this rank.
        device: of the model.

    Attributes:
        largest: fp32 (heads,), over the backward passes since `take`.
    """

    def __init__(self, core: Core, heads: int, device: torch.device) -> None:
        self.core, self.largest = core, torch.zeros(heads, dtype=torch.float32, device=device)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See Core."""
        output = self.core(q, k, v, mask, window=window, scale=scale, sinks=sinks)
        if not torch.is_grad_enabled():
            return output
        noted: Tensor = _Note.apply(output, largest_logits(q, k, mask, window=window, scale=scale), self.largest)
        return noted

    def prepare(
        self, mask: Mask, window: int | None, shape: tuple[int, int, int] | None, device: torch.device, *, sinks: bool = False
    ) -> None:
        """See prepare (layers/attention_kernel.py)."""
        attention_kernel.prepare(self.core, mask, window, shape, device, sinks=sinks)

    def take(self) -> Tensor:
        """Return `largest` and reset it."""
        largest = self.largest.clone()
        self.largest.zero_()
        return largest


class _Note(torch.autograd.Function):
    """Identity whose backward pass notes what was measured: that runs once, and a forward pass without one is not of training."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, largest: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(largest)
        ctx.total = total  # not saved as a tensor: other micro-batches change it in the meantime
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (largest,) = ctx.saved_tensors
        if torch.compiler.is_compiling():
            # Depends on the gradient: the compiler may compute all else in the forward pass, before other micro-batches change the total.
            largest = torch.where(grad.flatten()[:1].isnan(), largest, largest)
        ctx.total.copy_(torch.maximum(ctx.total, largest))
        return grad, None, None
