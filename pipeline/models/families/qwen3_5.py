"""Qwen 3.5 (Qwen Team 2026, https://huggingface.co/Qwen/Qwen3.5-27B): Qwen3-Next's layers with a dense feed-forward.

Qwen3_5ForCausalLM of transformers, and the language model of Qwen3_5ForConditionalGeneration, which is imported alone. The rotary
embeddings have sections for time, height and width; a token of text has the same position in all three, so that they are ordinary ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pipeline.models.config_json_keys import partial_rope
from pipeline.models.decoder_mapping import MLP, decoder_mapping
from pipeline.models.families.qwen3_next import (
    HEAD_DIM,
    LAYER_TYPES,
    LINEAR_KEYS,
    LINEAR_MIXER,
    MIXER,
    hybrid,
    hybrid_table,
    initial_std,
)
from pipeline.models.family import Family
from pipeline.models.huggingface_mapping import KeyGroup, tensors
from pipeline.models.shared_sizes import LinearAttentionConfig, PartialRotaryConfig, RotaryDecoderConfig
from pipeline.models.wrapper import Wrapper


@dataclass(frozen=True)
class Qwen35Config(
    PartialRotaryConfig,
    LinearAttentionConfig,
    RotaryDecoderConfig,
    family="qwen3_5",
    partial_rotary_factor=0.25,
    kv_heads=4,
    ffn_hidden=12288,
    vocab_size=248320,
    max_positions=32768,
    norm_eps=1e-6,
    rope_theta=1e7,
):
    """Linear attention in most layers and, at an interval, gated full attention; SwiGLU."""

    query_key_norm: ClassVar[bool] = True


def with_images(architecture: str, model_type: str) -> Wrapper:
    """Return the class of the models with images. It ties the head according to its own key, not to that of the language model."""
    return Wrapper(
        architecture=architecture,
        model_type=model_type,
        replaced={"tie_word_embeddings": False},
        ignored_keys=(
            *("vision_config", "language_model_only", "image_token_id", "video_token_id"),
            *("vision_start_token_id", "vision_end_token_id"),
        ),
        left_out=("visual.*", "model.visual.*"),
    )


_PARTIAL = partial_rope(share=0.25)
#: how positions of images are divided among the frequencies
_SECTIONS = ("mrope_section", "mrope_interleaved")


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields; sections have no effect on positions of text."""
    stated = {key: content[key] for key in ("rope_parameters", "rope_scaling") if isinstance(content.get(key), dict)}
    without = {key: {name: value for name, value in parameters.items() if name not in _SECTIONS} for key, parameters in stated.items()}
    return _PARTIAL.read({**content, **without})


ROPE: KeyGroup = replace(_PARTIAL, read=_read_rope)
#: The projections of the inputs of the linear attention, which are not interleaved.
INPUTS = (
    *tensors(f"{LINEAR_MIXER}.in_proj_qkv", f"{MIXER}.query", f"{MIXER}.key", f"{MIXER}.value"),
    *tensors(f"{LINEAR_MIXER}.in_proj_z", f"{MIXER}.gate"),
    *tensors(f"{LINEAR_MIXER}.in_proj_b", f"{MIXER}.beta"),
    *tensors(f"{LINEAR_MIXER}.in_proj_a", f"{MIXER}.decay"),
)
#: arguments of the mappings of Qwen 3.5 with and without experts
SHARED: dict[str, Any] = {
    "constants": {"attention_bias": False},
    "rope": ROPE,
    "head_width": None,
    "nested": (HEAD_DIM, LAYER_TYPES),
    # The class also loads the names of the class with images; files of both have an MTP module.
    "renamed": ((r"^model\.language_model\.", "model."),),
    "ignored_weights": ("mtp.*", "model.visual.*"),
}
DEFAULTS = {"vocab_size": 248320, "max_position_embeddings": 32768, "num_attention_heads": 16}
MAPPING = decoder_mapping(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    wrappers=(with_images("Qwen3_5ForConditionalGeneration", "qwen3_5"),),
    keys=LINEAR_KEYS,
    defaults={**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
    table=lambda config: hybrid_table(config, INPUTS, lambda _: MLP),
    **SHARED,
)

FAMILY = Family(config=Qwen35Config, build=hybrid, initial_std=initial_std, huggingface=(MAPPING,))
