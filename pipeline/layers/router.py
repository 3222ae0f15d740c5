"""Routers of MoE layers: the experts of each token and their weights, and the auxiliary losses that balance the load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """Output of a router, fp32 (fp64 in an fp64 model). A NamedTuple, since ZeRO 3 searches tuples for tensors.

    Attributes:
        logits: (tokens, experts).
        probs: (tokens, experts), the scores of a token divided by their sum.
        experts: int64 (tokens, top_k), the selected experts, highest score first.
        weights: (tokens, top_k), weights of the selected experts' outputs.
    """

    logits: Tensor
    probs: Tensor
    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Top-k router with a linear gate, computed in fp32. Ties are broken in favor of the lower expert index.

    With softmax and normalize it is Mixtral's router (Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.1): a softmax over all
    experts, normalized over the selected ones, is the softmax over the selected logits. The other options are those of DeepSeek-V3
    (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 2.1.2).

    Args:
        hidden: width of the residual stream.
        top_k: number of experts a token is routed to.
        scoring: "softmax" or "sigmoid", applied to the logits.
        normalize: whether the weights of the selected experts are normalized to sum to one.
        scaling_factor: factor of the weights after normalization.
        correction_bias: add a bias to the scores for expert selection only; it has no gradient; training/router_statistics.py updates it.
        groups: number of expert groups of equal size.
        topk_group: number of groups that experts are selected from: those with the largest sum of the two highest scores.
        logit_bias: the gate has a bias, which is trained as its weight is (gpt-oss); not the correction bias.

    Attributes:
        bias_update_speed: change of the correction bias per optimizer step; the model's set_loss_weights sets it.
    """

    logit_bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        correction_bias: bool = False,
        groups: int = 1,
        topk_group: int = 1,
        logit_bias: bool = False,
    ) -> None:
        super().__init__()
        assert scoring in ("softmax", "sigmoid")
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.bias = nn.Parameter(torch.empty(experts), requires_grad=False) if correction_bias else None
        self.register_parameter("logit_bias", nn.Parameter(torch.empty(experts)) if logit_bias else None)
        self.top_k, self.scoring, self.normalize, self.scaling_factor = top_k, scoring, normalize, scaling_factor
        self.groups, self.topk_group = groups, topk_group
        self.bias_update_speed = 0.0

    def forward(self, x: Tensor) -> Routing:
        """Route each token; x is (tokens, hidden)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(dtype), self.weight.to(dtype), None if self.logit_bias is None else self.logit_bias.to(dtype))
        scores = logits.softmax(dim=1) if self.scoring == "softmax" else logits.sigmoid()
        experts = self._select_experts(scores.detach())
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return Routing(logits, scores / scores.sum(dim=1, keepdim=True), experts, weights * self.scaling_factor)

    def _select_experts(self, scores: Tensor) -> Tensor:
        """Return the indices of the selected experts: (tokens, experts) -> int64 (tokens, top_k)."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.topk_group < self.groups:
            grouped = scores.unflatten(1, (self.groups, -1))
            best = _topk(grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2), self.topk_group)
            excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, value=False)
            scores = grouped.masked_fill(excluded.unsqueeze(2), -torch.inf).flatten(1)
        return _topk(scores, self.top_k)


def _topk(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values along dim 1, in descending order; torch.topk does not define the order of ties."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


@dataclass(frozen=True)
class AuxLoss:
    """Coefficients of the auxiliary losses that a MoE layer adds to the model's loss; 0 disables a loss.

    Each loss is a mean over the tokens of one layer, micro-batch and rank; the losses of all layers are summed.

    Attributes:
        batch: load-balancing loss: experts * sum over experts of (fraction of assignments) * (mean probability), over the tokens of a
            micro-batch (Fedus et al. 2022, https://arxiv.org/abs/2101.03961, equations 4 to 6); 1 if the load is balanced. transformers'
            Mixtral averages over the tokens of all layers together and does not divide the assignments by top_k.
        sequence: the same over the tokens of each sequence, averaged over the sequences (DeepSeek-V3, equations 17 to 20, computed from
            the actual assignments, with correction bias and groups).
        z: router z-loss: mean square of the logits' log-sum-exp (Zoph et al. 2022, https://arxiv.org/abs/2202.08906, equation 5).
    """

    batch: float = 0.0
    sequence: float = 0.0
    z: float = 0.0

    def loss(
        self, routing: Routing, valid: Tensor, reduce_sums: Callable[[Tensor], Tensor] | None = None, *, all_valid: bool = False
    ) -> Tensor:
        """Return the weighted sum of the losses.

        Args:
            routing: routing of batch * sequence tokens.
            valid: bool (batch, sequence), False for padding, which is excluded.
            reduce_sums: all-reduces sums over this rank's part of each sequence to sums over the full sequences; None for full sequences.
            all_valid: whether it is known that there is no padding.

        Returns:
            A 0-dim tensor.
        """
        if not (self.batch or self.sequence or self.z):
            return routing.logits.new_zeros(())
        experts = routing.probs.shape[1]
        sums = _sequence_sums(routing, valid.to(routing.logits.dtype), squares=bool(self.z), all_valid=all_valid)
        if reduce_sums is not None:  # in one collective
            reduced = reduce_sums(torch.cat(sums, dim=1))
            sums = Sums(*reduced.split([part.shape[1] for part in sums], dim=1))
        of_batch = Sums(*(part.sum(dim=0, keepdim=True) for part in sums))
        losses = []  # only those that count: each is several kernels
        if self.batch:
            losses.append(self.batch * _balance_loss(of_batch, experts))
        if self.sequence:
            losses.append(self.sequence * _balance_loss(sums, experts))
        if self.z:
            losses.append(self.z * of_batch.squares[0, 0] / of_batch.tokens[0, 0].clamp(min=1))
        return functools.reduce(torch.add, losses)


class Sums(NamedTuple):
    """Sums over the tokens of each sequence, other than padding.

    Attributes:
        assignments: (batch, experts), 1 / top_k for each assignment.
        probs: (batch, experts), of the probabilities.
        squares: (batch, 1), of the squared log-sum-exp of the logits (z-loss); zero if that loss is off.
        tokens: (batch, 1), number of tokens.
    """

    assignments: Tensor
    probs: Tensor
    squares: Tensor
    tokens: Tensor


def _sequence_sums(routing: Routing, weights: Tensor, *, squares: bool, all_valid: bool) -> Sums:
    """Return the sums, weighted by `weights` (batch, sequence), all of which are 1 if `all_valid`."""
    (rows, width), top_k = weights.shape, routing.experts.shape[1]
    assignments = weights.new_zeros(rows, routing.probs.shape[1])
    assignments = assignments.scatter_add(1, routing.experts.view(rows, -1), weights.repeat_interleave(top_k, dim=1) / top_k)
    probs = (routing.probs.unflatten(0, (rows, width)) * weights.unsqueeze(2)).sum(dim=1)
    squared = weights.new_zeros(rows, 1)
    if squares:
        squared = (routing.logits.logsumexp(dim=1).square().view(rows, width) * weights).sum(dim=1, keepdim=True)
    tokens = weights.new_full((rows, 1), width) if all_valid else weights.sum(dim=1, keepdim=True)
    return Sums(assignments, probs, squared, tokens)


def _balance_loss(sums: Sums, experts: int) -> Tensor:
    """Return experts * sum_i f_i P_i of each sequence, averaged over the sequences with tokens."""
    assignments, probs = (part / sums.tokens.clamp(min=1) for part in (sums.assignments, sums.probs))
    return experts * (assignments * probs).sum() / (sums.tokens > 0).sum().clamp(min=1)
