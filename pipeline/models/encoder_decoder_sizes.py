"""Sizes that all encoder-decoders have."""

from __future__ import annotations

from pipeline.errors import Violation


class EncoderDecoderSizes:
    """Blocks of an encoder and of a decoder, counted through; part of a configuration dataclass that has these fields."""

    layers: int
    encoder_layers: int | None
    heads: int

    @property
    def encoder_blocks(self) -> int:
        """Blocks of the encoder, the first ones."""
        return self.layers // 2 if self.encoder_layers is None else self.encoder_layers

    @property
    def decoder_blocks(self) -> int:
        """Blocks of the decoder."""
        return self.layers - self.encoder_blocks

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as query heads."""
        return self.heads

    def depth_violations(self) -> list[Violation]:
        """What is wrong with the number of blocks."""
        if self.decoder_blocks > 0:
            return []
        rule = f"leaves no decoder block of model.layers={self.layers}"
        return [Violation("model.encoder_layers", self.encoder_layers, rule, "choose fewer, or leave it unset")]
