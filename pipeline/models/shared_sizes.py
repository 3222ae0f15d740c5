"""Sizes that families share, and rules between them: of decoders, dense and with experts, of encoder-decoders, of multi-head attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models import rope
from pipeline.models.config import Sizes


@dataclass(frozen=True)
class DecoderConfig(Sizes):
    """Fields of a decoder with RMSNorm and grouped-query attention, whose heads have the width hidden / heads."""

    layers: int = knob(32, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(4096, "width of the residual stream", at_least=1)
    heads: int = knob(32, "query heads", at_least=1)
    kv_heads: int = knob(32, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(11008, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(32000, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(4096, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-5, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(False, "tie the weights of output head and token embedding")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """See Sizes."""
        width = getattr(self, "head_width", None)
        return [*rotary_heads_violations(self.hidden, self.heads, self.kv_heads, width), *super().violations()]


@dataclass(frozen=True)
class WideHeadConfig(DecoderConfig):
    """Fields of such a decoder, whose heads may be wider or narrower."""

    head_width: int | None = knob(None, "width of a head; hidden/heads when null", at_least=2)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.head_width or self.hidden // self.heads


@dataclass(frozen=True)
class RotaryDecoderConfig(WideHeadConfig, rope.RopeConfig):
    """Fields of such a decoder with scaled rotary position embeddings. Families add theirs."""


@dataclass(frozen=True)
class PartialRotaryConfig(Sizes):
    """Fields of a model that rotates only the first dims of a head; stands before the classes with the fields of its heads."""

    partial_rotary_factor: float = knob(0.5, "share of the dims of a head that are rotated, the first ones", above=0, at_most=1)

    def violations(self) -> list[Violation]:
        """See Sizes; if the width of a head is wrong, nothing is said of a share of it."""
        violations, config = super().violations(), cast(Any, self)
        if any(violation.key in ("model.heads", "model.head_width") for violation in violations):
            return violations
        return [*partial_rotary_violations(config.head_dim, self.partial_rotary_factor), *violations]


@dataclass(frozen=True)
class LinearAttentionConfig(Sizes):
    """Fields of a decoder with linear attention (layers/gated_delta_net.py) in all layers but, at an interval, those with full attention.

    Stands before the classes with the fields of its heads.
    """

    heads: int = knob(16, "query heads of the full attention", at_least=1)
    kv_heads: int = knob(2, "key and value heads of the full attention, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(256, "width of a head of the full attention; hidden/heads when null", at_least=2)
    full_attention_interval: int = knob(4, "the last of each of so many layers has full attention, the others linear attention", at_least=1)
    linear_key_heads: int = knob(16, "query and key heads of the linear attention", at_least=1)
    linear_value_heads: int = knob(32, "value heads of the linear attention, a multiple of its key heads", at_least=1)
    linear_key_dim: int = knob(128, "width of the queries and keys of a head of the linear attention", at_least=1)
    linear_value_dim: int = knob(128, "width of the values of a head of the linear attention", at_least=1)
    linear_kernel: int = knob(4, "tokens that the convolutions of the linear attention read, with the present one", at_least=1)

    def is_full(self, block: int) -> bool:
        """Whether a block has full attention instead of linear attention."""
        return is_marked(block, self.full_attention_interval)

    @property
    def linear_layers(self) -> int:
        """Number of layers with linear attention."""
        return sum(not self.is_full(block) for block in range(cast(Any, self).layers))

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        if self.linear_value_heads % self.linear_key_heads:
            rule = f"must be a multiple of model.linear_key_heads={self.linear_key_heads}"
            violations.append(Violation("model.linear_value_heads", self.linear_value_heads, rule, "choose a multiple"))
        return violations


@dataclass(frozen=True)
class WindowConfig(Sizes):
    """Fields of a decoder with a sliding window in all layers but, at an interval, global ones."""

    sliding_window_pattern: int = knob(2, "the last of each of so many layers attends globally, the others within the window", at_least=1)
    window: int = knob(4096, "sliding window of the local layers in tokens, including the current one", unit="tokens", at_least=1)
    max_positions: int = knob(4096, "longest sequence", unit="tokens", at_least=2)

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has no window."""
        return is_marked(layer, self.sliding_window_pattern)

    def local_window(self, layer: int) -> int | None:
        """The window of a layer; None for a global one."""
        return None if self.is_global(layer) else self.window

    def violations(self) -> list[Violation]:
        """See Sizes."""
        return [*window_violations("model.window", self.window, self.max_positions), *super().violations()]


CAPACITY_FACTOR = (
    "maximum load of an expert over the mean load of a micro-batch in training, excess assignments are dropped; null for no limit"
)


@dataclass(frozen=True)
class ExpertsConfig(Sizes):
    """Fields of a decoder with MoE layers of softmax routers."""

    experts: int = knob(64, "experts of each MoE layer", at_least=1)
    top_k: int = knob(8, "experts a token is routed to", at_least=1)
    capacity_factor: float | None = knob(None, CAPACITY_FACTOR, above=0)

    def violations(self) -> list[Violation]:
        """See Sizes."""
        return [*top_k_violations(self.top_k, self.experts), *super().violations()]


@dataclass(frozen=True)
class RotaryMoEConfig(RotaryDecoderConfig, ExpertsConfig):
    """Fields of a RotaryDecoderConfig with such MoE layers. Families add theirs."""

    norm_topk_prob: bool = knob(False, "normalize the weights of a token's experts to sum to one")


@dataclass(frozen=True)
class LayerPatternConfig(Sizes):
    """Field of a decoder with several kinds of blocks, in any order."""

    layer_pattern: str = knob("M*", "the kind of each block, from the first one on; repeated if there are more blocks")

    def kind(self, block: int) -> str:
        """Kind of a block, a letter of layer_pattern."""
        return self.layer_pattern[block % len(self.layer_pattern)]

    def blocks_of(self, kind: str) -> list[int]:
        """Return the blocks of a kind, counted from 0."""
        return [block for block in range(cast(Any, self).layers) if self.kind(block) == kind]

    def pattern_violations(self, kinds: str) -> list[Violation]:
        """Return the violation of the pattern, `kinds` being the letters of the family."""
        if self.layer_pattern and set(self.layer_pattern) <= set(kinds):
            return []
        rule = f"must consist of the letters {' '.join(kinds)}"
        return [Violation("model.layer_pattern", self.layer_pattern, rule, "choose a letter for each block")]


def shortest_pattern(letters: str) -> str:
    """Return the shortest start of a text that gives all of it when it is repeated."""
    lengths = range(1, len(letters) + 1)
    return next(letters[:length] for length in lengths if all(letters[i] == letters[i % length] for i in range(len(letters))))


@dataclass(frozen=True)
class BiasedExpertsConfig(Sizes):
    """Fields of a decoder with DeepSeek-V3's MoE layers. Families add theirs."""

    layers: int = knob(61, "decoder blocks", at_least=1, at_most=2000)
    dense_layers: int = knob(3, "first blocks with a dense feed-forward instead of experts", at_least=0)
    ffn_hidden: int = knob(18432, "intermediate width of the feed-forward of the dense blocks", at_least=1)
    experts: int = knob(256, "routed experts in each other block", at_least=1)
    shared_experts: int = knob(1, "shared experts, which process every token", at_least=1)
    expert_ffn_hidden: int = knob(2048, "intermediate width of each expert", at_least=1)
    top_k: int = knob(8, "routed experts per token", at_least=1)
    capacity_factor: float | None = knob(None, CAPACITY_FACTOR, above=0)
    groups: int = knob(8, "groups of routed experts", at_least=1)
    topk_group: int = knob(4, "groups that a token's experts are selected from", at_least=1)
    norm_topk_prob: bool = knob(True, "normalize the weights of a token's experts to sum to routed_scaling_factor")
    routed_scaling_factor: float = knob(2.5, "factor of the routed experts' weights", above=0)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of these families and their defaults."""
        return {"balance_loss": 0.0001, "bias_update_speed": 0.001}

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        if self.dense_layers > self.layers:
            rule = f"is more than model.layers={self.layers}"
            violations.append(Violation("model.dense_layers", self.dense_layers, rule, "choose at most that many"))
        if self.experts % self.groups:
            rule = f"must divide model.experts={self.experts}"
            violations.append(Violation("model.groups", self.groups, rule, "choose a divisor of model.experts"))
        elif self.groups > 1 and self.experts // self.groups < 2:
            rule = f"leaves fewer than 2 of model.experts={self.experts} per group; a group's score is the sum of its two best experts"
            violations.append(Violation("model.groups", self.groups, rule, "use fewer groups"))
        if self.topk_group > self.groups:
            rule = f"is more than model.groups={self.groups}"
            violations.append(Violation("model.topk_group", self.topk_group, rule, "choose at most that many"))
        elif self.top_k > self.experts * self.topk_group // self.groups:
            rule = f"is more than the number of experts in model.topk_group={self.topk_group} of model.groups={self.groups}"
            violations.append(Violation("model.top_k", self.top_k, rule, "choose fewer, or more groups"))
        return violations


@dataclass(frozen=True)
class SharedExpertsConfig(BiasedExpertsConfig):
    """Fields of such a decoder with MTP modules."""

    mtp_depth: int = knob(1, "MTP modules: further tokens that training predicts after the next one", unit="tokens", at_least=0)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of these families and their defaults."""
        return super().loss_weights | ({"mtp_loss": 0.3} if self.mtp_depth else {})

    def reused_weights(self, blocks: range, *, last: bool) -> str | None:  # noqa: ARG002 - see config/rules/parallel.py
        """Return which weights a pipeline stage uses at several depths: in the last one the embedding; None for none."""
        return f"the embedding in model.mtp_depth={self.mtp_depth} MTP modules" if last and self.mtp_depth > 1 else None


@dataclass(frozen=True)
class MultiHeadConfig(Sizes):
    """Fields of multi-head attention (Vaswani et al. 2017): head_dim = hidden / heads, as many key and value heads as query heads."""

    layers: int = knob(12, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    vocab_size: int = knob(50257, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(1024, "longest sequence", unit="tokens", at_least=2)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, equal to the number of query heads."""
        return self.heads

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """See Sizes."""
        return [*heads_violations(self.hidden, self.heads), *super().violations()]


@dataclass(frozen=True)
class LayerNormConfig(MultiHeadConfig):
    """Fields of such a model with LayerNorm."""

    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)


@dataclass(frozen=True)
class EncoderDecoderSizes(Sizes):
    """Fields of an encoder-decoder, whose blocks are numbered consecutively."""

    layers: int = knob(12, "blocks of encoder and decoder together", at_least=2, at_most=2000)
    encoder_layers: int | None = knob(None, "encoder blocks among them; half of them when null", at_least=1)
    hidden: int = knob(512, "width of the residual stream", at_least=1)
    heads: int = knob(8, "attention heads", at_least=1)
    ffn_hidden: int = knob(2048, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(32128, "number of token embeddings, which encoder and decoder share", unit="tokens", at_least=1)
    max_positions: int = knob(512, "longest sequence", unit="tokens", at_least=2)
    init_std: float = knob(1.0, "factor of the published standard deviations of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def encoder_blocks(self) -> int:
        """Number of encoder blocks, which come first."""
        return self.layers // 2 if self.encoder_layers is None else self.encoder_layers

    @property
    def decoder_blocks(self) -> int:
        """Number of decoder blocks."""
        return self.layers - self.encoder_blocks

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, equal to the number of query heads."""
        return self.heads

    def violations(self) -> list[Violation]:
        """See Sizes."""
        if self.decoder_blocks > 0:
            return super().violations()
        rule = f"must be below model.layers={self.layers}, since the remaining blocks are the decoder's"
        return [Violation("model.encoder_layers", self.encoder_layers, rule, "lower it, or leave it unset"), *super().violations()]


def is_marked(layer: int, interval: int) -> bool:
    """Whether a layer, counted from 0, is the last one of an interval."""
    return (layer + 1) % interval == 0


def marked(layers: int, interval: int) -> list[bool]:
    """Return for each layer whether it is the last one of an interval."""
    return [is_marked(layer, interval) for layer in range(layers)]


def heads_violations(hidden: int, heads: int) -> Iterator[Violation]:
    """Yield a violation if the heads do not divide the hidden width."""
    if hidden % heads:
        yield Violation("model.heads", heads, f"must divide model.hidden={hidden}", "choose a divisor of model.hidden")


def rotary_heads_violations(hidden: int, heads: int, kv_heads: int, width: int | None = None) -> Iterator[Violation]:
    """Yield violations of grouped-query attention with rotary position embeddings; `width` is head_dim, hidden / heads when None."""
    if width is None:
        yield from heads_violations(hidden, heads)
    key, value, dim = ("model.heads", heads, hidden / heads) if width is None else ("model.head_width", width, width)
    if dim % 2 == 1:
        yield Violation(
            key, value, f"results in the odd head_dim {dim:g}; rotary embeddings rotate pairs of dims", "choose it so that head_dim is even"
        )
    if heads % kv_heads:
        yield Violation("model.kv_heads", kv_heads, f"must divide model.heads={heads}", "choose a divisor of model.heads")


def rotated_dims(head_dim: int, factor: float) -> int:
    """Return the number of dims of a head that are rotated, the first ones: a share of them, rounded down."""
    return int(head_dim * factor)


def partial_rotary_violations(head_dim: int, factor: float) -> Iterator[Violation]:
    """Yield a violation if rotary position embeddings do not rotate pairs of dims."""
    if (dims := rotated_dims(head_dim, factor)) % 2 or not dims:
        rule = f"rotates {dims} of the {head_dim} dims of a head, which must be an even number of at least 2"
        yield Violation("model.partial_rotary_factor", factor, rule, "choose another share")


def window_violations(key: str, window: int | None, max_positions: int) -> Iterator[Violation]:
    """Yield a violation if a sliding window is longer than the longest sequence; None means no window."""
    if window is not None and window > max_positions:
        rule = f"is longer than model.max_positions={max_positions}"
        yield Violation(key, window, rule, f"set it to at most {max_positions}, which is full attention")


def top_k_violations(top_k: int, experts: int) -> Iterator[Violation]:
    """Yield a violation if a token is routed to more experts than there are."""
    if top_k > experts:
        yield Violation("model.top_k", top_k, f"is more than model.experts={experts}", "choose at most that many")
