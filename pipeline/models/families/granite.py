"""Granite 3 (IBM 2024, https://github.com/ibm-granite/granite-3.0-language-models): Llama's block with factors.

The factors keep the widths of a small and a large model comparable: those of the residual stream, of the scores and of the logits (maximal
update parametrization, Yang et al. 2022, https://arxiv.org/abs/2203.03466).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.layers.recipes import single_std
from pipeline.models.decoder_mapping import decoder_mapping
from pipeline.models.family import Family, Model
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class GraniteConfig(RotaryDecoderConfig, family="granite", layers=40, kv_heads=8, ffn_hidden=12800, vocab_size=49155, tie_embeddings=True):
    """Llama's block with a factor of the embedding, of the attention scores, of the output of each layer, and of the logits."""

    embedding_multiplier: float = knob(12.0, "factor of the token embeddings", above=0)
    attention_multiplier: float = knob(0.0078125, "factor of the attention scores, in place of 1 / sqrt(width of a head)", above=0)
    residual_multiplier: float = knob(0.22, "factor of the output of each layer, before it is added to the residual stream", above=0)
    logits_scaling: float = knob(16.0, "divisor of the logits", above=0)


def _build(config: GraniteConfig) -> Model:
    from pipeline.models.decoder import decoder

    return decoder(
        config,
        attention=lambda _: {"scale": config.attention_multiplier},
        block=lambda _: {"residual_factor": config.residual_multiplier},
        embed={"factor": config.embedding_multiplier},
        head={"factor": 1 / config.logits_scaling},
    )


#: keys of the factors, which are fields of the same name; the class has 1 without them
FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

MAPPING = decoder_mapping(
    "GraniteForCausalLM", "granite", keys={key: (key, 1.0) for key in FACTORS}, constants={"attention_bias": False, "mlp_bias": False}
)

# Initial weights: the residual factor takes the place of GPT-2's smaller outputs of the layers.
FAMILY = Family(config=GraniteConfig, build=_build, initial_std=single_std, huggingface=(MAPPING,))
