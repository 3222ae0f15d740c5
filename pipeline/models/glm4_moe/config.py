"""Configuration of GLM-4.5."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import partial_rotary_violations
from pipeline.models.shared_sizes import RotaryDecoderConfig, SharedExpertsConfig


@dataclass(frozen=True)
class Glm4MoeConfig(SharedExpertsConfig, RotaryDecoderConfig):
    """DeepSeek-V3's blocks with grouped-query attention, whose rotary positions are in a part of the dims of a head."""

    family: str = knob("glm4_moe", "model family", choices=("glm4_moe",))
    layers: int = knob(46, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(4096, "width of the residual stream", at_least=1)
    heads: int = knob(96, "query heads", at_least=1)
    kv_heads: int = knob(8, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(128, "width of a head; hidden/heads when null", at_least=2)
    partial_rotary_factor: float = knob(0.5, "share of the dims of a head that are rotated, the first ones", above=0, at_most=1)
    qkv_bias: bool = knob(True, "biases of the query, key and value projections")
    query_key_norm: bool = knob(False, "RMSNorm over the width of each head's queries and keys (GLM-4.5, not Air)")
    dense_layers: int = knob(1, "first blocks with a dense feed-forward instead of experts", at_least=0)
    ffn_hidden: int = knob(10944, "intermediate width of the feed-forward of the dense blocks", at_least=1)
    experts: int = knob(128, "routed experts in each other block", at_least=1)
    expert_ffn_hidden: int = knob(1408, "intermediate width of each expert", at_least=1)
    groups: int = knob(1, "groups of routed experts", at_least=1)
    topk_group: int = knob(1, "groups that a token's experts are selected from", at_least=1)
    routed_scaling_factor: float = knob(1.0, "factor of the routed experts' weights", above=0)
    vocab_size: int = knob(151552, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(131072, "longest sequence", unit="tokens", at_least=2)
    rope_theta: float = knob(1e6, "base of the rotary frequencies", above=1)

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        found = super().violations()
        found += [] if found else partial_rotary_violations(self.head_dim, self.partial_rotary_factor)
        return [*found, *self.expert_violations()]
