"""Operations of a training step, and what the devices could do."""

from __future__ import annotations

import torch

from pipeline.layers.experts import mixtures
from pipeline.models import registry
from pipeline.models.families import ModelConfig

#: Dense bf16 tensor-core peak of one device, FLOP/s, by part of its name; manufacturers' data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "GB200": 2500e12}


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward and backward operations a token, as Chowdhery et al. 2022 (PaLM, appendix B) count them for MFU.

    Six for every weight of a matrix product (the output head included, the embedding lookup not; of a mixture's experts as many as a
    token goes to), and 12 * layers * hidden * sequence for the products of attention, not halved for causality. Recomputation does not
    count.
    """
    with torch.device("meta"):
        whole = registry.build(model)
    weights = sum(p.numel() for name, p in whole.named_parameters() if p.dim() == 2 and not name.startswith("embed."))
    weights += sum(int(p.numel() * m.router.top_k / len(p)) for m in mixtures(whole) for p in m.experts.parameters())
    if model.tie_embeddings:
        weights += model.vocab_size * model.hidden
    return 6.0 * weights + 12.0 * model.layers * model.heads * model.head_dim * sequence_length


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak, FLOP/s; None for a CPU or a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAKS if part in name]
    return PEAKS[max(known, key=len)] if known else None
