"""Whether a bf16 run rounds gradients between the micro-batches and the optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.layers.batch import Batch
from pipeline.training.trainer import Trainer


def reduction_error(trainer: Trainer, tokens: Tensor, batch: Batch, micro_batches: int) -> float:
    """Compare the reduced gradient with the fp32 mean of the micro-batches' gradients. Collective; data parallelism only.

    Args:
        trainer: of a bf16 model.
        tokens: this rank's share of a global batch.
        batch: its targets.
        micro_batches: number of micro-batches of the share.

    Returns:
        The largest difference of an element, relative to the largest element.
    """
    parameters = list(trainer.model.pieces)
    stage = trainer.model.stages["0"]
    expected = [torch.zeros(trainer.model.pieces[p].shape) for p in parameters]
    for part, targets in zip(tokens.chunk(micro_batches), batch["targets"].chunk(micro_batches), strict=True):
        gradients = torch.autograd.grad(stage(part, targets=targets) / micro_batches, parameters)  # calls no hook of the parameters
        assert any(gradient.dtype == torch.bfloat16 for gradient in gradients)
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient.float()
    for total in expected:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    found = _reduced(trainer, tokens, batch)
    largest = max(float(total.abs().max()) for total in expected)
    return max(float((found[p] - total).abs().max()) for p, total in zip(parameters, expected, strict=True)) / largest


def _reduced(trainer: Trainer, tokens: Tensor, batch: Batch) -> dict[torch.nn.Parameter, Tensor]:
    """The gradients that the engine reduces, gathered from their partitions."""
    pipeline = trainer._pipeline(tokens, batch)
    with trainer.engine.accumulate(pipeline.micro_batches):
        pipeline.train(tokens, batch)
    reducer = trainer.engine._reducer  # type: ignore[attr-defined] # of all engines
    found: dict[torch.nn.Parameter, Tensor] = {}
    for bucket in reducer.buckets:
        partition = reducer.reduced(bucket)
        flat = partition.new_empty(bucket.elements) if bucket.ranks > 1 else partition
        if bucket.ranks > 1:
            dist.all_gather_into_tensor(flat, partition, group=bucket.group)
        found |= {p: bucket.view(flat, p) for p in bucket.pieces}
    return found
