"""A mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): each token goes through a few of many feed-forwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.mlp import ACTIVATIONS
from pipeline.layers.router import Balance, Router, Routing


class Experts(nn.Module):
    """Gated feed-forwards, their weights stacked along dim 0. Their number is read off the stacks, so that a part of them is right too.

    Args:
        experts: how many.
        hidden: width of a token.
        ffn_hidden: width inside each.
        activation: as in GatedMLP.
    """

    def __init__(self, experts: int, hidden: int, ffn_hidden: int, *, activation: str = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn_hidden))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Each expert on its own rows.

        Args:
            x: (rows, hidden), those of expert 0 first, then those of expert 1, ...
            counts: int64 (experts,), the rows of each.

        Returns:
            (rows, hidden). Rows that belong to no expert, at the end, are undefined.
        """
        product = grouped if x.is_cuda and x.dtype == torch.bfloat16 else looped
        inner = self.activation(product(x, self.gate, counts)) * product(x, self.up, counts)
        return product(inner, self.down, counts)


def looped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Compute x @ weights[e].T for the rows of each expert, one after the other; an expert without rows gets a gradient of zeros.

    Args:
        x: (rows, input), sorted by expert.
        weights: (experts, output, input).
        counts: int64 (experts,), rows of each; the host waits for them.

    Returns:
        (rows, output).
    """
    sizes = counts.tolist()
    parts = x.split([*sizes, x.shape[0] - sum(sizes)])
    products = [F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=False)]
    return torch.cat([*products, x.new_zeros(parts[-1].shape[0], weights.shape[1])])


def grouped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """As `looped`, in one kernel that reads the counts on the device; rows of no expert are undefined."""
    return F.grouped_mm(x, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


class MoE(nn.Module):
    """Routed experts. A token's output is the weighted sum of its experts' outputs.

    Args:
        router: chooses.
        experts: what is chosen from.
        balance: losses that join the model's loss in the backward pass.
        capacity_factor: an expert takes at most this factor times the mean load of a micro-batch, the earliest tokens first; what is
            beyond contributes nothing (Fedus et al. 2022, section 2.2). Each rank counts its own tokens. None drops nothing.

    Attributes:
        loss_scale: of the balance losses, where the model's loss is scaled too: who adds up gradients of several micro-batches sets it.
        total: as in Balance.loss; who cuts the sequences sets it.
        record: sums since `take_record`, fp32 (experts + 4,), None before the first backward pass: choices of each expert, mean entropy
            of a token's scores (nats), share of dropped choices, balance losses, micro-batches.
    """

    def __init__(self, router: Router, experts: nn.Module, *, balance: Balance | None = None, capacity_factor: float | None = None) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.balance, self.capacity_factor = balance or Balance(), capacity_factor
        self.loss_scale = 1.0
        self.total: Callable[[Tensor], Tensor] | None = None
        self.record: Tensor | None = None

    @torch.compiler.disable  # the split into experts has other sizes each time
    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """(batch, sequence, hidden) -> the same; padding tokens (document -1) go to no expert and get zeros."""
        documents = context.mask.documents if context is not None else None
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if documents is None else documents >= 0
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        count = routing.probs.shape[1]
        chosen = routing.experts.masked_fill(~real.view(-1, 1), count)
        if self.capacity_factor is not None:
            chosen = within_capacity(chosen, count, math.ceil(self.capacity_factor * chosen.numel() / count))
        mixed = self._mix(tokens, chosen, routing.weights.to(x.dtype), count)
        return self._join(mixed.view_as(x), routing, chosen, real)

    def _mix(self, tokens: Tensor, chosen: Tensor, weights: Tensor, count: int) -> Tensor:
        """Send the tokens to their experts and add up what comes back.

        Args:
            tokens: (tokens, hidden).
            chosen: int64 (tokens, top_k); `count` for no expert.
            weights: (tokens, top_k).
            count: experts.
        """
        order = chosen.flatten().argsort(stable=True)
        back = inverse(order)
        counts = loads(chosen, count)
        rows = dispatch(tokens, order, back, chosen.shape[1])
        # Also under a zero weight an undefined row would spoil the sum, and its gradient the token's.
        used = (torch.arange(len(order), device=order.device) < counts.sum()).unsqueeze(1)
        rows = rows.where(used, 0)
        rows = self.experts(rows, counts).where(used, 0)
        return (dispatch(rows, back, order).unflatten(0, chosen.shape) * weights.unsqueeze(2)).sum(dim=1)

    def _join(self, y: Tensor, routing: Routing, chosen: Tensor, real: Tensor) -> Tensor:
        """Let the balance losses into the backward pass, and note there what the routing was."""
        if not torch.is_grad_enabled():
            return y
        loss = self.balance.loss(routing, real, self.total)
        count = routing.probs.shape[1]
        with torch.no_grad():
            tokens = real.sum().clamp(min=1)
            entropy = (torch.special.entr(routing.probs).sum(dim=1) * real.flatten()).sum() / tokens
            load = loads(chosen, count)
            dropped = 1 - load.sum() / (tokens * chosen.shape[1])
            record = torch.cat([load, torch.stack([entropy, dropped, loss.detach(), torch.ones_like(loss)])]).float()
        joined: Tensor = _Join.apply(y, loss, self, record)
        return joined

    def take_record(self) -> Tensor | None:
        """The sums of `record`, which begin anew."""
        record, self.record = self.record, None
        return record


class SharedExpertMoE(nn.Module):
    """Routed experts beside one that every token goes through (Dai et al. 2024, https://arxiv.org/abs/2401.06066)."""

    def __init__(self, routed: MoE, shared: nn.Module) -> None:
        super().__init__()
        self.routed, self.shared = routed, shared

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """As MoE."""
        return self.routed(x, context) + self.shared(x)


def moe_layers(model: nn.Module) -> Iterator[MoE]:
    """The mixtures of a model, in order."""
    return (module for module in model.modules() if isinstance(module, MoE))


def loads(chosen: Tensor, count: int) -> Tensor:
    """How often each expert was chosen: (tokens, top_k) of 0 .. count, where `count` is nobody -> int64 (count,)."""
    flat = chosen.flatten()
    return torch.zeros(count + 1, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))[:count]


def within_capacity(chosen: Tensor, count: int, capacity: int) -> Tensor:
    """The choices with those beyond an expert's capacity replaced by `count`; the earliest tokens stay.

    Args:
        chosen: int64 (tokens, top_k) of 0 .. count.
        count: experts.
        capacity: choices an expert takes.
    """
    order = chosen.flatten().argsort(stable=True)
    ordered = chosen.flatten()[order]
    load = loads(chosen, count + 1)
    place = torch.arange(len(order), device=order.device) - (load.cumsum(0) - load)[ordered]
    return torch.empty_like(ordered).scatter(0, order, ordered.masked_fill(place >= capacity, count)).view_as(chosen)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another one."""
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


class _Dispatch(torch.autograd.Function):
    """Rows in another order; both passes are gathers, so that no sum depends on the order of a device's threads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        rows = grad.index_select(0, back)
        return rows if ctx.copies == 1 else rows.unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


def dispatch(x: Tensor, order: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """Take `copies` copies of each row and put them in an order.

    Args:
        x: (rows, hidden).
        order: int64 (rows * copies,), a permutation; copy c of row r counts as r * copies + c.
        back: its inverse.
        copies: see above.
    """
    result: Tensor = _Dispatch.apply(x, order, back, copies)
    return result


class _Join(torch.autograd.Function):
    """A layer's output unchanged; its backward pass, which runs once however often the forward pass is recomputed, adds a loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, moe: MoE, record: Tensor) -> Tensor:
        ctx.moe, ctx.record, ctx.of = moe, record, loss.new_full((), moe.loss_scale)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        before = ctx.moe.record
        ctx.moe.record = ctx.record if before is None else before + ctx.record
        return grad, ctx.of, None, None
