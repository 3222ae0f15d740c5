"""The sizes of a small model: heads, widths, vocabulary and experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pipeline.common import knobs
from pipeline.config.schema import RunConfig

#: The small sizes. A planned size that is smaller is kept.
HEAD_WIDTH = 8
VOCABULARY = 96
EXPERT_UNIT = 4
"""The width of experts is a multiple of it: the fp32 kernel of transformers requires rows of a multiple of 16 bytes."""

#: Sizes of multi-head latent attention: key -> width.
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": HEAD_WIDTH, "qk_rope_head_dim": 4, "v_head_dim": HEAD_WIDTH}
#: The same with fp8, whose products require sizes that are multiples of 16 on every rank.
FP8_WIDTH = 16
FP8_LATENT = {"q_lora_rank": 32} | dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), FP8_WIDTH)


def shrink_model(small: RunConfig, planned: RunConfig) -> RunConfig:
    """Return the small version with a small model, whose parallel axes and number of blocks it has already."""
    if planned.model.head_dim >= HEAD_WIDTH:  # else the model is as small already
        small = _widths(_heads(small, planned), planned)
    return _experts(small, planned)


def _heads(small: RunConfig, planned: RunConfig) -> RunConfig:
    """Keep the ratio of query heads to key and value heads, and whether a rank holds one or several of the latter."""

    def splits(config: RunConfig) -> int:
        ulysses = config.parallel.context_kind == "ulysses"
        return config.parallel.tensor * (config.parallel.context if ulysses else 1)

    wanted = planned.model
    shared = wanted.heads // wanted.kv_heads
    power_of_two = wanted.heads & (wanted.heads - 1) == 0  # ALiBi's slopes differ otherwise
    most = 2 if shared > 1 else 4 if power_of_two else 3
    kv_heads = splits(small) * min(wanted.kv_heads // splits(planned), most)
    sizes = {"model.heads": kv_heads * shared}
    if _has(wanted, "kv_heads"):
        sizes["model.kv_heads"] = kv_heads
    if (of_global := getattr(wanted, "global_kv_heads", None)) is not None:
        sizes["model.global_kv_heads"] = kv_heads if of_global >= wanted.kv_heads else max(kv_heads // 2, splits(small))
    return knobs.changed(small, sizes)


def _widths(small: RunConfig, planned: RunConfig) -> RunConfig:
    """Keep the ratio of the feed-forward to the hidden width, and which of hidden and heads x head_dim is wider."""
    model: Any = small.model
    wanted, tensor = planned.model, small.parallel.tensor
    sizes: dict[str, Any] = {}
    fp8 = planned.precision.fp8 != "none"
    head_width, latent, unit = (FP8_WIDTH, FP8_LATENT, FP8_WIDTH * tensor) if fp8 else (HEAD_WIDTH, LATENT, tensor)
    width = head_width  # of hidden, per head
    if _has(model, "kv_lora_rank"):
        width = 2 * head_width
        sizes |= {f"model.{name}": min(value, size) for name, size in latent.items() if (value := getattr(model, name)) is not None}
    elif getattr(model, "head_width", None) is not None:
        sizes["model.head_width"] = head_width
        attention = wanted.heads * wanted.head_dim
        width = head_width if attention == wanted.hidden else head_width // 2 if attention > wanted.hidden else 3 * head_width // 2
        width = min(width, max(1, wanted.hidden // wanted.heads))
    hidden = sizes["model.hidden"] = min(wanted.hidden, model.heads * width)
    if (base := getattr(model, "mup_base_width", None)) is not None:  # the same factors
        sizes["model.mup_base_width"] = max(1, round(base * hidden / wanted.hidden))
    if (share := getattr(model, "partial_rotary_factor", None)) is not None:  # of an even number of dims
        sizes["model.partial_rotary_factor"] = max(2, int(head_width * share) // 2 * 2) / head_width
    if _has(model, "global_head_width"):
        sizes["model.global_head_width"] = head_width * (2 if model.global_head_width > wanted.head_dim else 1)
        sizes["model.layer_input_width"] = min(model.layer_input_width, head_width)
    if getattr(model, "embed_width", None) is not None:
        sizes["model.embed_width"] = hidden if model.embed_width == wanted.hidden else max(1, 3 * hidden // 4)
    of_experts = "expert_ffn_hidden" if _has(model, "expert_ffn_hidden") else "ffn_hidden" if _has(model, "experts") else ""
    if _has(model, "linear_heads"):
        heads = tensor * min(model.linear_heads // tensor, 2 if head_width < FP8_WIDTH else FP8_WIDTH)
        sizes |= {"model.linear_heads": heads, "model.linear_head_dim": min(model.linear_head_dim, head_width)}
    if _has(model, "linear_key_heads"):
        sizes |= _linear(model, tensor, head_width)
    if _has(model, "mamba_heads"):
        of_rank = 2 if head_width < FP8_WIDTH else FP8_WIDTH
        groups = tensor * min(model.mamba_groups // tensor, 2) if _has(model, "mamba_groups") else tensor
        heads = groups * min(model.mamba_heads // getattr(model, "mamba_groups", tensor), of_rank)
        sizes |= {"model.mamba_heads": heads} | ({"model.mamba_groups": groups} if _has(model, "mamba_groups") else {})
        # Granite requires heads that are together a multiple of the residual stream.
        width = min(model.mamba_head_dim, head_width) if _has(model, "mamba_groups") else hidden // math.gcd(hidden, heads)
        sizes |= {"model.mamba_head_dim": width, "model.mamba_state": min(model.mamba_state, head_width)}
    for name in ("ffn_hidden", "expert_ffn_hidden", "shared_ffn_hidden"):
        if _has(model, name):
            value, multiple = getattr(wanted, name), math.lcm(unit, EXPERT_UNIT) if name == of_experts else unit
            sizes[f"model.{name}"] = min(value, max(2, round(value / wanted.hidden * hidden / multiple)) * multiple)
    uneven = wanted.vocab_size % planned.parallel.tensor != 0
    sizes["model.vocab_size"] = min(wanted.vocab_size, VOCABULARY // tensor * tensor + (1 if uneven else 0))
    return knobs.changed(small, sizes)


def _linear(model: Any, tensor: int, head_width: int) -> dict[str, Any]:
    """Return the sizes of linear attention, with the ratio of its heads.

    With fp8, the products of a number for each head require 16 value heads on every rank.
    """
    ratio, fewest = model.linear_value_heads // model.linear_key_heads, 2 if head_width < FP8_WIDTH else FP8_WIDTH
    key_heads = tensor * min(model.linear_key_heads // tensor, -(-fewest // ratio))
    return {
        "model.linear_key_heads": key_heads,
        "model.linear_value_heads": key_heads * ratio,
        "model.linear_key_dim": min(model.linear_key_dim, head_width),
        "model.linear_value_dim": min(model.linear_value_dim, head_width),
    }


def _has(model: Any, name: str) -> bool:
    """Whether a size is a field, not derived from others."""
    return any(field.name == name for field in dataclasses.fields(model))


def _experts(small: RunConfig, planned: RunConfig) -> RunConfig:
    """Keep at least two experts on a rank if it holds several, sparse routing, and a choice among groups."""
    model: Any = small.model
    experts = getattr(model, "experts", 0)
    if not experts:
        return small
    groups, chosen = getattr(model, "groups", 1), getattr(model, "topk_group", 1)
    small_groups = groups if groups < 4 else 4 if chosen < groups else 2
    small_chosen = min(chosen, 2) if groups >= 4 else chosen
    per_rank, ranks = min(experts // planned.parallel.expert_ranks, 2), small.parallel.expert_ranks
    fewest = max(ranks * per_rank, 2 * small_groups if groups > 1 else 1, 2 * min(model.top_k, 4))
    unit = math.lcm(ranks, small_groups)
    count = -(-fewest // unit) * unit
    if count >= experts:
        return small
    sizes = {"model.experts": count, "model.top_k": min(model.top_k, 4, count * small_chosen // small_groups)}
    if groups > 1 or _has(model, "groups"):
        sizes |= {"model.groups": small_groups, "model.topk_group": small_chosen}
    if getattr(model, "shared_experts", 0) > 2:
        sizes["model.shared_experts"] = 2
    return knobs.changed(small, sizes)
