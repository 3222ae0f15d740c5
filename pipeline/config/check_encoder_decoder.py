"""Rules of what encoder-decoders learn from: span corruption and pairs."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.schema import RunConfig
from pipeline.errors import Violation


def violations(config: RunConfig) -> Iterator[Violation]:
    """Every broken rule."""
    data, training = config.data, config.training
    if training.sequence_warmup:
        why = "cuts samples into parts; what an encoder-decoder reads is whole"
        yield Violation("training.sequence_warmup", f"{len(training.sequence_warmup)} entries", why, "leave it out")
    if training.document_mask:
        why = "tells documents apart for one sequence; an encoder-decoder has two"
        yield Violation("training.document_mask", True, why, "leave it out")
    if data.infill.rate > 0:
        why = "puts documents together anew for models that predict the next token"
        yield Violation("data.infill.rate", data.infill.rate, why, "leave it out, or choose another model")
    if data.packing != "windows":
        why = "pads samples; spans are taken out of whole ones, and pairs are not packed"
        yield Violation("data.packing", data.packing, why, "use windows")
    yield from _pairs(config) if config.model.objective == "pairs" else _spans(config)


def _spans(config: RunConfig) -> Iterator[Violation]:
    """Span corruption needs room, and names for its sentinels."""
    length, sentinel = config.training.sequence_length, config.data.spans.sentinel
    if length < 4:
        why = "has no room for a token, a sentinel, and the end"
        yield Violation("training.sequence_length", length, why, "choose 4 or more")
    if sentinel.count("*") != 1:
        yield Violation("data.spans.sentinel", sentinel, "must hold one *, for the number", "name it like <extra_id_*>")


def _pairs(config: RunConfig) -> Iterator[Violation]:
    """Pairs come from files of their own."""
    if not config.data.pairs.train:
        fix = "name .tsv or .jsonl files with a source and a target a line"
        yield Violation("data.pairs.train", [], "names no file, and the model learns from pairs", fix)
    if config.data.blend:
        why = "mixes token shards; the model learns from data.pairs"
        yield Violation("data.blend", ", ".join(sorted(config.data.blend)), why, "leave it out")
