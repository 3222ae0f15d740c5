"""What the objectives of encoder-decoders share: the token that a decoder reads first."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.data.load.special_tokens import SpecialTokens

#: The default of data.decoder_start: the first of these that the tokenizer has.
DECODER_STARTS = ("<pad>", "[PAD]")


def decoder_start(config: RunConfig, special: SpecialTokens) -> int:
    """The id of the token that a decoder reads first, which is also its padding.

    Raises:
        UserError: as SpecialTokens.find.
    """
    return special.find({"data.decoder_start": (config.data.decoder_start, DECODER_STARTS)})[0]
