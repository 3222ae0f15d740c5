"""What the config.json of encoder-decoders share: stock classes count the blocks of encoder and decoder apart, we go on counting."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Nested, refusal
from pipeline.models.halves import Halves


def depths(encoder_key: str, decoder_key: str, *, decoder_default: bool = False) -> Nested:
    """The keys of config.json that count blocks.

    Args:
        encoder_key: of the encoder's.
        decoder_key: of the decoder's.
        decoder_default: whether the decoder has as many as the encoder where its key is missing.
    """

    def write(config: Halves) -> dict[str, Any]:
        return {encoder_key: config.encoder_blocks, decoder_key: config.decoder_blocks}

    def read(content: dict[str, Any]) -> dict[str, Any]:
        first = content.get(encoder_key)
        second = content.get(decoder_key)
        second = first if second is None and decoder_default else second
        for key, value in ((encoder_key, first), (decoder_key, second)):
            if not isinstance(value, int) or value < 1:
                raise refusal(key, value, "must be a number of blocks, at least 1", f"set {key} in config.json")
        assert isinstance(first, int)
        assert isinstance(second, int)
        return {"layers": first + second, "encoder_layers": None if first == second else first}

    return Nested((encoder_key, decoder_key), write, read)
