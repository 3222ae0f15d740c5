"""Configuration of GPT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.mup_config import MupConfig, mup_violations
from pipeline.models.rules import heads_violations, window_violations
from pipeline.models.shared_sizes import MultiHead


@dataclass(frozen=True)
class GPTConfig(MupConfig, MultiHead):
    """Learned position embeddings, pre-norm LayerNorm, GELU, tied embeddings, biases in all layers."""

    family: str = knob("gpt", "model family", choices=("gpt",))
    layers: int = knob(12, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(3072, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(50257, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(1024, "longest sequence", unit="tokens", at_least=2)
    banded_window: int | None = knob(
        None,
        "sliding window of every second layer in tokens (GPT-3), including the current one; null for full attention",
        unit="tokens",
        at_least=1,
    )
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return [
            *heads_violations(self.hidden, self.heads),
            *window_violations("model.banded_window", self.banded_window, self.max_positions),
            *mup_violations(self),
        ]
