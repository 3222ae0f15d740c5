"""Full weights of a model that are read one at a time, on their way into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.weights import Weights
from pipeline.common.progress import Progress
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.tensor_parallel_roles import role
from pipeline.parallel.pieces import Piece


class FullWeights(Weights, Protocol):
    """Full weights of a model with this configuration, read one at a time."""

    config: ModelConfig


def fragments(weights: FullWeights, moments: Mapping[str, FullWeights]) -> Iterator[Fragment]:
    """Yield every weight with its moments as a fragment, loaded lazily.

    Args:
        moments: kind -> the moments of this kind; empty if there are none.
    """
    kinds = {"weight": weights, **moments}
    elements = {name: torch.Size(weights.shape(name)).numel() for name in weights.names()}
    table = registry.family_of(weights.config).tensor_parallel
    with Progress(sum(elements.values()) * 4 * len(kinds), "reading weights", "B") as progress:
        for name, count in elements.items():
            piece = Piece(name, weights.shape(name), role=role(table, name))
            yield Fragment(piece, 0, {kind: source.tensor(name).flatten() for kind, source in kinds.items()})
            progress.advance(count * 4 * len(kinds), name)
