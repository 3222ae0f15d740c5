"""Sizes that all encoder-decoders share."""

from __future__ import annotations

from pipeline.common.errors import Violation


class EncoderDecoderSizes:
    """Mixin of a configuration dataclass with these fields; the blocks of encoder and decoder are numbered consecutively."""

    layers: int
    encoder_layers: int | None
    heads: int

    @property
    def encoder_blocks(self) -> int:
        """Number of encoder blocks, which come first."""
        return self.layers // 2 if self.encoder_layers is None else self.encoder_layers

    @property
    def decoder_blocks(self) -> int:
        """Number of decoder blocks."""
        return self.layers - self.encoder_blocks

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, equal to the number of query heads."""
        return self.heads

    def depth_violations(self) -> list[Violation]:
        """Return the rules for the number of blocks that are violated."""
        if self.decoder_blocks > 0:
            return []
        rule = f"must be below model.layers={self.layers}, since the remaining blocks are the decoder's"
        return [Violation("model.encoder_layers", self.encoder_layers, rule, "lower it, or leave it unset")]
