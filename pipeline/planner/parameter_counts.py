"""Parameter counts: of the full model, of one rank, and of the primary copies of one rank."""

from __future__ import annotations

import torch

from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.training.buckets import is_primary_copy


def count_model_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the full model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in registry.build(config).parameters())


def count_local_parameters(model: LocalModel) -> int:
    """Return the number of parameters that a rank holds before ZeRO, replicated ones included."""
    return sum(parameter.numel() for parameter in model.pieces)


def count_primary_parameters(model: LocalModel, mesh: Mesh) -> int:
    """Return the number of parameters whose primary copy a rank holds; over all ranks of a replica they sum to the full model."""
    return sum(parameter.numel() for parameter, piece in model.pieces.items() if is_primary_copy(piece, mesh))
