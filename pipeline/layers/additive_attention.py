"""Additive attention (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473): before scores were products, they were a small network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.linear import Linear


class AdditiveAttention(nn.Module):
    """Softmax over v . tanh(W query + U key), which weighs the memory itself (there are no values).

    It has the face of Attention and can stand in a Block. The tanh is taken of every pair: memory is
    batch x queries x keys x width, which is why products took its place.

    Args:
        hidden: width of queries and of the memory.
        width: of the small network (the paper's n').
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.query = Linear(hidden, width, bias=False)
        self.key = Linear(hidden, width, bias=False)
        self.score = Linear(width, 1, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Attend to oneself, or to a memory; arguments as in Attention.

        Returns:
            (batch, sequence, hidden): for each query the weighted mean of the memory, zeros where it may look nowhere.
        """
        context = context or AttentionContext()
        source = x if memory is None else memory
        mask = context.mask if memory is None else context.cross
        pairs = (self.query(x).unsqueeze(2) + self.key(source).unsqueeze(1)).tanh()
        scores = self.score(pairs).squeeze(3)
        seen = mask.visible(x.shape[1], source.shape[1], x.device)
        if seen is None and mask.causal:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).tril()[None, None]
        if seen is None:
            return scores.softmax(dim=2) @ source
        hidden = ~seen.squeeze(1)
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=2).masked_fill(hidden, 0.0)
        return weights @ source
