"""What the config.json of encoder-decoders share: stock classes count the blocks of encoder and decoder apart, we go on counting."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Nested, refusal
from pipeline.models.encoder_decoder_sizes import EncoderDecoderSizes


def depths(encoder_key: str, decoder_key: str, *, default: int, alike: bool = False) -> Nested:
    """The keys of config.json that count blocks.

    Args:
        encoder_key: of the encoder's.
        decoder_key: of the decoder's.
        default: blocks where a key is missing.
        alike: whether the decoder then has as many as the encoder.
    """

    def write(config: EncoderDecoderSizes) -> dict[str, Any]:
        return {encoder_key: config.encoder_blocks, decoder_key: config.decoder_blocks}

    def read(content: dict[str, Any]) -> dict[str, Any]:
        first = content.get(encoder_key, default)
        second = content.get(decoder_key)
        if second is None:
            second = first if alike else default
        for key, value in ((encoder_key, first), (decoder_key, second)):
            if not isinstance(value, int) or value < 1:
                raise refusal(key, value, "must be a number of blocks, at least 1", f"set {key} in config.json")
        assert isinstance(first, int)
        assert isinstance(second, int)
        return {"layers": first + second, "encoder_layers": None if first == second else first}

    return Nested((encoder_key, decoder_key), write, read)
