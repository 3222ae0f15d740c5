"""Configuration of OPT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import heads_violations
from pipeline.models.shared_sizes import MultiHead


@dataclass(frozen=True)
class OPTConfig(MultiHead):
    """Learned position embeddings that start in row 2, LayerNorm, ReLU, tied embeddings, biases in all layers."""

    family: str = knob("opt", "model family", choices=("opt",))
    layers: int = knob(12, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(3072, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(50272, "number of token embeddings", unit="tokens", at_least=1)
    embed_width: int | None = knob(None, "width of embedding and head, projected to and from hidden; null for hidden", at_least=1)
    max_positions: int = knob(2048, "longest sequence", unit="tokens", at_least=2)
    pre_norm: bool = knob(True, "pre-norm; false for post-norm without a final norm (opt-350m)")
    activation: str = knob("relu", "activation of the feed-forward; gelu in Galactica", choices=("relu", "gelu"))
    init_std: float = knob(0.006, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def norm_eps(self) -> float:
        """Added to the variance in LayerNorm; the same in all released models."""
        return 1e-5

    @property
    def projected(self) -> bool:
        """Whether the width of embedding and head differs from hidden."""
        return self.embed_width not in (None, self.hidden)

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return list(heads_violations(self.hidden, self.heads))
