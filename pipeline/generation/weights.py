"""A model for generation, with the weights of a native checkpoint: no optimizer, no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.reader import Run
from pipeline.common import knobs
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
    values: dict[str, Any] = {"model": model, "lora": LoraConfig(), "training.frozen": []}  # adapters are merged
    values |= {"training.activation_checkpointing": "none", "training.compile": "off", "training.attention_group": 0}
    values |= {"parallel.zero_stage": 0, "parallel.zero_group": "job", "parallel.sequence_parallel": False, "parallel.schedule": "1f1b"}
    values |= {"parallel.expert_padding": False, "parallel.expert_parts": 1}
    values |= {"parallel.expert_tensor": None}  # whole experts require sequence parallelism
    values |= {"parallel.stages_per_rank": None, "parallel.layers_per_stage": [], "parallel.balance": "layers"}
    return knobs.changed(config, values)


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
        values = torch.empty(piece.elements)
        checkpoint.read([Run(piece.name, piece.full_shape, piece.box, 0, {"weight": values})])
        return values.view(piece.shape).to(mesh.device, dtype)

    model = parallelize(config, mesh, value)
    return model.eval().requires_grad_(False)
