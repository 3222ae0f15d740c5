"""Llama 1 (Touvron et al. 2023), 2 and 3; Qwen 2.5 (Qwen Team 2024, https://arxiv.org/abs/2412.15115) and 3 (2025, https://arxiv.org/abs/2505.09388).

LlamaForCausalLM of transformers; with qkv_bias Qwen2ForCausalLM, with query_key_norm Qwen3ForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models import mup
from pipeline.models.decoder_mapping import FULL_ATTENTION, NORMS, TABLE, decoder_mapping, key_value_heads
from pipeline.models.families import smollm3
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import Table
from pipeline.models.shared_sizes import RotaryDecoderConfig, is_marked
from pipeline.models.stock_tensors import tensors


@dataclass(frozen=True)
class LlamaConfig(mup.MupConfig, RotaryDecoderConfig, family="llama"):
    """RMSNorm, SwiGLU, rotary position embeddings, grouped-query attention; optionally the biases of Qwen 2.5 or the norms of Qwen 3."""

    query_key_norm: bool = knob(False, "RMSNorm over each head of queries and keys (Qwen 3)")
    attention_bias: bool = knob(False, "biases in all attention projections")
    qkv_bias: bool = knob(False, "biases in the projections of queries, keys and values only (Qwen 2 and 2.5)")
    no_rope_layer_interval: int | None = knob(
        None, "the last of each of so many layers has no rotary position embeddings (NoPE); null for none", at_least=1
    )

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        if self.qkv_bias and self.attention_bias:
            rule = "adds biases to the query, key and value projections, which model.attention_bias=true has already"
            violations.append(Violation("model.qkv_bias", True, rule, "set one of the two to false"))
        return violations


def _build(config: LlamaConfig) -> Model:
    from pipeline.models.decoder import decoder

    interval = config.no_rope_layer_interval
    return decoder(
        config,
        query_key_norm="head" if config.query_key_norm else None,
        attention=lambda layer: {
            "bias": config.attention_bias or config.qkv_bias,
            "output_bias": config.attention_bias,
            "rope": "none" if interval is not None and is_marked(layer, interval) else "global",
        },
    )


def _table(config: LlamaConfig) -> Table:
    biases = {"q": "query", "k": "key", "v": "value"} if config.attention_bias or config.qkv_bias else {}
    biases |= {"o": "output"} if config.attention_bias else {}
    return (
        *TABLE,
        *(NORMS if config.query_key_norm else ()),
        *(
            entry
            for hf, ours in biases.items()
            for entry in tensors(f"model.layers.{{i}}.self_attn.{hf}_proj", f"blocks.{{i}}.attention.{ours}", leaves=("bias",))
        ),
    )


_BIAS_KEY = {"attention_bias": ("attention_bias", False)}
MAPPING = decoder_mapping(
    "LlamaForCausalLM",
    "llama",
    keys=_BIAS_KEY,
    constants={"mlp_bias": False},
    implied={"query_key_norm": False, "qkv_bias": False, "no_rope_layer_interval": None},
    table=_table,
)
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": key_value_heads(32, 32)}
QWEN3 = decoder_mapping(
    "Qwen3ForCausalLM",
    "qwen3",
    keys=_BIAS_KEY,
    constants={"use_sliding_window": False},
    defaults=_QWEN,
    head_width=128,
    nested=(FULL_ATTENTION,),
    ignored_keys=("sliding_window", "max_window_layers"),  # off, since use_sliding_window is false
    implied={"query_key_norm": True, "qkv_bias": False, "no_rope_layer_interval": None},
    table=_table,
)
#: Qwen 2 and 2.5
QWEN2 = decoder_mapping(
    "Qwen2ForCausalLM",
    "qwen2",
    constants={"use_sliding_window": False},
    defaults=_QWEN,
    nested=(FULL_ATTENTION,),
    ignored_keys=QWEN3.ignored_keys,
    implied={"query_key_norm": False, "qkv_bias": True, "attention_bias": False, "no_rope_layer_interval": None},
    table=_table,
)
#: Export of a llama with layers without positions and without biases and norms of queries and keys.
_WITHOUT_POSITIONS = replace(
    smollm3.MAPPING, implied={"query_key_norm": False, "qkv_bias": False, "attention_bias": False}, export_only=True
)

# Initial weights: GPT-2's recipe; Meta published none.
FAMILY = Family(
    config=LlamaConfig,
    build=_build,
    initial_std=mup.initial(scaled_residual),
    rate=mup.rate,
    huggingface=(MAPPING, QWEN2, QWEN3, _WITHOUT_POSITIONS),
)
