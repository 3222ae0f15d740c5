"""Additive attention (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473): a small network computes the scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.linear import Linear


class AdditiveAttention(nn.Module):
    """Softmax over v . tanh(W query + U key), which weights the memory itself (there are no values).

    It has the interface of Attention and can replace it in a Block. The tanh is computed for every pair of query and key, so it needs
    batch x queries x keys x width elements of memory; dot-product attention does not.

    Args:
        hidden: width of the queries and of the memory.
        width: width of the network that computes the scores (n' in the paper).
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.query = Linear(hidden, width, bias=False)
        self.key = Linear(hidden, width, bias=False)
        self.score = Linear(width, 1, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Compute self-attention, or cross-attention to a memory; arguments as in Attention.

        Returns:
            (batch, sequence, hidden): the weighted mean of the memory for each query, zeros where all keys are masked.
        """
        context = context or AttentionContext()
        source = x if memory is None else memory
        mask = context.mask if memory is None else context.cross
        pairs = (self.query(x).unsqueeze(2) + self.key(source).unsqueeze(1)).tanh()
        scores = self.score(pairs).squeeze(3)
        allowed = mask.visible(x.shape[1], source.shape[1], x.device)
        if allowed is None and mask.causal:
            allowed = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).tril()[None, None]
        if allowed is None:
            return scores.softmax(dim=2) @ source
        masked = ~allowed.squeeze(1)
        weights = scores.masked_fill(masked, torch.finfo(scores.dtype).min).softmax(dim=2).masked_fill(masked, 0.0)
        return weights @ source
