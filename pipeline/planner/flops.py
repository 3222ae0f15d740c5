"""Operations of a training step, and what the devices could do."""

from __future__ import annotations

import torch

from pipeline.layers.attention import Attention
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.moe import moe_layers
from pipeline.models import registry
from pipeline.models.families import ModelConfig

#: Dense bf16 tensor-core peak of one device, FLOP/s, by part of its name; manufacturers' data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "GB200": 2500e12}

#: Tables whose rows are picked, not multiplied with.
LOOKED_UP = ("embed.tokens.", "embed.positions.", "embed.segments.")


def flops_per_token(model: ModelConfig, sequence_length: int, decoder_length: int | None = None) -> float:
    """Forward and backward operations a token, as Chowdhery et al. 2022 (PaLM, appendix B) count them for MFU.

    Six for every weight of a matrix product (the output head included, the embedding lookup not; of a mixture's experts as many as a
    token goes to), and 12 * layers * hidden * sequence for the products of attention, not halved for causality; where a layer sees a
    window, the window counts for the sequence. Recomputation does not count. Of an encoder-decoder the tokens are the encoder's; with
    each come `decoder_length / sequence_length` of the decoder's (as many when None).
    """
    with torch.device("meta"):
        whole = registry.build(model)
    if isinstance(whole, EncoderDecoder):
        return _of_encoder_decoder(whole, model, sequence_length, sequence_length if decoder_length is None else decoder_length)
    weights = sum(p.numel() for name, p in whole.named_parameters() if p.dim() == 2 and not name.startswith(LOOKED_UP))
    weights += sum(int(p.numel() * m.router.top_k / len(p)) for m in moe_layers(whole) for p in m.experts.parameters())
    if model.tie_embeddings:
        weights += whole.get_parameter("embed.tokens.weight").numel()
    windows = [layer.window for layer in whole.modules() if isinstance(layer, Attention) and layer.window is not None]
    lengths = model.layers * sequence_length - sum(max(0, sequence_length - window) for window in windows)
    return 6.0 * weights + 12.0 * lengths * model.heads * model.head_dim


def _of_encoder_decoder(whole: EncoderDecoder, model: ModelConfig, source: int, target: int) -> float:
    """The same of two stacks: keys and values of cross-attention are made of the encoder's tokens, all else of the decoder's of its own."""
    encoder, decoder, share = whole.encoder_blocks, len(whole.blocks) - whole.encoder_blocks, target / source
    weights = 0.0
    for index, block in whole.blocks.items():
        for name, parameter in block.named_parameters():
            reads_source = int(index) < encoder or name in ("cross.key.weight", "cross.value.weight")
            weights += parameter.numel() * (1 if reads_source else share) if parameter.dim() == 2 else 0
    weights += share * model.vocab_size * model.hidden
    keys = encoder * source + decoder * share * (target + source)
    return 6.0 * weights + 12.0 * keys * model.heads * model.head_dim


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak, FLOP/s; None for a CPU or a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAKS if part in name]
    return PEAKS[max(known, key=len)] if known else None
