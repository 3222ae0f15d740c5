"""The test cases of the model families, one entry a family: all that tests and tools read of a family beside its file.

tools/parity and its --fuzz read `variants`, tools/numerics `numerics`, tools/gpu_kernels `large`; tests/models/test_sizes.py reads `tiny`,
`released` and `options`, tests/training/layouts.py `trained` and `layouts`, tests of generation, quantization and conversion `variants`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.audit.numerics_cases import ALL, CONTEXT, DEEPSPEED, EXPERT, MUON_ROWS, NARROW, OPTIMIZER_ROWS, RECOMPUTED, SOME, Model, model

#: Defaults of all variants, for the fields that a family has. The fields of a variant override them.
SIZES = {"layers": 2, "hidden": 48, "heads": 4, "kv_heads": 4, "ffn_hidden": 96, "vocab_size": 300, "max_positions": 40}

#: Rotary positions scaled to four times the original length.
ROPE_SCALED = {"heads": 2, "kv_heads": 2, "hidden": 64, "max_positions": 64, "rope_factor": 4.0}
YARN = {**ROPE_SCALED, "rope_scaling": "yarn", "rope_original_positions": 16, "rope_beta_fast": 8.0}
#: YaRN from ten positions.
YARN_10 = dict(rope_scaling="yarn", rope_factor=4.0, rope_original_positions=10)

#: Small linear attention beside full attention (Qwen 3.5), with experts, and with experts of Qwen3-Next.
LINEAR = dict(linear_key_heads=2, linear_value_heads=4, linear_key_dim=12, linear_value_dim=10, kv_heads=2, head_width=16)
LINEAR_EXPERTS = {**LINEAR, "ffn_hidden": 20, "shared_ffn_hidden": 24}
NEXT = {**LINEAR, "expert_ffn_hidden": 20, "shared_ffn_hidden": 24}
LINEAR_TRAINED = (
    *("model.full_attention_interval=2", "model.linear_key_heads=2", "model.linear_value_heads=4"),
    *("model.linear_key_dim=6", "model.linear_value_dim=10"),
)
#: Small Mamba-2 layers.
MAMBA = dict(mamba_heads=4, mamba_head_dim=10, mamba_groups=2, mamba_state=12, head_width=16)
#: A small hybrid of Mamba-2 and attention.
HYBRID = (
    *("model.kv_heads=4", "model.head_width=8", "model.mamba_heads=8", "model.mamba_groups=4"),
    *("model.mamba_head_dim=6", "model.mamba_state=8"),
)
#: Those of a small Granite 4, as wide as the residual stream, and its factors.
GRANITE = dict(mamba_heads=4, mamba_head_dim=12, mamba_state=10, logits_scaling=1.5) | dict(
    embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4
)
NARROW_STATE = ("model.mamba_heads=8", "model.mamba_head_dim=8", "model.mamba_state=8")
#: A small DeepSeek-V3: one dense block and two MoE blocks. The stock class has no multi-token prediction.
LATENT_EXPERTS = dict(
    layers=3, dense_layers=1, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
) | dict(experts=8, shared_experts=2, expert_ffn_hidden=20, top_k=3, groups=4, topk_group=2)
LATENT = {**LATENT_EXPERTS, "mtp_depth": 0}
#: A small Kimi Linear.
KIMI = {**LATENT_EXPERTS, "q_lora_rank": None, "linear_heads": 4, "linear_head_dim": 12}

#: A small GLM-4.5, without MTP modules either.
GROUPED = dict(layers=3, kv_heads=2, head_width=16, rope_theta=1e3, dense_layers=1, experts=8, expert_ffn_hidden=20, top_k=3, mtp_depth=0)

#: A small Gemma 4.
SMALL_GEMMA4 = dict(layers=6, kv_heads=2, head_width=16, global_head_width=24, window=6, sliding_window_pattern=2, layer_input_width=12)

CLIP_LOW = "optimizer.gradient_clipping=0.1"  # for models with small gradients
LOWER_STD = "model.init_std=0.5"  # with 1 attention is so peaked that gradients of queries differ by 3e-6 between fp32 and fp64
HIGHER_STD = "model.init_std=0.02"  # with 0.006 gradients of queries are so small that they differ by 8e-6 between fp32 and fp64
WIDE_STD = "model.init_std=0.1"  # with 0.02 gradients of the query norms differ by 1.3e-5 between fp32 and fp64
HIGHER_EPS = "model.norm_eps=1e-3"  # with 1e-6 a gradient behind small outputs of linear attention differs by 1e-3 between fp32 and fp64
SMOOTH = "model.activation=gelu"  # with ReLU, rounding can change the sign of an input, which changes the gradient by more than rounding
ONE = "training.micro_batch_size=1"  # in all layouts, since the auxiliary losses of MoE layers are means over a micro-batch


@dataclass(frozen=True)
class Cases:
    """The cases of a family.

    Attributes:
        tiny: its size in conf/model that a CPU trains.
        released: size in conf/model -> number of parameters of the released weights (from their model cards and files); a float is a
            rounded number of the paper.
        large: a size in conf/model that stands for it on a GPU; None for none.
        variants: name -> fields of a small configuration; together they cover the options of the family, the first is the plainest.
        numerics: name -> a tiny model, and its layouts of eight ranks.
        options: fields that add or remove weights, besides tied embeddings.
        trained: of a decoder: settings of the tiny model that four ranks train.
        layouts: their layouts, as settings of parallel, or of training where they name it.
    """

    tiny: str
    variants: dict[str, dict[str, Any]]
    numerics: dict[str, Model]
    released: dict[str, float] = field(default_factory=dict)
    large: str | None = None
    options: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    trained: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()


LABELS = {"labels": ["no", "yes"], "next_sentence": False, "tie_embeddings": False}

FAMILIES: dict[str, Cases] = {
    "apertus": Cases(
        tiny="apertus-tiny",
        large="apertus-8b",
        released={
            # without the buffers of xIELU
            "apertus-8b": 8_053_338_176,
            "apertus-70b": 70_599_864_480,
        },
        variants={
            "default": {"rope_factor": 4.0, "rope_original_positions": 16, "rope_theta": 1e4},
            "unscaled": {"kv_heads": 2, "head_width": 16, "tie_embeddings": True, "rope_scaling": "none"},
        },
        numerics={
            # xIELU's derivative jumps at 0 and at -1e-6 (it clamps there, as the authors' code does). With seed 0 an input is at -3e-8, and
            # layouts that round it to the other side get another gradient (2e-3 of one weight's moments). With seed 15 no input is that
            # close.
            "apertus": model("apertus-tiny", "model.kv_heads=4", "training.seed=15")
        },
        # The derivative of xIELU jumps at -1e-6: with seed 0, rounding decides on which side an input is.
        trained=("model.kv_heads=4", "training.seed=2"),
        # Weights that are used on each rank's own heads or hidden units.
        layouts=("tensor=2 pipeline=2 zero_stage=1",),
    ),
    "bert": Cases(
        tiny="bert-tiny",
        large="bert-large-uncased",
        released={
            # with both heads, as transformers counts them
            "bert-base-uncased": 110_106_428,
            "bert-base-cased": 108_932_934,
            "bert-large-uncased": 336_226_108,
            "bert-large-cased": 334_661_958,
        },
        variants={"sentence pairs": {}, "masked": {"next_sentence": False}, "untied": {"next_sentence": False, "tie_embeddings": False}},
        numerics={"bert": model("bert-tiny")},
        options=[{}, LABELS],
    ),
    "bloom": Cases(
        tiny="bloom-tiny",
        large="bloom-7b1",
        released={
            "bloom-560m": 559_214_592,
            "bloom-1b1": 1_065_314_304,
            "bloom-1b7": 1_722_408_960,
            "bloom-3b": 3_002_557_440,
            "bloom-7b1": 7_069_016_064,
            "bloom-176b": 176_247_271_424,
        },
        variants={"tied": {}, "six heads": {"heads": 6, "tie_embeddings": False}},  # ALiBi slopes differ if heads is no power of 2
        numerics={"bloom": model("bloom-tiny", CLIP_LOW, sizes=NARROW, rows=SOME + CONTEXT)},
    ),
    "deepseek_v3": Cases(
        tiny="deepseek-tiny",
        large="deepseek-v3",
        released={
            "deepseek-v3": 682_636_487_424,  # see test_the_released_deepseek
            "kimi-k2": 1.04e12,  # released in fp8; the paper has 1.04 trillion
        },
        variants={
            "latent queries": LATENT,
            "direct queries": {**LATENT, "q_lora_rank": None, "norm_topk_prob": False, "groups": 1, "topk_group": 1},
            "yarn": LATENT | YARN_10 | dict(rope_beta_fast=4.0, rope_mscale=0.7, rope_mscale_all=1.0),
            "kimi k2": LATENT | YARN_10 | dict(groups=1, topk_group=1, rope_beta_fast=1.0, rope_mscale=1.0, rope_mscale_all=1.0),
        },
        numerics={
            # With seed 0 a token is at a tie of two experts, which fp32 and fp64 resolve differently: the rounding row shows 3e-2.
            "deepseek_v3": model("deepseek-tiny", "training.seed=1", ONE, rows=SOME + EXPERT),
            "deepseek-context": model("deepseek-tiny", "model.mtp_depth=0", ONE, rows=CONTEXT[:3]),
        },
        options=[{"dense_layers": 1, "mtp_depth": 2}, {"q_lora_rank": None, "mtp_depth": 0}],
    ),
    "exaone4": Cases(
        tiny="exaone4-tiny",
        large="exaone4-32b",
        released={"exaone4-1.2b": 1_279_391_488, "exaone4-32b": 32_003_216_384},
        variants={
            "windows": {"layers": 4, "kv_heads": 2, "head_width": 16, "window": 6, "sliding_window_pattern": 2, "rope_theta": 1e3},
            "global": {"kv_heads": 2, "window": None, "sliding_window_pattern": 1, "tie_embeddings": True},
            "llama3": {**ROPE_SCALED, "layers": 3, "window": 7, "rope_scaling": "llama3", "rope_original_positions": 16},
        },
        numerics={"exaone4": model("exaone4-tiny", "model.kv_heads=4", "model.window=6", WIDE_STD, rows=SOME + CONTEXT[:2])},
        trained=("model.kv_heads=4", "model.window=11"),
        layouts=("tensor=2 pipeline=2 zero_stage=1",),
    ),
    "gemma2": Cases(
        tiny="gemma2-tiny",
        large="gemma2-9b",
        released={"gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320},
        variants={
            "caps": dict(layers=4, kv_heads=2, head_width=16, window=6)
            | dict(query_pre_attn_scalar=3, attn_logit_softcapping=0.5, final_logit_softcapping=2.0),
            "uncapped": dict(layers=3, head_width=12, window=5, sliding_window_pattern=3, tie_embeddings=False)
            | dict(query_pre_attn_scalar=12, attn_logit_softcapping=None, final_logit_softcapping=None),
            "yarn": YARN | dict(head_width=32, window=9, sliding_window_pattern=1, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
        },
        numerics={
            "gemma2": model(
                "gemma2-tiny",
                *("model.kv_heads=4", "model.window=6", "model.query_pre_attn_scalar=2", "model.attn_logit_softcapping=0.5"),
                "model.final_logit_softcapping=1.0",
                rows=SOME + CONTEXT,
            )
        },
        trained=(
            "model.kv_heads=4",
            "model.head_width=8",
            "model.window=11",
            "model.query_pre_attn_scalar=2",
            "model.attn_logit_softcapping=0.5",
            "model.final_logit_softcapping=1.0",
        ),
        # The soft cap of the logits with a vocabulary that is sharded, and that of the scores over a ring.
        layouts=("tensor=2 context=2 context_kind=ring zero_stage=1",),
    ),
    "gemma3": Cases(
        tiny="gemma3-tiny",
        large="gemma3-4b",
        released={
            "gemma3-270m": 268_098_176,
            "gemma3-1b": 999_885_952,
            # without the image encoder and its projection
            "gemma3-4b": 3_880_263_168,
            "gemma3-12b": 11_766_034_176,
            "gemma3-27b": 27_009_346_304,
        },
        variants={
            "window": {"layers": 4, "kv_heads": 2, "head_width": 16, "window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
            "linear": dict(layers=3, heads=2, kv_heads=1, head_width=32, window=8, sliding_window_pattern=3, tie_embeddings=False)
            | dict(rope_theta=1e3, rope_local_theta=1e2, rope_scaling="linear", rope_factor=8.0),
            "local": {"window": 5, "head_width": 12},  # fewer layers than an interval
        },
        numerics={
            "gemma3": model(
                "gemma3-tiny",
                "model.kv_heads=4",
                "model.window=6",
                "model.sliding_window_pattern=2",
                "model.rope_local_theta=100",
                rows=SOME + CONTEXT,
            )
        },
        trained=("model.kv_heads=4", "model.head_width=8", "model.window=11", "model.rope_local_theta=100"),
        # Two rotary bases on every stage, and norms after the layers; with the ring, windows in some layers only.
        layouts=("tensor=2 pipeline=2 zero_stage=1", "context=2 context_kind=ring zero_stage=3"),
    ),
    "gemma4": Cases(
        tiny="gemma4-tiny",
        large="gemma4-e4b",
        released={
            # as transformers counts them, and a factor of each layer; without the encoders of images and speech
            "gemma4-e2b": 4_628_569_344 + 35,
            "gemma4-e4b": 7_463_013_376 + 42,
            "gemma4-31b": 30_697_345_280 + 60,
        },
        variants={
            "shared": SMALL_GEMMA4 | dict(kv_shared_layers=3, double_wide_mlp=True, final_logit_softcapping=2.0),
            "keys as values": dict(layers=5, global_kv_heads=2, head_width=12, global_head_width=16, attention_k_eq_v=True, window=5)
            | dict(sliding_window_pattern=2, layer_input_width=0, rope_theta=1e3, rope_local_theta=1e2, tie_embeddings=False)
            | dict(rope_scaling="linear", rope_factor=4.0),
            "both": SMALL_GEMMA4 | dict(kv_shared_layers=2, attention_k_eq_v=True, global_kv_heads=1, partial_rotary_factor=0.7),
            # Of one layer, config.json does not tell the pattern: the import takes the class's.
            "global": dict(layers=1, sliding_window_pattern=6, window=5, head_width=16, global_head_width=12, layer_input_width=5)
            | dict(partial_rotary_factor=1.0),
        },
        numerics={
            "gemma4": model(
                *("gemma4-tiny", "model.kv_heads=4", "model.head_width=8", "model.global_head_width=12", "model.layer_input_width=6"),
                *("model.window=6", "model.rope_local_theta=100", HIGHER_EPS),
                rows=(*(row for row in SOME + CONTEXT if row.pipeline == 1), *RECOMPUTED),
            ),
            "gemma4-dense": model(
                *("gemma4-tiny", "model.kv_heads=8", "model.global_kv_heads=4", "model.attention_k_eq_v=true", "model.head_width=8"),
                *("model.global_head_width=12", "model.layer_input_width=0", "model.kv_shared_layers=0", "model.double_wide_mlp=false"),
                *("model.window=6", "model.rope_local_theta=100", "model.final_logit_softcapping=1.0", HIGHER_EPS),
                rows=SOME + CONTEXT,
            ),
        },
        options=[{}, {"kv_shared_layers": 1, "attention_k_eq_v": True, "sliding_window_pattern": 2}, {"layer_input_width": 0}],
        trained=(
            *("model.kv_heads=4", "model.head_width=8", "model.global_head_width=16", "model.window=11", "model.rope_local_theta=100"),
            HIGHER_EPS,
        ),
        # Keys and values of an earlier layer with tensor ranks, on a ring, and recomputed.
        layouts=("tensor=2 zero_stage=1", "context=2 context_kind=ring zero_stage=3 training.activation_checkpointing=full"),
    ),
    "glm4_moe": Cases(
        tiny="glm4-moe-tiny",
        large="glm4.5-air",
        released={
            # with an MTP module, without its copies of embedding and head: 110,468,824,832 and 358,337,791,296 with them
            "glm4.5-air": 109_227_310_848,
            "glm4.5": 356_785_898_816,
        },
        variants={
            "air": {**GROUPED, "norm_topk_prob": False},
            "norms": GROUPED
            | dict(groups=4, topk_group=2, routed_scaling_factor=2.5)
            | dict(query_key_norm=True, qkv_bias=False, partial_rotary_factor=0.25, tie_embeddings=True),
            "yarn": GROUPED | YARN_10 | dict(head_width=None, partial_rotary_factor=1.0, dense_layers=0, rope_beta_fast=4.0),
        },
        numerics={"glm4_moe": model("glm4-moe-tiny", "model.kv_heads=4", "model.head_width=8", ONE, WIDE_STD, rows=SOME + EXPERT)},
        options=[{"mtp_depth": 2, "query_key_norm": True}, {"qkv_bias": False, "mtp_depth": 0}],
    ),
    "gpt": Cases(
        tiny="gpt-tiny",
        large="gpt2-xl",
        released={
            "gpt2": 124_439_808,
            "gpt2-medium": 354_823_168,
            "gpt2-large": 774_030_080,
            "gpt2-xl": 1_557_611_200,
            # Not released; rounded in table 2.1 of the paper.
            "gpt3-small": 125e6,
            "gpt3-medium": 350e6,
            "gpt3-large": 760e6,
            "gpt3-2.7b": 2.7e9,
            "gpt3-6.7b": 6.7e9,
            "gpt3-13b": 13.0e9,
            "gpt3-175b": 175.0e9,
        },
        variants={"tied": {}, "untied": {"tie_embeddings": False}},
        numerics={
            "gpt": model("gpt-tiny", layers=8, rows=ALL + CONTEXT),
            "gpt-banded": model("gpt-tiny", "model.banded_window=6", rows=SOME + CONTEXT[:2]),
        },
    ),
    "gpt1": Cases(
        tiny="gpt1-tiny",
        large="gpt1",
        released={"gpt1": 116_534_784},
        variants={"tied": {}},
        numerics={"gpt1": model("gpt1-tiny", CLIP_LOW, sizes=NARROW, rows=SOME + CONTEXT[:2])},
    ),
    "gpt_neox": Cases(
        tiny="gpt-neox-tiny",
        large="pythia-6.9b",
        released={
            "gpt-neox-20b": 20_554_567_680,
            "pythia-70m": 70_426_624,
            "pythia-160m": 162_322_944,
            "pythia-410m": 405_334_016,
            "pythia-1b": 1_011_781_632,
            "pythia-1.4b": 1_414_647_808,
            "pythia-2.8b": 2_775_208_960,
            "pythia-6.9b": 6_857_302_016,
            "pythia-12b": 11_846_072_320,
        },
        variants={
            "parallel": {"partial_rotary_factor": 0.5},
            "sequential": dict(heads=3, parallel_residual=False, attention_bias=False, activation="gelu_tanh", tie_embeddings=True),
            "whole": {"layers": 3, "partial_rotary_factor": 1.0, "rope_theta": 1e3, "norm_eps": 1e-3},
            "linear": {"rope_scaling": "linear", "rope_factor": 4.0, "partial_rotary_factor": 0.7},
            "yarn": {key: value for key, value in ROPE_SCALED.items() if key != "kv_heads"}
            | dict(rope_scaling="yarn", rope_original_positions=16, rope_beta_fast=8.0),
        },
        numerics={"gpt_neox": model("gpt-neox-tiny", rows=SOME + CONTEXT[:2])},
        options=[{}, {"attention_bias": False}],
        trained=(),
        layouts=("tensor=2 pipeline=2 zero_stage=1",),
    ),
    "gpt_oss": Cases(
        tiny="gpt-oss-tiny",
        large="gpt-oss-20b",
        released={"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672},
        variants={  # small bounds of SwiGLU, so that they apply
            "both kinds of layers": dict(layers=4, kv_heads=2, head_width=16, window=6, experts=6, top_k=3, swiglu_limit=0.3),
            "local": {"heads": 3, "kv_heads": 1, "head_width": None, "window": 4, "sliding_window_pattern": 3, "experts": 4, "top_k": 1},
            "yarn": dict(layers=3, kv_heads=2, head_width=24, window=8, sliding_window_pattern=3, attention_bias=False, tie_embeddings=True)
            | dict(experts=5, top_k=5, swiglu_limit=0.5, swiglu_alpha=1.2)
            | YARN_10
            | dict(rope_theta=1e3, rope_original_positions=13, rope_beta_fast=5.0, rope_truncate=False),
            "rounded yarn": YARN_10 | dict(experts=4, top_k=2, window=40),
        },
        numerics={
            "gpt_oss": model(
                *("gpt-oss-tiny", "model.kv_heads=4", "model.head_width=8", "model.window=6", ONE, WIDE_STD),
                rows=SOME + CONTEXT[:2] + EXPERT,
            )
        },
        options=[{}, {"attention_bias": False}],
    ),
    "granite": Cases(
        tiny="granite-tiny",
        large="granite3-8b",
        released={"granite3-2b": 2_533_531_648, "granite3-8b": 8_170_848_256},
        variants={
            "factors": dict(kv_heads=2, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.5),
            "yarn": {**YARN, "logits_scaling": 0.5},
            "untied": {"head_width": 16, "attention_multiplier": 0.25, "logits_scaling": 4.0, "tie_embeddings": False},
        },
        numerics={"granite": model("granite-tiny", "model.kv_heads=4", CLIP_LOW, rows=SOME + CONTEXT[:2])},
        trained=("model.kv_heads=4",),
        # The factor of the residual stream on every stage, and that of the logits with a vocabulary that is sharded.
        layouts=("tensor=2 pipeline=2 zero_stage=1",),
    ),
    "granite_hybrid": Cases(
        tiny="granite-hybrid-tiny",
        large="granite4-h-micro",
        released={"granite4-h-micro": 3_191_396_096, "granite4-h-tiny": 6_939_037_248, "granite4-h-small": 32_207_337_984},
        variants={
            "dense": {**GRANITE, "layers": 4, "layer_pattern": "MM*", "kv_heads": 2},
            "experts": {
                **GRANITE,
                "mamba_head_dim": 24,
                "layers": 3,
                "layer_pattern": "M*",
                "experts": 6,
                "top_k": 3,
                "expert_ffn_hidden": 20,
                "rotary": True,
            },
            "attention": {**GRANITE, "layer_pattern": "*", "rotary": True, "tie_embeddings": False, "rope_theta": 1e3},
        },
        numerics={
            "granite_hybrid": model("granite-hybrid-tiny", *HYBRID[:2], *NARROW_STATE, ONE, CLIP_LOW, rows=SOME + CONTEXT[:3] + EXPERT[:4]),
        },
        options=[{}, {"experts": 8}],
        trained=("model.kv_heads=4", "model.experts=0"),
        layouts=("tensor=2 pipeline=2 zero_stage=1",),
    ),
    "kimi_linear": Cases(
        tiny="kimi-linear-tiny",
        released={"kimi-linear-48b-a3b": 49_122_681_728},  # computed from config.json
        variants={
            "plain": {**KIMI, "layers": 4, "layer_pattern": "KK*"},
            "direct": KIMI
            | dict(layer_pattern="*K", dense_layers=0, linear_heads=3, linear_head_dim=10, linear_kernel=3, q_lora_rank=24)
            | dict(norm_topk_prob=False, groups=1, topk_group=1, routed_scaling_factor=1.5, shared_experts=1),
            "dense": {**KIMI, "layer_pattern": "K*", "dense_layers": 3, "norm_eps": 1e-3},
        },
        numerics={
            "kimi_linear": model("kimi-linear-tiny", "model.linear_head_dim=8", ONE, HIGHER_EPS, rows=SOME + CONTEXT + EXPERT),
        },
        options=[{"tie_embeddings": False}, {"layer_pattern": "KK*", "q_lora_rank": 96, "dense_layers": 2, "tie_embeddings": False}],
        trained=("model.linear_head_dim=8",),
        # Decays and gates of low rank, and states whose rows decay, on other ranks and stages.
        layouts=("tensor=2 pipeline=2 zero_stage=1", "context=2 context_kind=ring tensor=2 zero_stage=3"),
    ),
    "llama": Cases(
        tiny="llama-tiny",
        large="llama3-8b",
        released={
            "llama-7b": 6_738_415_616,
            "llama-13b": 13_015_864_320,
            "llama-33b": 32_528_943_616,
            "llama-65b": 65_285_660_672,
            "llama2-70b": 68_976_648_192,
            "llama3-8b": 8_030_261_248,
            "llama3-70b": 70_553_706_496,
            "llama3-405b": 405_853_388_800,
            "llama3.1-8b": 8_030_261_248,
            "llama3.1-70b": 70_553_706_496,
            "llama3.1-405b": 405_853_388_800,
            "llama3.2-1b": 1_235_814_400,
            "llama3.2-3b": 3_212_749_824,
            "qwen2.5-0.5b": 494_032_768,
            "qwen2.5-1.5b": 1_543_714_304,
            "qwen2.5-3b": 3_085_938_688,
            "qwen2.5-7b": 7_615_616_512,
            "qwen2.5-14b": 14_770_033_664,
            "qwen2.5-32b": 32_763_876_352,
            "qwen2.5-72b": 72_706_203_648,
            "qwen3-0.6b": 596_049_920,
            "qwen3-1.7b": 1_720_574_976,
            "qwen3-4b": 4_022_468_096,
            "qwen3-8b": 8_190_735_360,
            "qwen3-14b": 14_768_307_200,
            "qwen3-32b": 32_762_123_264,
        },
        variants={
            "plain": {},
            "grouped": {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 2, "rope_theta": 500000.0, "norm_eps": 1e-3},
            "tied": {"kv_heads": 1, "tie_embeddings": True},
            "biases": {"kv_heads": 2, "attention_bias": True},
            "linear": {**ROPE_SCALED, "rope_scaling": "linear"},
            "llama3": {**ROPE_SCALED, "rope_scaling": "llama3", "rope_original_positions": 16},
            "yarn": YARN,
            "qwen2.5": {"kv_heads": 2, "qkv_bias": True},
            "qwen3": {"kv_heads": 2, "head_width": 16, "query_key_norm": True},
        },
        numerics={
            "llama": model("llama-tiny", "model.kv_heads=4", layers=8, rows=ALL + CONTEXT + DEEPSPEED),
            "qwen2.5": model("qwen2.5-tiny", "model.kv_heads=4"),
        },
        options=[{}, {"attention_bias": True}, {"qkv_bias": True}, {"query_key_norm": True, "attention_bias": True, "head_width": 256}],
    ),
    "mistral": Cases(
        tiny="mistral-tiny",
        large="mistral-7b",
        released={
            "mistral-7b": 7_241_732_096,
            "mistral-7b-v0.3": 7_248_023_552,
            "mistral-nemo-12b": 12_247_782_400,
            "mistral-small3-24b": 23_572_403_200,
        },
        variants={"window": {"kv_heads": 2, "head_width": 16, "window": 6}, "dense": {"kv_heads": 2, "window": None, "rope_theta": 1e6}},
        numerics={"mistral": model("mistral-tiny", "model.kv_heads=4", "model.window=6", rows=SOME + CONTEXT)},
        trained=("model.kv_heads=2", "model.window=11"),
        layouts=("context=2 context_kind=ring tensor=2 zero_stage=1",),
    ),
    "mixtral": Cases(
        tiny="mixtral-tiny",
        large="mixtral-8x7b",
        released={"mixtral-8x22b": 140_620_634_112, "mixtral-8x7b": 46_702_792_704},
        variants={
            "two of four": {"kv_heads": 2, "experts": 4},
            "window": {"kv_heads": 2, "experts": 3, "top_k": 1, "window": 6, "tie_embeddings": True},
        },
        numerics={"mixtral": model("mixtral-tiny", "model.kv_heads=4", ONE, rows=SOME + CONTEXT[:3] + EXPERT)},
    ),
    "modernbert": Cases(
        tiny="modernbert-tiny",
        released={"modernbert-base": 149_655_232, "modernbert-large": 395_881_664},
        variants={
            "windows": {"layers": 4, "local_attention": 8, "rope_local_theta": 100.0},
            "every second": {"layers": 3, "local_attention": 7, "global_attn_every_n_layers": 2, "tie_embeddings": False},
            "global": {"global_attn_every_n_layers": 1, "rope_theta": 1000.0, "norm_eps": 1e-3},
        },
        numerics={"modernbert": model("modernbert-tiny", "model.local_attention=6")},
    ),
    "nemotron": Cases(
        tiny="nemotron-tiny",
        large="minitron-4b",
        released={
            # Of the papers: embeddings and other weights.
            "nemotron4-15b": 3.1e9 + 12.5e9,
            "nemotron4-340b": 9.4e9 + 331.6e9,
            "minitron-4b": 4.19e9,
            "minitron-8b": 8.27e9,
        },
        variants={
            "grouped": {"kv_heads": 2, "rope_theta": 1e3},
            "wide": {"layers": 3, "head_width": 20, "partial_rotary_factor": 0.7, "norm_eps": 1e-3, "tie_embeddings": True},
            "linear": {"kv_heads": 1, "rope_scaling": "linear", "rope_factor": 4.0, "partial_rotary_factor": 1.0},
            "yarn": YARN,
        },
        numerics={"nemotron": model("nemotron-tiny", "model.kv_heads=4", rows=SOME + CONTEXT[:2])},
        trained=("model.kv_heads=4",),
        layouts=("tensor=2 pipeline=2 zero_stage=1",),
    ),
    "nemotron_h": Cases(
        tiny="nemotron-h-tiny",
        large="nemotron-h-8b",
        released={
            "nemotron-h-8b": 8_100_852_736,
            "nemotron-nano2-9b": 8_888_227_328,
            "nemotron3-nano-30b-a3b": 31_577_940_288,
        },
        variants={
            "dense": {**MAMBA, "layers": 5, "layer_pattern": "M-*-"},
            "experts": MAMBA
            | dict(layers=6, layer_pattern="ME*E", mamba_groups=4, experts=8, top_k=3, expert_ffn_hidden=20, shared_ffn_hidden=24)
            | dict(groups=4, topk_group=2, routed_scaling_factor=2.5, mamba_kernel=3, kv_heads=2),
            "in a row": {**MAMBA, "layers": 4, "layer_pattern": "MM*-", "head_width": 20, "mamba_smallest_step": 0.5, "norm_eps": 1e-3},
        },
        numerics={
            "nemotron_h": model("nemotron-h-tiny", *HYBRID, "model.layer_pattern=M-*-", "model.experts=0", rows=SOME + CONTEXT),
            "nemotron-h-moe": model("nemotron-h-tiny", *HYBRID, "model.layer_pattern=ME*-", ONE, rows=SOME[:2] + CONTEXT[:2] + EXPERT),
        },
        options=[{"layer_pattern": "M*-", "tie_embeddings": False}, {"layer_pattern": "ME*-", "experts": 8, "tie_embeddings": False}],
        trained=("model.kv_heads=4", "model.mamba_groups=2"),
        layouts=("tensor=2 pipeline=2 zero_stage=1", "context=2 context_kind=ring zero_stage=3"),
    ),
    "olmo2": Cases(
        tiny="olmo2-tiny",
        large="olmo2-7b",
        released={"olmo2-1b": 1_484_916_736, "olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400, "olmo2-32b": 32_234_279_936},
        variants={"plain": {}, "grouped": {"layers": 3, "kv_heads": 2, "head_width": 16, "tie_embeddings": True}, "yarn": YARN},
        numerics={"olmo2": model("olmo2-tiny", "model.kv_heads=4", WIDE_STD, rows=SOME + CONTEXT)},
        trained=("model.kv_heads=4",),
        # The norm over the heads of all tensor ranks, with a split backward pass, and recomputed with weights that ZeRO 3 gathers.
        layouts=("tensor=2 pipeline=2 zero_stage=0 schedule=zbv", "tensor=2 zero_stage=3 training.activation_checkpointing=selective"),
    ),
    "olmo3": Cases(
        tiny="olmo3-tiny",
        large="olmo3-7b",
        released={"olmo3-7b": 7_298_011_136, "olmo3-32b": 32_233_522_176},
        variants={
            "window": {"layers": 5, "kv_heads": 2, "window": 6, "sliding_window_pattern": 2, "rope_theta": 1e3, "rope_local_theta": 1e2},
            "yarn": {**YARN, "layers": 4, "head_width": 16, "window": 7, "rope_local_theta": 1e3, "tie_embeddings": True},
            "local": {"window": 5},  # fewer layers than an interval
        },
        numerics={
            "olmo3": model(
                "olmo3-tiny", "model.kv_heads=4", "model.window=6", "model.rope_local_theta=100", WIDE_STD, rows=SOME + CONTEXT[:2]
            )
        },
    ),
    "olmo_hybrid": Cases(
        tiny="olmo-hybrid-tiny",
        large="olmo-hybrid-7b",
        released={"olmo-hybrid-7b": 7_430_870_688},  # computed from config.json
        variants={
            "plain": {**LINEAR, "layers": 4, "rope_theta": 1e3},
            "no positions": LINEAR
            | dict(layers=5, full_attention_interval=2, linear_value_heads=2, linear_kernel=3, kv_heads=4, head_width=None)
            | dict(rotary=False, negative_eigenvalues=False, tie_embeddings=True),
            "yarn": {**LINEAR, **YARN, "full_attention_interval": 2},
            "last": {**LINEAR, "layers": 3, "full_attention_interval": 3, "linear_value_heads": 6},
        },
        numerics={
            # with WIDE_STD, rounding changes gradients of decays by 2e-4
            "olmo_hybrid": model("olmo-hybrid-tiny", "model.kv_heads=4", "model.rope_theta=100", HIGHER_EPS, rows=SOME + CONTEXT)
        },
        trained=("model.kv_heads=4", *LINEAR_TRAINED),
        # Norms over the width of all heads, and negative eigenvalues in the maps that ranks exchange.
        layouts=("tensor=2 pipeline=2 zero_stage=1", "context=2 context_kind=ulysses zero_stage=3"),
    ),
    "olmoe": Cases(
        tiny="olmoe-tiny",
        large="olmoe-1b-7b",
        released={"olmoe-1b-7b": 6_919_161_856},
        variants={
            "unnormalized": {"experts": 8, "top_k": 3, "rope_theta": 1e3},
            "normalized": {"layers": 3, "kv_heads": 2, "experts": 5, "top_k": 2, "norm_topk_prob": True, "tie_embeddings": True},
            "yarn": {**YARN, "experts": 4, "top_k": 2},
        },
        numerics={
            # As for deepseek_v3 below: with seed 0, two layouts resolve a tie as fp64 does.
            "olmoe": model("olmoe-tiny", "model.kv_heads=4", "training.seed=1", ONE, WIDE_STD, rows=SOME + CONTEXT[:1] + EXPERT)
        },
    ),
    "opt": Cases(
        tiny="opt-tiny",
        large="opt-6.7b",
        released={
            "opt-125m": 125_239_296,
            "opt-350m": 331_196_416,
            "opt-1.3b": 1_315_758_080,
            "opt-2.7b": 2_651_596_800,
            "opt-6.7b": 6_658_473_984,
            "opt-13b": 12_853_473_280,
            "opt-30b": 29_974_540_288,
            # No exact count, and not public; rounded in table 1 of the paper.
            "opt-66b": 66.0e9,
            "opt-175b": 175.0e9,
        },
        variants={"pre-norm": {}, "post-norm": {"pre_norm": False, "embed_width": 32}},
        numerics={
            "opt": model("opt-tiny", SMOOTH, rows=SOME + CONTEXT[:2]),
            "opt-350m": model(
                "opt-tiny", "model.embed_width=48", "model.pre_norm=false", SMOOTH, HIGHER_STD, "optimizer.gradient_clipping=0.02"
            ),
        },
        options=[{}, {"embed_width": 512, "pre_norm": False}],
    ),
    "phi3": Cases(
        tiny="phi3-tiny",
        large="phi4-14b",
        released={"phi4-14b": 14_659_507_200},
        variants={
            "dense": {"kv_heads": 2, "rope_theta": 1e4},
            "window": {"kv_heads": 1, "head_width": 16, "window": 6, "tie_embeddings": True},
        },
        numerics={"phi3": model("phi3-tiny", "model.kv_heads=4", "model.window=6")},
    ),
    "qwen3_5": Cases(
        tiny="qwen3.5-tiny",
        large="qwen3.5-9b",
        released={
            # the language model, without the MTP module: computed from config.json
            "qwen3.5-9b": 8_953_803_264,
            "qwen3.5-27b": 26_895_998_464,
        },
        variants={
            "plain": {**LINEAR, "layers": 4},
            "every second": LINEAR
            | dict(layers=5, full_attention_interval=2, linear_value_heads=2, linear_kernel=3, tie_embeddings=True, head_width=24),
            "yarn": {**LINEAR, **YARN, "partial_rotary_factor": 0.5, "full_attention_interval": 2},
            "last": {**LINEAR, "layers": 3, "full_attention_interval": 3, "linear_value_heads": 6},
        },
        numerics={"qwen3_5": model("qwen3.5-tiny", "model.kv_heads=4", "model.head_width=8", WIDE_STD, HIGHER_EPS, rows=SOME + CONTEXT)},
        trained=("model.kv_heads=4", "model.head_width=8", *LINEAR_TRAINED),
        # States, convolutions and documents continue on other ranks and stages.
        layouts=("tensor=2 pipeline=2 zero_stage=1", "context=2 context_kind=ring tensor=2 zero_stage=3"),
    ),
    "qwen3_5_moe": Cases(
        tiny="qwen3.5-moe-tiny",
        released={"qwen3.5-35b-a3b": 34_660_610_688},
        variants={
            "plain": {**LINEAR_EXPERTS, "layers": 4, "experts": 8, "top_k": 3},
            "every second": LINEAR_EXPERTS
            | dict(layers=5, full_attention_interval=2, linear_value_heads=2, linear_kernel=3, experts=6, top_k=2, tie_embeddings=True),
            "scaled": LINEAR_EXPERTS | dict(rope_scaling="linear", rope_factor=4.0, full_attention_interval=2, experts=4, top_k=4),
        },
        numerics={
            "qwen3_5_moe": model(
                "qwen3.5-moe-tiny", "model.kv_heads=4", "model.head_width=8", ONE, WIDE_STD, HIGHER_EPS, rows=SOME + CONTEXT[:1] + EXPERT
            )
        },
    ),
    "qwen3_moe": Cases(
        tiny="qwen3-moe-tiny",
        large="qwen3-30b-a3b",
        released={"qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560},
        variants={
            "every block": {"kv_heads": 2, "head_width": 16, "experts": 8, "top_k": 3, "expert_ffn_hidden": 20},
            "some blocks": dict(layers=5, kv_heads=2, head_width=16, expert_interval=2, dense_blocks=[1], tie_embeddings=True)
            | dict(experts=6, top_k=2, expert_ffn_hidden=20, norm_topk_prob=False),
            "derived width": {"head_width": None, "experts": 4, "top_k": 4, "expert_ffn_hidden": 16, "rope_theta": 1e4},
        },
        numerics={
            "qwen3_moe": model("qwen3-moe-tiny", "model.kv_heads=4", "model.head_width=8", ONE, WIDE_STD, rows=SOME + CONTEXT[:1] + EXPERT)
        },
        options=[{}, {"expert_interval": 2}],
    ),
    "qwen3_next": Cases(
        tiny="qwen3-next-tiny",
        released={
            "qwen3-next-80b-a3b": 79.7e9  # released with an MTP module
        },
        variants={
            "every block": {**NEXT, "layers": 4, "experts": 8, "top_k": 3},
            "some blocks": NEXT
            | dict(layers=5, full_attention_interval=2, linear_value_heads=2, linear_kernel=3, tie_embeddings=True)
            | dict(expert_interval=2, dense_blocks=[1], experts=6, top_k=2, norm_topk_prob=False),
            "yarn": {**NEXT, **YARN, "partial_rotary_factor": 0.5, "full_attention_interval": 1, "experts": 4, "top_k": 2},
            "last": {**NEXT, "layers": 3, "full_attention_interval": 3, "linear_value_heads": 6, "experts": 4, "top_k": 2},
        },
        numerics={
            "qwen3_next": model(
                "qwen3-next-tiny", "model.kv_heads=4", "model.head_width=8", ONE, WIDE_STD, HIGHER_EPS, rows=SOME + CONTEXT + EXPERT
            )
        },
        options=[{}, {"expert_interval": 2, "full_attention_interval": 2}],
    ),
    "roberta": Cases(
        tiny="roberta-tiny",
        large="roberta-large",
        released={
            "roberta-base": 124_697_433,
            "roberta-large": 355_412_057,
            "xlm-roberta-base": 278_295_186,
            "xlm-roberta-large": 560_142_482,
            "camembert-base": 110_655_493,
            "camembert-large": 336_695_557,
        },
        variants={
            "tied": {},
            "untied": {"tie_embeddings": False},
            "xlm-r": {"model_type": "xlm-roberta"},
            "camembert": {"model_type": "camembert", "tie_embeddings": False},
        },
        numerics={"roberta": model("roberta-tiny")},
        options=[{}, *({"model_type": name, **more} for name in ("roberta", "xlm-roberta", "camembert") for more in ({}, LABELS))],
    ),
    "smollm3": Cases(
        tiny="smollm3-tiny",
        large="smollm3-3b",
        released={"smollm3-3b": 3_075_098_624},
        variants={
            "every second": {"layers": 4, "kv_heads": 2, "no_rope_layer_interval": 2},
            "every third": {"layers": 4, "no_rope_layer_interval": 3, "head_width": 16, "tie_embeddings": False},
            "none": {"kv_heads": 2},
        },
        numerics={"smollm3": model("smollm3-tiny", "model.kv_heads=4", "model.no_rope_layer_interval=2", rows=SOME + CONTEXT[:2])},
        trained=("model.kv_heads=4",),
        layouts=("context=2 context_kind=ulysses pipeline=2 zero_stage=1",),
    ),
    "t5": Cases(
        tiny="t5-tiny",
        large="t5-v1.1-xl",
        released={
            "t5-small": 60_506_624,
            "t5-base": 222_903_552,
            "t5-large": 737_668_096,
            "t5-3b": 2_851_598_336,
            "t5-11b": 11_307_321_344,
            "t5-v1.1-small": 76_961_152,
            "t5-v1.1-base": 247_577_856,
            "t5-v1.1-large": 783_150_080,
            "t5-v1.1-xl": 2_849_757_184,
            "t5-v1.1-xxl": 11_135_332_352,
        },
        variants={
            "tied": {"layers": 4, "head_width": 12},
            "v1.1": {"layers": 4, "head_width": 16, "gated": True, "tie_embeddings": False, "init_std": 0.3},
            "unscaled": {"layers": 4, "head_width": 16, "gated": True, "scale_head": False, "init_std": 0.3},
            "uneven": {"layers": 3, "encoder_layers": 1, "buckets": 8, "max_distance": 16},
        },
        numerics={"t5": model("t5-tiny", "model.gated=true")},
    ),
    "transformer": Cases(
        tiny="transformer-tiny",
        large="transformer-big",
        released={
            # Not released. Computed from section 3 for 37,000 tokens; table 3 has 65 and 213 million.
            "transformer-base": 37_000 * 512 + 6 * (3 * 4 * 512 * 513 + 2 * (2 * 512 * 2048 + 2048 + 512) + 5 * 2 * 512),
            "opus-mt": 58_101 * 513 + 6 * (3 * 4 * 512 * 513 + 2 * (2 * 512 * 2048 + 2048 + 512) + 5 * 2 * 512),
            "transformer-big": 37_000 * 1024 + 6 * (3 * 4 * 1024 * 1025 + 2 * (2 * 1024 * 4096 + 4096 + 1024) + 5 * 2 * 1024),
        },
        variants={"tied": {"layers": 4}, "uneven": {"layers": 3, "encoder_layers": 2}},
        numerics={
            "transformer": model("transformer-tiny", SMOOTH, LOWER_STD, "data.pairs.train=[none.tsv]"),
            "opus-mt": model("opus-mt", "data.pairs.train=[none.tsv]"),
        },
        options=[{}, {"output_bias": True}],
    ),
}

#: Tolerance of the absolute difference of two logits. fp32 sums differ in their order; some families have more of them.
TOLERANCE = {
    "mixtral": 1e-4,
    "deepseek_v3": 1e-4,
    "qwen3_next": 1e-4,
    "qwen3_5": 1e-4,
    "qwen3_5_moe": 1e-4,
    "olmo_hybrid": 1e-4,
    "kimi_linear": 1e-4,
}
DEFAULT_TOLERANCE = 1e-5

MUON = "optimizer.name=muon"
QK_CLIP = "optimizer.qk_clip=0.05"  # about half of the heads are above it
# Lion moves by signs: where one is that of a rounding error, an element differs by twice the learning rate, here below the tolerance.
LION = ("optimizer.name=lion", "optimizer.beta2=0.99", "optimizer.lr=1e-6", "optimizer.eps=1e-8")
ADEMAMIX = ("optimizer.name=ademamix", "optimizer.beta2=0.999", "optimizer.beta3=0.99", "optimizer.slow_warmup_steps=5")
SCHEDULE_FREE = ("optimizer.name=schedule_free", "optimizer.schedule=constant", "training.ema=null")

#: Models that tools/numerics trains with other optimizers.
OPTIMIZERS: dict[str, Model] = {
    "lion": model("llama-tiny", "model.kv_heads=4", *LION, rows=OPTIMIZER_ROWS),
    "ademamix": model("llama-tiny", "model.kv_heads=4", *ADEMAMIX, rows=OPTIMIZER_ROWS),
    "schedule_free": model("llama-tiny", "model.kv_heads=4", *SCHEDULE_FREE, rows=OPTIMIZER_ROWS),
    "muon": model("llama-tiny", "model.kv_heads=4", MUON, rows=MUON_ROWS),
    "muon-heads": model("llama-tiny", "model.kv_heads=4", MUON, "optimizer.muon_per_head=true", rows=SOME[:2]),
    "muon-mixtral": model("mixtral-tiny", "model.kv_heads=4", ONE, MUON, rows=(SOME[1], *EXPERT[:4])),
    "qk-clip": model("gpt-tiny", QK_CLIP, rows=SOME),
    "qk-clip-deepseek": model("deepseek-tiny", "training.seed=1", ONE, MUON, QK_CLIP, rows=(SOME[1], *EXPERT[:2])),
    "muon-deepseek": model("deepseek-tiny", "training.seed=1", ONE, MUON, rows=(SOME[1], *EXPERT[:2])),
}
#: All models of tools/numerics.
MODELS = {name: model for cases in FAMILIES.values() for name, model in cases.numerics.items()} | OPTIMIZERS
