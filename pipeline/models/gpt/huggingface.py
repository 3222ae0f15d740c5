"""GPT <-> transformers' GPT2LMHeadModel."""

from __future__ import annotations

from pipeline.models.adapter import Adapter, rows

_BOTH = ("weight", "bias")

ADAPTER = Adapter(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "max_positions",
        "n_ctx": "max_positions",
        "n_embd": "hidden",
        "n_layer": "layers",
        "n_head": "heads",
        "n_inner": "ffn_hidden",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"activation_function": "gelu_new", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    table=(
        *rows("transformer.wte", "embed.tokens"),
        *rows("transformer.wpe", "embed.positions"),
        *rows("transformer.h.{i}.ln_1", "blocks.{i}.attention_norm", leaves=_BOTH),
        *rows(
            "transformer.h.{i}.attn.c_attn",
            "blocks.{i}.attention.query",
            "blocks.{i}.attention.key",
            "blocks.{i}.attention.value",
            leaves=_BOTH,
            transposed=True,
        ),
        *rows("transformer.h.{i}.attn.c_proj", "blocks.{i}.attention.output", leaves=_BOTH, transposed=True),
        *rows("transformer.h.{i}.ln_2", "blocks.{i}.mlp_norm", leaves=_BOTH),
        *rows("transformer.h.{i}.mlp.c_fc", "blocks.{i}.mlp.up", leaves=_BOTH, transposed=True),
        *rows("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down", leaves=_BOTH, transposed=True),
        *rows("transformer.ln_f", "norm", leaves=_BOTH),
        *rows("lm_head", "head"),
    ),
)
