"""DeepSeek-V3 (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437) and Kimi K2: latent attention, experts, and MTP modules.

DeepseekV3ForCausalLM of transformers. MTP modules follow the last layer, as in released files of 61 layers. The released files contain
copies of the embedding and the head for each MTP module; these are ignored on import and not exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import single_std
from pipeline.models import rope
from pipeline.models.config import Sizes
from pipeline.models.config_json_keys import ROPE
from pipeline.models.decoder_mapping import LAYER
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import (
    BlockTensors,
    HuggingFaceMapping,
    KeyGroup,
    StockTensor,
    StoredTensors,
    Table,
    gated_experts,
    gated_mlp,
    refusal,
    tensors,
)
from pipeline.models.shared_sizes import SharedExpertsConfig

if TYPE_CHECKING:
    from torch import nn

    from pipeline.layers.mla import LatentAttention
    from pipeline.layers.moe import SharedExpertMoE
    from pipeline.layers.rotary import Rotary


@dataclass(frozen=True)
class LatentAttentionConfig(Sizes):
    """Fields of a decoder with multi-head latent attention. Families add theirs."""

    hidden: int = knob(7168, "width of the residual stream", at_least=1)
    heads: int = knob(128, "attention heads", at_least=1)
    q_lora_rank: int | None = knob(1536, "width of the query latent; null projects queries directly from the residual stream", at_least=1)
    kv_lora_rank: int = knob(512, "width of the latent of keys and values", at_least=1)
    qk_nope_head_dim: int = knob(128, "dims of a head's queries and keys without positions", at_least=1)
    qk_rope_head_dim: int = knob(64, "dims of a head's queries and keys that are rotated", at_least=2)
    v_head_dim: int = knob(128, "dims of a head's values", at_least=1)
    vocab_size: int = knob(129280, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(4096, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    init_std: float = knob(0.006, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(False, "tie the weights of output head and token embedding")

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: every head has its own, projected from the latent."""
        return self.heads

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"


@dataclass(frozen=True)
class DeepseekV3Config(LatentAttentionConfig, SharedExpertsConfig, rope.RopeConfig, family="deepseek_v3"):
    """Multi-head latent attention, dense blocks followed by blocks with shared and fine-grained routed experts, multi-token prediction."""

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        if self.qk_rope_head_dim % 2:
            rule = "is odd; rotary embeddings rotate pairs of dims"
            violations.append(Violation("model.qk_rope_head_dim", self.qk_rope_head_dim, rule, "choose an even width"))
        return violations


def latent_attention(config: LatentAttentionConfig, **further: Any) -> LatentAttention:
    """Build the attention of a layer; `further` are other arguments of LatentAttention."""
    from pipeline.layers.mla import LatentAttention

    widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentAttention(config.hidden, config.heads, **{name: getattr(config, name) for name in widths}, **further)


def shared_expert_moe(config: Any) -> SharedExpertMoE:
    """Build a MoE layer of a BiasedExpertsConfig."""
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.moe import SharedExpertMoE
    from pipeline.models.decoder import biased_router, moe

    routed = moe(config, config.expert_ffn_hidden, router=biased_router(config))
    return SharedExpertMoE(routed, GatedMLP(config.hidden, config.shared_experts * config.expert_ffn_hidden, bias=False))


def _build(config: DeepseekV3Config) -> Model:
    from pipeline.layers.rope_scaling import RopeScaling
    from pipeline.layers.rotary import Rotary

    scaling = RopeScaling(**rope.scaling(config))
    rotary = Rotary(config.qk_rope_head_dim, config.max_positions, config.rope_theta, scaling)
    return assemble(config, lambda: latent_attention(config, score_factor=scaling.score_factor), rotary)


def assemble(config: Any, attention: Callable[[], nn.Module], rotary: Rotary) -> Model:
    """Return the model with this attention, of a configuration with the fields of SharedExpertsConfig."""
    from torch import nn

    from pipeline.layers.embedding import Embedding, OutputHead
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.multi_token import MTPModule, MultiTokenHead, MultiTokenStack
    from pipeline.layers.stack import Block

    def block(mlp: nn.Module) -> Block:
        return Block(
            attention_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            attention=attention(),
            mlp_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            mlp=mlp,
        )

    embed = Embedding(config.vocab_size, config.hidden)
    depths = [MTPModule(config.hidden, config.norm_eps, block(shared_expert_moe(config))) for _ in range(config.mtp_depth)]
    model = MultiTokenStack(
        embed=embed,
        blocks=[
            *(block(GatedMLP(config.hidden, config.ffn_hidden, bias=False)) for _ in range(config.dense_layers)),
            *(block(shared_expert_moe(config)) for _ in range(config.layers - config.dense_layers)),
        ],
        norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
        head=MultiTokenHead(OutputHead(config.vocab_size, config.hidden), embed, depths),
        rotary=rotary,
        tie_embeddings=config.tie_embeddings,
    )
    model.set_loss_weights(config.loss_weights)
    return model


def tied_weights(config: Any) -> dict[str, str]:
    """Return the tied weights: with MTP modules, the head also holds the embedding."""
    copies = ["head.embed.tokens.weight"] if config.mtp_depth else []
    return dict.fromkeys(copies + (["head.output.weight"] if config.tie_embeddings else []), "embed.tokens.weight")


def _mtp_modules(config: Any) -> Iterator[tuple[int, int]]:
    return ((config.layers + index, index) for index in range(config.mtp_depth))


def latent_tensors(module: str, config: Any) -> tuple[StockTensor, ...]:
    """Return the tensors of the attention and the norms of a block, which is `module` in our model."""
    hf, ours = f"{LAYER}.self_attn", f"{module}.attention"
    low_rank = (
        *tensors(f"{hf}.q_a_proj", f"{ours}.query_down"),
        *tensors(f"{hf}.q_a_layernorm", f"{ours}.query_norm"),
        *tensors(f"{hf}.q_b_proj", f"{ours}.query_up"),
    )
    return (
        *tensors(f"{LAYER}.input_layernorm", f"{module}.attention_norm"),
        *(low_rank if config.q_lora_rank else tensors(f"{hf}.q_proj", f"{ours}.query_up")),
        *tensors(f"{hf}.kv_a_proj_with_mqa", f"{ours}.key_value_down"),
        *tensors(f"{hf}.kv_a_layernorm", f"{ours}.key_value_norm"),
        *tensors(f"{hf}.kv_b_proj", f"{ours}.key_value_up"),
        *tensors(f"{hf}.o_proj", f"{ours}.output"),
        *tensors(f"{LAYER}.post_attention_layernorm", f"{module}.mlp_norm"),
    )


def _moe(module: str) -> tuple[StockTensor, ...]:
    """Return the tensors of a MoE layer: router, routed experts and shared expert."""
    hf = f"{LAYER}.mlp"
    return (
        *tensors(f"{hf}.gate", f"{module}.mlp.routed.router"),
        StockTensor(f"{hf}.gate.e_score_correction_bias", (f"{module}.mlp.routed.router.bias",)),
        *gated_experts(hf, f"{module}.mlp.routed"),
        *gated_mlp(f"{hf}.shared_experts", f"{module}.mlp.shared"),
    )


def table(config: Any, attention: Callable[[str, Any], tuple[StockTensor, ...]]) -> Table:
    """Return the tensors of a model with MoE layers and MTP modules.

    Args:
        config: a configuration with the fields of SharedExpertsConfig.
        attention: (block, configuration) -> the tensors of the attention and the norms of a block.
    """
    block, depth = "blocks.{i}", "head.depths.{i}.block"
    dense, routed = range(config.dense_layers), range(config.dense_layers, config.layers)
    return (
        *tensors("model.embed_tokens", "embed.tokens"),
        BlockTensors((*attention(block, config), *gated_mlp(f"{LAYER}.mlp", f"{block}.mlp")), lambda _: zip(dense, dense, strict=True)),
        BlockTensors((*attention(block, config), *_moe(block)), lambda _: zip(routed, routed, strict=True), experts="experts"),
        BlockTensors(
            (
                *tensors(f"{LAYER}.enorm", "head.depths.{i}.token_norm"),
                *tensors(f"{LAYER}.hnorm", "head.depths.{i}.hidden_norm"),
                *tensors(f"{LAYER}.eh_proj", "head.depths.{i}.project"),
                *attention(depth, config),
                *_moe(depth),
                *tensors(f"{LAYER}.shared_head.norm", "head.depths.{i}.final_norm"),
            ),
            _mtp_modules,
            experts="experts",
        ),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head.output"),
    )


def unexpected_modules(*expected: int) -> Callable[[Any], tuple[str, ...]]:
    """Return `separate_weights` of a class that expects MTP modules as these layers only, where released models have one."""
    return lambda config: tuple(f"model.layers.{index}.*" for index, _ in _mtp_modules(config) if index not in expected)


def without_missing_modules(config: Any, stored: StoredTensors) -> Any:
    """The class saves no MTP modules, whatever num_nextn_predict_layers is; files have all of them or none."""
    numbers = {int(name.split(".")[2]) for name in stored.names() if re.match(r"model\.layers\.\d+\.", name)}
    return config if any(number >= config.layers for number in numbers) else replace(config, mtp_depth=0)


#: The keys of MoE layers and MTP modules.
EXPERT_KEYS: dict[str, tuple[str, Any]] = {
    "first_k_dense_replace": ("dense_layers", 3),
    "intermediate_size": ("ffn_hidden", 18432),
    "n_routed_experts": ("experts", 256),
    "n_shared_experts": ("shared_experts", 1),
    "moe_intermediate_size": ("expert_ffn_hidden", 2048),
    "num_experts_per_tok": ("top_k", 8),
    "n_group": ("groups", 8),
    "topk_group": ("topk_group", 4),
    "norm_topk_prob": ("norm_topk_prob", True),
    "routed_scaling_factor": ("routed_scaling_factor", 2.5),
    "num_nextn_predict_layers": ("mtp_depth", 1),
}
#: Copies of the embedding and the head in MTP modules.
COPIES = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")


def _kv_heads(content: dict[str, Any]) -> int:
    """Return the default of num_key_value_heads."""
    return content.get("num_key_value_heads", 128) or content.get("num_attention_heads", 128)


_KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 129280),
    "max_position_embeddings": ("max_positions", 4096),
    "hidden_size": ("hidden", 7168),
    "num_hidden_layers": ("layers", 61),
    "num_attention_heads": ("heads", 128),
    "num_key_value_heads": ("kv_heads", _kv_heads),
    "q_lora_rank": ("q_lora_rank", 1536),
    "kv_lora_rank": ("kv_lora_rank", 512),
    "qk_nope_head_dim": ("qk_nope_head_dim", 128),
    "qk_rope_head_dim": ("qk_rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
    **EXPERT_KEYS,
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}


def _read_widths(content: dict[str, Any]) -> dict[str, Any]:
    """Verify widths that the class derives from others, and that a file can override."""
    rotated, others = (content.get(key, _KEYS[key][1]) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
    for key, expected in (("head_dim", rotated), ("qk_head_dim", rotated + others)):
        if content.get(key, expected) != expected:
            raise refusal(key, content[key], f"must be {expected}, given the other keys", f"remove {key} from config.json")
    return {}


MAPPING = HuggingFaceMapping(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),  # Kimi K2, whose class is this one
    keys=_KEYS,
    constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_interleave": True,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    nested=(ROPE, KeyGroup(("head_dim", "qk_head_dim"), lambda _: {}, _read_widths)),
    ignored_weights=COPIES,
    from_weights=without_missing_modules,
    separate_weights=unexpected_modules(61),
    table=lambda config: table(config, latent_tensors),
)

# Initial weights: Section 4.2 of the paper, with 0.006.
FAMILY = Family(config=DeepseekV3Config, build=_build, initial_std=single_std, huggingface=(MAPPING,), tied_weights=tied_weights)
