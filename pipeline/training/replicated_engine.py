"""ZeRO stage 0: every data rank holds the full state of its part of the model. DeepSpeed is not used.

A step does not synchronize with the device: norm, clipping, the check for non-finite gradients and the learning rate are tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.checkpoint.fragments import Fragment
from pipeline.config.schema import OptimizerConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.training import gradient_clipping
from pipeline.training.buckets import build_buckets, is_primary_copy, replica_of
from pipeline.training.engine import Engine, StepResult, fixed_fragments
from pipeline.training.gradient_reduction import GradientReducer, Reduction
from pipeline.training.loss_scale import LossScale
from pipeline.training.lr_schedule import learning_rate
from pipeline.training.optimizers import OPTIMIZERS, Groups, create_state
from pipeline.training.skipped_steps import is_skipped
from pipeline.training.weight_averaging import WeightAverage


class ReplicatedEngine(Engine):
    """The optimizer on fp32 master weights; the weights of an fp32 model are their own master weights."""

    def __init__(
        self,
        model: LocalModel,
        mesh: Mesh,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
    ) -> None:
        self.model = model
        self._mesh = mesh
        self._clipping = optimizer.gradient_clipping
        self.loss_scale = LossScale(precision, mesh.device)
        buckets = build_buckets(model, mesh, sequence_parallel=parallel.sequence_parallel)
        self._reducer = GradientReducer(buckets, mesh, Reduction.ALL)
        self._parameters = list(model.pieces)
        low = precision.dtype != "fp32"
        self._masters: list[Tensor] = [p.detach().float() if low else p for p in self._parameters]
        self._low = [p.detach() for p in self._parameters] if low else []

        rates = [learning_rate(update, optimizer, training) for update in range(training.steps)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=mesh.device)
        self._updates = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._lr = torch.zeros((), dtype=torch.float32, device=mesh.device)
        self._kind = OPTIMIZERS[optimizer.name]
        self._optimizer = self._kind.build(self._groups(optimizer.weight_decay), optimizer, self._lr)
        self._average = WeightAverage(training, self._masters)

    def _groups(self, weight_decay: float) -> Groups:
        """Parameter groups of the master weights: those of a bucket decay, or none of them."""
        master_of = dict(zip(self._parameters, self._masters, strict=True))
        decays = {True: weight_decay, False: 0.0}
        members = {
            kind: [master_of[p] for bucket in self._reducer.buckets if bucket.decays is kind for p in bucket.pieces] for kind in decays
        }
        return [{"params": members[kind], "weight_decay": decay} for kind, decay in decays.items() if members[kind]]

    @contextmanager
    def accumulate(self, micro_batches: int) -> Iterator[None]:
        """See Engine."""
        with self._reducer.accumulate(micro_batches):
            yield
        for bucket in self._reducer.buckets:
            for parameter in bucket.pieces:
                parameter.grad = bucket.view(self._reducer.reduced(bucket), parameter)
        self._reducer.release()

    @torch.no_grad()
    def step(self) -> StepResult:
        """See Engine. Clipping is passed as the optimizer's grad_scale and skipping as found_inf: neither reads the gradients once more."""
        primary = [p.grad for p, piece in self.model.pieces.items() if p.grad is not None and is_primary_copy(piece, self._mesh)]
        model = (self._mesh.tensor, self._mesh.expert, self._mesh.pipeline)  # one replica
        norm = self.loss_scale.divide(gradient_clipping.global_norm(primary, model, self._mesh.device))
        skipped = is_skipped(norm)
        self._lr.copy_(self._rates.take(self._updates.clamp(max=len(self._rates) - 1)))  # indexing by a tensor would synchronize
        self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self._optimizer.grad_scale = gradient_clipping.divisor(norm, self._clipping, self.loss_scale.factor)  # type: ignore[attr-defined]
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.grad
        self._optimizer.step()
        self._updates += (1 - skipped).long()
        self._average.update(skipped)
        self.loss_scale.update(skipped)
        if self._low:
            torch._foreach_copy_(self._low, self._masters)
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.grad = None
        return StepResult(norm, skipped, self._lr.clone())

    def fragments(self) -> list[Fragment]:
        """See Engine."""
        create_state(self._optimizer, self._kind, self._masters)
        learned = [
            Fragment(
                self.model.pieces[parameter],
                0,
                {
                    "weight": master.detach().view(-1),
                    **{name: self._optimizer.state[master][name].view(-1) for name in self._kind.state},
                    **self._average.tensors(index),
                },
                *replica_of(self.model.pieces[parameter], self._mesh),
            )
            for index, (parameter, master) in enumerate(zip(self._parameters, self._masters, strict=True))
        ]
        return learned + fixed_fragments(self.model, self._mesh)

    def updates(self) -> int:
        """See Engine."""
        return int(self._updates.item())

    def counters(self) -> Tensor:
        """See Engine."""
        return torch.cat([self._updates.double()[None], self.loss_scale.counters(self._mesh.device)])

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """See Engine."""
        self._updates.fill_(updates)
        for master in self._masters:
            self._optimizer.state[master]["step"].fill_(updates)
        if self._low:
            torch._foreach_copy_(self._low, self._masters)
