"""GPT <-> transformers' GPT2LMHeadModel."""

from __future__ import annotations

from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, tensors

_BOTH = ("weight", "bias")

MAPPING = HuggingFaceMapping(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "max_positions",
        "n_embd": "hidden",
        "n_layer": "layers",
        "n_head": "heads",
        "n_inner": "ffn_hidden",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
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
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": lambda content: 4 * content.get("n_embd", 768),
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    # Other readers require n_ctx; the class does not read it.
    nested=(KeyGroup(("n_ctx",), lambda config: {"n_ctx": config.max_positions}, lambda _: {}),),
    ignored_keys=("reorder_and_upcast_attn",),  # affects only half precision
    ignored_weights=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    renamed=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    table=(
        *tensors("transformer.wte", "embed.tokens"),
        *tensors("transformer.wpe", "embed.positions"),
        *tensors("transformer.h.{i}.ln_1", "blocks.{i}.attention_norm", leaves=_BOTH),
        *tensors(
            "transformer.h.{i}.attn.c_attn",
            "blocks.{i}.attention.query",
            "blocks.{i}.attention.key",
            "blocks.{i}.attention.value",
            leaves=_BOTH,
            transposed=True,
        ),
        *tensors("transformer.h.{i}.attn.c_proj", "blocks.{i}.attention.output", leaves=_BOTH, transposed=True),
        *tensors("transformer.h.{i}.ln_2", "blocks.{i}.mlp_norm", leaves=_BOTH),
        *tensors("transformer.h.{i}.mlp.c_fc", "blocks.{i}.mlp.up", leaves=_BOTH, transposed=True),
        *tensors("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down", leaves=_BOTH, transposed=True),
        *tensors("transformer.ln_f", "norm", leaves=_BOTH),
        *tensors("lm_head", "head"),
    ),
    implied={"banded_window": None},
)
