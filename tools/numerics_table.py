"""What tools/numerics audits: a small model of every family, the layouts it is trained in, and random batches of its objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE

WORLD = 8
STEPS = 10

COMMON = (
    "precision=fp32",
    "model.vocab_size=101",  # odd: the vocabulary's pieces have different sizes
    "training.sequence_length=16",
    f"training.steps={STEPS}",
    "training.global_batch_size=32",
    "training.micro_batch_size=2",
    "optimizer.lr=0.001",
    "optimizer.warmup_steps=2",
    "optimizer.gradient_clipping=0.5",
    "optimizer.eps=1e-6",
)
SIZES = ("model.layers=8", "model.hidden=64", "model.heads=8", "model.ffn_hidden=96", "model.max_positions=32")


@dataclass(frozen=True)
class Row:
    """One layout: sizes of its axes and what else is special."""

    tensor: int
    pipeline: int
    zero: int
    schedule: str = "1f1b"
    more: tuple[str, ...] = ()
    context: int = 1
    expert: int = 1

    @property
    def data(self) -> int:
        """What is left of the world."""
        return WORLD // (self.tensor * self.pipeline * self.context * self.expert)

    def overrides(self) -> list[str]:
        """The command line that asks for it."""
        axes = ("tensor", "pipeline", "context", "expert")
        return [
            *(f"parallel.{axis}={getattr(self, axis)}" for axis in axes),
            f"parallel.zero_stage={self.zero}",
            f"parallel.schedule={self.schedule}",
            *self.more,
        ]

    def __str__(self) -> str:
        more = [f"{axis} {getattr(self, axis)}" for axis in ("context", "expert") if getattr(self, axis) > 1]
        more += [m.rpartition(".")[2] for m in self.more]
        return " ".join([f"tensor {self.tensor} pipeline {self.pipeline} data {self.data} zero {self.zero} {self.schedule}", *more])


NO_SEQUENCE = ("parallel.sequence_parallel=false",)
ULYSSES = ("parallel.context_kind=ulysses",)

#: Every family.
SOME = (
    Row(1, 1, 3),
    Row(2, 1, 1),
    Row(4, 1, 2, more=NO_SEQUENCE),
    Row(1, 2, 0, "zbv"),
    Row(1, 2, 2, "interleaved"),
    Row(2, 2, 1),
    Row(2, 2, 3, more=("training.activation_checkpointing=full",)),
)
#: gpt and llama.
ALL = (
    *(Row(1, 1, zero) for zero in (0, 1, 2, 3)),
    *(Row(2, 1, zero) for zero in (0, 1, 3)),
    Row(4, 1, 2),
    Row(2, 1, 1, more=NO_SEQUENCE),
    Row(4, 1, 2, more=NO_SEQUENCE),
    *(Row(1, 2, zero) for zero in (0, 1, 3)),
    Row(1, 4, 2),
    Row(1, 8, 1),
    *(Row(1, 2, zero, "interleaved") for zero in (0, 2, 3)),
    *(Row(1, 4, zero, "zbv") for zero in (0, 1)),
    *(Row(2, 2, zero) for zero in (0, 1, 2, 3)),
    Row(2, 2, 2, more=NO_SEQUENCE),
    *(Row(2, 2, zero, "interleaved") for zero in (0, 1)),
    *(Row(2, 2, zero, "zbv") for zero in (0, 2)),
    Row(4, 2, 1, "zbv", NO_SEQUENCE),
    Row(2, 2, 1, more=("training.activation_checkpointing=full",)),
    Row(2, 2, 3, more=("training.activation_checkpointing=selective",)),
)
#: Decoders: long sequences on several ranks.
CONTEXT = (
    Row(1, 1, 1, context=2),
    Row(2, 2, 0, context=2),
    Row(1, 1, 3, context=4),
    Row(1, 2, 1, more=ULYSSES, context=2),
    Row(2, 1, 2, more=ULYSSES, context=2),
)
#: Mixtures of experts.
EXPERT = (
    Row(1, 1, 0, expert=4),
    Row(2, 1, 1, expert=2),
    Row(2, 1, 2, more=NO_SEQUENCE, expert=2),
    Row(1, 2, 3, expert=2),
    Row(2, 2, 1, expert=2),
)
