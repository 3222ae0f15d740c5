"""Configuration of OLMo 3."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.olmo2.config import Olmo2Config
from pipeline.models.rules import window_violations


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """OLMo 2's layers; local ones with a sliding window and, at an interval, global ones."""

    family: str = knob("olmo3", "model family", choices=("olmo3",))
    sliding_window_pattern: int = knob(4, "the last of each of so many layers attends globally, the others within the window", at_least=1)
    window: int = knob(4096, "sliding window of the local layers in tokens, including the current one", unit="tokens", at_least=1)
    rope_local_theta: float = knob(500000.0, "base of the rotary frequencies of the local layers, which are not scaled", above=1)
    vocab_size: int = knob(100278, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(8192, "longest sequence", unit="tokens", at_least=2)

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return [*super().violations(), *window_violations("model.window", self.window, self.max_positions)]
