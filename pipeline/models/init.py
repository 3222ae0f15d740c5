"""The initial weights of a whole model, one parameter at a time."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.layers.init import initial_tensor
from pipeline.models import registry
from pipeline.models.config import ModelConfig


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of an unsplit model (a shared one once, under its first name), as the family's recipe says."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_tensor(name, parameter.shape, registry.initial_std(config, name), seed))
