"""Sizes of a T5."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob
from pipeline.models.encoder_decoder_sizes import EncoderDecoderSizes


@dataclass
class T5Config(EncoderDecoderSizes):
    """Encoder-decoder with RMSNorm, relative positions in buckets and no biases; T5 1.1 is gated and has a head of its own."""

    family: str = knob("t5", "model family", choices=("t5",))
    layers: int = knob(12, "blocks of encoder and decoder together", at_least=2)
    encoder_layers: int | None = knob(None, "of these the encoder's; half of them when unset", at_least=1)
    hidden: int = knob(512, "width of the residual stream", at_least=1)
    heads: int = knob(8, "attention heads", at_least=1)
    head_width: int = knob(64, "width of a head; heads x head_width need not be the residual stream's", at_least=1)
    ffn_hidden: int = knob(2048, "width inside the feed-forward", at_least=1)
    gated: bool = knob(False, "feed-forward gated with GELU as in T5 1.1, else plain with ReLU")
    vocab_size: int = knob(32128, "rows of the embedding, which encoder and decoder share", unit="tokens", at_least=1)
    max_positions: int = knob(512, "longest sequence", unit="tokens", at_least=2)
    buckets: int = knob(32, "buckets of relative positions", at_least=4)
    max_distance: int = knob(128, "distance from which all share the last bucket", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0)
    init_std: float = knob(1.0, "factor of the published standard deviations of initial weights", above=0)
    tie_embeddings: bool = knob(True, "output head and token embedding are one matrix, the head's input scaled by hidden^-1/2")

    @property
    def objective(self) -> str:
        """What it is trained on."""
        return "span_corruption"

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.head_width

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        found = self.depth_violations()
        if self.buckets % 4:
            found.append(Violation("model.buckets", self.buckets, "must be a multiple of 4: two directions, two halves", "choose one"))
        elif self.max_distance <= self.buckets // 2:
            rule = f"must be above {self.buckets // 2}, which model.buckets={self.buckets} count one by one"
            found.append(Violation("model.max_distance", self.max_distance, rule, "raise it, or choose fewer buckets"))
        return found
