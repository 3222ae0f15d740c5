"""Import of the config.json of a Hugging Face model. Keys and values that the family does not support are reported by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pipeline import knobs
from pipeline.errors import UserError, Violation
from pipeline.models.adapter import Adapter, refusal
from pipeline.models.config import ModelConfig

#: Keys that do not affect the logits: origin of the file, token ids, generation, dtypes, outputs of the forward pass, heads of other tasks.
IGNORED_KEYS = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "_name_or_path", "auto_map", "torch_dtype", "dtype", "_commit_hash"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "prefix", "suppress_tokens"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "output_past", "gradient_checkpointing", "torchscript"),
        *("max_length", "min_length", "num_beams", "early_stopping", "do_sample", "temperature", "top_k", "top_p", "length_penalty"),
        *("repetition_penalty", "no_repeat_ngram_size", "task_specific_params", "id2label", "label2id", "num_labels", "problem_type"),
        *("finetuning_task", "chunk_size_feed_forward", "pretraining_tp", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_internal", "_attn_implementation_autoset", "classifier_dropout", "is_encoder_decoder"),
    )
)


def read(adapter: Adapter, schema: type[Any], content: dict[str, Any]) -> ModelConfig:
    """Return our configuration of a Hugging Face model.

    Dropout rates configure training, not the model: any value is accepted, and none is used.

    Args:
        adapter: adapter of the class that config.json specifies.
        schema: configuration dataclass of the family.
        content: content of config.json.

    Raises:
        UserError: with every key that is missing, unknown, or has a value that the family does not support.
    """
    violations = [*_constants(adapter, content), *_unknown(adapter, content)]
    values: dict[str, Any] = dict(adapter.implied)
    types = {item.name: str(item.type) for item in dataclasses.fields(schema)}
    present: dict[str, Any] = {}
    for key, field in adapter.fields.items():
        try:
            present[key] = _typed(key, _value(adapter, content, key, types.get(field, "")), types.get(field, ""))
        except UserError as error:
            violations.extend(error.violations)
        else:
            if field in types:
                values.setdefault(field, present[key])
    for group in adapter.nested:
        try:
            values.update(group.read(content))
        except UserError as error:
            violations.extend(error.violations)
    if violations:
        raise UserError(violations)
    config: ModelConfig = schema(**values)
    violations = [*_contradictions(adapter, config, present), *knobs.range_violations(config, "model."), *config.violations()]
    if violations:
        raise UserError(violations)
    return config


def is_dropout(key: str) -> bool:
    """Whether a key of config.json is a dropout rate."""
    return any(word in key for word in ("dropout", "pdrop", "layerdrop"))


def _value(adapter: Adapter, content: dict[str, Any], key: str, kind: str) -> Any:
    """Return the value of a key, or the default of the Hugging Face class. A null counts as a value only if our field may be None."""
    if key in content and (content[key] is not None or "None" in kind):
        return content[key]
    if key not in adapter.defaults:
        raise refusal(key, content.get(key), f"is missing, and {adapter.architecture} requires it", f"set {key} in config.json")
    default = adapter.defaults[key]
    return default(content) if callable(default) else default


def _typed(key: str, value: Any, kind: str) -> Any:
    """Return the value converted to the type of its field."""
    if kind.startswith("float") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = {"int": int, "float": float, "bool": bool, "str": str}.get(kind.removesuffix(" | None"))
    if value is not None and expected and (not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool)):
        raise refusal(key, value, f"must be of type {expected.__name__}", "fix config.json")
    return value


def _constants(adapter: Adapter, content: dict[str, Any]) -> Iterator[Violation]:
    """Yield violations of keys that have one value in the family."""
    for key, expected in adapter.constants.items():
        value = content.get(key, adapter.defaults.get(key, expected))
        if value != expected and not is_dropout(key):
            missing = "" if key in content else f" (the default of {adapter.architecture}, since the key is missing)"
            yield from refusal(key, value, f"is not supported by this family{missing}; only {expected} is supported").violations


def _unknown(adapter: Adapter, content: dict[str, Any]) -> Iterator[Violation]:
    """Yield violations of unknown keys. A null means that the feature is not used."""
    nested = {key for group in adapter.nested for key in group.keys}
    known = adapter.fields.keys() | adapter.constants.keys() | adapter.defaults.keys() | nested | IGNORED_KEYS | set(adapter.ignored_keys)
    for key in sorted(content.keys() - known):
        if content[key] is not None and not is_dropout(key):
            yield from refusal(key, content[key], f"is not a key of {adapter.architecture} that the import supports").violations


def _contradictions(adapter: Adapter, config: ModelConfig, present: dict[str, Any]) -> Iterator[Violation]:
    """Yield violations of keys that contradict other keys, such as a head_dim other than hidden / heads if the family derives it."""
    for key, value in present.items():
        expected = getattr(config, adapter.fields[key])
        if expected != value:
            yield from refusal(key, value, f"must be {expected} in this family, given the other keys").violations
