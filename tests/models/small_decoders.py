"""Small decoders of every family and option, for tests that compare them with their Hugging Face classes."""

from dataclasses import replace

from pipeline.models.config_classes import CONFIG_CLASSES
from pipeline.models.families.apertus import ApertusConfig
from pipeline.models.families.bloom import BloomConfig
from pipeline.models.families.deepseek_v3 import DeepseekV3Config
from pipeline.models.families.gemma2 import Gemma2Config
from pipeline.models.families.gemma3 import Gemma3Config
from pipeline.models.families.glm4_moe import Glm4MoeConfig
from pipeline.models.families.gpt import GPTConfig
from pipeline.models.families.gpt1 import GPT1Config
from pipeline.models.families.gpt_neox import GPTNeoXConfig
from pipeline.models.families.gpt_oss import GptOssConfig
from pipeline.models.families.granite import GraniteConfig
from pipeline.models.families.llama import LlamaConfig
from pipeline.models.families.mistral import MistralConfig
from pipeline.models.families.mixtral import MixtralConfig
from pipeline.models.families.nemotron import NemotronConfig
from pipeline.models.families.olmo2 import Olmo2Config
from pipeline.models.families.olmo3 import Olmo3Config
from pipeline.models.families.olmoe import OlmoeConfig
from pipeline.models.families.opt import OPTConfig
from pipeline.models.families.phi3 import Phi3Config
from pipeline.models.families.qwen3_moe import Qwen3MoeConfig
from pipeline.models.families.qwen3_next import Qwen3NextConfig
from pipeline.models.families.smollm3 import SmolLM3Config
from tools.audit.family_cases import FAMILIES
from tools.audit.small_models import configuration

DEEPSEEK = DeepseekV3Config(
    layers=3,
    hidden=48,
    heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    dense_layers=1,
    ffn_hidden=96,
    experts=8,
    shared_experts=2,
    expert_ffn_hidden=20,
    top_k=3,
    groups=4,
    topk_group=2,
    mtp_depth=0,
    vocab_size=300,
    max_positions=40,
)
SMALL = {"layers": 2, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab_size": 300, "max_positions": 40}
CONFIGS = {
    "apertus": ApertusConfig(**SMALL, rope_theta=1e4, rope_factor=4.0, rope_original_positions=16),
    "gemma2": Gemma2Config(  # caps that bound most scores and logits
        **{**SMALL, "layers": 3},
        head_width=16,
        window=8,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
    ),
    "gemma3": Gemma3Config(  # local layers with another rotary base, and linear scaling in the global layer only
        **{**SMALL, "layers": 3},
        head_width=16,
        window=8,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        rope_theta=1e3,
        rope_local_theta=1e2,
        rope_scaling="linear",
        rope_factor=4.0,
    ),
    "gpt-neox": GPTNeoXConfig(layers=2, hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=40, partial_rotary_factor=0.5),
    "gpt-neox-sequential": GPTNeoXConfig(
        layers=2,
        hidden=48,
        heads=3,
        ffn_hidden=96,
        vocab_size=300,
        max_positions=40,
        parallel_residual=False,
        attention_bias=False,
        activation="gelu_tanh",
        tie_embeddings=True,
    ),
    "glm4-moe": Glm4MoeConfig(  # rotary positions in half of the dims, biases and norms of queries and keys
        **{**SMALL, "layers": 3},
        head_width=16,
        query_key_norm=True,
        rope_theta=1e3,
        experts=6,
        shared_experts=2,
        expert_ffn_hidden=24,
        top_k=3,
        routed_scaling_factor=1.5,
        mtp_depth=0,
    ),
    "gpt-oss": GptOssConfig(  # local and global layers, yarn without rounding, bounds of SwiGLU that apply
        **{**SMALL, "layers": 4},
        head_width=16,
        window=8,
        experts=6,
        top_k=3,
        swiglu_limit=0.1,
        rope_theta=1e3,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_positions=13,
        rope_beta_fast=5.0,
        rope_truncate=False,
    ),
    "granite": GraniteConfig(**SMALL, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.5),
    "nemotron": NemotronConfig(**SMALL, head_width=16),
    "olmo2": Olmo2Config(**SMALL, head_width=16),
    "olmo3": Olmo3Config(  # yarn in the global layer only
        **{**SMALL, "layers": 3},
        window=8,
        sliding_window_pattern=3,
        rope_theta=1e3,
        rope_local_theta=1e2,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_positions=10,
        rope_beta_fast=4.0,
    ),
    "olmoe": OlmoeConfig(**SMALL, experts=6, top_k=3),
    "phi3": Phi3Config(**SMALL, window=16),
    "qwen3-moe": Qwen3MoeConfig(  # blocks with experts and without
        **{**SMALL, "layers": 3}, head_width=16, experts=6, top_k=3, expert_ffn_hidden=24, dense_blocks=[1]
    ),
    "qwen3-next": Qwen3NextConfig(  # linear and full attention, blocks with experts and without
        **{**SMALL, "layers": 4},
        head_width=16,
        partial_rotary_factor=0.25,
        full_attention_interval=2,
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=12,
        linear_value_dim=10,
        experts=6,
        top_k=3,
        expert_ffn_hidden=24,
        shared_ffn_hidden=20,
        dense_blocks=[2],
        rope_theta=1e4,
    ),
    "qwen2.5": LlamaConfig(**SMALL, qkv_bias=True),
    "smollm3": SmolLM3Config(**{**SMALL, "layers": 3}, no_rope_layer_interval=2),
    "deepseek": DEEPSEEK,
    "deepseek-yarn": replace(
        DEEPSEEK,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_positions=10,
        rope_beta_fast=4.0,
        rope_mscale=0.7,
        rope_mscale_all=1.0,
    ),
    "deepseek-direct": replace(DEEPSEEK, q_lora_rank=None, norm_topk_prob=False, groups=1, topk_group=1),
    "bloom": BloomConfig(layers=2, hidden=48, heads=4, vocab_size=300, max_positions=40),
    "bloom-six-heads": BloomConfig(layers=2, hidden=48, heads=6, vocab_size=300, max_positions=40),  # number of heads is not a power of two
    "gpt1": GPT1Config(layers=2, hidden=48, heads=4, vocab_size=300, max_positions=40),
    "gpt": GPTConfig(layers=2, hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=40),
    "gpt-untied": GPTConfig(layers=2, hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=40, tie_embeddings=False),
    "llama": LlamaConfig(layers=2, hidden=48, heads=4, kv_heads=4, ffn_hidden=96, vocab_size=300, max_positions=40),
    "llama-grouped": LlamaConfig(
        layers=3, hidden=64, heads=8, kv_heads=2, ffn_hidden=80, vocab_size=300, max_positions=64, rope_theta=500000.0, norm_eps=1e-3
    ),
    "llama-tied": LlamaConfig(
        layers=2, hidden=48, heads=4, kv_heads=2, ffn_hidden=96, vocab_size=300, max_positions=40, tie_embeddings=True
    ),
    "llama-biased": LlamaConfig(
        layers=2, hidden=48, heads=4, kv_heads=2, ffn_hidden=96, vocab_size=300, max_positions=40, attention_bias=True
    ),
    "llama-nope": LlamaConfig(
        layers=3, hidden=48, heads=4, kv_heads=2, ffn_hidden=96, vocab_size=300, max_positions=40, no_rope_layer_interval=2
    ),
    "llama-interpolated": LlamaConfig(
        layers=2,
        hidden=48,
        heads=4,
        kv_heads=2,
        ffn_hidden=96,
        vocab_size=300,
        max_positions=40,
        rope_scaling="linear",
        rope_factor=4.0,
    ),
    "llama-3.1": LlamaConfig(
        layers=2,
        hidden=64,
        heads=2,
        kv_heads=2,
        ffn_hidden=96,
        vocab_size=300,
        max_positions=128,
        rope_theta=10000.0,
        rope_scaling="llama3",
        rope_factor=4.0,
        rope_original_positions=32,
    ),
    "llama-yarn": LlamaConfig(
        layers=2,
        hidden=64,
        heads=2,
        kv_heads=2,
        ffn_hidden=96,
        vocab_size=300,
        max_positions=128,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_positions=32,
        rope_beta_fast=8.0,
    ),
    "qwen3": LlamaConfig(  # heads wider than hidden / heads
        layers=2, hidden=48, heads=4, kv_heads=2, head_width=16, ffn_hidden=96, vocab_size=300, max_positions=40, query_key_norm=True
    ),
    "mistral": MistralConfig(  # sequences are five windows long, heads wider than hidden / heads
        layers=3,
        hidden=48,
        heads=4,
        kv_heads=2,
        head_width=16,
        ffn_hidden=96,
        vocab_size=300,
        max_positions=40,
        window=8,
        rope_theta=500000.0,
    ),
    "mistral-unbounded": MistralConfig(
        layers=2, hidden=48, heads=4, kv_heads=2, ffn_hidden=96, vocab_size=300, max_positions=40, window=None
    ),
    "mixtral": MixtralConfig(
        layers=2, hidden=48, heads=4, kv_heads=2, ffn_hidden=40, experts=5, top_k=2, vocab_size=300, max_positions=40, window=16
    ),
    "mixtral-all-experts": MixtralConfig(
        layers=2, hidden=48, heads=4, kv_heads=4, ffn_hidden=96, experts=3, top_k=3, vocab_size=300, max_positions=40, tie_embeddings=True
    ),
    "opt": OPTConfig(layers=2, hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=40),
    "opt-projected": OPTConfig(
        layers=2, hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=40, embed_width=24, pre_norm=False, activation="gelu"
    ),
    "opt-untied": OPTConfig(layers=2, hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=40, tie_embeddings=False),
}
#: A model of each family of decoders that has none above.
OTHERS = {
    name: configuration(name, next(iter(cases.variants.values())))
    for name, cases in FAMILIES.items()
    if CONFIG_CLASSES[name]().objective == "causal" and name not in {config.family for config in CONFIGS.values()}
}
CONFIGS |= OTHERS
