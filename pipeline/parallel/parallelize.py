"""From a plain model to this rank's part of it, in one fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.layers.attention import Core, plain, sdpa
from pipeline.layers.flex import automatic, flex
from pipeline.layers.init import initial_tensor
from pipeline.layers.stack import Stack
from pipeline.models import registry
from pipeline.parallel import context, expert, tensor
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.partition import partition_weights, replace_weights, take_stage
from pipeline.parallel.pieces import Piece

#: training.attention -> what computes it
CORES: dict[str, Core] = {"auto": automatic, "sdpa": sdpa, "flex": flex, "plain": plain}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LocalModel(nn.Module):
    """The pipeline stages of one rank. The pipeline schedule calls them one by one; the whole is never called.

    Attributes:
        stages: stage index (as text) -> its part of the model.
        pieces: parameter -> which piece of which full weight it is.
        fixed: the same for weights that no gradient moves (the bias of a router), fp32. They are plain tensors, no parameters, so that
            DeepSpeed neither casts nor shards them.
    """

    def __init__(self, stages: dict[int, Stack], pieces: dict[nn.Parameter, Piece]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(stage): module for stage, module in stages.items()})
        self.pieces = pieces
        self.fixed: dict[Tensor, Piece] = {}

    def parts(self) -> Iterator[Stack]:
        """The stages in order."""
        for module in self.stages.values():
            assert isinstance(module, Stack)
            yield module


def parallelize(config: RunConfig, mesh: Mesh) -> LocalModel:
    """This rank's stages: cut on the meta device, wired to its groups, then filled with initial weights on its device.

    On the meta device (the dry run) nothing is filled.
    """
    model = partition_model(config, mesh.layout, mesh.rank)
    plan = registry.plan(config.model)
    for stage in model.parts():
        if mesh.layout.tensor > 1:
            tensor.apply(stage, model.pieces, plan, mesh.tensor, sequence=config.parallel.sequence_parallel)
        expert.apply(stage, mesh)
        for layer in attention_layers(stage):
            layer.core = CORES[config.training.attention]
        if mesh.layout.context > 1:
            context.apply(attention_layers(stage), mesh.context, config.parallel.context_kind)
        recompute(stage, config.training.activation_checkpointing)
        if compiles(config, mesh.device):
            if mesh.layout.context > 1:
                for layer in attention_layers(stage):
                    layer.core = torch.compiler.disable(layer.core)  # ranks talk within it
            for block in stage.blocks.values():
                block.compile()
    if mesh.device.type != "meta":
        fill(model, config, mesh.device)
    return model


def attention_layers(model: nn.Module) -> list[Any]:
    """Every module whose `core` computes attention."""
    return [module for module in model.modules() if hasattr(module, "core")]


def partition_model(config: RunConfig, layout: Layout, rank: int) -> LocalModel:
    """The rank's stages with the rank's pieces of every weight, on the meta device. Needs no process group."""
    where = layout.coordinates(rank)
    with torch.device("meta"):
        stages = {index: take_stage(registry.build(config.model), layout, index) for index in layout.stages(where.pipeline)}
        return LocalModel(stages, partition_weights(stages, config.model, layout, where))


def fill(model: LocalModel, config: RunConfig, device: torch.device) -> None:
    """Give every weight storage and its initial values: slices of the full weights, which depend on the seed and the name alone."""
    dtype = DTYPES[config.precision.dtype]
    pieces: dict[nn.Parameter, Piece] = {}

    def filled(_: str, parameter: nn.Parameter) -> Tensor:
        piece = model.pieces[parameter]
        value = initial_piece(piece, registry.initial_std(config.model, piece.name), config.training.seed)
        kind = dtype if parameter.requires_grad else torch.float32
        local = value.to(device=device, dtype=kind, copy=True, memory_format=torch.contiguous_format)
        if not parameter.requires_grad:
            model.fixed[local] = piece
            return local
        learned = nn.Parameter(local)
        pieces[learned] = piece
        return learned

    replace_weights(model.parts(), filled)
    model.pieces = pieces
    for stage in model.parts():
        stage.reset_buffers()


def initial_piece(piece: Piece, std: float | None, seed: int) -> Tensor:
    """The initial value of a piece, fp32 on the CPU; of a stack no more than the piece's own matrices are drawn."""
    if len(piece.full_shape) < 3:
        return piece.of(initial_tensor(piece.name, piece.full_shape, std, seed))
    first = piece.start(0)
    cuts = tuple(replace(cut, dim=cut.dim - 1) for cut in piece.slices if cut.dim > 0)
    matrices = (Piece(f"{piece.name}.{index}", piece.full_shape[1:], cuts) for index in range(first, first + piece.shape[0]))
    return torch.stack([matrix.of(initial_tensor(matrix.name, matrix.full_shape, std, seed)) for matrix in matrices])


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether the blocks are compiled. The split backward pass of zbv cannot be."""
    if config.parallel.schedule == "zbv" and config.parallel.pipeline > 1:
        return False
    return config.training.compile == "on" or (config.training.compile == "auto" and device.type == "cuda")


def recompute(model: Stack, what: str) -> None:
    """Let the backward pass recompute the blocks (`full`), or all of them but matrix products and attention (`selective`)."""
    if what == "none":
        return
    options: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)} if what == "selective" else {}
    for block in model.blocks.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_products(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:  # noqa: ARG001 - torch's signature
    """Keep what costs most to compute for each byte."""
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
