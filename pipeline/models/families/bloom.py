"""BLOOM (Le Scao et al. 2022, https://arxiv.org/abs/2211.05100): GPT with ALiBi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models.decoder_mapping import BOTH
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, positive, refusal, tensors
from pipeline.models.shared_sizes import LayerNormConfig


@dataclass(frozen=True)
class BloomConfig(LayerNormConfig, family="bloom", layers=24, hidden=1024, heads=16, vocab_size=250880, init_std=0.0048):
    """GPT with ALiBi instead of position embeddings and a norm after the embedding: pre-norm LayerNorm, GELU, tied embeddings."""

    max_positions: int = knob(2048, "longest sequence; no weight's shape depends on it", unit="tokens", at_least=2)

    @property
    def ffn_hidden(self) -> int:
        """Intermediate width of the feed-forward."""
        return 4 * self.hidden


def _build(config: BloomConfig) -> Model:
    from torch import nn

    from pipeline.layers.position_bias import AlibiSlopes
    from pipeline.models.decoder import decoder, plain_mlp

    return decoder(
        config,
        norm=nn.LayerNorm,
        attention=lambda _: {"bias": True},
        mlp=plain_mlp(config, "gelu_tanh", bias=True),
        embed={"norm": nn.LayerNorm(config.hidden, eps=config.norm_eps)},
        slopes=AlibiSlopes(config.heads),
    )


#: our field -> the key that the Hugging Face class writes, and another that it reads, which BigScience's files have
_SIZES = {"hidden": ("hidden_size", "n_embed"), "layers": ("n_layer", "num_hidden_layers"), "heads": ("n_head", "num_attention_heads")}
_DEFAULTS = {"hidden": 64, "layers": 2, "heads": 8}


def _write(config: BloomConfig) -> dict[str, Any]:
    return {names[0]: getattr(config, field) for field, names in _SIZES.items()}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    return {field: _size(content, names, _DEFAULTS[field]) for field, names in _SIZES.items()}


def _size(content: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    """Return the size that a key contains, under any of its names."""
    sizes = {name: content[name] for name in names if content.get(name) is not None}
    if len(set(map(str, sizes.values()))) > 1:
        raise refusal(*next(iter(sizes.items())), f"contradicts {sizes}, other names of it", "remove one of them from config.json")
    return positive(*next(iter(sizes.items()))) if sizes else default


def _read_exact(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that the class multiplies whole matrices; the slow variant that sums slices of them leaves out the bias."""
    if content.get("slow_but_exact") and content.get("pretraining_tp", 1) != 1:
        raise refusal("slow_but_exact", content["slow_but_exact"], "is not supported with a pretraining_tp other than 1", "set it to false")
    return {}


_HF, _BLOCK = "transformer.h.{i}", "blocks.{i}"
_QUERIES = (f"{_BLOCK}.attention.query", f"{_BLOCK}.attention.key", f"{_BLOCK}.attention.value")

MAPPING = HuggingFaceMapping(
    architecture="BloomForCausalLM",
    model_type="bloom",
    # The class has no maximum length; BigScience's files contain it as seq_length.
    keys={
        "vocab_size": ("vocab_size", 250880),
        "seq_length": ("max_positions", 2048),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    constants={"apply_residual_connection_post_layernorm": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    table=(
        *tensors("transformer.word_embeddings", "embed.tokens"),
        *tensors("transformer.word_embeddings_layernorm", "embed.norm", leaves=BOTH),
        *tensors(f"{_HF}.input_layernorm", f"{_BLOCK}.attention_norm", leaves=BOTH),
        *tensors(f"{_HF}.self_attention.query_key_value", *_QUERIES, leaves=BOTH, interleaved="heads"),
        *tensors(f"{_HF}.self_attention.dense", f"{_BLOCK}.attention.output", leaves=BOTH),
        *tensors(f"{_HF}.post_attention_layernorm", f"{_BLOCK}.mlp_norm", leaves=BOTH),
        *tensors(f"{_HF}.mlp.dense_h_to_4h", f"{_BLOCK}.mlp.up", leaves=BOTH),
        *tensors(f"{_HF}.mlp.dense_4h_to_h", f"{_BLOCK}.mlp.down", leaves=BOTH),
        *tensors("transformer.ln_f", "norm", leaves=BOTH),
        *tensors("lm_head", "head"),
    ),
    renamed=((r"^(word_embeddings|word_embeddings_layernorm|h|ln_f)\.", r"transformer.\1."),),
    nested=(
        KeyGroup(tuple(name for names in _SIZES.values() for name in names), _write, _read),
        KeyGroup(("slow_but_exact", "pretraining_tp"), lambda _: {}, _read_exact),
    ),
)

# Initial weights: BigScience's recipe for all sizes (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml): Megatron-LM's with
# N(0, 0.0048), about 1 / sqrt(3 * hidden) of the largest size.
FAMILY = Family(config=BloomConfig, build=_build, initial_std=scaled_residual, huggingface=(MAPPING,))
