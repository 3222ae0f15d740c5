"""What the objectives of encoder-decoders share: the token that a decoder reads first, and configuration rules."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import whole_sequence_violations
from pipeline.data.load.special_tokens import SpecialTokens

#: The default of data.decoder_start: the first of these that the tokenizer has.
DECODER_STARTS = ("<pad>", "[PAD]")


def decoder_start(config: RunConfig, special: SpecialTokens) -> int:
    """The id of the token that a decoder reads first, which is also its padding.

    Raises:
        UserError: as SpecialTokens.find.
    """
    return special.find({"data.decoder_start": (config.data.decoder_start, DECODER_STARTS)})[0]


def violations(config: RunConfig) -> Iterator[Violation]:
    """The configuration rules of encoder-decoders that a run breaks."""
    yield from whole_sequence_violations(config)
    if config.training.document_mask:
        rule = "separates the documents of one sequence; an encoder-decoder has two sequences"
        yield Violation("training.document_mask", True, rule, "set it to false")
    if config.data.packing != "windows":
        rule = "pads samples; spans are taken from unpadded samples, and pairs are not packed"
        yield Violation("data.packing", config.data.packing, rule, "use windows")
