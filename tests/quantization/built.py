"""Models in memory, which the tests compare with what is computed block by block."""

import torch
from torch import nn

from pipeline.checkpoint.weights import Weights
from pipeline.layers.lora import linear_layers
from pipeline.layers.stack import Stack
from pipeline.models import registry
from pipeline.models.config import ModelConfig


def build(weights: Weights, config: ModelConfig) -> Stack:
    """The model with these weights, fp32, without gradients."""
    model = registry.build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.tensor(name))
    return model.eval().requires_grad_(False)


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model that are quantized, by name."""
    return {name: layer for name, layer in linear_layers(model) if name.startswith("blocks.")}
