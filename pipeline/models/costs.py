"""FLOPs of the parts of a model: each block, and what the first and the last pipeline stage compute besides their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.mla import LatentAttention
from pipeline.layers.moe import MoE
from pipeline.layers.recurrent import RecurrentLayer
from pipeline.layers.stack import Stack
from pipeline.models.config import ModelConfig
from pipeline.models.vectors import is_matrix

#: Embedding tables: lookups, not matrix products.
LOOKED_UP = ("embed.tokens.", "embed.positions.", "embed.segments.", "embed.layer_inputs.embed.")
#: Weights that are applied once per sequence, not per token: BERT's pooler and next-sentence head.
ONCE = ("head.sentence.",)


@dataclass(frozen=True)
class Costs:
    """Forward and backward FLOPs per token.

    Attributes:
        first: of the embedding, whose lookup has none.
        blocks: of each block.
        last: of the output head, with its MTP modules.
    """

    first: float
    blocks: tuple[float, ...]
    last: float

    @property
    def total(self) -> float:
        """FLOPs per token of the full model."""
        return self.first + sum(self.blocks) + self.last


def costs_per_token(model: Stack, config: ModelConfig, sequence_length: int, decoder_length: int | None) -> Costs:
    """Count the FLOPs of a full model; see Family.costs_per_token."""
    if isinstance(model, EncoderDecoder):
        return _encoder_decoder_costs(model, config, sequence_length, decoder_length)
    sums = dict.fromkeys(["embed", *(f"blocks.{index}" for index in range(len(model.blocks))), "head"], 0.0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and is_matrix(name, parameter.shape) and not name.startswith(LOOKED_UP):
            sums[_part(name)] += parameter.numel() / (max(1, sequence_length) if name.startswith(ONCE) else 1)
    for name, module in model.named_modules():
        sums[_part(name)] += _score_width(module, config, sequence_length, causal=model.causal)
        if isinstance(module, MoE):
            sums[_part(name)] += sum(int(p.numel() * module.router.top_k / len(p)) for p in module.experts.parameters() if p.dim() == 3)
    output = model.get_parameter("embed.tokens.weight").numel()
    sums["head"] += output * (getattr(config, "mtp_depth", 0) + (1 if config.tie_embeddings else 0))
    first, *blocks, last = (6.0 * value for value in sums.values())
    return Costs(first, tuple(blocks), last)


def _encoder_decoder_costs(model: EncoderDecoder, config: ModelConfig, sequence_length: int, decoder_length: int | None) -> Costs:
    """Count the FLOPs of an encoder-decoder.

    Keys and values of cross-attention are computed from encoder tokens, all else of the decoder from decoder tokens.
    """
    source, target = sequence_length, sequence_length if decoder_length is None else decoder_length
    ratio, width = target / source, 12.0 * config.heads * config.head_dim
    blocks = []
    for index, block in model.blocks.items():
        encodes = int(index) < model.encoder_blocks
        weights = 0.0
        for name, parameter in block.named_parameters():
            reads_source = encodes or name in ("cross.key.weight", "cross.value.weight")
            weights += parameter.numel() * (1 if reads_source else ratio) if parameter.dim() == 2 else 0
        blocks.append(6.0 * weights + width * (source if encodes else ratio * (target + source)))
    return Costs(0.0, tuple(blocks), 6.0 * ratio * config.vocab_size * config.hidden)


def _part(name: str) -> str:
    """The part of the model that a parameter or module belongs to: "embed", "blocks.3" or "head"."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "blocks" and len(words) > 1 else "embed" if words[0] == "embed" else "head"


def _score_width(layer: nn.Module, config: ModelConfig, sequence_length: int, *, causal: bool) -> int:
    """Return keys x heads x (width of queries and keys + width of values) of an attention layer, 0 for another module.

    A recurrent layer: the multiplications of the convolutions, and of the products of each head's state with a vector or of two vectors.
    """
    if isinstance(layer, RecurrentLayer):
        convolutions = sum(weight.numel() for weight in layer.convolutions())
        return convolutions + layer.state_products * len(layer.decay_rate_log) * layer.key_dim * layer.value_dim
    if isinstance(layer, LatentAttention):
        return sequence_length * config.heads * (config.head_dim + layer.v_head_dim)
    if isinstance(layer, Attention):
        window = layer.window or sequence_length
        # Not causal, a window has as many tokens on the other side of the query.
        return min(sequence_length, window if causal else 2 * window - 1) * config.heads * 2 * layer.head_dim
    return 0
