"""GPT-1 <-> transformers' OpenAIGPTLMHeadModel."""

from __future__ import annotations

from pipeline.models.huggingface_mapping import HuggingFaceMapping, tensors

_BOTH = ("weight", "bias")

MAPPING = HuggingFaceMapping(
    architecture="OpenAIGPTLMHeadModel",
    model_type="openai-gpt",
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "max_positions",
        "n_embd": "hidden",
        "n_layer": "layers",
        "n_head": "heads",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    # In this class, gelu means the tanh approximation.
    constants={"afn": "gelu", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    table=(
        *tensors("transformer.tokens_embed", "embed.tokens"),
        *tensors("transformer.positions_embed", "embed.positions"),
        *tensors(
            "transformer.h.{i}.attn.c_attn",
            "blocks.{i}.attention.query",
            "blocks.{i}.attention.key",
            "blocks.{i}.attention.value",
            leaves=_BOTH,
            transposed=True,
        ),
        *tensors("transformer.h.{i}.attn.c_proj", "blocks.{i}.attention.output", leaves=_BOTH, transposed=True),
        *tensors("transformer.h.{i}.ln_1", "blocks.{i}.attention_norm", leaves=_BOTH),
        *tensors("transformer.h.{i}.mlp.c_fc", "blocks.{i}.mlp.up", leaves=_BOTH, transposed=True),
        *tensors("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down", leaves=_BOTH, transposed=True),
        *tensors("transformer.h.{i}.ln_2", "blocks.{i}.mlp_norm", leaves=_BOTH),
        *tensors("lm_head", "head"),
    ),
    defaults={
        "vocab_size": 40478,
        "n_positions": 512,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    ignored_weights=("transformer.h.*.attn.bias",),
    renamed=((r"^(tokens_embed|positions_embed|h)\.", r"transformer.\1."),),
)
