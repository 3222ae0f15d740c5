"""A model for generation, with the weights of a native checkpoint: no optimizer, no gradients."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.config.lora import LoraConfig
from pipeline.config.schema import RunConfig
from pipeline.models import config_classes
from pipeline.models.config import ModelConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.parallel.pieces import Piece


def model_of(checkpoint: MergedWeights) -> ModelConfig:
    """Return the model configuration of a checkpoint."""
    return config_classes.from_dict(checkpoint.config["model"])


def for_generation(config: RunConfig, model: ModelConfig) -> RunConfig:
    """Return the configuration with a checkpoint's model, and without what serves training only."""
    config = copy.deepcopy(config)
    config.model = model
    parallel = config.parallel
    parallel.zero_stage, parallel.sequence_parallel = 0, False
    parallel.schedule, parallel.stages_per_rank, parallel.layers_per_stage, parallel.balance = "1f1b", None, [], "layers"
    config.training.activation_checkpointing, config.training.compile = "none", "off"
    config.training.frozen, config.lora = [], LoraConfig()  # adapters are merged
    config.training.attention_group = 0
    return config


def load(checkpoint: MergedWeights, config: RunConfig, mesh: Mesh) -> LocalModel:
    """Build this rank's part of the model.

    Args:
        checkpoint: the weights.
        config: as for_generation returns it.
        mesh: this rank's process groups.

    Raises:
        UserError: the checkpoint is damaged.
    """

    def value(piece: Piece, dtype: torch.dtype) -> Tensor:
        return piece.narrow(checkpoint.tensor(piece.name)).to(mesh.device, dtype)

    model = parallelize(config, mesh, value)
    return model.eval().requires_grad_(False)
