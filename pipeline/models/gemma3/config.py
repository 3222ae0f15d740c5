"""Configuration of Gemma 3, without its image encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import heads_violations, window_violations
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class Gemma3Config(RotaryDecoderConfig):
    """Local layers with a sliding window and, at an interval, global ones; norms before and after each layer; GeGLU; scaled embeddings."""

    #: Queries and keys have norms.
    query_key_norm: ClassVar[bool] = True

    family: str = knob("gemma3", "model family", choices=("gemma3",))
    sliding_window_pattern: int = knob(6, "the last of each of so many layers attends globally, the others within the window", at_least=1)
    window: int = knob(512, "sliding window of the local layers in tokens, including the current one", unit="tokens", at_least=1)
    query_pre_attn_scalar: int = knob(256, "the attention scores are divided by its square root", at_least=1)
    rope_local_theta: float = knob(10000.0, "base of the rotary frequencies of the local layers, which are not scaled", above=1)
    layers: int = knob(26, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(1152, "width of the residual stream", at_least=1)
    heads: int = knob(4, "query heads", at_least=1)
    kv_heads: int = knob(1, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(256, "width of a head; hidden/heads when null", at_least=2)
    ffn_hidden: int = knob(6912, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(262144, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(32768, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    rope_theta: float = knob(1e6, "base of the rotary frequencies of the global layers", above=1)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates; the Hugging Face class requires heads to divide hidden."""
        violations = [*super().violations(), *window_violations("model.window", self.window, self.max_positions)]
        return violations if self.head_width is None else [*violations, *heads_violations(self.hidden, self.heads)]
