"""Configuration of GPT-1."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import heads_violations
from pipeline.models.shared_sizes import MultiHead


@dataclass(frozen=True)
class GPT1Config(MultiHead):
    """Learned position embeddings, post-norm LayerNorm, GELU, tied embeddings, biases in all layers."""

    family: str = knob("gpt1", "model family", choices=("gpt1",))
    layers: int = knob(12, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    vocab_size: int = knob(40478, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(512, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def ffn_hidden(self) -> int:
        """Intermediate width of the feed-forward."""
        return 4 * self.hidden

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return list(heads_violations(self.hidden, self.heads))
