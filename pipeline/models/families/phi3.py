"""Phi-3 (Abdin et al. 2024, https://arxiv.org/abs/2404.14219) and Phi-4 (https://arxiv.org/abs/2412.08905): the function of Mistral.

Phi3ForCausalLM of transformers joins queries, keys and values, and the two inner matrices of a feed-forward. Supported are rotary positions
of all dims of a head without scaling (Phi-4, Phi-3 mini 4k), not longrope and partial_rotary_factor (Phi-4 mini).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.layers.recipes import scaled_residual
from pipeline.models.config_json_keys import UNSCALED
from pipeline.models.decoder_mapping import INPUT_NORM, LAYER, NO_PADDING, OUTPUT_NORM, decoder_mapping, decoder_table
from pipeline.models.families import mistral
from pipeline.models.family import Family
from pipeline.models.huggingface_mapping import tensors


@dataclass(frozen=True)
class Phi3Config(
    mistral.MistralConfig,
    family="phi3",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=10,
    ffn_hidden=17920,
    vocab_size=100352,
    max_positions=16384,
    window=None,
    rope_theta=250000.0,
):
    """Mistral's block under the names of Phi-3's class, whose files have its matrices joined."""


MAPPING = decoder_mapping(
    "Phi3ForCausalLM",
    "phi3",
    constants={"partial_rotary_factor": 1.0},
    defaults={"vocab_size": 32064, "max_position_embeddings": 4096, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5},
    rope=UNSCALED,
    nested=(NO_PADDING, mistral.window(default=None)),
    ignored_keys=("original_max_position_embeddings",),  # of longrope
    table=decoder_table(
        *INPUT_NORM,
        *tensors(f"{LAYER}.self_attn.qkv_proj", *(f"blocks.{{i}}.attention.{name}" for name in ("query", "key", "value"))),
        *tensors(f"{LAYER}.self_attn.o_proj", "blocks.{i}.attention.output"),
        *OUTPUT_NORM,
        *tensors(f"{LAYER}.mlp.gate_up_proj", "blocks.{i}.mlp.gate", "blocks.{i}.mlp.up"),
        *tensors(f"{LAYER}.mlp.down_proj", "blocks.{i}.mlp.down"),
    ),
)

# Initial weights: GPT-2's recipe; Microsoft published none.
FAMILY = Family(config=Phi3Config, build=mistral.FAMILY.build, initial_std=scaled_residual, huggingface=(MAPPING,))
