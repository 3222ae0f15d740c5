"""A rank's part of the model: its stages, and its piece of every weight in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from pipeline.config.layout import Coordinates, Layout
from pipeline.layers.stack import Stack
from pipeline.models import registry
from pipeline.models.families import ModelConfig
from pipeline.models.plan import role
from pipeline.parallel.pieces import Piece, slice_weight


def take_stage(model: Stack, layout: Layout, stage: int) -> Stack:
    """Keep a stage's blocks; the first stage keeps the embedding, the last one norm and head."""
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


def replace_weights(stages: Iterable[nn.Module], new: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Put `new(name, parameter)` in every parameter's place; a parameter that stands in two places stays one."""
    done: dict[nn.Parameter, Tensor] = {}
    for stage in stages:
        for prefix, module in stage.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in done:
                    done[parameter] = new(f"{prefix}.{leaf}".lstrip("."), parameter)
                delattr(module, leaf)  # in case the new one is no parameter
                setattr(module, leaf, done[parameter])


def partition_weights(stages: dict[int, Stack], config: ModelConfig, layout: Layout, where: Coordinates) -> dict[nn.Parameter, Piece]:
    """Replace every weight (on the meta device) by this rank's piece of it.

    A weight that stands in the model under two names, or in every stage, becomes one parameter a rank.

    Args:
        stages: stage index -> its part of the model; names are those of the whole model.
        config: of the model.
        layout: of the job.
        where: this rank.

    Returns:
        The new parameters and which piece each is.
    """
    plan, aliases, everywhere = registry.plan(config), registry.aliases(config), registry.everywhere(config)
    axes = {"tensor": (layout.tensor, where.tensor), "expert": (layout.expert, where.expert)}
    pieces: dict[nn.Parameter, Piece] = {}
    made: dict[str, nn.Parameter] = {}

    def piece_of(name: str, parameter: nn.Parameter) -> nn.Parameter:
        name = aliases.get(name, name)
        if name not in made:
            piece = slice_weight(name, tuple(parameter.shape), role(plan, name), axes)
            shared = ""
            if layout.pipeline > 1 and name in aliases.values():
                shared = "tied_embedding"
            elif layout.pipeline > 1 and any(fnmatchcase(name, pattern) for pattern in everywhere):
                shared = "pipeline"
            made[name] = nn.Parameter(parameter.new_empty(piece.shape), requires_grad=parameter.requires_grad)
            pieces[made[name]] = replace(piece, shared=shared, copy=bool(shared) and 0 not in stages)
        return made[name]

    replace_weights(stages.values(), piece_of)
    return pieces
