"""Configuration of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import top_k_violations, window_violations
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class GptOssConfig(RotaryDecoderConfig):
    """Attention with sinks, local ones with a sliding window and, at an interval, global ones; experts with biases and a clamped SwiGLU."""

    family: str = knob("gpt_oss", "model family", choices=("gpt_oss",))
    layers: int = knob(36, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(2880, "width of the residual stream", at_least=1)
    heads: int = knob(64, "query heads", at_least=1)
    kv_heads: int = knob(8, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(64, "width of a head; hidden/heads when null", at_least=2)
    attention_bias: bool = knob(True, "biases of the query, key, value and output projections")
    sliding_window_pattern: int = knob(2, "the last of each of so many layers attends globally, the others within the window", at_least=1)
    window: int = knob(128, "sliding window of the local layers in tokens, including the current one", unit="tokens", at_least=1)
    ffn_hidden: int = knob(2880, "intermediate width of each expert", at_least=1)
    experts: int = knob(128, "experts of each block", at_least=1)
    top_k: int = knob(4, "experts a token is routed to", at_least=1)
    capacity_factor: float | None = knob(
        None,
        "maximum load of an expert over the mean load of a micro-batch in training, excess assignments are dropped; null for no limit",
        above=0,
    )
    swiglu_limit: float = knob(7.0, "bound of the inputs of the experts' gate, and of what it multiplies", above=0)
    swiglu_alpha: float = knob(1.702, "factor in the sigmoid of the experts' gate", above=0)
    vocab_size: int = knob(201088, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(131072, "longest sequence", unit="tokens", at_least=2)
    rope_theta: float = knob(150000.0, "base of the rotary frequencies", above=1)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.001, "z_loss": 0.0}

    @property
    def attention_sinks(self) -> bool:
        """Whether query heads have attention sinks: all have."""
        return True

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return [
            *super().violations(),
            *window_violations("model.window", self.window, self.max_positions),
            *top_k_violations(self.top_k, self.experts),
        ]
