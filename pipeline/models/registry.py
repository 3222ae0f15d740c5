"""All model families, and functions that select the family of a configuration. Importing it loads no torch; building a model does."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pipeline.common.errors import UserError, Violation
from pipeline.models.config import ModelConfig
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, StockTensor, refusal
from pipeline.models.unsupported import nearest

#: The families; each is a file of families/.
NAMES = (
    *("apertus", "bert", "bloom", "deepseek_v3", "exaone4", "gemma2", "gemma3", "gemma4", "glm4_moe", "gpt", "gpt1"),
    *("gpt_neox", "gpt_oss", "granite", "granite_hybrid", "kimi_linear", "llama", "mistral", "mixtral", "modernbert"),
    *("nemotron", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi3", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_moe", "qwen3_next", "roberta", "smollm3", "t5", "transformer"),
)
FAMILIES: dict[str, Family] = {name: import_module(f"pipeline.models.families.{name}").FAMILY for name in NAMES}
#: family -> its configuration dataclass
CONFIG_CLASSES: dict[str, type[Any]] = {name: family.config for name, family in FAMILIES.items()}


def from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """Return the model configuration that a checkpoint or a run directory stores as a dictionary."""
    config: ModelConfig = CONFIG_CLASSES[values["family"]](**values)
    return config


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration."""
    return FAMILIES[config.family]


def build(config: ModelConfig) -> Model:
    """Build the full model with uninitialized weights on torch's default device (meta included)."""
    return family_of(config).build(config)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the weights of a model with their shapes, without memory for them."""
    import torch  # a configuration is read without it

    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in build(config).named_parameters()}


def mapping_of(config: ModelConfig) -> HuggingFaceMapping:
    """Return the mapping of the Hugging Face class that supports this configuration.

    Raises:
        UserError: no Hugging Face class supports the configuration.
    """
    candidates = family_of(config).huggingface
    mismatches = {candidate.architecture: candidate.mismatches(config) for candidate in candidates}
    for candidate in candidates:
        if not mismatches[candidate.architecture]:
            return candidate
    fix = "such a model cannot be exported to Hugging Face; train with the supported value to export it"
    raise UserError(
        [
            Violation(f"model.{field}", getattr(config, field), f"is not supported by {name}; only {value} is supported", fix)
            for name, values in mismatches.items()
            for field, value in values.items()
        ]
    )


def stock_tensors(config: ModelConfig) -> tuple[list[StockTensor], dict[str, str]]:
    """Return the tensors of the Hugging Face model in its order, without duplicates, and its names for duplicates: name -> stored tensor.

    Duplicates are tied weights (the head) and the `copies` of the mapping.
    """
    mapping, tied = mapping_of(config), family_of(config).tied_weights(config)
    tensors = list(mapping.tensors(config))
    hf_names = {entry.names: entry.hf_name for entry in tensors if entry.names}
    duplicates = {entry.hf_name: hf_names[(tied[entry.names[0]],)] for entry in tensors if entry.names and entry.names[0] in tied}
    stored = [entry for entry in tensors if entry.hf_name not in duplicates]
    stored_names = {entry.hf_name for entry in stored}
    return stored, {**{copy: name for copy, name in mapping.copies.items() if copy not in stored_names}, **duplicates}


def find_mapping(content: Mapping[str, Any]) -> tuple[Family, HuggingFaceMapping]:
    """Return the family and the mapping of a Hugging Face model.

    Args:
        content: content of its config.json.

    Raises:
        UserError: no family supports its class.
    """
    candidates = [(family, mapping) for family in FAMILIES.values() for mapping in family.huggingface if not mapping.export_only]
    names = content.get("architectures")
    if names is not None and not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise refusal("architectures", names, "must be a list with the name of a class", 'set it, such as ["LlamaForCausalLM"]')
    architecture = names[0] if names else None
    for family, mapping in candidates:
        named = content.get("model_type") in (mapping.model_type, *mapping.other_model_types)
        if named and architecture in (mapping.architecture, *mapping.legacy_architectures):
            return family, mapping
        for wrapper in mapping.wrappers:
            if (content.get("model_type"), architecture) == (wrapper.model_type, wrapper.architecture):
                return family, mapping.within(wrapper)
    classes = [
        name for _, mapping in candidates for name in (mapping.architecture, *(wrapper.architecture for wrapper in mapping.wrappers))
    ]
    if architecture in classes:
        raise refusal(
            "model_type", content.get("model_type"), f"is not that of {architecture}", "correct config.json, or choose another model"
        )
    key, value = ("architectures", architecture) if architecture else ("model_type", content.get("model_type"))
    rule = f"is not a class that can be imported{nearest(architecture, classes)}"
    raise refusal(key, value, rule, f"choose a model of one of {', '.join(classes)}")
