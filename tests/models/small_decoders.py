"""Small decoders of every family and option, for tests that compare them with their Hugging Face classes."""

from dataclasses import replace
from typing import Any

from pipeline.models.registry import CONFIG_CLASSES
from tools.audit.family_cases import FAMILIES
from tools.audit.small_models import configuration


def small(family: str, variant: str, **changes: Any) -> Any:
    """A variant of a family in the table of cases, with other values of some fields."""
    return replace(configuration(family, FAMILIES[family].variants[variant]), **changes)


CONFIGS = {
    "apertus": small("apertus", "default", kv_heads=2),
    # caps that bound most scores and logits
    "gemma2": small("gemma2", "caps", window=8, layers=3),
    # local layers with another rotary base, and linear scaling in the global layer only
    "gemma3": small("gemma3", "linear", rope_factor=4.0, heads=4, kv_heads=2, tie_embeddings=True, head_width=16, query_pre_attn_scalar=24),
    # inputs of the layers, and layers with keys and values of earlier ones, some of them local
    "gemma4": small("gemma4", "shared", window=8),
    # global layers with fewer, wider heads whose values are the keys
    "gemma4-keys": small("gemma4", "keys as values", tie_embeddings=True),
    "gpt-neox": small("gpt_neox", "parallel"),
    "gpt-neox-sequential": small("gpt_neox", "sequential"),
    # rotary positions in half of the dims, biases and norms of queries and keys
    "glm4-moe": small(
        "glm4_moe",
        "air",
        experts=6,
        shared_experts=2,
        expert_ffn_hidden=24,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        query_key_norm=True,
    ),
    # local and global layers, yarn without rounding, bounds of SwiGLU that apply
    "gpt-oss": small(
        "gpt_oss",
        "both kinds of layers",
        window=8,
        rope_theta=1000.0,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_positions=13,
        rope_beta_fast=5.0,
        rope_truncate=False,
        swiglu_limit=0.1,
    ),
    "granite": small("granite", "factors"),
    "granite-hybrid": small("granite_hybrid", "experts", rotary=False),
    "nemotron": small("nemotron", "grouped", rope_theta=10000.0, head_width=16),
    # Mamba-2, attention, experts and feed-forwards in blocks of their own; the stock class bounds no steps when it generates
    "nemotron-h": small("nemotron_h", "experts", mamba_smallest_step=0.0),
    "nemotron-h-dense": small("nemotron_h", "in a row", mamba_smallest_step=0.0),
    "olmo2": small("olmo2", "plain", kv_heads=2, head_width=16),
    # yarn in the global layer only
    "olmo3": small(
        "olmo3",
        "window",
        sliding_window_pattern=3,
        window=8,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_positions=10,
        rope_beta_fast=4.0,
        layers=3,
    ),
    "olmoe": small("olmoe", "unnormalized", experts=6, rope_theta=10000.0, kv_heads=2),
    "phi3": small("phi3", "dense", window=16, rope_theta=250000.0),
    # blocks with experts and without
    "qwen3-moe": small("qwen3_moe", "every block", experts=6, layers=3, expert_ffn_hidden=24, dense_blocks=[1]),
    # linear and full attention, blocks with experts and without
    "qwen3-next": small(
        "qwen3_next",
        "every block",
        experts=6,
        rope_theta=10000.0,
        expert_ffn_hidden=24,
        dense_blocks=[2],
        full_attention_interval=2,
        shared_ffn_hidden=20,
    ),
    # with linear attention in three layers, the logits in fp32 differ by 1e-4 from those in fp64, in the stock class, too
    "qwen3.5-moe": small("qwen3_5_moe", "plain", experts=6, rope_theta=10000.0, full_attention_interval=2),
    "qwen2.5": small("llama", "qwen2.5"),
    "smollm3": small("smollm3", "every second", layers=3),
    "deepseek": small("deepseek_v3", "latent queries"),
    "deepseek-yarn": small("deepseek_v3", "yarn"),
    "deepseek-direct": small("deepseek_v3", "direct queries"),
    "bloom": small("bloom", "tied"),
    # number of heads is not a power of two
    "bloom-six-heads": small("bloom", "tied", heads=6),
    "gpt1": small("gpt1", "tied"),
    "gpt": small("gpt", "tied"),
    "gpt-untied": small("gpt", "untied"),
    "llama": small("llama", "plain"),
    "llama-grouped": small("llama", "grouped", ffn_hidden=80, max_positions=64),
    "llama-tied": small("llama", "tied", kv_heads=2),
    "llama-biased": small("llama", "biases"),
    "llama-nope": small("llama", "plain", layers=3, kv_heads=2, no_rope_layer_interval=2),
    "llama-interpolated": small("llama", "plain", rope_scaling="linear", rope_factor=4.0, kv_heads=2),
    "llama-3.1": small("llama", "llama3", rope_original_positions=32, max_positions=128),
    "llama-yarn": small("llama", "yarn", rope_original_positions=32, max_positions=128),
    # heads wider than hidden / heads
    "qwen3": small("llama", "qwen3"),
    # sequences are five windows long, heads wider than hidden / heads
    "mistral": small("mistral", "window", layers=3, window=8, rope_theta=500000.0),
    "mistral-unbounded": small("mistral", "dense", rope_theta=10000.0),
    "mixtral": small("mixtral", "two of four", experts=5, ffn_hidden=40, window=16),
    "mixtral-all-experts": small("mixtral", "window", top_k=3, kv_heads=4, window=None),
    "opt": small("opt", "pre-norm"),
    "opt-projected": small("opt", "post-norm", embed_width=24, activation="gelu"),
    "opt-untied": small("opt", "pre-norm", tie_embeddings=False),
}
DEEPSEEK = CONFIGS["deepseek"]
#: A model of each family of decoders that has none above.
OTHERS = {
    name: configuration(name, next(iter(cases.variants.values())))
    for name, cases in FAMILIES.items()
    if CONFIG_CLASSES[name]().objective == "causal" and name not in {config.family for config in CONFIGS.values()}
}
CONFIGS |= OTHERS
