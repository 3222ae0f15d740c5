"""Partitioning of a model: the pipeline stages of a rank, and its piece of every weight in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from pipeline.config.layout import Coordinates, Layout
from pipeline.layers.stack import Stack
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.tensor_parallel_roles import role
from pipeline.parallel.pieces import Piece, slice_weight


def extract_stage(model: Stack, layout: Layout, stage: int) -> Stack:
    """Delete everything but a stage's blocks; the first stage keeps the embedding, the last one the final norm and the head."""
    keep = layout.layers(stage, len(model.blocks))
    for index in range(len(model.blocks)):
        if index not in keep:
            del model.blocks[str(index)]
    if stage > 0:
        model.embed = None
    if stage < layout.stage_count - 1:
        model.norm = None
        model.head = None
    return model


def replace_weights(stages: Iterable[nn.Module], create: Callable[[str, nn.Parameter], Tensor | nn.Module]) -> None:
    """Replace every parameter by `create(name, parameter)`. Shared parameters stay shared."""
    replaced: dict[nn.Parameter, Tensor | nn.Module] = {}
    for stage in stages:
        for prefix, module in list(stage.named_modules()):
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in replaced:
                    replaced[parameter] = create(f"{prefix}.{leaf}".lstrip("."), parameter)
                delattr(module, leaf)  # the replacement may be a plain tensor
                setattr(module, leaf, replaced[parameter])


def partition_weights(stages: dict[int, Stack], config: ModelConfig, layout: Layout, coordinates: Coordinates) -> dict[nn.Parameter, Piece]:
    """Replace every weight, on the meta device, by this rank's piece of it.

    A weight that has two names in the model, or that every stage holds, becomes one parameter per rank.

    Args:
        stages: stage index -> its part of the model, with the names of the full model.
        layout: the layout of the job.
        coordinates: coordinates of this rank.

    Returns:
        The new parameters, each with its piece of the full weight.
    """
    family = registry.family_of(config)
    tied = family.tied_weights(config)
    axes = {"tensor": (layout.tensor, coordinates.tensor), "expert": (layout.expert, coordinates.expert)}
    pieces: dict[nn.Parameter, Piece] = {}
    local: dict[str, nn.Parameter] = {}

    def local_parameter(name: str, parameter: nn.Parameter) -> nn.Parameter:
        name = tied.get(name, name)
        if name not in local:
            piece = slice_weight(name, tuple(parameter.shape), role(family.tensor_parallel, name), axes, folded=layout.folded)
            shared = ""
            if layout.pipeline > 1 and name in tied.values():
                shared = "tied_embedding"
            elif layout.pipeline > 1 and any(fnmatchcase(name, pattern) for pattern in family.on_every_stage):
                shared = "pipeline"
            local[name] = nn.Parameter(parameter.new_empty(piece.shape), requires_grad=parameter.requires_grad)
            pieces[local[name]] = replace(piece, shared=shared, copy=bool(shared) and 0 not in stages, rate=family.rate(config, name))
        return local[name]

    replace_weights(stages.values(), local_parameter)
    return pieces
