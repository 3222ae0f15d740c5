"""Configuration of T5."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.shared_sizes import EncoderDecoderSizes


@dataclass(frozen=True)
class T5Config(EncoderDecoderSizes):
    """Encoder-decoder with RMSNorm and relative position biases, no other biases; T5 1.1 has gated feed-forwards and an untied head."""

    family: str = knob("t5", "model family", choices=("t5",))
    layers: int = knob(12, "blocks of encoder and decoder together", at_least=2, at_most=2000)
    encoder_layers: int | None = knob(None, "encoder blocks among them; half of them when null", at_least=1)
    hidden: int = knob(512, "width of the residual stream", at_least=1)
    heads: int = knob(8, "attention heads", at_least=1)
    head_width: int = knob(64, "width of a head; heads x head_width may differ from hidden", at_least=1)
    ffn_hidden: int = knob(2048, "intermediate width of the feed-forward", at_least=1)
    gated: bool = knob(False, "feed-forward gated with GELU (T5 1.1); false for ReLU without gate")
    vocab_size: int = knob(32128, "number of token embeddings, which encoder and decoder share", unit="tokens", at_least=1)
    max_positions: int = knob(512, "longest sequence", unit="tokens", at_least=2)
    buckets: int = knob(32, "buckets of the relative position biases", at_least=4)
    max_distance: int = knob(128, "distance from which all positions share the last bucket", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    init_std: float = knob(1.0, "factor of the published standard deviations of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")
    scale_head: bool | None = knob(None, "scale the head's input by hidden^-1/2; if the embeddings are tied when null")

    @property
    def head_factor(self) -> float:
        """Factor of the head's input."""
        scaled = self.tie_embeddings if self.scale_head is None else self.scale_head
        return float(self.hidden**-0.5) if scaled else 1.0

    @property
    def objective(self) -> str:
        """Training objective: span corruption."""
        return "span_corruption"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.head_width

    def reused_weights(self, blocks: range, *, last: bool) -> str | None:  # noqa: ARG002 - see layout.reused_weights
        """Return which weights a pipeline stage with these blocks uses at several depths: the biases of a kind of block; None for none."""
        encoder = sum(block < self.encoder_blocks for block in blocks)
        for kind, count in (("encoder", encoder), ("decoder", len(blocks) - encoder)):
            if count > 1:
                return f"the relative position biases of {count} {kind} blocks"
        return None

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        violations = self.depth_violations()
        if self.buckets % 4:
            violations.append(
                Violation(
                    "model.buckets",
                    self.buckets,
                    "must be a multiple of 4: two directions, with exact and logarithmic buckets",
                    "choose one",
                )
            )
        elif self.max_distance <= self.buckets // 2:
            rule = f"must be above {self.buckets // 2}, the number of exact buckets of model.buckets={self.buckets}"
            violations.append(Violation("model.max_distance", self.max_distance, rule, "raise it, or choose fewer buckets"))
        return violations
