"""Rules of the training objectives (data/load/objectives/), by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from pipeline.common.errors import Violation
from pipeline.config.data import MaskingConfig
from pipeline.config.rules.unread import unlike
from pipeline.config.schema import RunConfig
from pipeline.models.config import MaskedModelConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the rules of the configured objective that are violated."""
    training = config.training
    if training.head_z_loss and config.objective in ("classification", "dpo"):
        rule = f"has no effect with the objective {config.objective}, whose loss is not that of next tokens"
        yield Violation("training.head_z_loss", training.head_z_loss, rule, "remove it")
    yield from RULES[config.objective](config)


def _causal(config: RunConfig) -> Iterator[Violation]:
    """The goldfish loss leaves targets, and hashes tokens in the order of the text; removed documents have no targets."""
    training, depth = config.training, getattr(config.model, "mtp_depth", 0)
    if config.data.teacher is not None and config.stage.name in ("certify", "rehearse"):
        rule = f"is not read by stage={config.stage.name}"
        yield Violation("data.teacher", config.data.teacher, rule, "remove it, and training.teacher_weight")
    if config.data.remove is not None and depth:
        rule = "predicts further tokens from the labels of all positions, and those of removed documents have none"
        yield Violation("model.mtp_depth", depth, rule, "leave the documents out with stage=shard, in a new run")
    if not training.goldfish_k:
        return
    if training.goldfish_k == 1:
        yield Violation("training.goldfish_k", 1, "would drop every target", "set it to 2 or more, such as 4, or to 0")
    if training.goldfish_context >= training.sequence_length:
        rule = f"must be less than training.sequence_length={training.sequence_length}"
        yield Violation("training.goldfish_context", training.goldfish_context, rule, "reduce it")
    if config.data.infill.rate > 0:
        rule = "reorders documents, and training.goldfish_k hashes their tokens in order"
        yield Violation("data.infill.rate", config.data.infill.rate, rule, "set it to 0, or training.goldfish_k=0")
    if depth:  # its modules read the labels of earlier positions
        rule = "predicts further tokens from the labels of all positions, and training.goldfish_k drops some"
        yield Violation("model.mtp_depth", depth, rule, "choose a model without it, or set training.goldfish_k=0")


def _masked(config: RunConfig) -> Iterator[Violation]:
    """The special tokens leave room for text, and two segments may come from different documents."""
    yield from _whole_sequences(config)
    training, masking, paired = config.training, config.data.masking, cast(MaskedModelConfig, config.model).next_sentence
    if masking.random + masking.keep > 1:
        rule = f"and data.masking.keep={masking.keep} have a sum above 1"
        yield Violation("data.masking.random", masking.random, rule, "lower one of them")
    least = 5 if paired else 3
    if training.sequence_length < least:
        rule = f"leaves no room for text between the special tokens, which takes {least}"
        yield Violation("training.sequence_length", training.sequence_length, rule, f"choose {least} or more")
    if paired and training.document_mask:
        rule = "would hide the second segment, which may come from another document"
        yield Violation("training.document_mask", True, rule, "set it to false, or set model.next_sentence=false")


def _masked_diffusion(config: RunConfig) -> Iterator[Violation]:
    """A bidirectional encoder, whose masks have a rate for each sequence and no random tokens."""
    key, name = "training.objective", config.training.objective
    if config.model.objective != "masked":
        rule = f"requires attention to both sides; model.family={config.model.family} has the objective {config.model.objective}"
        yield Violation(key, name, rule, "choose a BERT, RoBERTa or ModernBERT")
        return
    if config.stage.name == "finetune":
        rule, fix = "is not supported by stage=finetune", "use stage=pretrain with checkpoint.initialize_from"
        yield Violation(key, name, rule, fix)
    if cast(MaskedModelConfig, config.model).next_sentence:
        rule = "reads two segments, and training.objective=masked_diffusion one text"
        yield Violation("model.next_sentence", True, rule, "set it to false")
    rule = "has no effect with training.objective=masked_diffusion, which draws the share of masked tokens"
    defaults = {f"data.masking.{share}": getattr(MaskingConfig(), share) for share in ("rate", "random", "keep")}
    yield from unlike(config, defaults, rule, "remove it")
    yield from _whole_sequences(config)
    if (length := config.training.sequence_length) < 3:
        rule = "leaves no room for text between the special tokens, which takes 3"
        yield Violation("training.sequence_length", length, rule, "choose 3 or more")


def _span_corruption(config: RunConfig) -> Iterator[Violation]:
    """A sequence has room for a sentinel, and the sentinels are numbered."""
    yield from _encoder_decoder(config)
    length, sentinel = config.training.sequence_length, config.data.spans.sentinel
    if length < 4:
        rule = "leaves no room for a token, a sentinel and the end token"
        yield Violation("training.sequence_length", length, rule, "choose 4 or more")
    if sentinel.count("*") != 1:
        yield Violation("data.spans.sentinel", sentinel, "must contain one *, for the number", "use a pattern like <extra_id_*>")


def _pairs(config: RunConfig) -> Iterator[Violation]:
    """Pairs come from data.pairs."""
    yield from _encoder_decoder(config)
    if not config.data.pairs.train:
        fix = "name .tsv or .jsonl files with a source and a target per line"
        yield Violation("data.pairs.train", [], "names no file, and the model is trained on pairs", fix)
    if config.data.blend:
        rule = "blends token shards; the model is trained on data.pairs"
        yield Violation("data.blend", ", ".join(sorted(config.data.blend)), rule, "leave it empty")


def _supervised(config: RunConfig) -> Iterator[Violation]:
    """Answers are predicted by decoders, from the files of data.instructions."""
    data, training = config.data, config.training
    if config.model.objective != "causal":
        rule = f"trains models that predict the next token; model.family={config.model.family} has another objective"
        yield Violation("training.objective", training.objective, rule, "choose a decoder, or set training.objective=auto")
    if config.stage.name != "evaluate" and not data.instructions.train and data.instructions.tokens is None:
        fix = 'name .jsonl files with lines {"messages": [...]} or {"prompt": ..., "completion": ...}, or set data.instructions.tokens'
        yield Violation("data.instructions.train", [], "names no file", fix)
    if data.infill.rate > 0:
        yield Violation("data.infill.rate", data.infill.rate, "reorders documents, and answers have an order", "set it to 0")
    if data.blend:
        rule, named = "blends token shards; fine-tuning reads data.instructions", sorted(data.blend)
        fix = f"leave it out; where a file sets it, add {' '.join(f'~data.blend.{name}' for name in named)} to the command"
        yield Violation("data.blend", ", ".join(named), rule, fix)
    if training.sequence_warmup:
        rule = "splits samples, and examples are not split"
        yield Violation("training.sequence_warmup", f"{len(training.sequence_warmup)} entries", rule, "leave it empty")
    if depth := getattr(config.model, "mtp_depth", 0):  # its modules read the labels of earlier positions, and prompts have none
        rule = "predicts further tokens from the labels of all positions, and prompts have none"
        yield Violation("model.mtp_depth", depth, rule, "choose a model without it")


def _preferences(config: RunConfig) -> Iterator[Violation]:
    """With adapters, the reference model is the model without them."""
    yield from _supervised(config)
    if config.parallel.context > 1:
        rule = "splits answers, and the loss of a pair is no sum over their tokens"
        yield Violation("parallel.context", config.parallel.context, rule, "set it to 1 and use tensor, pipeline or data ranks")
    if config.stage.name == "evaluate" or not config.has_reference:
        return
    if config.lora.modules_to_save:
        rule = "would change the reference model, which is the model without adapters"
        yield Violation("lora.modules_to_save", ", ".join(config.lora.modules_to_save), rule, "leave it empty")
    if config.lora.adapter is not None:
        rule = "would not be part of the reference model, which is the model without adapters"
        fix = "merge it into the weights first (stage=convert stage.adapter), and start from those"
        yield Violation("lora.adapter", config.lora.adapter, rule, fix)


def _classification(config: RunConfig) -> Iterator[Violation]:
    """Texts of data.instructions are classified by an encoder."""
    labels: list[str] = getattr(config.model, "labels", [])
    if config.model.objective not in ("masked", "classification"):
        rule = f"classifies with a bidirectional encoder; model.family={config.model.family} is none"
        yield Violation("training.objective", "classification", rule, "choose a BERT or RoBERTa")
    elif not hasattr(config.model, "labels"):
        rule = f"is not supported with model.family={config.model.family}"
        yield Violation("training.objective", "classification", rule, "choose a BERT or RoBERTa")
    elif config.stage.name not in ("finetune", "evaluate"):
        rule = f"is not supported by stage={config.stage.name}"
        yield Violation("training.objective", "classification", rule, "use stage=finetune")
    elif config.stage.name == "evaluate" and not labels:
        rule = "needs a model with labels, and the checkpoint has none"
        yield Violation("training.objective", "classification", rule, "train one: stage=finetune training.objective=classification")
    elif config.stage.name == "finetune" and not config.data.instructions.train:
        fix = 'name .jsonl files with lines {"text": ..., "label": ...}'
        yield Violation("data.instructions.train", [], "names no file", fix)
    elif len(set(labels)) < max(2, len(labels)):
        rule = f"are the labels {', '.join(labels) or 'of no line'}; at least two different ones are required"
        yield Violation("data.instructions.labels", labels, rule, "add lines with other labels, or list the labels")
    for key, value, default in (
        ("data.instructions.tokens", config.data.instructions.tokens, None),
        ("data.blend", ", ".join(sorted(config.data.blend)), ""),
        ("training.sequence_warmup", f"{len(config.training.sequence_warmup)} entries", "0 entries"),
        ("parallel.context", config.parallel.context, 1),
    ):
        if value != default:
            yield Violation(key, value, "is not supported by training.objective=classification", "leave it out")


def _whole_sequences(config: RunConfig) -> Iterator[Violation]:
    """Samples cannot be split along the sequence, and their text must keep its order."""
    if config.data.infill.rate > 0:
        rule = "reorders documents for models that predict the next token"
        yield Violation("data.infill.rate", config.data.infill.rate, rule, "set it to 0, or choose another model")
    if config.training.sequence_warmup:
        rule = f"splits samples; the samples of model.family={config.model.family} are complete sequences"
        yield Violation("training.sequence_warmup", f"{len(config.training.sequence_warmup)} entries", rule, "leave it empty")
    if config.parallel.context > 1:
        rule = f"requires a causal language model; model.family={config.model.family} has the objective {config.model.objective}"
        fix = "set parallel.context=1 and use more data, tensor or pipeline ranks"
        yield Violation("parallel.context", config.parallel.context, rule, fix)


def _encoder_decoder(config: RunConfig) -> Iterator[Violation]:
    """An encoder-decoder reads two sequences, which are complete and not padded."""
    yield from _whole_sequences(config)
    if config.training.document_mask:
        rule = "separates the documents of one sequence; an encoder-decoder has two sequences"
        yield Violation("training.document_mask", True, rule, "set it to false")
    if config.data.packing != "windows":
        rule = "pads samples; spans are taken from unpadded samples, and pairs are not packed"
        yield Violation("data.packing", config.data.packing, rule, "use windows")


#: Name of an objective -> the rules that its configuration can violate.
RULES: dict[str, Callable[[RunConfig], Iterator[Violation]]] = {
    "causal": _causal,
    "classification": _classification,
    "dpo": _preferences,
    "masked": _masked,
    "masked_diffusion": _masked_diffusion,
    "pairs": _pairs,
    "span_corruption": _span_corruption,
    "supervised": _supervised,
}
