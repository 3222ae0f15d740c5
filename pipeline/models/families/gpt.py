"""GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models import mup
from pipeline.models.decoder_mapping import BOTH
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, tensors
from pipeline.models.shared_sizes import LayerNormConfig, window_violations


@dataclass(frozen=True)
class GPTConfig(mup.MupConfig, LayerNormConfig, family="gpt"):
    """Learned position embeddings, pre-norm LayerNorm, GELU, tied embeddings, biases in all layers."""

    ffn_hidden: int = knob(3072, "intermediate width of the feed-forward", at_least=1)
    banded_window: int | None = knob(
        None,
        "sliding window of every second layer in tokens (GPT-3), including the current one; null for full attention",
        unit="tokens",
        at_least=1,
    )

    def violations(self) -> list[Violation]:
        """See Sizes."""
        windows = window_violations("model.banded_window", self.banded_window, self.max_positions)
        return [*super().violations(), *windows]


def _build(config: GPTConfig) -> Model:
    from torch import nn

    from pipeline.models.decoder import decoder, plain_mlp

    return decoder(
        config,
        norm=nn.LayerNorm,
        # Dense and banded layers alternate (Brown et al. 2020, section 2.1, after Child et al. 2019).
        attention=lambda layer: {"bias": True, "window": config.banded_window if layer % 2 == 1 else None},
        mlp=plain_mlp(config, "gelu_tanh", bias=True),
        embed={"max_positions": config.max_positions},
    )


def initial_std(config: GPTConfig, name: str) -> float | None:
    """OpenAI's recipe (github.com/openai/gpt-2, src/model.py): position embeddings with half the standard deviation of other weights."""
    if name == "embed.positions.weight":
        return config.init_std / 2
    return scaled_residual(config, name)


_HF, _BLOCK = "transformer.h.{i}", "blocks.{i}"
#: The matrices of a block in the classes of GPT-2 and GPT-1, with their biases: transposed, and queries, keys and values joined.
ATTENTION = (
    *tensors(f"{_HF}.attn.c_attn", *(f"{_BLOCK}.attention.{name}" for name in ("query", "key", "value")), leaves=BOTH, transposed=True),
    *tensors(f"{_HF}.attn.c_proj", f"{_BLOCK}.attention.output", leaves=BOTH, transposed=True),
)
MLP = (
    *tensors(f"{_HF}.mlp.c_fc", f"{_BLOCK}.mlp.up", leaves=BOTH, transposed=True),
    *tensors(f"{_HF}.mlp.c_proj", f"{_BLOCK}.mlp.down", leaves=BOTH, transposed=True),
)
#: The norms before or after them.
NORM_1 = tensors(f"{_HF}.ln_1", f"{_BLOCK}.attention_norm", leaves=BOTH)
NORM_2 = tensors(f"{_HF}.ln_2", f"{_BLOCK}.mlp_norm", leaves=BOTH)

MAPPING = HuggingFaceMapping(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    keys={
        "vocab_size": ("vocab_size", 50257),
        "n_positions": ("max_positions", 1024),
        "n_embd": ("hidden", 768),
        "n_layer": ("layers", 12),
        "n_head": ("heads", 12),
        "n_inner": ("ffn_hidden", lambda content: 4 * content.get("n_embd", 768)),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    constants={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    # Other readers require n_ctx; the class does not read it.
    nested=(KeyGroup(("n_ctx",), lambda config: {"n_ctx": config.max_positions}, lambda _: {}),),
    ignored_keys=("reorder_and_upcast_attn",),  # affects only half precision
    ignored_weights=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    renamed=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    table=(
        *tensors("transformer.wte", "embed.tokens"),
        *tensors("transformer.wpe", "embed.positions"),
        *(*NORM_1, *ATTENTION, *NORM_2, *MLP),
        *tensors("transformer.ln_f", "norm", leaves=BOTH),
        *tensors("lm_head", "head"),
    ),
    implied={"banded_window": None},
)

FAMILY = Family(config=GPTConfig, build=_build, initial_std=mup.initial(initial_std), rate=mup.rate, huggingface=(MAPPING,))
