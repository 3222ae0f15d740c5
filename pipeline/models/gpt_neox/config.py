"""Configuration of GPT-NeoX."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models import rope
from pipeline.models.rules import heads_violations, partial_rotary_violations
from pipeline.models.shared_sizes import MultiHead


@dataclass(frozen=True)
class GPTNeoXConfig(MultiHead, rope.RopeConfig):
    """Attention and feed-forward side by side, rotary positions of a part of the dims of a head, LayerNorm, GELU, untied embeddings."""

    family: str = knob("gpt_neox", "model family", choices=("gpt_neox",))
    layers: int = knob(24, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(2048, "width of the residual stream", at_least=1)
    heads: int = knob(16, "attention heads", at_least=1)
    ffn_hidden: int = knob(8192, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(50304, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(2048, "longest sequence", unit="tokens", at_least=2)
    parallel_residual: bool = knob(True, "the feed-forward reads the input of the block, as attention does; false for GPT-2's order")
    partial_rotary_factor: float = knob(0.25, "share of the dims of a head that are rotated, the first ones", above=0, at_most=1)
    attention_bias: bool = knob(True, "biases of the attention layers")
    activation: str = knob("gelu", "activation of the feed-forward; gelu_tanh in GPT-NeoX-20B", choices=("gelu", "gelu_tanh"))
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)
    init_method: str = knob(
        "small_init",
        "initial weights: small_init for Pythia's, with standard deviations that depend on the sizes; normal for GPT-2's with init_std",
        choices=("small_init", "normal"),
    )
    init_std: float = knob(0.02, "standard deviation of initial weights with init_method=normal", above=0)
    tie_embeddings: bool = knob(False, "tie the weights of output head and token embedding")

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        found = [*heads_violations(self.hidden, self.heads)]
        found += [] if found else partial_rotary_violations(self.head_dim, self.partial_rotary_factor)
        return [*found, *rope.violations(self)]
