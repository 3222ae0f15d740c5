"""Configuration of OLMoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.common.knobs import knob
from pipeline.models.shared_sizes import RotaryMoEConfig


@dataclass(frozen=True)
class OlmoeConfig(RotaryMoEConfig):
    """Llama's block with fine-grained experts, and RMSNorm over the full width of queries and keys."""

    #: Queries and keys have norms.
    query_key_norm: ClassVar[bool] = True

    family: str = knob("olmoe", "model family", choices=("olmoe",))
    layers: int = knob(16, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(2048, "width of the residual stream", at_least=1)
    heads: int = knob(16, "query heads", at_least=1)
    kv_heads: int = knob(16, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(1024, "intermediate width of each expert", at_least=1)
    vocab_size: int = knob(50304, "number of token embeddings", unit="tokens", at_least=1)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults: those of the paper (section 2)."""
        return {"balance_loss": 0.01, "z_loss": 0.001}
