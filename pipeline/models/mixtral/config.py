"""Configuration of Mixtral."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import rotary_heads_violations, top_k_violations, window_violations


@dataclass(frozen=True)
class MixtralConfig:
    """Llama's block with MoE layers instead of feed-forwards."""

    family: str = knob("mixtral", "model family", choices=("mixtral",))
    layers: int = knob(32, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(4096, "width of the residual stream", at_least=1)
    heads: int = knob(32, "query heads", at_least=1)
    kv_heads: int = knob(8, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(14336, "intermediate width of each expert", at_least=1)
    experts: int = knob(8, "experts in each block", at_least=1)
    top_k: int = knob(2, "experts a token is routed to", at_least=1)
    capacity_factor: float | None = knob(
        None,
        "maximum load of an expert over the mean load of a micro-batch in training, excess assignments are dropped; null for no limit",
        above=0,
    )
    vocab_size: int = knob(32000, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(32768, "longest sequence", unit="tokens", at_least=2)
    window: int | None = knob(
        None, "sliding window of attention in tokens, including the current one; null for full attention", unit="tokens", at_least=1
    )
    rope_theta: float = knob(1e6, "base of the rotary frequencies", above=0)
    norm_eps: float = knob(1e-5, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(False, "tie the weights of output head and token embedding")

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.02, "z_loss": 0.0}

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return [
            *rotary_heads_violations(self.hidden, self.heads, self.kv_heads),
            *window_violations("model.window", self.window, self.max_positions),
            *top_k_violations(self.top_k, self.experts),
        ]
