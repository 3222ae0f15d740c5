"""A stack of transformer blocks between an embedding and a head: decoder-only and encoder-only models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.mask import Mask
from pipeline.layers.moe import MoE, SharedExpertMoE
from pipeline.layers.position_bias import AlibiSlopes
from pipeline.layers.rotary import Rotary
from pipeline.layers.table import Table


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream; between them, in some decoders, attention to an encoder's output.

    Args:
        attention_norm, mlp_norm: before each layer, or with `post_norm` after its sum with the residual stream (Vaswani et al. 2017).
        attention: self-attention.
        mlp: feed-forward.
        post_norm: see above.
        cross_norm, cross: cross-attention and its norm, None in a block without.
        output_norm: of the block's output (the last one of an encoder whose blocks are pre-norm).
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        post_norm: bool = False,
        cross_norm: nn.Module | None = None,
        cross: nn.Module | None = None,
        output_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.cross_norm, self.cross = cross_norm, cross
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.output_norm = output_norm
        self.post_norm = post_norm

    def forward(self, x: Tensor, context: AttentionContext, memory: Tensor | None = None) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden); memory is (batch, keys, hidden)."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, None, context))
            if self.cross is not None and self.cross_norm is not None:
                x = self.cross_norm(x + self.cross(x, memory, context))
            x = self.mlp_norm(x + self._feed_forward(x, context))
        else:
            x = x + self.attention(self.attention_norm(x), None, context)
            if self.cross is not None and self.cross_norm is not None:
                x = x + self.cross(self.cross_norm(x), memory, context)
            x = x + self._feed_forward(self.mlp_norm(x), context)
        return x if self.output_norm is None else self.output_norm(x)

    def _feed_forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Experts must know which tokens are padding; for others it does not matter."""
        return self.mlp(x, context) if isinstance(self.mlp, MoE | SharedExpertMoE) else self.mlp(x)


class Stack(nn.Module):
    """A whole model, or the part of it that is left when embed, norm or head are None and blocks are missing (a pipeline stage).

    Blocks keep their index in the whole model as their key, so weights have the same names in every part.

    Args:
        embed: tokens to hidden states.
        blocks: in order.
        norm: of the last block's output, None where the blocks are post-norm.
        head: hidden states to logits or loss: an OutputHead, or what has one as its `output`.
        rotary: rotary positions, None for none.
        slopes: linear biases (ALiBi), None for none.
        causal: whether a token sees itself and those before it alone.
        tie_embeddings: head and embedding are one matrix.
    """

    def __init__(
        self,
        embed: Embedding,
        blocks: Iterable[nn.Module],
        norm: nn.Module | None,
        head: nn.Module,
        rotary: Rotary | None = None,
        slopes: AlibiSlopes | None = None,
        *,
        causal: bool = True,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.embed: nn.Module | None = embed
        self.rotary, self.slopes, self.causal = rotary, slopes, causal
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.norm = norm
        self.head: nn.Module | None = head
        if tie_embeddings:
            output = head if isinstance(head, OutputHead) else head.output
            output.weight = embed.tokens.weight  # type: ignore[union-attr] # a head's own output, a Parameter

    def forward(self, x: Tensor, **batch: Unpack[Batch]) -> Tensor:
        """Run the parts that are here.

        Args:
            x: tokens, int64 (batch, sequence), or without an embedding the hidden states (batch, sequence, hidden).
            batch: targets for a loss instead of logits; documents, positions, segments where there are any.

        Returns:
            Hidden states where there is no head, else logits or the loss.
        """
        # Nothing here reads the sequence length off x: under sequence parallelism it holds a slice of the rows.
        context = self.attention_context(batch)
        if self.embed is not None:
            x = self.embed(x, batch.get("positions"), batch.get("segments"))
        for block in self.blocks.values():
            x = block(x, context)
        return x if self.head is None else self.finish(x, context, batch)

    def attention_context(self, batch: Batch) -> AttentionContext:
        """What all blocks need."""
        positions = batch.get("positions")
        slopes = self.slopes() if self.slopes is not None else None
        mask = Mask(causal=self.causal, documents=batch.get("documents"), positions=positions, slopes=slopes)
        return AttentionContext(mask, self.rotary(positions) if self.rotary is not None else None)

    def finish(self, x: Tensor, context: AttentionContext, batch: Batch) -> Tensor:  # noqa: ARG002 - for families whose heads have blocks of their own
        """What comes after the blocks: norm and head."""
        assert self.head is not None
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x, batch.get("targets"), batch.get("loss_scale"))

    def reset_buffers(self) -> None:
        """Compute what is neither learned nor stored (tables of positions) on the device of the weights, after weights came from meta."""
        device = next(self.parameters()).device
        for module in self.modules():
            if isinstance(module, Table):
                module.reset_buffers(device)
