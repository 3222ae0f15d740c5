"""Nemotron-4 (Parmar et al. 2024, https://arxiv.org/abs/2402.16819) and Minitron (Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.layers.recipes import offset_norms
from pipeline.models.config_json_keys import partial_rope
from pipeline.models.decoder_mapping import BOTH, LAYER, decoder_mapping, projections
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import tensors
from pipeline.models.shared_sizes import PartialRotaryConfig, RotaryDecoderConfig


@dataclass(frozen=True)
class NemotronConfig(
    PartialRotaryConfig,
    RotaryDecoderConfig,
    family="nemotron",
    hidden=6144,
    heads=48,
    kv_heads=8,
    ffn_hidden=24576,
    vocab_size=256000,
    init_std=0.0134,
):
    """LayerNorm, squared ReLU without a gate, rotary positions of a part of the dims of a head, grouped-query attention."""

    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)


def _build(config: NemotronConfig) -> Model:
    from pipeline.layers.norm import OffsetLayerNorm
    from pipeline.models.decoder import decoder, plain_mlp

    return decoder(config, norm=OffsetLayerNorm, mlp=plain_mlp(config, "relu2"))


MAPPING = decoder_mapping(
    "NemotronForCausalLM",
    "nemotron",
    keys={"norm_eps": ("norm_eps", 1e-5)},
    without=("rms_norm_eps",),
    activation={"hidden_act": "relu2"},
    constants={"attention_bias": False, "mlp_bias": False},
    defaults={
        "vocab_size": 256000,
        "max_position_embeddings": 4096,
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "intermediate_size": 24576,
        "initializer_range": 0.0134,
    },
    rope=partial_rope(share=0.5),
    table=(
        *tensors("model.embed_tokens", "embed.tokens"),
        *tensors(f"{LAYER}.input_layernorm", "blocks.{i}.attention_norm", leaves=BOTH),
        *projections(),
        *tensors(f"{LAYER}.post_attention_layernorm", "blocks.{i}.mlp_norm", leaves=BOTH),
        *tensors(f"{LAYER}.mlp.up_proj", "blocks.{i}.mlp.up"),
        *tensors(f"{LAYER}.mlp.down_proj", "blocks.{i}.mlp.down"),
        *tensors("model.norm", "norm", leaves=BOTH),
        *tensors("lm_head", "head"),
    ),
)

# Initial weights: Megatron-LM's recipe, with the standard deviation of NVIDIA's config.json.
FAMILY = Family(config=NemotronConfig, build=_build, initial_std=offset_norms, huggingface=(MAPPING,))
