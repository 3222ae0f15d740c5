"""What the objectives of encoder-decoders share: the token that a decoder reads first."""

from __future__ import annotations

from pipeline.config.data import DECODER_STARTS
from pipeline.data.load.special_tokens import SpecialTokens


def decoder_start(named: str | None, special: SpecialTokens) -> int:
    """The id of the token that a decoder reads first, which is also its padding.

    Args:
        named: data.decoder_start.
        special: the special tokens of the tokenizer.

    Raises:
        UserError: as SpecialTokens.find.
    """
    return special.find({"data.decoder_start": (named, DECODER_STARTS)})[0]
