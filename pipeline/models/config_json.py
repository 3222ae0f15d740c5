"""Import of the config.json of a Hugging Face model. Keys and values that the family does not support are reported by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.models import stock_keys
from pipeline.models.config import ModelConfig
from pipeline.models.huggingface_mapping import HuggingFaceMapping, refusal

#: Keys that the code of Hugging Face classes reads and that do not affect the logits: origin of the file, token ids, dtypes, kernels,
#: cache, outputs of the forward pass, heads of other tasks. Keys that the code does not read need no entry (models/stock_keys.py).
WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "name_or_path", "auto_map", "torch_dtype", "dtype", "_commit_hash"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "id2label", "num_labels", "problem_type", "chunk_size_feed_forward"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "is_encoder_decoder"),
        *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    )
)
#: Sizes above it are damaged, not large.
_LARGEST = 2**31 - 1


def read(mapping: HuggingFaceMapping, schema: type[Any], content: dict[str, Any]) -> ModelConfig:
    """Return our configuration of a Hugging Face model.

    Dropout rates configure training, not the model: any value is accepted, and none is used. So are keys that the Hugging Face class does
    not read (`unread`).

    Args:
        mapping: mapping of the class that config.json specifies.
        schema: configuration dataclass of the family.

    Raises:
        UserError: with every key that is missing, or has a value that the family does not support.
    """
    content, violations = _without_aliases(mapping, mapping.language_model(content))
    violations += [*_constants(mapping, content), *_unknown(mapping, content)]
    present, wrong = _fields(mapping, schema, content)
    violations += wrong
    values = {field: present[key] for key, (field, _) in reversed(mapping.keys.items()) if key in present and field in _types(schema)}
    for group in () if wrong else mapping.nested:  # they use the keys of fields
        try:
            values.update(group.read(content))
        except UserError as error:
            violations.extend(error.violations)
    UserError.raise_for(violations)
    values = {**values, **{name: value for name, value in mapping.implied.items() if name in _types(schema)}}
    config: ModelConfig = schema(**values)
    violations = [*knobs.range_violations(config, "model.")] or [*config.violations()]
    violations = violations or [*_contradictions(mapping, config, present)]
    if violations:  # overrides of model.KEY have no effect on an import
        raise UserError([replace(violation, fix="correct config.json, or import another model") for violation in violations])
    return config


def is_dropout(key: str) -> bool:
    """Whether a key of config.json is a dropout rate."""
    return any(word in key for word in ("dropout", "pdrop", "layerdrop"))


def unread(mapping: HuggingFaceMapping, content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that the Hugging Face class does not read, with their values: an export writes them again."""
    stock = stock_keys.keys_of(mapping.architecture)
    if stock is None:
        return {}
    others = _known(mapping) | stock.reads | stock.aliases.keys()
    return {key: value for key, value in mapping.language_model(content).items() if key not in others and not is_dropout(key)}


def _known(mapping: HuggingFaceMapping) -> set[str]:
    """Return the keys that the import reads or knows to have no effect."""
    nested = {key for group in mapping.nested for key in group.keys}
    return {*mapping.keys, *mapping.constants, *nested, *WITHOUT_EFFECT, *mapping.training_keys, *mapping.ignored_keys}


def _without_aliases(mapping: HuggingFaceMapping, content: dict[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Return config.json with the further names of keys replaced by the keys, and a violation for names of one key that contradict."""
    stock = stock_keys.keys_of(mapping.architecture)
    # A family may name a key by its alias; its own table knows best.
    known, named = _known(mapping), stock.aliases if stock else {}
    aliases = {alias: key for alias, key in named.items() if alias not in known}
    aliases |= {key: alias for alias, key in named.items() if alias in known and key not in known}
    plain = {key: value for key, value in content.items() if key not in aliases}
    violations: list[Violation] = []
    for alias, key in aliases.items():
        if content.get(alias) is None:
            continue
        if plain.get(key) is None:
            plain[key] = content[alias]
        elif plain[key] != content[alias]:
            rule = f"is another name of {key}={plain[key]}, and they differ"
            violations += refusal(alias, content[alias], rule, "remove one of them from config.json").violations
    return plain, violations


def _types(schema: type[Any]) -> dict[str, str]:
    return {item.name: str(item.type) for item in dataclasses.fields(schema)}


def _fields(mapping: HuggingFaceMapping, schema: type[Any], content: dict[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Return the values of the keys that are fields, with defaults, and the violations of their types and ranges."""
    present: dict[str, Any] = {}
    violations: list[Violation] = []
    for key in sorted(mapping.keys, key=lambda key: _is_computed(mapping, content, key)):
        if violations and _is_computed(mapping, content, key):
            break  # computed from keys that may be wrong
        try:
            present[key] = _typed(key, _value(mapping, schema, content, key), mapping.keys[key][0], schema)
        except UserError as error:
            violations.extend(error.violations)
    return present, violations


def _is_computed(mapping: HuggingFaceMapping, content: dict[str, Any], key: str) -> bool:
    return content.get(key) is None and callable(mapping.keys[key][1])


def _value(mapping: HuggingFaceMapping, schema: type[Any], content: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or the default of the Hugging Face class. A null counts as a value only if our field may be None."""
    field, default = mapping.keys[key]
    if key in content and (content[key] is not None or "None" in _types(schema).get(field, "")):
        return content[key]
    if callable(default):
        return default({name: value for name, value in content.items() if value is not None or name == key})
    if key in content:
        raise refusal(key, None, f"is null, and {mapping.architecture} requires it", f"set {key} in config.json")
    return default


def _typed(key: str, value: Any, field: str, schema: type[Any]) -> Any:
    """Return the value converted to the type of its field, and verify the type and the range.

    A property of the configuration has no field; its value is compared with the one of config.json (`_contradictions`).
    """
    kind = _types(schema).get(field, "").removesuffix(" | None")
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    expected = {"int": int, "float": float, "bool": bool, "str": str}.get(kind)
    if value is not None and expected and (not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool)):
        raise refusal(key, value, f"must be of type {expected.__name__}", "fix config.json")
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(key, value, "must be finite", "fix config.json")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise refusal(key, value, f"must be at most {_LARGEST}", "fix config.json")
    for item in dataclasses.fields(schema):
        if item.name == field and (rule := item.metadata["knob"].violated(value)):
            raise refusal(key, value, rule, "fix config.json")
    return value


def _constants(mapping: HuggingFaceMapping, content: dict[str, Any]) -> Iterator[Violation]:
    """Yield violations of keys that have one value in the family."""
    for key, expected in mapping.constants.items():
        value = content.get(key, mapping.constant_defaults.get(key, expected))
        if value != expected and not is_dropout(key):
            missing = "" if key in content else f" (the default of {mapping.architecture}, since the key is missing)"
            yield from refusal(key, value, f"is not supported by this family{missing}; only {expected} is supported").violations


def _unknown(mapping: HuggingFaceMapping, content: dict[str, Any]) -> Iterator[Violation]:
    """Yield violations of keys that the Hugging Face class reads and the import does not. Most code reads null as absence."""
    stock = stock_keys.keys_of(mapping.architecture)
    release = content.get("transformers_version")
    for key in sorted(content.keys() - _known(mapping)):
        value = content[key]
        if is_dropout(key):
            continue
        if stock is None or not stock.covers(release):
            if value is not None and key not in stock_keys.INERT:
                rule = f"may be read by {mapping.architecture} of transformers {release}, whose code is not known here"
                fix = f"remove it if it has no effect, or install transformers {release} and run python -m tools.audit.stock_keys"
                yield from refusal(key, value, rule, fix).violations
        elif key in stock.reads and (value is not None or key in stock.defaulted):
            yield from refusal(key, value, f"is read by {mapping.architecture}, and the import does not support it").violations


def _contradictions(mapping: HuggingFaceMapping, config: ModelConfig, present: dict[str, Any]) -> Iterator[Violation]:
    """Yield violations of keys that contradict other keys, such as a head_dim other than hidden / heads if the family derives it."""
    for key, value in present.items():
        expected = getattr(config, mapping.keys[key][0])
        if expected != value:
            yield from refusal(key, value, f"must be {expected} in this family, given the other keys").violations
