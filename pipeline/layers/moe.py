"""MoE layer (mixture of experts, Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): top_k of many experts process each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.computed_buffers import ComputedBuffers
from pipeline.layers.experts import RoutedExperts
from pipeline.layers.mlp import OutputGate
from pipeline.layers.router import AuxLoss, Router, Routing
from pipeline.layers.token_permutation import (
    Slots,
    buffer_slots,
    drop_over_capacity,
    inverse_permutation,
    padded_slots,
    permute,
    tokens_per_expert,
)

#: What is called while the tokens travel to their experts.
Meanwhile = Callable[[], None] | None


@dataclass(frozen=True)
class Buffers:
    """Rows that a rank sends to those with the experts, whose number does not depend on the load.

    Attributes:
        count: ranks with experts, the same number each.
        factor: rows of the buffer for a rank, over the mean number of assignments to its experts.
    """

    count: int
    factor: float

    def rows(self, assignments: int, parts: int) -> int:
        """The rows of a buffer for assignments to all experts, a multiple of `parts`."""
        return math.ceil(self.factor * assignments / self.count / parts) * parts


class MoE(ComputedBuffers):
    """MoE layer: a router and routed experts. A token's output is the weighted sum of its experts' outputs.

    Args:
        router: selects the experts of each token.
        experts: the routed experts.
        aux_loss: auxiliary losses, added to the model's loss in the backward pass.
        capacity_factor: maximum load of an expert, over the mean load of a micro-batch; assignments beyond it are dropped, those of the
            last tokens first (Fedus et al. 2022, section 2.2). The capacity is that of the tokens that a rank routes. None drops
            nothing, and so does a forward pass without gradients: the loss of a validation is that of an export, and does not depend on the
            other sequences of a batch.

    Attributes:
        loss_scale: scales the auxiliary losses like the model's loss; gradient accumulation over micro-batches sets it.
        reduce_sums: as in AuxLoss.loss; context parallelism sets it.
        parts: if not 0, every expert gets as many rows as its capacity, filled with zeros, in this number of parts: no size depends on the
            load, and one part travels while another one is computed. parallel/expert_parallel.py sets it.
        row_buffers: with parts and without a capacity, what carries the rows to the experts of several ranks in training. A pass in which
            a rank has more assignments than its buffer has rows is wrong and says so in its record: it must be computed again.
        exact: whether to compute without buffers for now.
        narrow: (tokens, hidden) -> the columns that this rank sends to the experts; expert with tensor parallelism sets it.
        own: (batch, sequence) -> the part of the tokens that this rank routes; set where whole experts are on every tensor rank, and x is
            sharded along the sequence. The documents of the context are those of all tokens.
        record: sums over the backward passes since the last `take_record`, fp32 (experts + 5,): tokens of each expert, mean entropy of a
            token's scores (nats), fraction of dropped assignments, auxiliary loss, assignments beyond the buffers, micro-batches.
    """

    def __init__(
        self, router: Router, experts: RoutedExperts, *, aux_loss: AuxLoss | None = None, capacity_factor: float | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.aux_loss, self.capacity_factor = aux_loss or AuxLoss(), capacity_factor
        self.loss_scale: float | Tensor = 1.0
        self.reduce_sums: Callable[[Tensor], Tensor] | None = None
        self.parts = 0
        self.row_buffers: Buffers | None = None
        self.exact = False
        self.narrow: Callable[[Tensor], Tensor] | None = None
        self.own: Callable[[Tensor], Tensor] | None = None
        self.register_buffer("record", torch.zeros(router.weight.shape[0] + 5, dtype=torch.float32), persistent=False)
        self.record: Tensor

    def compute_buffers(self, device: torch.device) -> None:
        """See ComputedBuffers."""
        self.record = torch.zeros(self.record.shape, dtype=torch.float32, device=device)

    def forward(self, x: Tensor, context: AttentionContext | None = None, meanwhile: Meanwhile = None) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden); padding (document -1) is routed to no expert and its output is zero.

        Args:
            x: the hidden states.
            context: whose documents mark padding.
            meanwhile: is called while the tokens travel to their experts.
        """
        documents = context.mask.documents if context is not None else None
        every = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if documents is None else documents >= 0
        valid = every if documents is None or self.own is None else self.own(every)
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        num_experts, expert_ids = routing.probs.shape[1], routing.experts
        if documents is not None:
            expert_ids = expert_ids.masked_fill(~valid.reshape(-1, 1), num_experts)
        tokens = tokens if self.narrow is None else self.narrow(tokens)
        weights = routing.weights.to(x.dtype)
        limited = self.capacity_factor is not None and torch.is_grad_enabled()
        beyond: Tensor | None = None
        if limited and self.parts:
            slots = padded_slots(expert_ids, num_experts, self._capacity(expert_ids, num_experts), self.parts)
            outputs, counts = self._compute_padded(tokens, slots, weights, num_experts, None, meanwhile), slots.counts
        elif self.row_buffers is not None and self.parts and torch.is_grad_enabled() and not self.exact:
            counts, rows = tokens_per_expert(expert_ids, num_experts), self.row_buffers.rows(expert_ids.numel(), self.parts)
            slots = buffer_slots(expert_ids, num_experts, self.row_buffers.count, rows, self.parts)
            beyond = counts.sum() - slots.counts.sum()
            outputs = self._compute_padded(tokens, slots, weights, self.row_buffers.count, slots.counts, meanwhile)
        else:
            if limited:
                expert_ids = drop_over_capacity(expert_ids, num_experts, self._capacity(expert_ids, num_experts))
            counts = tokens_per_expert(expert_ids, num_experts)
            # Rows of no expert are undefined: times a zero weight they could still be NaN, in the output and in the gradient.
            all_assigned = documents is None and not limited
            assigned = None if all_assigned else (torch.arange(expert_ids.numel(), device=x.device) < counts.sum()).unsqueeze(1)
            outputs = self._compute_experts(tokens, expert_ids, weights, counts, assigned, meanwhile)
        outputs = outputs.unflatten(0, x.shape[:2])
        if not torch.is_grad_enabled():
            return outputs
        loss, record = self._loss_and_record(routing, counts, valid, None if documents is None else every, beyond)
        scale = self.loss_scale if isinstance(self.loss_scale, Tensor) else loss.new_full((), self.loss_scale)
        with_loss: Tensor = _AddAuxLoss.apply(outputs, loss, scale, record, self.record)
        return with_loss

    def _capacity(self, expert_ids: Tensor, num_experts: int) -> int:
        """The most assignments of an expert; a token has at most one to each."""
        assert self.capacity_factor is not None
        return min(math.ceil(self.capacity_factor * expert_ids.numel() / num_experts), len(expert_ids))

    def _compute_padded(
        self, tokens: Tensor, slots: Slots, weights: Tensor, blocks: int, counts: Tensor | None, meanwhile: Meanwhile
    ) -> Tensor:
        """As `_compute_experts`, with numbers of rows that do not depend on the load, and without a wait for the device.

        Args:
            slots: rows of the assignments, (parts, blocks, rows).
            blocks, counts: of experts, whose rows are all computed, and None; of buffers, and RoutedExperts.dispatch_padded's counts.
        """
        rows = permute(tokens, slots.assignment, slots.slot, weights.shape[1], partial=True)
        compute = self.experts.dispatch_padded(rows.view(self.parts, blocks, -1, rows.shape[1]).unbind(), counts)
        if meanwhile is not None:
            meanwhile()
        outputs = torch.stack(compute()).flatten(0, 2)
        combined = permute(outputs, slots.slot, slots.assignment, partial=True).unflatten(0, weights.shape)
        return (combined * weights.unsqueeze(2)).sum(dim=1)

    def _compute_experts(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, counts: Tensor, assigned: Tensor | None, meanwhile: Meanwhile
    ) -> Tensor:
        """Permute the tokens by expert, apply the experts and combine their outputs.

        Args:
            tokens: (tokens, hidden).
            expert_ids: int64 (tokens, top_k); the number of experts for no expert.
            weights: (tokens, top_k).
            counts: int64 (experts,), as of tokens_per_expert.
            assigned: bool (tokens * top_k, 1), whether a row belongs to an expert, in the order of experts; None if all do.
            meanwhile: as in forward.

        Returns:
            (tokens, hidden).
        """
        order = expert_ids.flatten().argsort(stable=True)
        inverse = inverse_permutation(order)
        rows = permute(tokens, order, inverse, expert_ids.shape[1])
        compute = self.experts.dispatch(rows if assigned is None else rows.where(assigned, 0), counts)
        if meanwhile is not None:
            meanwhile()
        rows = compute() if assigned is None else compute().where(assigned, 0)
        return (permute(rows, inverse, order).unflatten(0, expert_ids.shape) * weights.unsqueeze(2)).sum(dim=1)

    def _loss_and_record(
        self, routing: Routing, counts: Tensor, valid: Tensor, every: Tensor | None, beyond: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the auxiliary losses, 0-dim, and what `record` sums of a micro-batch.

        Args:
            routing: of all tokens.
            counts: int64 (experts,), as of tokens_per_expert.
            valid: bool (batch, sequence), False for padding.
            every: the same of the tokens of all ranks that share a sequence by `own`; None if it is known that there is no padding.
            beyond: 0-dim, assignments beyond the buffers; None without buffers.
        """
        loss = self.aux_loss.loss(routing, valid, self.reduce_sums, all_valid=every is None)
        with torch.no_grad():
            tokens: int | Tensor = valid.numel()
            if every is not None:  # the mean over these ranks: the mean of their records is then that of all tokens
                tokens = every.sum().clamp(min=1)
                tokens = tokens if self.own is None else tokens * (valid.numel() / every.numel())
            entropy = (torch.special.entr(routing.probs).sum(dim=1) * valid.flatten()).sum() / tokens
            dropped = 1 - counts.sum() / (tokens * routing.experts.shape[1])
            beyond = torch.zeros_like(loss) if beyond is None else beyond
            values = (entropy, dropped, loss.detach(), beyond, torch.ones_like(loss))
            record = torch.cat([counts, *(value.view(1) for value in values)]).float()
        return loss, record

    def take_record(self) -> Tensor:
        """Return `record` and reset it."""
        record = self.record.clone()
        self.record.zero_()
        return record


class SharedExpertMoE(nn.Module):
    """MoE layer with a shared expert, which processes every token (Dai et al. 2024, https://arxiv.org/abs/2401.06066).

    Args:
        routed: the experts that tokens are routed to.
        shared: the shared expert.
        shared_gate: of the output of the shared expert (Qwen 2 MoE); None for no gate.
    """

    def __init__(self, routed: MoE, shared: nn.Module, shared_gate: OutputGate | None = None) -> None:
        super().__init__()
        self.routed, self.shared, self.shared_gate = routed, shared, shared_gate

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden); context as in MoE."""
        outputs: list[Tensor] = []
        routed = self.routed(x, context, lambda: outputs.append(self._shared_output(x)))
        return routed + outputs[0]

    def _shared_output(self, x: Tensor) -> Tensor:
        """Return the output of the shared expert."""
        return self.shared(x) if self.shared_gate is None else self.shared_gate(x) * self.shared(x)


def moe_layers(model: nn.Module) -> Iterator[MoE]:
    """Iterate over the MoE layers of a model, in order."""
    return (module for module in model.modules() if isinstance(module, MoE))


def filled_rows(model: nn.Module) -> float:
    """Return the mean share of the rows of experts that belong to tokens; the rest of their buffers is not computed."""
    return next((1 / moe.row_buffers.factor for moe in moe_layers(model) if moe.row_buffers is not None), 1.0)


class _AddAuxLoss(torch.autograd.Function):
    """Identity on a layer's output whose backward pass adds a loss; that runs once, however often the forward pass is recomputed."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor, record: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(scale, record)
        ctx.total, ctx.dtype = total, loss.dtype  # not saved as a tensor: other micro-batches change it in the meantime
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        scale, record = ctx.saved_tensors
        if torch.compiler.is_compiling():
            # Depends on the gradient: the compiler may compute all else in the forward pass, before other micro-batches change the sum.
            record = torch.where(grad.flatten()[:1].isnan(), record, record)
        ctx.total.add_(record)
        return grad, scale.to(ctx.dtype), None, None, None
