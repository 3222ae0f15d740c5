"""DeepSeek-V3 (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.init import single_std
from pipeline.layers.mla import LatentAttention
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.moe import MoE, SharedExpertMoE, moe_layers
from pipeline.layers.multi_token import MTPModule, MultiTokenHead
from pipeline.layers.preference import log_probabilities
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import AuxLoss, Router
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.deepseek_v3.config import DeepseekV3Config
from pipeline.models.deepseek_v3.huggingface import MAPPING
from pipeline.models.family import Family


class DeepseekV3(Stack):
    """Stack with MTP modules in the head."""

    def forward_head(self, x: Tensor, context: AttentionContext, batch: Batch) -> Tensor:
        """See Stack."""
        assert self.head is not None
        assert self.norm is not None
        if "choices" in batch:  # without MTP modules, which this objective refuses
            return self._preferences(log_probabilities(self.head.output, self.norm(x), batch), batch)  # type: ignore[arg-type] # an OutputHead
        return self.head(self.norm(x), context, batch.get("targets"), batch.get("loss_scale"))

    def set_loss_weights(self, weights: Mapping[str, float]) -> None:
        """See Stack."""
        for moe in moe_layers(self):
            moe.aux_loss = AuxLoss(sequence=weights["balance_loss"])
            moe.router.bias_update_speed = weights["bias_update_speed"]
        if isinstance(self.head, MultiTokenHead):
            self.head.factor = weights.get("mtp_loss", 0.0)


def moe_layer(config: Any) -> SharedExpertMoE:
    """Return the MoE layer of a configuration with the fields of SharedExpertsConfig."""
    router = Router(
        config.hidden,
        config.experts,
        config.top_k,
        scoring="sigmoid",
        normalize=config.norm_topk_prob,
        scaling_factor=config.routed_scaling_factor,
        correction_bias=True,
        groups=config.groups,
        topk_group=config.topk_group,
    )
    experts = Experts(config.experts, config.hidden, config.expert_ffn_hidden)
    routed = MoE(router, experts, capacity_factor=config.capacity_factor)
    return SharedExpertMoE(routed, GatedMLP(config.hidden, config.shared_experts * config.expert_ffn_hidden, bias=False))


def assemble(config: Any, attention: Callable[[], nn.Module], rotary: Rotary) -> DeepseekV3:
    """Return the model with this attention, of a configuration with the fields of SharedExpertsConfig."""

    def block(mlp: nn.Module) -> Block:
        return Block(
            attention_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            attention=attention(),
            mlp_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            mlp=mlp,
        )

    embed = Embedding(config.vocab_size, config.hidden)
    depths = [MTPModule(config.hidden, config.norm_eps, block(moe_layer(config))) for _ in range(config.mtp_depth)]
    model = DeepseekV3(
        embed=embed,
        blocks=[
            *(block(GatedMLP(config.hidden, config.ffn_hidden, bias=False)) for _ in range(config.dense_layers)),
            *(block(moe_layer(config)) for _ in range(config.layers - config.dense_layers)),
        ],
        norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
        head=MultiTokenHead(OutputHead(config.vocab_size, config.hidden), embed, depths),
        rotary=rotary,
        tie_embeddings=config.tie_embeddings,
    )
    model.set_loss_weights(config.loss_weights)
    return model


def build(config: DeepseekV3Config) -> DeepseekV3:
    """Build the full model with uninitialized weights on torch's default device."""
    scaling = RopeScaling(**rope.scaling(config))

    def attention() -> LatentAttention:
        return LatentAttention(
            config.hidden,
            config.heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            score_factor=scaling.score_factor,
        )

    return assemble(config, attention, Rotary(config.qk_rope_head_dim, config.max_positions, config.rope_theta, scaling))


def tied_weights(config: Any) -> dict[str, str]:
    """Return the tied weights: with MTP modules, the head also holds the embedding."""
    copies = ["head.embed.tokens.weight"] if config.mtp_depth else []
    return dict.fromkeys(copies + (["head.output.weight"] if config.tie_embeddings else []), "embed.tokens.weight")


DEEPSEEK_V3 = Family(
    config=DeepseekV3Config,
    build=build,
    # Section 4.2 of the paper, with 0.006.
    initial_std=single_std,
    huggingface=(MAPPING,),
    tied_weights=tied_weights,
)
