"""Configuration of Llama, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.mup_config import MupConfig, mup_violations
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class LlamaConfig(MupConfig, RotaryDecoderConfig):
    """RMSNorm, SwiGLU, rotary position embeddings, grouped-query attention; optionally the biases of Qwen 2.5 or the norms of Qwen 3."""

    family: str = knob("llama", "model family", choices=("llama",))
    query_key_norm: bool = knob(False, "RMSNorm over each head of queries and keys (Qwen 3)")
    attention_bias: bool = knob(False, "biases in all attention projections")
    qkv_bias: bool = knob(False, "biases in the projections of queries, keys and values only (Qwen 2 and 2.5)")

    no_rope_layer_interval: int | None = knob(
        None, "the last of each of so many layers has no rotary position embeddings (NoPE); null for none", at_least=1
    )

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        violations = [*super().violations(), *mup_violations(self)]
        if self.qkv_bias and self.attention_bias:
            rule = "adds biases to the query, key and value projections, which model.attention_bias=true has already"
            violations.append(Violation("model.qkv_bias", True, rule, "set one of the two to false"))
        return violations
