"""The weights of Megatron-Core's GPTModel: names, the parts of stacked tensors, and the arguments of Megatron-LM that describe a model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.common.errors import UserError, Violation
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import Shape, StockTensor

#: Families that Megatron-Core's GPTModel computes.
FAMILIES = ("llama", "mistral", "mixtral")
#: The only rotary scaling of Megatron-Core, whose other constants are fixed (rope_scaling of its RotaryEmbedding).
LLAMA3 = {"rope_original_positions": 8192, "rope_low_frequency": 1.0, "rope_high_frequency": 4.0}


def check(config: ModelConfig) -> None:
    """Refuse a model that GPTModel does not compute.

    Raises:
        UserError: with all violations.
    """
    if config.family not in FAMILIES:
        rule = f"is supported for model.family={', '.join(FAMILIES)}; this is {config.family}"
        raise UserError.of("stage.format", "megatron", rule, "set stage.format=huggingface or consolidated")
    wanted: dict[str, Any] = {"attention_bias": False, "window": None, "capacity_factor": None, "no_rope_layer_interval": None}
    if getattr(config, "rope_scaling", "none") != "none":
        wanted |= {"rope_scaling": "llama3", **LLAMA3}
    actual = {name: getattr(config, name, value) for name, value in wanted.items()}
    fix = "set stage.format=huggingface or consolidated"
    violations = [
        Violation("stage.format", "megatron", f"requires model.{name}={value}; this is {actual[name]}", fix)
        for name, value in wanted.items()
        if actual[name] != value
    ]
    UserError.raise_for(violations)


@dataclass(frozen=True)
class Chunk:
    """A part of a stored tensor, from weights of our model.

    Attributes:
        key: name of the stored tensor.
        tensor: the weights.
        layer: index along the dim of layers, None outside of them.
        half: the stored tensor has gate (0) and up (1) along the dim of their outputs; None for others.
    """

    key: str
    tensor: StockTensor
    layer: int | None = None
    half: int | None = None

    def box(self, shape: Shape, config: Any) -> tuple[Shape, Shape, Shape]:
        """Return (shape of the stored tensor, first element of the chunk, shape of the chunk), from the shape of the weight."""
        full, start, size = list(shape), [0] * len(shape), list(shape)
        if self.half is not None:
            full[0], start[0] = 2 * shape[0], self.half * shape[0]
        for index, count in ((self.tensor.expert, getattr(config, "experts", 0)), (self.layer, config.layers)):
            if index is not None:
                full, start, size = [count, *full], [index, *start], [1, *size]
        return tuple(full), tuple(start), tuple(size)


def chunks(config: Any) -> Iterator[Chunk]:
    """Yield all chunks of a model, in the order of its layers."""

    def weight(key: str, *names: str, layer: int | None = None, half: int | None = None, groups: int = 1) -> Chunk:
        prefix = "" if layer is None else "decoder.layers."
        return Chunk(prefix + key, StockTensor(prefix + key, names, groups=groups), layer, half)

    yield weight("embedding.word_embeddings.weight", "embed.tokens.weight")
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        heads = [f"{block}.attention.{name}" for name in ("query", "key", "value")]
        yield weight("self_attention.linear_qkv.layer_norm_weight", f"{block}.attention_norm.weight", layer=layer)
        for leaf in ("weight", "bias") if getattr(config, "qkv_bias", False) else ("weight",):
            names = [f"{name}.{leaf}" for name in heads]
            yield weight(f"self_attention.linear_qkv.{leaf}", *names, layer=layer, groups=config.kv_heads)
        if getattr(config, "query_key_norm", False):
            yield weight("self_attention.q_layernorm.weight", f"{block}.attention.query_norm.weight", layer=layer)
            yield weight("self_attention.k_layernorm.weight", f"{block}.attention.key_norm.weight", layer=layer)
        yield weight("self_attention.linear_proj.weight", f"{block}.attention.output.weight", layer=layer)
        yield weight("mlp.linear_fc1.layer_norm_weight", f"{block}.mlp_norm.weight", layer=layer)
        if config.family == "mixtral":
            # Layers of Transformer Engine have this name for the norm before experts, the others that above.
            yield weight("pre_mlp_layernorm.weight", f"{block}.mlp_norm.weight", layer=layer)
            yield weight("mlp.router.weight", f"{block}.mlp.router.weight", layer=layer)
        for name, key, half in (("gate", "linear_fc1", 0), ("up", "linear_fc1", 1), ("down", "linear_fc2", None)):
            if config.family != "mixtral":
                yield weight(f"mlp.{key}.weight", f"{block}.mlp.{name}.weight", layer=layer, half=half)
                continue
            for expert in range(config.experts):
                stored = f"decoder.layers.mlp.experts.experts.{key}.weight"
                yield Chunk(stored, StockTensor(stored, (f"{block}.mlp.experts.{name}",), expert=expert), layer, half)
    yield weight("decoder.final_layernorm.weight", "norm.weight")
    if not config.tie_embeddings:
        yield weight("output_layer.weight", "head.weight")


def layer_states(config: Any) -> Iterator[str]:
    """Yield the keys of the states: name, index along the dims of layers and experts, and their sizes."""
    for layer in range(config.layers):
        for module in ("self_attention.linear_qkv", "self_attention.linear_proj"):
            yield f"decoder.layers.{module}._extra_state/shard_{layer}_{config.layers}"
        for linear in ("linear_fc1", "linear_fc2"):
            if config.family != "mixtral":
                yield f"decoder.layers.mlp.{linear}._extra_state/shard_{layer}_{config.layers}"
                continue
            for expert in range(config.experts):
                place = f"{layer}.{expert}_{config.layers}.{config.experts}"
                yield f"decoder.layers.mlp.experts.experts.{linear}._extra_state/shard_{place}"


def arguments(config: Any, dtype: torch.dtype, tokenizer: str) -> argparse.Namespace:
    """Return the arguments of Megatron-LM that describe the model, which it reads with --use-checkpoint-args."""
    values = {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn_hidden,
        "num_attention_heads": config.heads,
        "group_query_attention": config.kv_heads != config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "seq_length": config.max_positions,
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": config.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": getattr(config, "rope_scaling", "none") == "llama3",
        "rope_scaling_factor": getattr(config, "rope_factor", 8.0),
        "add_position_embedding": False,
        "normalization": "RMSNorm",
        "norm_epsilon": config.norm_eps,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": getattr(config, "qkv_bias", False),
        "qk_layernorm": getattr(config, "query_key_norm", False),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not config.tie_embeddings,
        "num_experts": getattr(config, "experts", None),
        "moe_router_topk": getattr(config, "top_k", 2),
        "moe_router_pre_softmax": False,
        "padded_vocab_size": config.vocab_size,
        "vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": tokenizer,
        "params_dtype": dtype,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return argparse.Namespace(**values)
