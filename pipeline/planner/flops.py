"""FLOPs of a training step, and peak FLOP/s of devices."""

from __future__ import annotations

import torch

from pipeline.models.config import ModelConfig
from pipeline.models.registry import family_of

#: Dense bf16 tensor-core peak of one device, FLOP/s, by a substring of its name; from manufacturers' data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "GB200": 2500e12}


def flops_per_token(model: ModelConfig, sequence_length: int, decoder_length: int | None = None) -> float:
    """Return forward and backward FLOPs per token of the full model, as Family.costs_per_token counts them."""
    return family_of(model).costs_per_token(model, sequence_length, decoder_length).total


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s; None for a CPU or an unknown device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [part for part in PEAKS if part in name]
    return PEAKS[max(known, key=len)] if known else None
