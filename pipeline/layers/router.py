"""Routers of a mixture of experts: which experts a token goes to, with which weights, and the losses that keep the load even."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """What a router says of every token; fp32 (or wider, where the model is). A tuple, in which ZeRO 3 finds the tensors.

    Attributes:
        logits: (tokens, experts).
        probs: (tokens, experts), the scores of a token divided by their sum.
        experts: int64 (tokens, top_k), the chosen ones, the best first.
        weights: (tokens, top_k), of their outputs.
    """

    logits: Tensor
    probs: Tensor
    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """A linear gate and a choice of the top_k best experts; of equal ones the lower index wins. It computes in fp32.

    With softmax and normalise it is Mixtral's (Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.1): a softmax over all,
    normalised over the chosen ones, is the softmax over the chosen logits. The other options are DeepSeek-V3's
    (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 2.1.2).

    Args:
        hidden: width of a token.
        experts: how many there are.
        top_k: how many a token goes to.
        scoring: "softmax" or "sigmoid", of the logits.
        normalise: the weights of the chosen experts sum to one.
        factor: of all weights, after that.
        correction: add a bias to the scores for the choice alone; no gradient moves it, training/routing.py does.
        bias_update_speed: by how much, after each step of the optimizer.
        groups: experts stand in so many groups of equal size.
        topk_group: the choice is among so many groups, those whose two best experts have the largest sum.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalise: bool = True,
        factor: float = 1.0,
        correction: bool = False,
        bias_update_speed: float = 0.001,
        groups: int = 1,
        topk_group: int = 1,
    ) -> None:
        super().__init__()
        assert scoring in ("softmax", "sigmoid")
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.bias = nn.Parameter(torch.empty(experts), requires_grad=False) if correction else None
        self.top_k, self.scoring, self.normalise, self.factor = top_k, scoring, normalise, factor
        self.groups, self.topk_group = groups, topk_group
        self.bias_update_speed = bias_update_speed

    def forward(self, x: Tensor) -> Routing:
        """(tokens, hidden) -> the routing of each."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(dim=1) if self.scoring == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return Routing(logits, scores / scores.sum(dim=1, keepdim=True), experts, weights * self.factor)

    def _choose(self, scores: Tensor) -> Tensor:
        """(tokens, experts) -> the indices of the best, int64 (tokens, top_k)."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.topk_group < self.groups:
            members = scores.unflatten(1, (self.groups, -1))
            best = _best(members.topk(min(2, members.shape[2]), dim=2).values.sum(dim=2), self.topk_group)
            closed = torch.ones(members.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, value=False)
            scores = members.masked_fill(closed.unsqueeze(2), -torch.inf).flatten(1)
        return _best(scores, self.top_k)


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values along dim 1, best first; topk leaves open which of equal ones it takes."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


@dataclass(frozen=True)
class Balance:
    """Coefficients of the losses that a mixture adds to the model's loss; 0 leaves one out.

    Each is taken for every layer and micro-batch of a rank by itself, as a mean over its tokens, and added over the layers.

    Attributes:
        batch: experts * sum over experts of (share of the choices) * (mean share of the scores), over a micro-batch's tokens
            (Fedus et al. 2022, https://arxiv.org/abs/2101.03961, equations 4 to 6); 1 when the load is even. The stock Mixtral puts the
            tokens of all layers together and does not divide the choices by top_k.
        sequence: the same over the tokens of each sequence, and the mean of the sequences (DeepSeek-V3, equations 17 to 20, with the
            choices as they were made, bias and groups included).
        z: mean square of the log of the softmax's denominator (Zoph et al. 2022, https://arxiv.org/abs/2202.08906, equation 5).
    """

    batch: float = 0.0
    sequence: float = 0.0
    z: float = 0.0

    def loss(self, routing: Routing, real: Tensor, total: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The weighted sum of the losses.

        Args:
            routing: of batch * sequence tokens.
            real: (batch, sequence) of bool, False for padding, which counts nowhere.
            total: makes sums over parts of the sequences those over the whole, where others have the other parts.

        Returns:
            A 0-dim tensor.
        """
        if not (self.batch or self.sequence or self.z):
            return routing.logits.new_zeros(())
        experts = routing.probs.shape[1]
        sums = _sums(routing, real.to(routing.logits.dtype))
        sums = sums if total is None else total(sums)
        whole = sums.sum(dim=0, keepdim=True)
        loss = self.batch * _unevenness(whole, experts) + self.sequence * _unevenness(sums, experts)
        return loss + self.z * whole[0, -2] / whole[0, -1].clamp(min=1)


def _sums(routing: Routing, counted: Tensor) -> Tensor:
    """Sums over the tokens of each sequence, weighted by `counted` (batch, sequence): (batch, 2 * experts + 2).

    They are a token's choices (each 1 / top_k) and its probabilities, by expert, then its square for the z-loss and 1.
    """
    (rows, width), top_k = counted.shape, routing.experts.shape[1]
    chosen = counted.new_zeros(rows, routing.probs.shape[1])
    chosen = chosen.scatter_add(1, routing.experts.view(rows, -1), counted.repeat_interleave(top_k, dim=1) / top_k)
    probs = (routing.probs.unflatten(0, (rows, width)) * counted.unsqueeze(2)).sum(dim=1)
    squares = (routing.logits.logsumexp(dim=1).square().view(rows, width) * counted).sum(dim=1, keepdim=True)
    return torch.cat([chosen, probs, squares, counted.sum(dim=1, keepdim=True)], dim=1)


def _unevenness(sums: Tensor, experts: int) -> Tensor:
    """The number of experts times sum_i f_i P_i in each row of `_sums`, and the mean over the rows that have tokens."""
    tokens = sums[:, -1:]
    chosen, probs = (sums[:, start : start + experts] / tokens.clamp(min=1) for start in (0, experts))
    return experts * (chosen * probs).sum() / (tokens > 0).sum().clamp(min=1)
