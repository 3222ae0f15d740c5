"""Weight initialization of an unsharded model, one parameter at a time."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.layers.init import initial_tensor
from pipeline.models import registry
from pipeline.models.config import ModelConfig


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialize every parameter of an unsharded model by the family's recipe; a tied parameter once, under its first name."""
    initial_std = registry.family_of(config).initial_std
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_tensor(name, parameter.shape, initial_std(config, name), seed))
