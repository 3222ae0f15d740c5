"""Configuration of Transformer."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import heads_violations
from pipeline.models.shared_sizes import EncoderDecoderSizes


@dataclass(frozen=True)
class TransformerConfig(EncoderDecoderSizes):
    """Encoder-decoder with post-norm LayerNorm, ReLU, sinusoidal position embeddings and shared embeddings."""

    family: str = knob("transformer", "model family", choices=("transformer",))
    layers: int = knob(12, "blocks of encoder and decoder together", at_least=2, at_most=2000)
    encoder_layers: int | None = knob(None, "encoder blocks among them; half of them when null", at_least=1)
    hidden: int = knob(512, "width of the residual stream", at_least=1)
    heads: int = knob(8, "attention heads", at_least=1)
    ffn_hidden: int = knob(2048, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(37000, "number of token embeddings, which encoder and decoder share", unit="tokens", at_least=1)
    max_positions: int = knob(1024, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)
    init_std: float = knob(1.0, "factor of the published standard deviations of initial weights", above=0)
    activation: str = knob("relu", "activation of the feed-forward; silu in many OPUS-MT models", choices=("relu", "gelu", "silu"))
    label_smoothing: float = knob(0.1, "probability mass of the target that is spread over the vocabulary", at_least=0, at_most=0.999)
    output_bias: bool = knob(False, "bias of the output head, as in OPUS-MT models")
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def objective(self) -> str:
        """Training objective: source-target pairs."""
        return "pairs"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        violations = [*self.depth_violations(), *heads_violations(self.hidden, self.heads)]
        if self.hidden % 2:
            rule = "must be even: half of the dims of the position embedding are sines, half are cosines"
            violations.append(Violation("model.hidden", self.hidden, rule, "choose an even width"))
        return violations
