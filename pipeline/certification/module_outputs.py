"""Where a forward pass differs from that of the plain loop: the outputs of the modules, of the first micro-batch of the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.certification.batches import random_batches, split, with_loss_scale
from pipeline.certification.layout_training import begin
from pipeline.certification.reference import build_plain, micro_batches_of
from pipeline.certification.reference_loss import reference_loss
from pipeline.config import loss_weights
from pipeline.config.layout import Coordinates, Layout
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.layers.stack import Stack
from pipeline.parallel.mesh import gather_objects
from pipeline.parallel.ring_layout import token_positions

#: Compared are outputs (batch, sequence, width). Those of experts and routers, whose tokens are in another order, have fewer dimensions,
#: those of single heads, in which the sequence follows the heads, more.
DIMENSIONS = 3


def first_module(config: RunConfig, tolerance: float) -> str:
    """Return the first module whose output differs on a rank, with the rank and the difference; empty if none does. Collective.

    Args:
        config: in fp32; legal for the number of ranks.
        tolerance: largest relative difference that is a rounding error.
    """
    trainer = begin(config)
    layout, where = trainer.mesh.layout, trainer.mesh.coordinates
    tokens, batch = next(iter(random_batches(config)))
    local, fields = split(tokens, batch, layout.batch_shards)[layout.batch_shard(where)]
    with _first_outputs(trainer.model.stage_modules()) as outputs:
        trainer.train(local, fields, step=0)
    expected = _plain_outputs(config, *split(local, with_loss_scale(fields), micro_batches_of(config, local))[0])
    differing = []
    for order, (name, full) in enumerate(expected.items()):
        part = None if name not in outputs else local_part(full, outputs[name].shape, layout, where, config.parallel.context_kind)
        if part is None:
            continue
        error, size = float((outputs[name] - part).norm()), float(part.norm())
        if not error <= tolerance * size:
            differing.append((order, -error / size if size else -torch.inf, name, _text(layout, where)))
    first = min((entry for entries in gather_objects(differing[:1]) for entry in entries), default=None)
    return "" if first is None else f"{first[2]}{first[3]}: {-first[1]:.1e}"


def local_part(full: Tensor, shape: Sequence[int], layout: Layout, where: Coordinates, context_kind: str) -> Tensor | None:
    """Return the part of an output that a rank computes.

    Args:
        full: (batch, sequence, width), the output of one process.
        shape: of the rank's output. Its sequence is divided over the context ranks, and with sequence parallelism over the tensor ranks;
            its width may be divided over the tensor ranks.
        layout, where: of the rank.
        context_kind: parallel.context_kind.

    Returns:
        A tensor of this shape; None if it is not such a part.
    """
    if not len(shape) == full.dim() == DIMENSIONS or full.shape[0] != shape[0]:
        return None
    part = full
    if layout.context > 1:
        local = full.shape[1] // layout.context
        first = torch.arange(local) + where.context * local
        ring = context_kind == "ring"
        part = part[:, token_positions(where.context, layout.context, local, full.device) if ring else first]
    for dim in (1, 2):
        if part.shape[dim] == layout.tensor * shape[dim]:
            part = part.chunk(layout.tensor, dim)[where.tensor]
    return part if part.shape == tuple(shape) else None


@contextmanager
def _first_outputs(models: Iterable[nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the first output of every module that returns one tensor of numbers, in the order in which the modules end."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and name not in outputs:
            outputs[name] = output.detach().clone()

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: keep(name, output))
        for model in models
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _plain_outputs(config: RunConfig, tokens: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Return the outputs of the modules in one process, for a micro-batch."""
    model = build_plain(config, torch.float32)
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        stack.set_loss_weights(loss_weights.at(config.model, config.training, 0))
    with _first_outputs([model]) as outputs:
        reference_loss(model, tokens, batch)
    return outputs


def _text(layout: Layout, where: Coordinates) -> str:
    """Return the coordinates of a rank on the axes that have several ranks."""
    axes = ("pipeline", "data", "expert", "context", "tensor")
    return "".join(f", {axis} rank {getattr(where, axis)}" for axis in axes if getattr(layout, axis) > 1)
