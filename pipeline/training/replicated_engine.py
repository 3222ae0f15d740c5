"""ZeRO stage 0: every data rank holds the full state of its part of the model. DeepSpeed is not used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.checkpoint.fragments import Fragment
from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import PrecisionConfig
from pipeline.config.training import TrainingConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import DTYPES, LocalModel
from pipeline.parallel.pieces import Piece
from pipeline.training import gradient_clipping, muon, noise_scale
from pipeline.training.buckets import build_buckets, is_primary_copy, replica_of
from pipeline.training.elementwise_optimizers import Groups
from pipeline.training.engine import Engine, fixed_fragments
from pipeline.training.gradient_reduction import GradientReducer, Reduction
from pipeline.training.loss_scale import LossScale
from pipeline.training.matrix_layout import Space
from pipeline.training.matrix_rule import MatrixRule
from pipeline.training.weight_update import StepResult, WeightUpdate


class ReplicatedEngine(Engine):
    """The optimizer on fp32 master weights; those of an fp32 model are its weights, unless its gradients are computed elsewhere."""

    def __init__(
        self,
        model: LocalModel,
        mesh: Mesh,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        rule: MatrixRule,
    ) -> None:
        self.model = model
        self._mesh = mesh
        self.loss_scale = LossScale(precision, mesh.device)
        buckets = build_buckets(model, mesh, sequence_parallel=parallel.sequence_parallel, rule=rule)
        self._reducer = GradientReducer(buckets, mesh, Reduction.ALL, DTYPES[precision.reduce_dtype])
        self._parameters = list(model.pieces)
        self.separate = OPTIMIZERS[optimizer.name].separate
        low = precision.dtype != "fp32" or self.separate
        self._masters: list[Tensor] = [p.detach().to(torch.float32, copy=True) if low else p for p in self._parameters]
        self._low = [p.detach() for p in self._parameters] if low else []

        self.update = WeightUpdate(self._groups(optimizer.weight_decay), optimizer, training, self.loss_scale, mesh.device)
        self.update.begin(self._masters)
        master_of = dict(zip(self._parameters, self._masters, strict=True))
        spaces = (
            Space(master_of[weight], ((piece, 0),), bucket.group, divided=False)
            for bucket in buckets
            if bucket.muon
            for weight, piece in bucket.pieces.items()
        )
        muon.begin(self.update.optimizer, spaces, rule, mesh.tensor, precision.dtype)

    def _groups(self, weight_decay: float) -> Groups:
        """Parameter groups of the master weights: those of a bucket decay, or none of them, have one rate, and Muon updates all or none."""
        master_of = dict(zip(self._parameters, self._masters, strict=True))
        members: dict[tuple[float, bool, float], list[Tensor]] = {}
        for bucket in self._reducer.buckets:
            kind = weight_decay if bucket.decays else 0.0, bucket.muon, bucket.rate
            members.setdefault(kind, []).extend(master_of[p] for p in bucket.pieces)
        return [
            {"params": masters, "weight_decay": decay, "muon": hidden, "rate": rate} for (decay, hidden, rate), masters in members.items()
        ]

    @contextmanager
    def accumulate(self, micro_batches: int, *, measure: bool = False) -> Iterator[None]:
        """See Engine."""
        with self._reducer.accumulate(micro_batches, measure=measure):
            yield
        for bucket in self._reducer.buckets:
            for parameter in bucket.pieces:
                parameter.grad = bucket.view(self._reducer.reduced(bucket), parameter)
        self._reducer.release()

    @torch.no_grad()
    def step(self) -> StepResult:
        """See Engine."""
        primary = [p.grad for p, piece in self.model.pieces.items() if p.grad is not None and is_primary_copy(piece, self._mesh)]
        model = (self._mesh.tensor, self._mesh.expert, self._mesh.pipeline)  # one replica
        norm = self.loss_scale.divide(gradient_clipping.global_norm(primary, model, self._mesh.device))
        noise = noise_scale.measured(norm, self._reducer.shares(), self.loss_scale)
        result = self.update.step(norm, [parameter.grad for parameter in self._parameters])
        self.round_weights()
        for parameter in self._parameters:
            parameter.grad = None
        return replace(result, more=noise)

    @torch.no_grad()
    def round_weights(self, *, trained: bool = False) -> None:
        """See Engine."""
        if self.separate and not trained:  # one after the other: the values of all would double the memory
            for index, weight in enumerate(self._low):
                weight.copy_(self.gradient_point(self.update.state(index)).view_as(weight))
        elif self._low:
            torch._foreach_copy_(self._low, self._masters)

    def fragments(self) -> list[Fragment]:
        """See Engine."""
        self.update.create_state()
        learned = []
        for index, parameter in enumerate(self._parameters):
            piece = self.model.pieces[parameter]
            learned.append(Fragment(piece, 0, {**self.update.state(index)}, *replica_of(piece, self._mesh)))
        return learned + fixed_fragments(self.model, self._mesh)

    def forward_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        """See Engine."""
        for parameter, piece in self.model.pieces.items():
            yield piece, parameter.detach()
