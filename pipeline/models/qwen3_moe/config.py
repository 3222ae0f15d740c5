"""Configuration of Qwen3-MoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.shared_sizes import RotaryMoEConfig, is_marked


@dataclass(frozen=True)
class Qwen3MoeConfig(RotaryMoEConfig):
    """Qwen 3's attention, with norms of queries and keys, and many fine-grained experts; some blocks may be dense."""

    #: Queries and keys have norms.
    query_key_norm: ClassVar[bool] = True

    family: str = knob("qwen3_moe", "model family", choices=("qwen3_moe",))
    layers: int = knob(48, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(2048, "width of the residual stream", at_least=1)
    heads: int = knob(32, "query heads", at_least=1)
    kv_heads: int = knob(4, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(128, "width of a head; hidden/heads when null", at_least=2)
    experts: int = knob(128, "experts of each MoE layer", at_least=1)
    norm_topk_prob: bool = knob(True, "normalize the weights of a token's experts to sum to one")
    expert_ffn_hidden: int = knob(768, "intermediate width of each expert", at_least=1)
    expert_interval: int = knob(1, "the last of each of so many blocks has experts, the others a dense feed-forward", at_least=1)
    dense_blocks: list[int] = knob([], "indices of further blocks with a dense feed-forward")
    ffn_hidden: int = knob(6144, "intermediate width of the feed-forward of dense blocks", at_least=1)
    vocab_size: int = knob(151936, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(40960, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    rope_theta: float = knob(1e6, "base of the rotary frequencies", above=1)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.001, "z_loss": 0.0}

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts instead of a dense feed-forward."""
        return is_marked(block, self.expert_interval) and block not in self.dense_blocks

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        rule = f"must be indices of model.layers={self.layers} blocks, counted from 0"
        others = [block for block in self.dense_blocks if not 0 <= block < self.layers]
        wrong = [Violation("model.dense_blocks", self.dense_blocks, rule, f"remove {others}")] if others else []
        return [*super().violations(), *wrong]
