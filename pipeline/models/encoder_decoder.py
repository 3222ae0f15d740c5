"""config.json keys that encoder-decoders share: Hugging Face numbers the blocks of encoder and decoder separately."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import KeyGroup, positive
from pipeline.models.encoder_decoder_sizes import EncoderDecoderSizes


def layer_counts(encoder_key: str, decoder_key: str, *, default: int, decoder_as_encoder: bool = False) -> KeyGroup:
    """Return the keys of config.json with the numbers of blocks.

    Args:
        encoder_key: key with the number of encoder blocks.
        decoder_key: key with the number of decoder blocks.
        default: number of blocks if a key is missing.
        decoder_as_encoder: whether a missing decoder_key means as many blocks as the encoder has.
    """

    def write(config: EncoderDecoderSizes) -> dict[str, Any]:
        return {encoder_key: config.encoder_blocks, decoder_key: config.decoder_blocks}

    def read(content: dict[str, Any]) -> dict[str, Any]:
        first = content.get(encoder_key, default)
        second = content.get(decoder_key)
        if second is None:
            second = first if decoder_as_encoder else default
        blocks = positive(encoder_key, first), positive(decoder_key, second)
        return {"layers": sum(blocks), "encoder_layers": None if blocks[0] == blocks[1] else blocks[0]}

    return KeyGroup((encoder_key, decoder_key), write, read)
