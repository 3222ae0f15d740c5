"""The model of a checkpoint of Megatron-LM or GPT-NeoX, from the settings of its training. What no family here has is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.conversion.foreign_weights import Source
from pipeline.models.config import ModelConfig
from pipeline.models.config_classes import CONFIG_CLASSES

_FIX = "import a model without it, or convert it with the tool that trained it"


class _Settings:
    """Settings of another tool, and the reasons why no family here has them."""

    def __init__(self, tool: str, values: Mapping[str, Any]) -> None:
        self._tool, self._values = tool, values
        self.violations: list[Violation] = []

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first of some settings that is set."""
        return next((value for key in keys if (value := self._values.get(key)) is not None), default)

    def number(self, *keys: str) -> Any:
        """Return a setting that must be there; 1 if it is not, and a violation."""
        if (value := self.get(*keys)) is None:
            self.violations.append(
                Violation(f"{self._tool} {keys[0]}", None, "is missing in the checkpoint", "put a config.json beside it")
            )
            return 1
        return value

    def require(self, key: str, *legal: Any, default: Any = None) -> None:
        """Refuse a setting with another value than these; a missing one has the default."""
        self.check(key, self.get(key, default=default), *legal)

    def check(self, key: str, value: Any, *legal: Any) -> None:
        """Refuse another value of a setting than these."""
        if value not in legal:
            rule = f"is not supported by the families here; supported: {', '.join(map(str, legal))}"
            self.violations.append(Violation(f"{self._tool} {key}", value, rule, _FIX))

    def build(self, family: str, **fields: Any) -> ModelConfig:
        """Return a configuration.

        Raises:
            UserError: with all violations.
        """
        UserError.raise_for(self.violations)
        config: ModelConfig = CONFIG_CLASSES[family](**fields)
        UserError.raise_for([*knobs.range_violations(config, "model.")] or config.violations())
        return config


def _rows(source: Source, *names: str) -> int:
    """Return the number of rows of a tensor over all ranks, 1 if there is no such tensor: `check` of the weights names it."""
    stored = source.names()
    name = next((name for name in names if name in stored), None)
    return 1 if name is None else sum(meta.shape[0] for meta in source.meta(name))


def megatron(args: Mapping[str, Any], source: Source) -> ModelConfig:
    """Return the model of Megatron-LM's arguments: GPT-2, Llama, Qwen 2 and 3, or Mixtral.

    Raises:
        UserError: with every argument that no family here has.
    """
    settings = _Settings("Megatron-LM", args)
    for key in ("apply_layernorm_1p", "multi_latent_attention", "squared_relu", "rotary_interleaved", "heterogeneous_layers_config_path"):
        settings.require(key, False, default=False)
    for key in ("mtp_num_layers", "window_size", "moe_shared_expert_intermediate_size", "softmax_type"):
        settings.require(key, None, 0, "vanilla")
    hidden, heads, layers = settings.number("hidden_size"), settings.number("num_attention_heads"), settings.number("num_layers")
    swiglu = settings.get("swiglu", default=False)
    common = {
        "hidden": hidden,
        "heads": heads,
        "layers": layers,
        "ffn_hidden": settings.get("ffn_hidden_size", default=4 * hidden),
        "vocab_size": _rows(source, "embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight"),
        "max_positions": settings.number("max_position_embeddings"),
        "norm_eps": settings.get("norm_epsilon", "layernorm_epsilon", default=1e-5),
        "init_std": settings.get("init_method_std", default=0.02),
        "tie_embeddings": not settings.get("untie_embeddings_and_output_weights", default=False),
    }
    positions = (
        "rope" if settings.get("use_rotary_position_embeddings") else settings.get("position_embedding_type", default="learned_absolute")
    )
    if not swiglu:
        settings.require("normalization", "LayerNorm", default="LayerNorm")
        settings.check("position_embedding_type", positions, "learned_absolute")
        settings.require("kv_channels", None, hidden // heads)
        settings.require("add_bias_linear", True, default=True)
        settings.require("num_experts", None)
        settings.require("num_query_groups", None, 1, heads)
        if not settings.get("bias_gelu_fusion", default=True) and not settings.get("openai_gelu"):
            rule = "computes the exact GELU; the family gpt has its tanh approximation, which bias_gelu_fusion and openai_gelu are"
            settings.violations.append(Violation("Megatron-LM bias_gelu_fusion", False, rule, _FIX))
        return settings.build("gpt", **common)
    settings.require("normalization", "RMSNorm", default="LayerNorm")
    settings.require("add_bias_linear", False, default=True)
    settings.require("rotary_percent", 1.0, default=1.0)
    settings.check("position_embedding_type", positions, "rope")
    grouped = settings.get("group_query_attention", default=False)
    common["kv_heads"] = settings.get("num_query_groups", default=heads) if grouped else heads
    common["rope_theta"] = float(settings.get("rotary_base", default=10000))
    qkv_bias, head_norm = settings.get("add_qkv_bias", default=False), settings.get("qk_layernorm", default=False)
    if settings.get("num_experts"):
        return _mixtral(settings, common, hidden // heads)
    width = settings.get("kv_channels", default=hidden // heads)
    scaling: dict[str, Any] = {}
    if settings.get("use_rope_scaling"):
        factor = float(settings.get("rope_scaling_factor", default=8.0))
        scaling = {"rope_scaling": "llama3", "rope_factor": factor, "rope_original_positions": 8192}
    elif (factor := settings.get("rotary_seq_len_interpolation_factor", default=1)) != 1:
        scaling = {"rope_scaling": "linear", "rope_factor": float(factor)}
    width = None if width == hidden / heads else width
    return settings.build("llama", **common, **scaling, head_width=width, qkv_bias=qkv_bias, query_key_norm=head_norm)


def _mixtral(settings: _Settings, common: dict[str, Any], width: int) -> ModelConfig:
    """Return a model with experts in every layer."""
    for key in ("add_qkv_bias", "qk_layernorm", "use_rope_scaling", "moe_router_pre_softmax", "moe_router_enable_expert_bias"):
        settings.require(key, False, default=False)
    for key in ("moe_router_num_groups", "moe_router_topk_scaling_factor", "moe_latent_size"):
        settings.require(key, None)
    settings.require("moe_router_score_function", "softmax", default="softmax")
    settings.require("moe_layer_freq", 1, [1] * common["layers"], default=1)
    settings.require("kv_channels", width, default=width)
    settings.require("rotary_seq_len_interpolation_factor", 1, default=1)
    common["ffn_hidden"] = settings.get("moe_ffn_hidden_size", default=common["ffn_hidden"])
    return settings.build("mixtral", **common, experts=settings.get("num_experts"), top_k=settings.get("moe_router_topk", default=2))


def neox(values: Mapping[str, Any], source: Source, layers: int) -> ModelConfig:
    """Return the model of GPT-NeoX's settings, with underscores: GPT-2 or Llama. Widths are those of the tensors.

    GPT-NeoX adds the epsilon of RMSNorm to the root, Llama to the mean square: with its default of 1e-8 both are the same in fp32.

    Raises:
        UserError: with every setting that no family here has.
    """
    settings = _Settings("GPT-NeoX", values)
    for key in ("gpt_j_residual", "use_qk_layernorm", "use_mup", "rotary_emb_interleaved"):
        settings.require(key, False, default=False)
    settings.require("sliding_window_width", None)
    settings.require("moe_num_experts", 1, default=1)
    heads = settings.number("num_attention_heads")
    hidden = (
        source.meta("word_embeddings.weight")[0].shape[1] if "word_embeddings.weight" in source.names() else settings.number("hidden_size")
    )
    names = source.names()
    common = {
        "hidden": hidden,
        "heads": heads,
        "layers": layers,
        "vocab_size": _rows(source, "word_embeddings.weight"),
        "max_positions": settings.number("max_position_embeddings", "seq_length"),
        "init_std": settings.get("init_method_std", default=0.02),
        "tie_embeddings": not settings.get("no_weight_tying", default=False),
    }
    gated = "layers.0.mlp.w1.weight" in names or settings.get("activation", default="gelu") == "swiglu"
    if not gated:
        settings.require("norm", "layernorm", default="layernorm")
        settings.require("pos_emb", "learned", default="learned")
        settings.require("activation", "gelu", default="gelu")
        settings.require("bias_gelu_fusion", True, default=False)  # without it GELU is exact, and the family gpt has the tanh approximation
        settings.require("num_kv_heads", None, heads)
        ffn = _rows(source, "layers.0.mlp.dense_h_to_4h.weight", "layers.0.mlp.linear1.weight")
        return settings.build("gpt", **common, ffn_hidden=ffn, norm_eps=settings.get("layernorm_epsilon", default=1e-5))
    settings.require("norm", "rmsnorm", default="layernorm")
    settings.require("pos_emb", "rotary", default="learned")
    settings.require("rotary_pct", 1, default=1)
    settings.require("activation", "silu", "swiglu", default="gelu")
    settings.require("use_bias_in_mlp", *([True, False] if "layers.0.mlp.w1.weight" in names else [False]), default=True)
    ffn = (
        _rows(source, "layers.0.mlp.w1.weight") if "layers.0.mlp.w1.weight" in names else _rows(source, "layers.0.mlp.linear1.weight") // 2
    )
    return settings.build(
        "llama",
        **common,
        ffn_hidden=ffn,
        kv_heads=settings.get("num_kv_heads", default=heads),
        rope_theta=float(settings.get("rotary_emb_base", default=10000)),
        norm_eps=settings.get("rms_norm_epsilon", default=1e-8),
        attention_bias=settings.get("use_bias_in_attn_linear", default=True),
    )
