"""Configuration of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models import rope


@dataclass(frozen=True)
class DeepseekV3Config(rope.RopeConfig):
    """Multi-head latent attention, dense blocks followed by blocks with shared and fine-grained routed experts, multi-token prediction."""

    family: str = knob("deepseek_v3", "model family", choices=("deepseek_v3",))
    layers: int = knob(61, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(7168, "width of the residual stream", at_least=1)
    heads: int = knob(128, "attention heads", at_least=1)
    q_lora_rank: int | None = knob(1536, "width of the query latent; null projects queries directly from the residual stream", at_least=1)
    kv_lora_rank: int = knob(512, "width of the latent of keys and values", at_least=1)
    qk_nope_head_dim: int = knob(128, "dims of a head's queries and keys without positions", at_least=1)
    qk_rope_head_dim: int = knob(64, "dims of a head's queries and keys that are rotated", at_least=2)
    v_head_dim: int = knob(128, "dims of a head's values", at_least=1)
    dense_layers: int = knob(3, "first blocks with a dense feed-forward instead of experts", at_least=0)
    ffn_hidden: int = knob(18432, "intermediate width of the feed-forward of the dense blocks", at_least=1)
    experts: int = knob(256, "routed experts in each other block", at_least=1)
    shared_experts: int = knob(1, "shared experts, which process every token", at_least=1)
    expert_ffn_hidden: int = knob(2048, "intermediate width of each expert", at_least=1)
    top_k: int = knob(8, "routed experts per token", at_least=1)
    capacity_factor: float | None = knob(
        None,
        "maximum load of an expert over the mean load of a micro-batch in training, excess assignments are dropped; null for no limit",
        above=0,
    )
    groups: int = knob(8, "groups of routed experts", at_least=1)
    topk_group: int = knob(4, "groups that a token's experts are selected from", at_least=1)
    norm_topk_prob: bool = knob(True, "normalize the weights of a token's experts to sum to routed_scaling_factor")
    routed_scaling_factor: float = knob(2.5, "factor of the routed experts' weights", above=0)
    mtp_depth: int = knob(1, "MTP modules: further tokens that training predicts after the next one", unit="tokens", at_least=0)
    vocab_size: int = knob(129280, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(4096, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    init_std: float = knob(0.006, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(False, "tie the weights of output head and token embedding")

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.0001, "bias_update_speed": 0.001} | ({"mtp_loss": 0.3} if self.mtp_depth else {})

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

    def reused_weights(self, blocks: range, *, last: bool) -> str | None:  # noqa: ARG002 - see layout.reused_weights
        """Return which weights a pipeline stage uses at several depths: in the last one the embedding; None for none."""
        return f"the embedding in model.mtp_depth={self.mtp_depth} MTP modules" if last and self.mtp_depth > 1 else None

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        violations = list(rope.violations(self))
        if self.qk_rope_head_dim % 2:
            violations.append(
                Violation(
                    "model.qk_rope_head_dim",
                    self.qk_rope_head_dim,
                    "is odd; rotary embeddings rotate pairs of dims",
                    "choose an even width",
                )
            )
        if self.dense_layers > self.layers:
            rule = f"is more than model.layers={self.layers}"
            violations.append(Violation("model.dense_layers", self.dense_layers, rule, "choose at most that many"))
        if self.experts % self.groups:
            rule = f"must divide model.experts={self.experts}"
            violations.append(Violation("model.groups", self.groups, rule, "choose a divisor of model.experts"))
        elif self.groups > 1 and self.experts // self.groups < 2:
            rule = f"leaves fewer than 2 of model.experts={self.experts} per group; a group's score is the sum of its two best experts"
            violations.append(Violation("model.groups", self.groups, rule, "use fewer groups"))
        if self.topk_group > self.groups:
            rule = f"is more than model.groups={self.groups}"
            violations.append(Violation("model.topk_group", self.topk_group, rule, "choose at most that many"))
        elif self.top_k > self.experts * self.topk_group // self.groups:
            rule = f"is more than the number of experts in model.topk_group={self.topk_group} of model.groups={self.groups}"
            violations.append(Violation("model.top_k", self.top_k, rule, "choose fewer, or more groups"))
        return violations
