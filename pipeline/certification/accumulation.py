"""Part "precision": gradients of micro-batches are added without rounding errors of the job's precision.

Micro-batches of equal samples have equal gradients. A step of four times as many, each with a quarter of the weight, has the same
gradient if sums are kept in fp32: gradients in a lower precision have few digits, and four is a power of two.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.certification.batches import RandomBatch, Rows, random_batches, split
from pipeline.certification.layout_training import begin, gather, train_steps
from pipeline.certification.parts import PartReport
from pipeline.certification.reference import micro_batches_of
from pipeline.config.layout import Layout
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch

#: How many times as many micro-batches the second step has.
FACTOR = 4
#: Largest relative difference: rounding errors of fp32.
TOLERANCE = 1e-5


def report(config: RunConfig) -> PartReport:
    """Train a step on few and a step on many equal micro-batches, and compare their gradients. Collective."""
    few, many = (_first_moments(config, factor) for factor in (1, FACTOR))
    found = PartReport("precision")
    if not any(bool(moment.any()) for moment in few.values()):
        found.not_covered.append("sums over micro-batches: the first step is skipped, since its gradients overflow")
        return found
    for name, moment in few.items():
        difference = float((many[name] - moment).norm() / moment.norm().clamp(min=torch.finfo(torch.float32).tiny))
        if not difference <= TOLERANCE:
            found.failures.append(
                f"the gradient of {name} depends on the number of equal micro-batches, by {difference:.1e}: their sum is not kept in fp32"
            )
    found.covered.append(f"sums over micro-batches: equal ones, and {FACTOR} times as many, have the same gradients")
    return found


def _first_moments(config: RunConfig, factor: int) -> dict[str, Tensor]:
    """Return Adam's first moments after a step whose micro-batches are equal on each rank, and `factor` times as many as in the run."""
    # fp16 rounds small gradients to multiples of 2^-24: with as large a loss scale, those of a micro-batch are the same numbers.
    precision = dataclasses.replace(config.precision, initial_loss_scale=config.precision.initial_loss_scale * factor)
    trainer = begin(dataclasses.replace(config, precision=precision))
    train_steps(trainer, [(0, _of_equal_parts(config, factor))], ())
    return gather(trainer.engine.fragments(), {OPTIMIZERS[config.optimizer.name].moment: "moment"}, trainer.model.fixed_names())["moment"]


def _of_equal_parts(config: RunConfig, factor: int) -> RandomBatch:
    """Return a global batch: that of the first step, in which every data rank has only its first micro-batch, repeated."""
    tokens, batch = random_batches(config, 1)[0]
    shards = Layout.of(config, dist.get_world_size()).batch_shards
    parts = []
    for own, fields in split(tokens, batch, shards):
        count = micro_batches_of(config, own)
        parts.append((split(own, fields, count)[0], count * factor))
    return (
        torch.cat([first for (first, _), times in parts for _ in range(times)]),
        cast(Batch, {name: torch.cat([cast(Rows, fields)[name] for (_, fields), times in parts for _ in range(times)]) for name in batch}),
    )
