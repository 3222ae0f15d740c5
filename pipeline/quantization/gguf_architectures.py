"""The architectures of GGUF, an entry for each class: settings, how tensors are stored, and what llama.cpp takes for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.common.errors import UserError, Violation
from pipeline.layers.gated_delta_net import LENGTH_EPS
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.shared_sizes import rotated_dims

#: A function of a tensor, and its inverse up to the shape.
Change = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, for a Hugging Face class.

    Attributes:
        name: in GGUF.
        family: of ours.
        requires: field of our configuration -> the only value that llama.cpp computes, or what returns it.
        refuses: what else llama.cpp does not compute of a configuration.
        neighbors: rotates neighboring elements of a head instead of its halves, so that outputs of queries and keys are reordered.
        shifted: norms are stored with 1 added, but those of the outputs of linear attention.
        tiled: the value heads of linear attention are stored in turn, one of each key head after the other.
        settings: name in GGUFWriter -> value, of what only some architectures have or others have differently; None for none.
        changes: end of a tensor's name -> how it is stored, where it is not as in other architectures.
        constants: name of a tensor that is no weight of ours -> how it follows from the number 1.
        moe: what the name of a model with experts ends with.
        stock: field of our configuration -> the only value with which stock transformers reads the file; None: it does not read it.
    """

    name: str
    family: str
    requires: Mapping[str, Any] = field(default_factory=dict)
    refuses: Callable[[Any], Iterable[str]] = lambda _: ()
    neighbors: bool = False
    shifted: bool = False
    tiled: bool = False
    settings: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    changes: Callable[[Any], Mapping[str, Change]] = lambda _: {}
    constants: Callable[[Any], Mapping[str, Change]] = lambda _: {}
    moe: str = ""
    stock: Mapping[str, Any] | None = field(default_factory=dict)


def _mamba(config: Any) -> dict[str, Any]:
    """Settings of hybrids with Mamba-2, in which a layer without key heads is no attention."""
    kv_heads = [config.kv_heads if config.kind(block) == "*" else 0 for block in range(config.layers)]
    sizes = dict(ssm_conv_kernel=config.mamba_kernel, ssm_state_size=config.mamba_state, ssm_time_step_rank=config.mamba_heads)
    inner, groups = config.mamba_heads * config.mamba_head_dim, getattr(config, "mamba_groups", 1)
    return sizes | dict(ssm_inner_size=inner, ssm_group_count=groups, head_count_kv=kv_heads)


def _granite(config: Any) -> dict[str, Any]:
    expert, shared = config.expert_ffn_hidden, config.ffn_hidden
    sizes = dict(feed_forward_length=expert, expert_feed_forward_length=expert, expert_shared_feed_forward_length=shared)
    factors = dict(attention_scale=config.attention_multiplier, embedding_scale=config.embedding_multiplier)
    factors |= dict(residual_scale=config.residual_multiplier, logit_scale=config.logits_scaling)
    return {**_mamba(config), **factors, "rope_scaling_finetuned": config.rotary, **(sizes if config.experts else {})}


def _groups(config: Any) -> dict[str, Any]:
    """Settings of experts in groups. The loader requires that there are more groups than are selected."""
    counts = dict(expert_group_count=config.groups, expert_group_used_count=config.topk_group)
    return {"expert_weights_scale": config.routed_scaling_factor, **(counts if config.topk_group < config.groups else {})}


def _nemotron(config: Any) -> dict[str, Any]:
    """The loader requires the eps of both kinds of norms."""
    widths = {"-": config.ffn_hidden, "E": config.expert_ffn_hidden}
    lengths = [widths.get(config.kind(block), 0) for block in range(config.layers)]
    experts = {"expert_weights_norm": config.norm_topk_prob, **_groups(config)} if config.experts else {}
    return {**_mamba(config), **experts, "layer_norm_eps": config.norm_eps, "feed_forward_length": lengths}


def _linear(config: Any) -> dict[str, Any]:
    """Settings of hybrids with GatedDeltaNet."""
    inner, rank = config.linear_value_heads * config.linear_value_dim, config.linear_value_heads
    sizes = dict(ssm_conv_kernel=config.linear_kernel, ssm_state_size=config.linear_key_dim, ssm_group_count=config.linear_key_heads)
    return sizes | dict(ssm_time_step_rank=rank, ssm_inner_size=inner, full_attention_interval=config.full_attention_interval)


def _sections(config: Any) -> dict[str, Any]:
    """The same with positions in time, height and width, which are equal for text."""
    rotated = rotated_dims(config.head_dim, config.partial_rotary_factor)
    return {**_linear(config), "rope_dimension_sections": [(rotated // 2 + 2 - index) // 3 for index in range(3)] + [0]}


def _kimi(config: Any) -> dict[str, Any]:
    """Latent attention is stored as attention of one key head, the latent, which is the value, too (layers/mla.py, absorb)."""
    from gguf import ExpertGatingFuncType

    latent, rotated, kv_heads = config.kv_lora_rank, config.qk_rope_head_dim, [int(config.is_full(i)) for i in range(config.layers)]
    linear = dict(ssm_conv_kernel=config.linear_kernel, kda_head_dim=config.linear_head_dim, head_count_kv=kv_heads)
    lengths = dict(key_length=latent + rotated, value_length=latent, key_length_mla=config.head_dim, value_length_mla=config.v_head_dim)
    experts = dict(leading_dense_block_count=config.dense_layers, expert_feed_forward_length=config.expert_ffn_hidden)
    experts |= dict(expert_shared_count=config.shared_experts, expert_gating_func=ExpertGatingFuncType.SIGMOID)
    return linear | lengths | dict(kv_lora_rank=latent, rope_dimension_count=rotated) | experts | _groups(config)


def _gemma4(config: Any) -> dict[str, Any]:
    """Of layers with a window ("swa") and without. Without a soft cap in the file, it is 30."""
    layers, width, local = range(config.layers), config.global_head_width, config.head_dim
    lengths = [config.ffn_hidden * (2 if config.double_wide_mlp and config.is_shared(i) else 1) for i in layers]
    heads = dict(head_count_kv=[config.heads_of(i)[0] for i in layers], shared_kv_layers=config.kv_shared_layers)
    widths = dict(key_length=width, value_length=width, key_length_swa=local, value_length_swa=local)
    rotary = dict(rope_dimension_count=width, rope_dimension_count_swa=local, rope_freq_base_swa=config.rope_local_theta)
    others = dict(feed_forward_length=lengths, embedding_length_per_layer_input=config.layer_input_width)
    windows, softcap = [not config.is_global(i) for i in layers], config.final_logit_softcapping or 0.0
    return heads | widths | rotary | others | dict(sliding_window_pattern=windows, final_logit_softcapping=softcap)


def _frequencies(config: Any) -> dict[str, Change]:
    """Divisors of the rotary frequencies of global layers, which leave pairs of dims unrotated."""
    factor = config.rope_factor if config.rope_scaling == "linear" else 1.0
    pairs, rotated = config.global_head_width // 2, int(config.partial_rotary_factor * config.global_head_width // 2)
    divisors = torch.where(torch.arange(pairs) < rotated, factor, 1e30)
    return {"rope_freqs.weight": (lambda _: divisors, lambda value: value)}


def _mamba_changes(config: Any) -> dict[str, Change]:
    column: Change = (lambda value: value[:, None], lambda value: value)
    groups: Change = (lambda value: value.unflatten(0, (getattr(config, "mamba_groups", 1), -1)), lambda value: value)
    return {"ssm_a": (lambda value: -value[:, None].exp(), lambda value: (-value).log()), "ssm_d": column, "ssm_norm.weight": groups}


def _latent_changes(config: Any) -> dict[str, Change]:
    """The matrix of keys and values in two tensors, of which the first is transposed."""
    keys, values, heads = config.qk_nope_head_dim, config.v_head_dim, (config.heads, -1)
    return {
        "attn_k_b.weight": (
            lambda value: value.unflatten(0, heads)[:, :keys].mT.contiguous(),
            lambda value: F.pad(value.mT, (0, 0, 0, values)).flatten(0, 1),
        ),
        "attn_v_b.weight": (
            lambda value: value.unflatten(0, heads)[:, keys:].contiguous(),
            lambda value: F.pad(value, (0, 0, keys, 0)).flatten(0, 1),
        ),
    }


def _mamba_refuses(config: Any) -> Iterable[str]:
    """Hybrids without a recurrent layer or without attention, feed-forwards beside experts."""
    kinds = {config.kind(block) for block in range(config.layers)}
    if not kinds >= {"M", "*"} or kinds >= {"-", "E"}:
        yield f"model.layer_pattern={config.layer_pattern}, only with both M and *, and not with both - and E"


def _linear_refuses(config: Any) -> Iterable[str]:
    if config.linear_layers in (0, config.layers):
        interval = f"model.full_attention_interval={config.full_attention_interval}"
        yield f"{interval}, only with both linear and full attention in model.layers={config.layers}"


def _pattern_refuses(config: Any) -> Iterable[str]:
    if len({*map(config.kind, range(config.layers))}) < 2:
        yield f"model.layer_pattern={config.layer_pattern}, only with both K and *"


def _gemma4_refuses(config: Any) -> Iterable[str]:
    """Models without a window, and keys of another layer than the last global one or, if that follows it, the last local one."""
    if config.sliding_window_pattern == 1 or config.layers == 1:
        yield f"model.sliding_window_pattern={config.sliding_window_pattern}, only with both local and global layers"
    own = config.layers - config.kv_shared_layers
    if config.kv_shared_layers and (not config.is_global(own - 1) or config.is_global(own - 2)):
        yield f"model.kv_shared_layers={config.kv_shared_layers}, only after a local layer that a global one follows"


_PLAIN = {"rope_scaling": "none", "attention_bias": False}
_GEMMA3 = {"sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "head_dim": 256, "rope_local_theta": 1e4}
# llama.cpp has one eps for the norms of the stream and for the lengths of queries and keys.
_ONE_WIDTH = {"rope_scaling": "none", "norm_eps": LENGTH_EPS, "linear_value_dim": lambda config: config.linear_key_dim}
_EXPERTS = {"norm_topk_prob": True, "expert_interval": 1, "dense_blocks": []}
_TWICE = {"rope_scaling": "none", "mamba_head_dim": lambda config: Fraction(2 * config.hidden, config.mamba_heads)}
_ONE_EPS = {"norm_eps": LENGTH_EPS, "linear_heads": lambda config: config.heads, "norm_topk_prob": True, "q_lora_rank": None}
_MAMBA: dict[str, Any] = {"refuses": _mamba_refuses, "changes": _mamba_changes, "stock": None}
_KIMI: dict[str, Any] = {"refuses": _pattern_refuses, "changes": _latent_changes, "stock": None}
_LINEAR: dict[str, Any] = {"refuses": _linear_refuses, "shifted": True, "stock": None}
#: Hugging Face class -> architecture. transformers does not read the width of heads of Qwen 3, nor vocabulary and positions of GPT-2.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", "llama", _PLAIN, neighbors=True),
    "Qwen2ForCausalLM": Architecture("qwen2", "llama", _PLAIN),
    "Qwen3ForCausalLM": Architecture("qwen3", "llama", _PLAIN, stock={"head_dim": 128}),
    "MistralForCausalLM": Architecture("llama", "mistral", {"window": None}, neighbors=True),
    "MixtralForCausalLM": Architecture("llama", "mixtral", {"window": None}, neighbors=True, stock=None),
    "Olmo2ForCausalLM": Architecture("olmo2", "olmo2", {**_PLAIN, "head_width": None}, stock=None),
    "SmolLM3ForCausalLM": Architecture("smollm3", "smollm3", {**_PLAIN, "no_rope_layer_interval": 4}, neighbors=True, stock=None),
    "GPT2LMHeadModel": Architecture("gpt2", "gpt", stock={"vocab_size": 50257, "max_positions": 1024}),
    "BloomForCausalLM": Architecture("bloom", "bloom"),
    "Gemma3ForCausalLM": Architecture("gemma3", "gemma3", {**_PLAIN, **_GEMMA3}, shifted=True),
    "Gemma4ForCausalLM": Architecture("gemma4", "gemma4", refuses=_gemma4_refuses, settings=_gemma4, constants=_frequencies, stock=None),
    "GraniteMoeHybridForCausalLM": Architecture("granitehybrid", "granite_hybrid", _TWICE, neighbors=True, settings=_granite, **_MAMBA),
    "NemotronHForCausalLM": Architecture("nemotron_h", "nemotron_h", {"mamba_smallest_step": 0}, settings=_nemotron, moe="_moe", **_MAMBA),
    "Qwen3NextForCausalLM": Architecture("qwen3next", "qwen3_next", {**_ONE_WIDTH, **_EXPERTS}, settings=_linear, **_LINEAR),
    "Qwen3_5ForCausalLM": Architecture("qwen35", "qwen3_5", _ONE_WIDTH, tiled=True, settings=_sections, **_LINEAR),
    "Qwen3_5MoeForCausalLM": Architecture("qwen35moe", "qwen3_5_moe", _ONE_WIDTH, tiled=True, settings=_sections, **_LINEAR),
    "KimiLinearForCausalLM": Architecture("kimi-linear", "kimi_linear", _ONE_EPS, settings=_kimi, **_KIMI),
}


def check(config: ModelConfig) -> None:
    """Refuse a model that cannot be written.

    Raises:
        UserError: with all violations.
    """
    families = {architecture.family: None for architecture in ARCHITECTURES.values()}
    fix = "set stage.format=huggingface"
    if config.family not in families:
        rule = f"is supported for model.family={', '.join(families)}; this is {config.family}"
        raise UserError.of("stage.format", "gguf", rule, fix)
    architecture = architecture_of(config)
    differences = _differences(config, architecture.requires).items()
    rules = [*(f"model.{name}={getattr(config, name)}, only with {value}" for name, value in differences), *architecture.refuses(config)]
    UserError.raise_for(Violation("stage.format", "gguf", f"is not supported with {rule}", fix) for rule in rules)


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a model."""
    arch = ARCHITECTURES[registry.mapping_of(config).architecture]
    return replace(arch, name=arch.name + arch.moe) if getattr(config, "experts", 0) else arch


def is_read_by_transformers(config: ModelConfig) -> bool:
    """Whether stock transformers computes the model from the file."""
    stock = architecture_of(config).stock
    return stock is not None and not _differences(config, stock)


def _differences(config: ModelConfig, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a configuration does not have, of the fields that it has."""
    values = {name: value(config) if callable(value) else value for name, value in wanted.items()}
    return {name: value for name, value in values.items() if getattr(config, name, value) != value}
