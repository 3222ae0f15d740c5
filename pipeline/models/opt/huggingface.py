"""OPT <-> transformers' OPTForCausalLM."""

from __future__ import annotations

from pipeline.models.adapter import Adapter, Table, rows
from pipeline.models.opt.config import OPTConfig

_BOTH = ("weight", "bias")


def table(config: OPTConfig) -> Table:
    """The weights; opt-350m alone has projections beside embedding and head, and no norm after the last block."""
    return (
        *rows("model.decoder.embed_tokens", "embed.tokens"),
        *rows("model.decoder.embed_positions", "embed.positions"),
        *(rows("model.decoder.project_out", "head.project") if config.projected else ()),
        *(rows("model.decoder.project_in", "embed.project") if config.projected else ()),
        *(rows("model.decoder.final_layer_norm", "norm", leaves=_BOTH) if config.pre_norm else ()),
        *rows("model.decoder.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key", leaves=_BOTH),
        *rows("model.decoder.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value", leaves=_BOTH),
        *rows("model.decoder.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query", leaves=_BOTH),
        *rows("model.decoder.layers.{i}.self_attn.out_proj", "blocks.{i}.attention.output", leaves=_BOTH),
        *rows("model.decoder.layers.{i}.self_attn_layer_norm", "blocks.{i}.attention_norm", leaves=_BOTH),
        *rows("model.decoder.layers.{i}.fc1", "blocks.{i}.mlp.up", leaves=_BOTH),
        *rows("model.decoder.layers.{i}.fc2", "blocks.{i}.mlp.down", leaves=_BOTH),
        *rows("model.decoder.layers.{i}.final_layer_norm", "blocks.{i}.mlp_norm", leaves=_BOTH),
        *rows("lm_head", "head"),
    )


ADAPTER = Adapter(
    architecture="OPTForCausalLM",
    model_type="opt",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "ffn_dim": "ffn_hidden",
        "word_embed_proj_dim": "embed_width",
        "do_layer_norm_before": "pre_norm",
        "init_std": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
    },
    table=table,
    defaults={
        "do_layer_norm_before": True,
        "word_embed_proj_dim": None,
        "init_std": 0.02,
        "tie_word_embeddings": True,
    },
)
