"""Configuration of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models import rope
from pipeline.models.shared_sizes import SharedExpertsConfig


@dataclass(frozen=True)
class DeepseekV3Config(SharedExpertsConfig, rope.RopeConfig):
    """Multi-head latent attention, dense blocks followed by blocks with shared and fine-grained routed experts, multi-token prediction."""

    family: str = knob("deepseek_v3", "model family", choices=("deepseek_v3",))
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
        return [*violations, *self.expert_violations()]
