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
from pipeline.layers.stack import Stack, prepare_layer


class EncoderDecoder(Stack):
    """A full encoder-decoder, or one pipeline stage of it. The decoder's blocks are numbered after the encoder's.

    Pipeline stages exchange a pair of tensors: the hidden states of the encoder and of the decoder, both embedded by the first stage.
    An encoder block updates the first, a decoder block the second.

    Args:
        embed: embedding of the encoder's and the decoder's tokens.
        encoder: blocks of the encoder; the norm of the encoder's output is the `output_norm` of its last block.
        decoder: blocks of the decoder, with cross-attention.
        norm: norm of the decoder's output, None for post-norm blocks.
        head: output head of the decoder.
        encoder_bias, decoder_bias: relative position biases of self-attention, shared by all blocks; None for none.
        tie_embeddings: whether head and embedding share one weight.
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

    def forward(self, x: Tensor, decoder_states: Tensor | None = None, **batch: Unpack[Batch]) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Run the modules that this stage holds.

        Args:
            x: the encoder's tokens, int64 (batch, sequence), or without an embedding its hidden states (batch, sequence, hidden).
            decoder_states: hidden states of the decoder (batch, decoder sequence, hidden), None with an embedding.
            batch: decoder_tokens; documents are those of the encoder's tokens, -1 for padding. Padding of the decoder is at the end of its
                sequence, where the causal mask excludes it; its targets are IGNORE.

        Returns:
            The hidden states of encoder and decoder without a head, else logits (batch, decoder sequence, vocabulary) or the loss.
        """
        if self.embed is not None:
            x, decoder_states = self.embed(x), self.embed(batch["decoder_tokens"])
        assert decoder_states is not None
        encoder_context, decoder_context = self.attention_contexts(x, decoder_states, batch)
        encoder_states, decoder_input = x, decoder_states
        for index, block in self.blocks.items():
            if int(index) < self.encoder_blocks:
                encoder_states = block(encoder_states, encoder_context)
            else:
                decoder_states = block(decoder_states, decoder_context, encoder_states)
        if self.head is not None:
            return self.result(decoder_states, decoder_context, batch)
        # Pipeline schedules detach a stage's outputs in place, so an output must not be the same tensor as an input.
        encoder_states = encoder_states.clone() if encoder_states is x else encoder_states
        return encoder_states, decoder_states.clone() if decoder_states is decoder_input else decoder_states

    def attention_contexts(self, encoder_states: Tensor, decoder_states: Tensor, batch: Batch) -> tuple[AttentionContext, AttentionContext]:
        """Return the contexts of the encoder's and the decoder's blocks, and compute what the blocks derive from their masks."""
        # Under sequence parallelism both states are slices along the sequence by the same factor, known from the decoder's full length.
        length = batch["decoder_tokens"].shape[1]
        source = encoder_states.shape[1] * (length // decoder_states.shape[1])
        documents = batch.get("documents")
        # A pipeline stage may hold only encoder or only decoder blocks: the bias of the other kind is not computed.
        indices = [int(index) for index in self.blocks]
        encoder_bias = self.encoder_bias(source) if self.encoder_bias is not None and min(indices) < self.encoder_blocks else None
        decoder_bias = self.decoder_bias(length) if self.decoder_bias is not None and max(indices) >= self.encoder_blocks else None
        encoder = AttentionContext(Mask(causal=False, documents=documents, bias=encoder_bias))
        decoder = AttentionContext(Mask(bias=decoder_bias), cross=Mask(causal=False, key_documents=documents))
        batch_size, device = encoder_states.shape[0], encoder_states.device
        for index, block in self.blocks.items():
            if int(index) < self.encoder_blocks:
                prepare_layer(block.attention, encoder.mask, (batch_size, source, source), device)
            else:
                prepare_layer(block.attention, decoder.mask, (batch_size, length, length), device)
                prepare_layer(block.cross, decoder.cross, (batch_size, length, source), device)
        return encoder, decoder
