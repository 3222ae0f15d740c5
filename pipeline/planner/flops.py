"""FLOPs of a training step, and peak FLOP/s of devices."""

from __future__ import annotations

import torch

from pipeline.layers.attention import Attention
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.moe import moe_layers
from pipeline.models import registry
from pipeline.models.config import ModelConfig

#: Dense bf16 tensor-core peak of one device, FLOP/s, by a substring of its name; from manufacturers' data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "GB200": 2500e12}

#: Embedding tables: lookups, not matrix products.
LOOKED_UP = ("embed.tokens.", "embed.positions.", "embed.segments.")


def flops_per_token(model: ModelConfig, sequence_length: int, decoder_length: int | None = None) -> float:
    """Return forward and backward FLOPs per token, as Chowdhery et al. 2022 (PaLM, appendix B) count them for MFU.

    6 FLOPs per weight of a matrix product (including the output head, excluding the embedding lookup; of an MoE layer, only the experts
    that a token is routed to), and 12 * layers * hidden * sequence for the attention products, not halved for causality. In a layer with
    sliding-window attention, the window replaces the sequence length. Recomputation is not counted. For an encoder-decoder, the result is
    per encoder token; each comes with `decoder_length / sequence_length` decoder tokens (one when None).
    """
    with torch.device("meta"):
        full = registry.build(model)
    if isinstance(full, EncoderDecoder):
        return _encoder_decoder_flops_per_token(full, model, sequence_length, sequence_length if decoder_length is None else decoder_length)
    weights = sum(p.numel() for name, p in full.named_parameters() if p.dim() == 2 and not name.startswith(LOOKED_UP))
    weights += sum(int(p.numel() * m.router.top_k / len(p)) for m in moe_layers(full) for p in m.experts.parameters())
    if model.tie_embeddings:
        weights += full.get_parameter("embed.tokens.weight").numel()
    windows = [layer.window for layer in full.modules() if isinstance(layer, Attention) and layer.window is not None]
    lengths = model.layers * sequence_length - sum(max(0, sequence_length - window) for window in windows)
    return 6.0 * weights + 12.0 * lengths * model.heads * model.head_dim


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
