"""FLOPs of a training step, and peak FLOP/s of devices."""

from __future__ import annotations

import torch

from pipeline.layers.attention import Attention
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.mla import LatentAttention
from pipeline.layers.moe import moe_layers
from pipeline.models import registry
from pipeline.models.config import ModelConfig

#: Dense bf16 tensor-core peak of one device, FLOP/s, by a substring of its name; from manufacturers' data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "GB200": 2500e12}

#: Embedding tables: lookups, not matrix products.
LOOKED_UP = ("embed.tokens.", "embed.positions.", "embed.segments.")
#: Weights that are applied once per sequence, not per token: BERT's pooler and next-sentence head.
ONCE = ("head.sentence.",)


def flops_per_token(model: ModelConfig, sequence_length: int, decoder_length: int | None = None) -> float:
    """Return forward and backward FLOPs per token, as Chowdhery et al. 2022 (PaLM, appendix B) count them for MFU.

    6 FLOPs per weight of a matrix product (including the output head, excluding the embedding lookup; of an MoE layer, only the experts
    that a token is routed to), and 12 * layers * hidden * sequence for the attention products, not halved for causality. In a layer with
    sliding-window attention, the window replaces the sequence length; where values are narrower than queries and keys, both widths count.
    An MTP module counts as a layer with an output head. Recomputation is not counted. For an encoder-decoder, the result is per encoder
    token; each comes with `decoder_length / sequence_length` decoder tokens (one when None).
    """
    with torch.device("meta"):
        full = registry.build(model)
    if isinstance(full, EncoderDecoder):
        return _encoder_decoder_flops_per_token(full, model, sequence_length, sequence_length if decoder_length is None else decoder_length)
    matrices = {name: p.numel() for name, p in full.named_parameters() if p.dim() == 2 and not name.startswith(LOOKED_UP)}
    weights = sum(size / max(1, sequence_length) if name.startswith(ONCE) else size for name, size in matrices.items())
    weights += sum(int(p.numel() * m.router.top_k / len(p)) for m in moe_layers(full) for p in m.experts.parameters())
    output = full.get_parameter("embed.tokens.weight").numel()
    weights += output * (getattr(model, "mtp_depth", 0) + bool(model.tie_embeddings))
    return 6.0 * weights + 6.0 * sum(_score_width(layer, model, sequence_length) for layer in full.modules())


def _score_width(layer: torch.nn.Module, model: ModelConfig, sequence_length: int) -> int:
    """Return keys x heads x (width of queries and keys + width of values) of an attention layer, 0 for another module."""
    if isinstance(layer, LatentAttention):
        return sequence_length * model.heads * (model.head_dim + layer.v_head_dim)
    if isinstance(layer, Attention):
        return min(sequence_length, layer.window or sequence_length) * model.heads * 2 * model.head_dim
    return 0


def _encoder_decoder_flops_per_token(full: EncoderDecoder, model: ModelConfig, source: int, target: int) -> float:
    """FLOPs per encoder token: keys and values of cross-attention are computed from encoder tokens, all else from decoder tokens."""
    encoder, decoder, ratio = full.encoder_blocks, len(full.blocks) - full.encoder_blocks, target / source
    weights = 0.0
    for index, block in full.blocks.items():
        for name, parameter in block.named_parameters():
            reads_source = int(index) < encoder or name in ("cross.key.weight", "cross.value.weight")
            weights += parameter.numel() * (1 if reads_source else ratio) if parameter.dim() == 2 else 0
    weights += ratio * model.vocab_size * model.hidden
    keys = encoder * source + decoder * ratio * (target + source)
    return 6.0 * weights + 12.0 * keys * model.heads * model.head_dim


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s; None for a CPU or an unknown device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAKS if part in name]
    return PEAKS[max(known, key=len)] if known else None
