"""ZeRO 1, 2 and 3 behind the Engine interface. Only this file and zero_optimizer.py know DeepSpeed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.fragments import Fragment
from pipeline.config.schema import OptimizerConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.training import gradient_clipping
from pipeline.training.buckets import Bucket, build_buckets, is_primary_copy, partition_fragments
from pipeline.training.engine import Engine, StepResult, fixed_fragments
from pipeline.training.gradient_reduction import GradientReducer, Reduction
from pipeline.training.loss_scale import LossScale
from pipeline.training.lr_schedule import learning_rate
from pipeline.training.optimizers import OPTIMIZERS, create_state
from pipeline.training.weight_averaging import WeightAverage
from pipeline.training.weight_gathering import WeightGatherer

#: ZeRO stage -> what remains of a gradient, and when it is reduced.
REDUCTIONS = {1: Reduction.PARTITION, 2: Reduction.PARTITION_EACH, 3: Reduction.PARTITION_EACH}


def _prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed without its warnings, and make it use the process groups of this job."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed uses deprecated names of collectives: two lines per rank in every job's log.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    import deepspeed

    # None of DeepSpeed's operators is used. To learn which ones it can compile, it would run compilers, and on a CPU it would compile one.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)


class ZeroEngine(Engine):
    """ZeRO 1, 2 and 3: the state of every bucket is sharded over the ranks that hold the same weights."""

    def __init__(
        self,
        model: LocalModel,
        mesh: Mesh,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
    ) -> None:
        _prepare_deepspeed(mesh.device)
        from pipeline.training.deepspeed_optimizer import BucketZeroOptimizer

        self.model = model
        self._mesh, self._optimizer, self._training = mesh, optimizer, training
        self._kind = OPTIMIZERS[optimizer.name]
        self._buckets = build_buckets(model, mesh, sequence_parallel=parallel.sequence_parallel)
        decay = optimizer.weight_decay
        groups: list[dict[str, Any]] = [{"params": list(b.pieces), "weight_decay": decay if b.decays else 0.0} for b in self._buckets]
        stage = parallel.zero_stage
        self.loss_scale = LossScale(precision, mesh.device)
        self._zero = BucketZeroOptimizer(
            self._kind.build(groups, optimizer, optimizer.lr),
            self._buckets,
            self._global_norm,
            optimizer.gradient_clipping,
            self.loss_scale,
            model.materialize,
            shard_weights=stage == 3,
        )
        self._average = WeightAverage(training, self._zero.single_partition_of_fp32_groups)
        self._gatherer = WeightGatherer(self._zero.weights, model.stages)
        self._reducer = GradientReducer(self._buckets, mesh, REDUCTIONS[stage], self._gatherer.backward_finished)
        #: Index of a bucket and slice of its partition, for every weight that counts in the global norm.
        self._primary = [
            (index, where)
            for index, bucket in enumerate(self._buckets)
            for parameter, where in bucket.partition_slices().items()
            if is_primary_copy(bucket.pieces[parameter], mesh, sharded=True)
        ]
        self._updates = 0

    @contextmanager
    def accumulate(self, micro_batches: int) -> Iterator[None]:
        """See Engine."""
        with self._reducer.accumulate(micro_batches):
            yield
        self._gatherer.finish()

    def step(self) -> StepResult:
        """See Engine. DeepSpeed waits for the device once, to learn whether the norm is finite."""
        rate = learning_rate(self._updates, self._optimizer, self._training)
        for index, (group, bucket) in enumerate(zip(self._zero.param_groups, self._buckets, strict=True)):
            group["lr"] = rate
            self._zero.set_gradient(index, self._reducer.reduced(bucket))
        self._reducer.release()
        self._zero.step()
        self._gatherer.refresh()
        skipped = bool(self._zero.overflow)  # on the host since step(); is_skipped(norm) would wait for the device once more
        self._updates += not skipped
        norm = torch.as_tensor(self._zero._global_grad_norm, dtype=torch.float32)
        result = StepResult(norm, torch.tensor(float(skipped)), torch.tensor(rate))
        on_device = result.skipped.to(self._mesh.device, non_blocking=True)
        self._average.update(on_device)
        self.loss_scale.update(on_device)
        return result

    def _global_norm(self) -> Tensor:
        """The norm of the full gradient, without the loss scale, before clipping."""
        primary = [self._zero.averaged_gradients[index].flat_partition[where] for index, where in self._primary]
        return self.loss_scale.divide(gradient_clipping.global_norm(primary, self._mesh.all_ranks, self._mesh.device))

    def fragments(self) -> list[Fragment]:
        """See Engine."""
        masters: list[Tensor] = self._zero.single_partition_of_fp32_groups
        create_state(self._zero.optimizer, self._kind, masters)
        learned = [fragment for index, bucket in enumerate(self._buckets) for fragment in self._fragments(index, bucket, masters[index])]
        return learned + fixed_fragments(self.model, self._mesh)

    def _fragments(self, index: int, bucket: Bucket, master: Tensor) -> list[Fragment]:
        """This rank's elements of a bucket: one contiguous range of each weight in the partition."""
        state = self._zero.optimizer.state[master]
        flat = {"weight": master.detach(), **{name: state[name] for name in self._kind.state}, **self._average.tensors(index)}
        return partition_fragments(bucket, self._mesh, flat)

    def updates(self) -> int:
        """See Engine."""
        return self._updates

    def counters(self) -> Tensor:
        """See Engine."""
        updates = torch.tensor([self._updates], dtype=torch.float64).to(self._mesh.device, non_blocking=True)
        return torch.cat([updates, self.loss_scale.counters(self._mesh.device)])

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """See Engine."""
        self._updates = updates
        for master in self._zero.single_partition_of_fp32_groups:
            self._zero.optimizer.state[master]["step"].fill_(updates)
        self._zero.round_weights()
        self._gatherer.refresh()
