"""Configuration of Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.qwen3_moe.config import Qwen3MoeConfig
from pipeline.models.rules import partial_rotary_violations
from pipeline.models.shared_sizes import is_marked


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen3MoeConfig):
    """Linear attention in most layers and, at an interval, gated full attention; many fine-grained experts and a gated shared one."""

    family: str = knob("qwen3_next", "model family", choices=("qwen3_next",))
    hidden: int = knob(2048, "width of the residual stream", at_least=1)
    heads: int = knob(16, "query heads of the full attention", at_least=1)
    kv_heads: int = knob(2, "key and value heads of the full attention, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(256, "width of a head of the full attention; hidden/heads when null", at_least=2)
    partial_rotary_factor: float = knob(0.25, "share of the dims of a head that is rotated, the first ones", above=0, at_most=1)
    full_attention_interval: int = knob(4, "the last of each of so many layers has full attention, the others linear attention", at_least=1)
    linear_key_heads: int = knob(16, "query and key heads of the linear attention", at_least=1)
    linear_value_heads: int = knob(32, "value heads of the linear attention, a multiple of its key heads", at_least=1)
    linear_key_dim: int = knob(128, "width of the queries and keys of a head of the linear attention", at_least=1)
    linear_value_dim: int = knob(128, "width of the values of a head of the linear attention", at_least=1)
    linear_kernel: int = knob(4, "tokens that the convolutions of the linear attention read, with the present one", at_least=1)
    experts: int = knob(512, "experts of each MoE layer", at_least=1)
    top_k: int = knob(10, "experts a token is routed to", at_least=1)
    expert_ffn_hidden: int = knob(512, "intermediate width of each expert", at_least=1)
    shared_ffn_hidden: int = knob(512, "intermediate width of the shared expert", at_least=1)
    ffn_hidden: int = knob(5632, "intermediate width of the feed-forward of dense blocks", at_least=1)
    max_positions: int = knob(32768, "longest sequence", unit="tokens", at_least=2)
    rope_theta: float = knob(1e7, "base of the rotary frequencies", above=1)

    def is_full(self, block: int) -> bool:
        """Whether a block has full attention instead of linear attention."""
        return is_marked(block, self.full_attention_interval)

    @property
    def linear_layers(self) -> int:
        """Number of layers with linear attention."""
        return sum(not self.is_full(block) for block in range(self.layers))

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        violations = super().violations()
        violations += [] if violations else partial_rotary_violations(self.head_dim, self.partial_rotary_factor)
        if self.linear_value_heads % self.linear_key_heads:
            rule = f"must be a multiple of model.linear_key_heads={self.linear_key_heads}"
            violations.append(Violation("model.linear_value_heads", self.linear_value_heads, rule, "choose a multiple"))
        return violations
