"""GPT-1 (Radford et al. 2018, Improving Language Understanding by Generative Pre-Training): the decoder of Vaswani et al. 2017."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.layers.recipes import single_std
from pipeline.models.families.gpt import ATTENTION, MLP, NORM_1, NORM_2
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, tensors
from pipeline.models.shared_sizes import LayerNormConfig


@dataclass(frozen=True)
class GPT1Config(LayerNormConfig, family="gpt1", vocab_size=40478, max_positions=512):
    """Learned position embeddings, post-norm LayerNorm, GELU, tied embeddings, biases in all layers."""

    @property
    def ffn_hidden(self) -> int:
        """Intermediate width of the feed-forward."""
        return 4 * self.hidden


def _build(config: GPT1Config) -> Model:
    from torch import nn

    from pipeline.models.decoder import decoder, plain_mlp

    return decoder(
        config,
        norm=nn.LayerNorm,
        attention=lambda _: {"bias": True},
        mlp=plain_mlp(config, "gelu_tanh", bias=True),
        block=lambda _: {"post_norm": True},
        embed={"max_positions": config.max_positions},
        final_norm=False,
    )


MAPPING = HuggingFaceMapping(
    architecture="OpenAIGPTLMHeadModel",
    model_type="openai-gpt",
    keys={
        "vocab_size": ("vocab_size", 40478),
        "n_positions": ("max_positions", 512),
        "n_embd": ("hidden", 768),
        "n_layer": ("layers", 12),
        "n_head": ("heads", 12),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    # In this class, gelu means the tanh approximation.
    constants={"afn": "gelu", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    table=(
        *tensors("transformer.tokens_embed", "embed.tokens"),
        *tensors("transformer.positions_embed", "embed.positions"),
        *(*ATTENTION, *NORM_1, *MLP, *NORM_2),
        *tensors("lm_head", "head"),
    ),
    ignored_weights=("transformer.h.*.attn.bias",),
    renamed=((r"^(tokens_embed|positions_embed|h)\.", r"transformer.\1."),),
)

# Initial weights: N(0, 0.02) for every weight (section 4.1 of the paper); with post-norm, activations do not grow with depth.
FAMILY = Family(config=GPT1Config, build=_build, initial_std=single_std, huggingface=(MAPPING,))
