"""Configuration of ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import rotary_heads_violations
from pipeline.models.shared_sizes import MultiHead


@dataclass(frozen=True)
class ModernBertConfig(MultiHead):
    """Pre-norm encoder without biases: rotary positions, GeGLU; at an interval global layers, the others with a window on both sides."""

    family: str = knob("modernbert", "model family", choices=("modernbert",))
    layers: int = knob(22, "encoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(1152, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(50368, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(8192, "longest sequence", unit="tokens", at_least=2)
    global_attn_every_n_layers: int = knob(3, "the first of each of so many layers attends globally, the others locally", at_least=1)
    local_attention: int = knob(
        128, "window of the local layers: a token attends to half as many tokens on each side, and to itself", unit="tokens", at_least=2
    )
    rope_theta: float = knob(160000.0, "base of the rotary frequencies of the global layers", above=1)
    rope_local_theta: float = knob(10000.0, "base of the rotary frequencies of the local layers", above=1)
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def objective(self) -> str:
        """Training objective: masked-token prediction."""
        return "masked"

    @property
    def next_sentence(self) -> bool:
        """There is no next-sentence prediction."""
        return False

    @property
    def padding_token(self) -> int | None:
        """The Hugging Face class computes positions without regard to the padding token."""
        return None

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, attends to all tokens."""
        return layer % self.global_attn_every_n_layers == 0

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return list(rotary_heads_violations(self.hidden, self.heads, self.heads))
