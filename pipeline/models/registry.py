"""All model families, and functions that select the family of a configuration. Loads torch; `config_classes.py` does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.common.errors import UserError, Violation
from pipeline.layers.stack import Stack
from pipeline.models.apertus.model import APERTUS
from pipeline.models.bert.model import BERT
from pipeline.models.bloom.model import BLOOM
from pipeline.models.config import ModelConfig
from pipeline.models.deepseek_v3.model import DEEPSEEK_V3
from pipeline.models.family import Family
from pipeline.models.gemma2.model import GEMMA2
from pipeline.models.gemma3.model import GEMMA3
from pipeline.models.glm4_moe.model import GLM4_MOE
from pipeline.models.gpt.model import GPT
from pipeline.models.gpt1.model import GPT1
from pipeline.models.gpt_neox.model import GPT_NEOX
from pipeline.models.gpt_oss.model import GPT_OSS
from pipeline.models.granite.model import GRANITE
from pipeline.models.huggingface_mapping import HuggingFaceMapping, StockTensor, refusal
from pipeline.models.llama.model import LLAMA
from pipeline.models.mistral.model import MISTRAL
from pipeline.models.mixtral.model import MIXTRAL
from pipeline.models.nemotron.model import NEMOTRON
from pipeline.models.olmo2.model import OLMO2
from pipeline.models.olmo3.model import OLMO3
from pipeline.models.olmoe.model import OLMOE
from pipeline.models.opt.model import OPT
from pipeline.models.phi3.model import PHI3
from pipeline.models.qwen3_moe.model import QWEN3_MOE
from pipeline.models.qwen3_next.model import QWEN3_NEXT
from pipeline.models.roberta.model import ROBERTA
from pipeline.models.smollm3.model import SMOLLM3
from pipeline.models.t5.model import T5
from pipeline.models.transformer.model import TRANSFORMER
from pipeline.models.unsupported import nearest

#: name of a family -> the family
FAMILIES: dict[str, Family] = {
    "apertus": APERTUS,
    "bert": BERT,
    "bloom": BLOOM,
    "deepseek_v3": DEEPSEEK_V3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "glm4_moe": GLM4_MOE,
    "gpt": GPT,
    "gpt1": GPT1,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "nemotron": NEMOTRON,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "opt": OPT,
    "phi3": PHI3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "roberta": ROBERTA,
    "smollm3": SMOLLM3,
    "t5": T5,
    "transformer": TRANSFORMER,
}


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration."""
    return FAMILIES[config.family]


def build(config: ModelConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device (meta included)."""
    return family_of(config).build(config)


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
    candidates = [(family, mapping) for family in FAMILIES.values() for mapping in family.huggingface]
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
