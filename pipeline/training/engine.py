"""The interface between an engine, which owns the training state, and the loop and checkpoints; and the factory of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from pipeline.checkpoint.fragments import Fragment
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import PrecisionConfig
from pipeline.config.training import TrainingConfig
from pipeline.layers.nf4 import NF4Weight
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pieces import Piece
from pipeline.training.buckets import replica_of
from pipeline.training.loss_scale import LossScale
from pipeline.training.matrix_rule import ADAMW, MatrixRule
from pipeline.training.weight_update import StepResult, WeightUpdate

#: parallel.engine -> engine, imported when it is built.
ENGINES = {
    "native": "pipeline.training.native_engine:NativeEngine",
    "deepspeed": "pipeline.training.deepspeed_engine:DeepSpeedEngine",
}


class Engine(ABC):
    """Owner of weights, gradients and optimizer state on this rank.

    Attributes:
        model: this rank's stages.
        stages: the modules that a step calls, by the index of their stage.
        loss_scale: by whose factor the caller multiplies the loss before the backward pass.
        update: updates this rank's master weights.
        separate: whether the forward pass of training reads other values than those of the master weights (OptimizerKind.separate).
    """

    model: LocalModel
    stages: nn.ModuleDict
    loss_scale: LossScale
    update: WeightUpdate
    separate: bool

    @abstractmethod
    def accumulate(self, micro_batches: int, *, measure: bool = False) -> AbstractContextManager[None]:
        """A context for the backward passes of a step, `micro_batches` of every stage; at its end the gradients are reduced.

        With `measure`, the step also returns the noise of the gradient (training/noise_scale.py).
        """

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch, if there is one stage; a pipeline schedule calls autograd itself."""
        loss.backward()

    @abstractmethod
    def step(self, discarded: Tensor | None = None) -> StepResult:
        """Clip by the global norm, update the weights, clear the gradients. A non-finite gradient changes nothing.

        Args:
            discarded: 0-dim, the same on every rank: if it is above 0, the gradient counts as not finite.
        """

    @abstractmethod
    def fragments(self) -> list[Fragment]:
        """This rank's fragments of weights and optimizer state."""

    @abstractmethod
    def close(self) -> None:
        """Remove what keeps the weights in memory; the engine is not used any more."""

    def partitions(self) -> list[Tensor]:
        """This rank's partition of the weights of each bucket, as it is gathered; empty if weights are not partitioned."""
        return []

    @abstractmethod
    def forward_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        """This rank's pieces of the trained weights as the forward pass reads them. Collective: weights that are freed are gathered."""

    def after_update(self, call: Callable[[Tensor], None]) -> None:
        """Have a function called after every update with StepResult.skipped, before the new master weights are averaged and rounded."""
        self.update.after_update = call

    def gradient_point(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The fp32 values, from Fragment.tensors, of which training reads the rounded ones: master weights for most optimizers."""
        return self.update.gradient_point(tensors)

    @abstractmethod
    def round_weights(self, *, trained: bool = False) -> None:
        """Set the weights of the forward pass by `gradient_point`, or with `trained` by the master weights. Collective."""

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """A context in which the forward pass reads the weights of checkpoints, also where training computes gradients elsewhere.

        Collective. After an error the weights are not set again: a collective would wait for ranks without one, and the job ends.
        """
        if not self.separate:
            yield
            return
        self.round_weights(trained=True)
        yield
        self.round_weights()

    def updates(self) -> int:
        """Optimizer updates so far, without skipped steps."""
        return self.update.updates()

    def counters(self) -> Tensor:
        """`updates()` and `loss_scale.state()` as numbers, fp64 (3,), without waiting for the device."""
        return self.update.counters()

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """Adopt fragments that were loaded in place, as the state after `updates` updates."""
        self.update.loaded(updates)
        self.round_weights()


def build_engine(
    model: LocalModel,
    mesh: Mesh,
    optimizer: OptimizerConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    rule: MatrixRule = ADAMW,
) -> Engine:
    """Build the configured engine for this rank's stages."""
    engine: Engine = resolve_name(ENGINES[parallel.engine])(model, mesh, optimizer, training, parallel, precision, rule)
    return engine


def fixed_fragments(model: LocalModel, mesh: Mesh) -> list[Fragment]:
    """Fragments of the weights that no optimizer updates, without its state."""
    weights: list[tuple[Tensor | NF4Weight, Piece]] = [(value.detach().view(-1), piece) for value, piece in model.fixed.items()]
    weights += model.quantized.items()
    return [Fragment(piece, 0, {"weight": value}, *replica_of(piece, mesh)) for value, piece in weights]
