"""Configuration of Gemma 2."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import heads_violations, window_violations
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class Gemma2Config(RotaryDecoderConfig):
    """Local layers with a sliding window and, at an interval, global ones; soft caps of scores and logits; else Gemma 3's block."""

    family: str = knob("gemma2", "model family", choices=("gemma2",))
    sliding_window_pattern: int = knob(2, "the last of each of so many layers attends globally, the others within the window", at_least=1)
    window: int = knob(4096, "sliding window of the local layers in tokens, including the current one", unit="tokens", at_least=1)
    query_pre_attn_scalar: int = knob(256, "the attention scores are divided by its square root", at_least=1)
    attn_logit_softcapping: float | None = knob(50.0, "bound c of the attention scores s: c tanh(s / c); null for none", above=0)
    final_logit_softcapping: float | None = knob(30.0, "the same bound of the logits; null for none", above=0)
    layers: int = knob(26, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(2304, "width of the residual stream", at_least=1)
    heads: int = knob(8, "query heads", at_least=1)
    kv_heads: int = knob(4, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(256, "width of a head; hidden/heads when null", at_least=2)
    ffn_hidden: int = knob(9216, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(256000, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(8192, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates; the Hugging Face class requires heads to divide hidden."""
        violations = [*super().violations(), *window_violations("model.window", self.window, self.max_positions)]
        return violations if self.head_width is None else [*violations, *heads_violations(self.hidden, self.heads)]
