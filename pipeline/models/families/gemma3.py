"""Gemma 3 (Gemma Team 2025, https://arxiv.org/abs/2503.19786): mostly local attention, with another rotary base in the global layers.

Gemma3ForCausalLM of transformers, and the language model of Gemma3ForConditionalGeneration, which is imported alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import offset_norms
from pipeline.models.config_json_keys import layer_types, rope_by_kind
from pipeline.models.decoder_mapping import INPUT_NORM, LAYER, MLP, NO_PADDING, NORMS, decoder_mapping, decoder_table, projections
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import KeyGroup, Table, positive, tensors
from pipeline.models.shared_sizes import RotaryDecoderConfig, WindowConfig, heads_violations
from pipeline.models.wrapper import Wrapper


@dataclass(frozen=True)
class GemmaConfig(RotaryDecoderConfig, WindowConfig, layers=26, head_width=256, max_positions=8192, norm_eps=1e-6, tie_embeddings=True):
    """What Gemma 2 and 3 share: windows, norms before and after each layer, GeGLU, scaled embeddings."""

    query_pre_attn_scalar: int = knob(256, "the attention scores are divided by its square root", at_least=1)

    @property
    def score_factor(self) -> float:
        """Factor of the attention scores."""
        return 1 / math.sqrt(self.query_pre_attn_scalar)

    def violations(self) -> list[Violation]:
        """See Sizes; the Hugging Face class requires heads to divide hidden."""
        violations = super().violations()
        return violations if self.head_width is None else [*violations, *heads_violations(self.hidden, self.heads)]


@dataclass(frozen=True)
class Gemma3Config(
    GemmaConfig,
    family="gemma3",
    sliding_window_pattern=6,
    window=512,
    hidden=1152,
    heads=4,
    kv_heads=1,
    ffn_hidden=6912,
    vocab_size=262144,
    max_positions=32768,
):
    """Local layers with a sliding window and, at an interval, global ones; norms before and after each layer; GeGLU; scaled embeddings."""

    query_key_norm: ClassVar[bool] = True

    rope_theta: float = knob(1e6, "base of the rotary frequencies of the global layers", above=1)
    rope_local_theta: float = knob(10000.0, "base of the rotary frequencies of the local layers, which are not scaled", above=1)


def gemma(config: GemmaConfig, **arguments: Any) -> Model:
    """Build a Gemma; the arguments are those of `decoder`."""
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.norm import OffsetRMSNorm
    from pipeline.models.decoder import decoder

    return decoder(
        config,
        norm=OffsetRMSNorm,
        norms="both",
        mlp=lambda _: GatedMLP(config.hidden, config.ffn_hidden, bias=False, activation="gelu_tanh"),
        embed={"factor": math.sqrt(config.hidden)},
        **arguments,
    )


def _build(config: Gemma3Config) -> Model:
    from pipeline.models.decoder import local_windows

    windows = local_windows(config)
    return gemma(config, query_key_norm="head", attention=lambda layer: {**windows(layer), "scale": config.score_factor})


def gemma_table(*norms: Any) -> Table:
    """Return the tensors of a Gemma with these norms of queries and keys."""
    return decoder_table(
        *INPUT_NORM,
        *projections(),
        *norms,
        *tensors(f"{LAYER}.post_attention_layernorm", "blocks.{i}.post_attention_norm"),
        *tensors(f"{LAYER}.pre_feedforward_layernorm", "blocks.{i}.mlp_norm"),
        *MLP,
        *tensors(f"{LAYER}.post_feedforward_layernorm", "blocks.{i}.post_mlp_norm"),
    )


#: The models from 4b on. The class ties the head according to its own key, not to that of the language model.
WITH_IMAGES = Wrapper(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    constants={"tie_word_embeddings": True},
    ignored_keys=(
        *("vision_config", "mm_tokens_per_image", "initializer_range", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("boi_token_id", "eoi_token_id", "image_token_id"),
    ),
    left_out=("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*"),
)
#: of Gemma 2, too
HEAD_DIM = KeyGroup(
    keys=("head_dim",),
    write=lambda config: {"head_dim": config.head_dim},
    read=lambda content: {"head_width": positive("head_dim", content.get("head_dim", 256))},
)
KEYS = {"query_pre_attn_scalar": ("query_pre_attn_scalar", 256), "sliding_window": ("window", 4096)}
DEFAULTS = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
}
MAPPING = decoder_mapping(
    "Gemma3ForCausalLM",
    "gemma3_text",
    wrappers=(WITH_IMAGES,),
    keys=KEYS,
    activation={"hidden_activation": "gelu_pytorch_tanh"},
    constants={"attention_bias": False, "final_logit_softcapping": None, "use_bidirectional_attention": False},
    defaults={**DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072},
    rope=rope_by_kind(theta=1e6, local_theta=10000.0, positions=131072, local_key="rope_local_base_freq"),
    head_width=None,
    nested=(HEAD_DIM, NO_PADDING, layer_types(default=6, interval_key="sliding_window_pattern")),
    # the class stores attn_logit_softcapping and does not use it
    ignored_keys=("_sliding_window_pattern", "attn_logit_softcapping"),
    table=gemma_table(*NORMS),
)

# Initial weights: GPT-2's recipe; Google published none.
FAMILY = Family(config=Gemma3Config, build=_build, initial_std=offset_norms, huggingface=(MAPPING,))
