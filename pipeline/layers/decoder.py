"""The decoder-only transformer: embedding, pre-norm blocks, norm, output head."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers import linear
from pipeline.layers.attention import document_mask
from pipeline.layers.loss import linear_cross_entropy
from pipeline.layers.rotary import Rotary, RotaryTables


class Embedding(nn.Module):
    """A vector for every token, plus one for its position where positions are learned."""

    def __init__(self, vocab_size: int, hidden: int, max_positions: int | None = None) -> None:
        super().__init__()
        self.tokens = linear.Embedding(vocab_size, hidden)
        self.positions = linear.Embedding(max_positions, hidden) if max_positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (batch, sequence) -> (batch, sequence, hidden)."""
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return hidden


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream and added back to it."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(self, x: Tensor, rotary: RotaryTables | None = None, mask: Tensor | None = None) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden); rotary and mask as in Attention."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.mlp(self.mlp_norm(x))


class OutputHead(nn.Module):
    """The projection to the vocabulary, and the loss."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden))

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or with targets the loss (without the logits of the whole batch in memory).

        Args:
            hidden: (batch, sequence, hidden).
            targets: int64 (batch, sequence), the next token of each position.

        Returns:
            Logits (batch, sequence, vocabulary), or the mean cross-entropy as a 0-dim fp32 tensor.
        """
        if targets is None:
            return F.linear(hidden, self.weight)
        return linear_cross_entropy(hidden, self.weight, targets)


class Decoder(nn.Module):
    """A whole model, or the part of it that is left when embed, norm or head are None and blocks are missing (a pipeline stage).

    Blocks keep their index in the whole model as their key, so weights have the same names in every part.
    """

    def __init__(
        self,
        embed: Embedding,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        head: OutputHead,
        rotary: Rotary | None = None,
        *,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.embed: nn.Module | None = embed
        self.rotary = rotary
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.norm: nn.Module | None = norm
        self.head: nn.Module | None = head
        if tie_embeddings:
            head.weight = embed.tokens.weight  # type: ignore[assignment] # a Parameter that torch annotates as Tensor

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Run the parts that are here.

        Args:
            x: tokens, int64 (batch, sequence), or without an embedding the hidden states (batch, sequence, hidden).
            targets: int64 (batch, sequence), the next tokens; needed for the loss only.
            documents: int (batch, sequence), the document of each token; None lets tokens look across documents.

        Returns:
            Hidden states where there is no head, else logits or the loss as in OutputHead.
        """
        # Nothing here reads the sequence length off x: under sequence parallelism it holds a slice of the rows.
        rotary = self.rotary() if self.rotary is not None else None
        mask = document_mask(documents) if documents is not None else None
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x, rotary, mask)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x, targets)

    def reset_buffers(self) -> None:
        """Compute what is neither learned nor stored (rotary tables) on the device of the weights, after weights came from meta."""
        if self.rotary is not None:
            self.rotary.reset_buffers(next(self.parameters()).device)
