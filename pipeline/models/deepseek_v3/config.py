"""Sizes of a DeepSeek-V3."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob
from pipeline.models import rope


@dataclass
class DeepseekV3Config(rope.RopeConfig):
    """Latent attention; after some dense blocks, a shared and many small routed experts; multi-token prediction."""

    family: str = knob("deepseek_v3", "model family", choices=("deepseek_v3",))
    layers: int = knob(61, "decoder blocks", at_least=1)
    hidden: int = knob(7168, "width of the residual stream", at_least=1)
    heads: int = knob(128, "attention heads", at_least=1)
    q_lora_rank: int | None = knob(1536, "width of the queries' latent; null makes queries from the residual stream", at_least=1)
    kv_lora_rank: int = knob(512, "width of the keys' and values' latent", at_least=1)
    qk_nope_head_dim: int = knob(128, "width of a head's queries and keys that carries no position", at_least=1)
    qk_rope_head_dim: int = knob(64, "width of a head's queries and keys that is rotated", at_least=2)
    v_head_dim: int = knob(128, "width of a head's values", at_least=1)
    dense_layers: int = knob(3, "blocks at the bottom without experts", at_least=0)
    ffn_hidden: int = knob(18432, "width inside the feed-forward of those blocks", at_least=1)
    experts: int = knob(256, "routed experts of each other block", at_least=1)
    shared_experts: int = knob(1, "experts that every token goes to", at_least=1)
    expert_ffn_hidden: int = knob(2048, "width inside each expert", at_least=1)
    top_k: int = knob(8, "routed experts a token goes to", at_least=1)
    groups: int = knob(8, "groups of routed experts", at_least=1)
    topk_group: int = knob(4, "groups that a token's experts come from", at_least=1)
    norm_topk_prob: bool = knob(True, "weights of a token's experts sum to routed_scaling_factor")
    routed_scaling_factor: float = knob(2.5, "of the routed experts' weights", above=0)
    bias_update_speed: float = knob(0.001, "by which a step moves the routers' biases towards an even load; 0 leaves them", at_least=0)
    balance_loss: float = knob(0.0001, "coefficient of the sequence-wise balance loss, a layer", at_least=0)
    mtp_depth: int = knob(1, "tokens after the next one that training predicts too", unit="tokens", at_least=0)
    mtp_loss: float = knob(0.3, "factor of their mean loss in training's", above=0)
    vocab_size: int = knob(129280, "rows of the embedding", unit="tokens", at_least=1)
    max_positions: int = knob(4096, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0)
    init_std: float = knob(0.006, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(False, "output head and token embedding are one matrix")

    @property
    def head_dim(self) -> int:
        """Width of one head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_heads(self) -> int:
        """Each head makes its own keys and values from the latent."""
        return self.heads

    @property
    def objective(self) -> str:
        """What it is trained to predict: the next token."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        found = list(rope.violations(self))
        if self.qk_rope_head_dim % 2:
            found.append(Violation("model.qk_rope_head_dim", self.qk_rope_head_dim, "is odd; rotary turns pairs", "choose an even width"))
        if self.dense_layers > self.layers:
            rule = f"is more than model.layers={self.layers}"
            found.append(Violation("model.dense_layers", self.dense_layers, rule, "choose at most as many as there are"))
        if self.experts % self.groups:
            rule = f"must divide model.experts={self.experts}"
            found.append(Violation("model.groups", self.groups, rule, "choose a divisor of model.experts"))
        elif self.groups > 1 and self.experts // self.groups < 2:
            rule = f"leaves fewer than 2 of model.experts={self.experts} a group, which is judged by its two best"
            found.append(Violation("model.groups", self.groups, rule, "use fewer groups"))
        if self.topk_group > self.groups:
            rule = f"is more than model.groups={self.groups}"
            found.append(Violation("model.topk_group", self.topk_group, rule, "choose at most as many as there are"))
        elif self.top_k > self.experts * self.topk_group // self.groups:
            rule = f"is more than the experts of {self.topk_group} of {self.groups} groups"
            found.append(Violation("model.top_k", self.top_k, rule, "choose fewer, or more groups"))
        return found
