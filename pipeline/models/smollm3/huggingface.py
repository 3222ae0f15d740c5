"""SmolLM3 <-> transformers' SmolLM3ForCausalLM; the weights have Llama's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import ROPE, interval_of
from pipeline.models.huggingface_mapping import KeyGroup, refusal
from pipeline.models.llama import huggingface as llama
from pipeline.models.shared_sizes import marked
from pipeline.models.smollm3.config import SmolLM3Config


def _write(config: SmolLM3Config) -> dict[str, Any]:
    """Return the interval, and 1 for each layer with positions, else 0."""
    interval = config.no_rope_layer_interval
    return {"no_rope_layer_interval": interval, "no_rope_layers": [int(not without) for without in marked(config.layers, interval)]}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Return no_rope_layer_interval; the list takes precedence, as in the class."""
    interval, layers = content.get("no_rope_layer_interval", 4), content.get("no_rope_layers")
    count = content.get("num_hidden_layers", 36)
    if layers is not None and not isinstance(layers, list):
        raise refusal("no_rope_layers", layers, "must be a list", "fix config.json")
    return {"no_rope_layer_interval": interval if layers is None else interval_of("no_rope_layers", layers[:count], 0, interval)}


MAPPING = replace(
    llama.MAPPING,
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    fields={key: field for key, field in llama.MAPPING.fields.items() if key != "attention_bias"},
    constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "use_sliding_window": False},
    defaults={
        **llama.MAPPING.defaults,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": llama.kv_heads(4, 16),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    nested=(
        replace(ROPE, read=lambda content: ROPE.read({"rope_theta": 2000000.0, **content})),
        replace(llama.HEAD_DIM, read=lambda content: llama.HEAD_DIM.read({"hidden_size": 2048, "num_attention_heads": 16, **content})),
        llama.NO_PADDING,
        llama.FULL_ATTENTION,
        KeyGroup(keys=("no_rope_layers", "no_rope_layer_interval"), write=_write, read=_read),
    ),
    # sliding windows are off (use_sliding_window), whatever the width is
    ignored_keys=("sliding_window",),
    implied={},
    table=llama.TABLE,
)
#: Export of a llama with layers without positions and without biases and norms of queries and keys.
EXPORT = replace(MAPPING, implied={"query_key_norm": False, "qkv_bias": False, "attention_bias": False}, export_only=True)
