"""OPT <-> transformers' OPTForCausalLM."""

from __future__ import annotations

from typing import Any

from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, Table, positive, tensors
from pipeline.models.opt.config import OPTConfig

_BOTH = ("weight", "bias")


def table(config: OPTConfig) -> Table:
    """Return the tensors of all weights; only opt-350m has projections at embedding and head, and no final norm."""
    return (
        *tensors("model.decoder.embed_tokens", "embed.tokens"),
        *tensors("model.decoder.embed_positions", "embed.positions"),
        *(tensors("model.decoder.project_out", "head.project") if config.projected else ()),
        *(tensors("model.decoder.project_in", "embed.project") if config.projected else ()),
        *(tensors("model.decoder.final_layer_norm", "norm", leaves=_BOTH) if config.pre_norm else ()),
        *tensors("model.decoder.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key", leaves=_BOTH),
        *tensors("model.decoder.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value", leaves=_BOTH),
        *tensors("model.decoder.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query", leaves=_BOTH),
        *tensors("model.decoder.layers.{i}.self_attn.out_proj", "blocks.{i}.attention.output", leaves=_BOTH),
        *tensors("model.decoder.layers.{i}.self_attn_layer_norm", "blocks.{i}.attention_norm", leaves=_BOTH),
        *tensors("model.decoder.layers.{i}.fc1", "blocks.{i}.mlp.up", leaves=_BOTH),
        *tensors("model.decoder.layers.{i}.fc2", "blocks.{i}.mlp.down", leaves=_BOTH),
        *tensors("model.decoder.layers.{i}.final_layer_norm", "blocks.{i}.mlp_norm", leaves=_BOTH),
        *tensors("lm_head", "head"),
    )


def _write_width(config: OPTConfig) -> dict[str, Any]:
    return {"word_embed_proj_dim": config.embed_width}


def _read_width(content: dict[str, Any]) -> dict[str, Any]:
    """Return embed_width; the Hugging Face class writes the key also if it equals hidden_size."""
    hidden = content.get("hidden_size", 768)
    width = content.get("word_embed_proj_dim", hidden)
    return {"embed_width": None if width in (None, hidden) else positive("word_embed_proj_dim", width)}


MAPPING = HuggingFaceMapping(
    architecture="OPTForCausalLM",
    model_type="opt",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "ffn_dim": "ffn_hidden",
        "do_layer_norm_before": "pre_norm",
        "activation_function": "activation",
        "init_std": "init_std",
        "tie_word_embeddings": "tie_embeddings",
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
    table=table,
    nested=(KeyGroup(("word_embed_proj_dim",), _write_width, _read_width),),
    defaults={
        "do_layer_norm_before": True,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "activation_function": "relu",
        "init_std": 0.02,
        "tie_word_embeddings": True,
    },
)
