"""An encoder and a decoder that attends to its output (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import Embedding
from pipeline.layers.mask import Mask
from pipeline.layers.position_bias import RelativeBias
from pipeline.layers.stack import Stack


class EncoderDecoder(Stack):
    """A whole model, or a pipeline stage of it. The encoder's blocks come first, the decoder's go on counting.

    What goes from stage to stage is a pair: the encoder's states and the decoder's, both embedded by the first stage. An encoder block
    changes the first, a decoder block the second.

    Args:
        embed: of source and decoder tokens alike.
        encoder: its blocks; a norm of the encoder's output is the `output_norm` of the last one.
        decoder: its blocks, with cross-attention.
        norm: of the decoder's output, None where the blocks are post-norm.
        head: of the decoder.
        encoder_bias, decoder_bias: of the scores of self-attention in all blocks, None for none.
        tie_embeddings: head and embedding are one matrix.
    """

    def __init__(
        self,
        embed: Embedding,
        encoder: Sequence[nn.Module],
        decoder: Iterable[nn.Module],
        norm: nn.Module | None,
        head: nn.Module,
        encoder_bias: RelativeBias | None = None,
        decoder_bias: RelativeBias | None = None,
        *,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__(embed, [*encoder, *decoder], norm, head, tie_embeddings=tie_embeddings)
        self.encoder_blocks = len(encoder)
        self.encoder_bias, self.decoder_bias = encoder_bias, decoder_bias

    def forward(self, x: Tensor, decoded: Tensor | None = None, **batch: Unpack[Batch]) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Run the parts that are here.

        Args:
            x: the encoder's tokens, int64 (batch, sequence), or without an embedding its states (batch, sequence, hidden).
            decoded: the decoder's states (batch, decoder sequence, hidden), None with an embedding.
            batch: decoder_tokens; documents are those of the encoder's tokens, -1 for padding. Padding of the decoder stands at its end,
                where nothing looks at it; its targets are IGNORE.

        Returns:
            Both states where there is no head, else logits (batch, decoder sequence, vocabulary) or the loss.
        """
        if self.embed is not None:
            x, decoded = self.embed(x), self.embed(batch["decoder_tokens"])
        assert decoded is not None
        encoder_context, decoder_context = self.attention_contexts(x, decoded, batch)
        encoded, given = x, decoded
        for index, block in self.blocks.items():
            if int(index) < self.encoder_blocks:
                encoded = block(encoded, encoder_context)
            else:
                decoded = block(decoded, decoder_context, encoded)
        if self.head is not None:
            return self.finish(decoded, decoder_context, batch)
        # The pipeline's schedules detach in place what a stage gives on: it must not be what the stage was given.
        return encoded.clone() if encoded is x else encoded, decoded.clone() if decoded is given else decoded

    def attention_contexts(self, encoded: Tensor, decoded: Tensor, batch: Batch) -> tuple[AttentionContext, AttentionContext]:
        """What the encoder's blocks need, and the decoder's."""
        # Under sequence parallelism both states hold the same share of their rows; the decoder's tokens tell which.
        length = batch["decoder_tokens"].shape[1]
        source = encoded.shape[1] * (length // decoded.shape[1])
        documents = batch.get("documents")
        # A pipeline stage has one kind of blocks, or both: what no block here asks for is not made.
        here = [int(index) for index in self.blocks]
        own = self.encoder_bias(source) if self.encoder_bias is not None and min(here) < self.encoder_blocks else None
        other = self.decoder_bias(length) if self.decoder_bias is not None and max(here) >= self.encoder_blocks else None
        encoder = AttentionContext(Mask(causal=False, documents=documents, bias=own))
        return encoder, AttentionContext(Mask(bias=other), cross=Mask(causal=False, key_documents=documents))
