"""OPT (Zhang et al. 2022, https://arxiv.org/abs/2205.01068)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models.decoder_mapping import BOTH
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, Table, positive, tensors
from pipeline.models.shared_sizes import MultiHeadConfig


@dataclass(frozen=True)
class OPTConfig(MultiHeadConfig, family="opt", vocab_size=50272, max_positions=2048, init_std=0.006):
    """Learned position embeddings that start in row 2, LayerNorm, ReLU, tied embeddings, biases in all layers."""

    ffn_hidden: int = knob(3072, "intermediate width of the feed-forward", at_least=1)
    embed_width: int | None = knob(None, "width of embedding and head, projected to and from hidden; null for hidden", at_least=1)
    pre_norm: bool = knob(True, "pre-norm; false for post-norm without a final norm (opt-350m)")
    activation: str = knob("relu", "activation of the feed-forward; gelu in Galactica", choices=("relu", "gelu"))

    @property
    def norm_eps(self) -> float:
        """Added to the variance in LayerNorm; the same in all released models."""
        return 1e-5

    @property
    def projected(self) -> bool:
        """Whether the width of embedding and head differs from hidden."""
        return self.embed_width not in (None, self.hidden)


def _build(config: OPTConfig) -> Model:
    from torch import nn

    from pipeline.models.decoder import decoder, plain_mlp

    width = config.embed_width if config.projected else None
    return decoder(
        config,
        norm=nn.LayerNorm,
        attention=lambda _: {"bias": True},
        mlp=plain_mlp(config, config.activation, bias=True),
        block=lambda _: {"post_norm": not config.pre_norm},
        embed={"max_positions": config.max_positions, "position_offset": 2, "width": width},
        head={"width": width},
        final_norm=config.pre_norm,
    )


def _table(config: OPTConfig) -> Table:
    """Return the tensors of all weights; only opt-350m has projections at embedding and head, and no final norm."""
    layer = "model.decoder.layers.{i}"
    return (
        *tensors("model.decoder.embed_tokens", "embed.tokens"),
        *tensors("model.decoder.embed_positions", "embed.positions"),
        *(tensors("model.decoder.project_out", "head.project") if config.projected else ()),
        *(tensors("model.decoder.project_in", "embed.project") if config.projected else ()),
        *(tensors("model.decoder.final_layer_norm", "norm", leaves=BOTH) if config.pre_norm else ()),
        *tensors(f"{layer}.self_attn.k_proj", "blocks.{i}.attention.key", leaves=BOTH),
        *tensors(f"{layer}.self_attn.v_proj", "blocks.{i}.attention.value", leaves=BOTH),
        *tensors(f"{layer}.self_attn.q_proj", "blocks.{i}.attention.query", leaves=BOTH),
        *tensors(f"{layer}.self_attn.out_proj", "blocks.{i}.attention.output", leaves=BOTH),
        *tensors(f"{layer}.self_attn_layer_norm", "blocks.{i}.attention_norm", leaves=BOTH),
        *tensors(f"{layer}.fc1", "blocks.{i}.mlp.up", leaves=BOTH),
        *tensors(f"{layer}.fc2", "blocks.{i}.mlp.down", leaves=BOTH),
        *tensors(f"{layer}.final_layer_norm", "blocks.{i}.mlp_norm", leaves=BOTH),
        *tensors("lm_head", "head"),
    )


def _read_width(content: dict[str, Any]) -> dict[str, Any]:
    """Return embed_width; the Hugging Face class writes the key also if it equals hidden_size."""
    hidden = content.get("hidden_size", 768)
    width = content.get("word_embed_proj_dim", hidden)
    return {"embed_width": None if width in (None, hidden) else positive("word_embed_proj_dim", width)}


MAPPING = HuggingFaceMapping(
    architecture="OPTForCausalLM",
    model_type="opt",
    keys={
        "vocab_size": ("vocab_size", 50272),
        "max_position_embeddings": ("max_positions", 2048),
        "hidden_size": ("hidden", 768),
        "num_hidden_layers": ("layers", 12),
        "num_attention_heads": ("heads", 12),
        "ffn_dim": ("ffn_hidden", 3072),
        "do_layer_norm_before": ("pre_norm", True),
        "activation_function": ("activation", "relu"),
        "init_std": ("init_std", 0.02),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    renamed=((r"^decoder\.", "model.decoder."),),
    constants={
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
    },
    table=_table,
    nested=(KeyGroup(("word_embed_proj_dim",), lambda config: {"word_embed_proj_dim": config.embed_width}, _read_width),),
)

# Initial weights: Megatron-LM's recipe with N(0, 0.006) (section 2.2 of the paper).
FAMILY = Family(config=OPTConfig, build=_build, initial_std=scaled_residual, huggingface=(MAPPING,))
