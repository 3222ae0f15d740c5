"""ZeRO 1, 2 and 3 behind the Engine interface. Only this file and deepspeed_optimizer.py know DeepSpeed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline.checkpoint.fragments import Fragment
from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import PrecisionConfig
from pipeline.config.training import TrainingConfig
from pipeline.layers.linear import Linear
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import DTYPES, LocalModel
from pipeline.parallel.pieces import Piece
from pipeline.parallel.tensor_parallel import joint_layers
from pipeline.training import gradient_clipping, muon, noise_scale
from pipeline.training.buckets import Bucket, build_buckets, is_primary_copy, partition_fragments
from pipeline.training.elementwise_optimizers import Groups
from pipeline.training.engine import Engine, fixed_fragments
from pipeline.training.gradient_reduction import GradientReducer, Reduction
from pipeline.training.loss_scale import LossScale
from pipeline.training.matrix_layout import Space
from pipeline.training.matrix_rule import MatrixRule
from pipeline.training.offloaded_update import OffloadedUpdate
from pipeline.training.weight_gathering import FlatWeights, WeightGatherer
from pipeline.training.weight_update import StepResult, WeightUpdate

log = logging.getLogger("pipeline")

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
    """ZeRO 1, 2 and 3: the state of every bucket is sharded over the ranks that hold the same weights, or over groups of them."""

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
        _prepare_deepspeed(mesh.device)
        from pipeline.training.deepspeed_optimizer import BucketZeroOptimizer

        self.model = model
        self._mesh = mesh
        self._buckets = build_buckets(model, mesh, sequence_parallel=parallel.sequence_parallel, rule=rule)
        decay = optimizer.weight_decay
        groups: Groups = [
            {"params": list(b.pieces), "weight_decay": decay if b.decays else 0.0, "muon": b.muon, "rate": b.rate} for b in self._buckets
        ]
        stage = parallel.zero_stage
        self.loss_scale = LossScale(precision, mesh.device)
        self._offloads = parallel.offload == "optimizer"
        update = OffloadedUpdate if self._offloads else WeightUpdate
        self.separate = OPTIMIZERS[optimizer.name].separate
        self.update = update(groups, optimizer, training, self.loss_scale, mesh.device)
        self._zero = BucketZeroOptimizer(
            *(self.update.optimizer, self._buckets, model.materialize),
            shard_weights=stage == 3,
            offload=self._offloads,
            separate=self.separate,
            joint_layers=joint_layers(model.stages),
        )
        self.update.begin(self._zero.masters)
        spaces = (
            Space(master, tuple((piece, bucket.offsets[weight]) for weight, piece in bucket.pieces.items()), bucket.group, divided=True)
            for bucket, master in zip(self._buckets, self._zero.masters, strict=True)
            if bucket.muon
        )
        muon.begin(self.update.optimizer, spaces, rule, mesh.tensor, precision.dtype)
        self._frozen = shard_frozen(model, mesh)
        self._gatherer = WeightGatherer([*self._zero.weights, *self._frozen], model.stages)
        wire_dtype = DTYPES[precision.reduce_dtype]
        self._reducer = GradientReducer(
            self._buckets, mesh, REDUCTIONS[stage], wire_dtype, self._gatherer.backward_finished, self._begin_offload()
        )
        #: Index of a bucket and slice of its partition, for every weight that counts in the global norm.
        self._primary = [
            (index, where)
            for index, bucket in enumerate(self._buckets)
            for parameter, where in bucket.partition_slices().items()
            if bucket.replica == 0 and is_primary_copy(bucket.pieces[parameter], mesh, sharded=True)
        ]

    def _begin_offload(self) -> Callable[[Bucket, Tensor], None]:
        """Return what is called with the final gradient of a bucket."""
        if not isinstance(self.update, OffloadedUpdate):
            return lambda _bucket, _gradient: None
        update, weights = self.update, self._zero.weights
        index = {flat.bucket: number for number, flat in enumerate(weights)}
        order = [index[flat.bucket] for flat in self._gatherer.order if flat.trained]
        update.begin_weights([flat.partition for flat in weights], order, lambda number: weights[number].refresh_present())
        return lambda bucket, gradient: update.fetch(index[bucket], gradient)

    @contextmanager
    def accumulate(self, micro_batches: int, *, measure: bool = False) -> Iterator[None]:
        """See Engine."""
        with self._reducer.accumulate(micro_batches, measure=measure):
            yield
        self._gatherer.finish()

    def step(self) -> StepResult:
        """See Engine."""
        gradients = [self._reducer.reduced(bucket) for bucket in self._buckets]
        primary = [gradients[index][where] for index, where in self._primary]
        norm = self.loss_scale.divide(gradient_clipping.global_norm(primary, self._mesh.all_ranks, self._mesh.device))
        noise = noise_scale.measured(norm, self._reducer.shares(), self.loss_scale)
        result = self.update.step(norm, gradients)
        self._reducer.release()
        if not self._offloads:  # else each bucket is gathered once the CPU has updated it
            self.round_weights()
        return replace(result, more=noise)

    @torch.no_grad()
    def round_weights(self, *, trained: bool = False) -> None:
        """See Engine."""
        self._gatherer.wait()  # outside of a step, those that it has begun may still read the partitions
        states = (self.update.state(index) for index in range(len(self._buckets)))
        self._zero.round_weights((self.gradient_point(state) for state in states) if self.separate and not trained else None)
        self._gatherer.refresh()

    def fragments(self) -> list[Fragment]:
        """See Engine."""
        self.update.create_state()
        # Of a bucket, a rank has one contiguous range of each weight in its partition.
        learned = [
            fragment
            for index, bucket in enumerate(self._buckets)
            for fragment in partition_fragments(bucket, self._mesh, self.update.state(index))
        ]
        frozen = [
            fragment for flat in self._frozen for fragment in partition_fragments(flat.bucket, self._mesh, {"weight": flat.partition})
        ]
        return learned + frozen + fixed_fragments(self.model, self._mesh)

    def partitions(self) -> list[Tensor]:
        """See Engine."""
        return [flat.partition for flat in self._zero.weights]

    def forward_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        """See Engine."""
        for flat in self._zero.weights:
            flat.acquire()
            for parameter, piece in flat.bucket.pieces.items():
                yield piece, parameter.detach()
            flat.release()


@torch.no_grad()
def shard_frozen(model: LocalModel, mesh: Mesh) -> list[FlatWeights]:
    """Allocate LocalModel.sharded, one bucket after the other, and return the buckets with this rank's partitions."""
    buckets = build_buckets(model, mesh, sequence_parallel=False, pieces=model.sharded)
    joint = list(joint_layers(model.stages))
    sharded = [_partitioned(bucket, model.materialize, joint) for bucket in buckets]
    if sharded:
        mine, whole = sum(weights.partition.nbytes for weights in sharded), sum(weights.flat.nbytes for weights in sharded)
        log.info("zero 3: %d frozen weights, %.1f MB on this rank instead of %.1f MB", len(model.sharded), mine / 1e6, whole / 1e6)
    return sharded


def _partitioned(bucket: Bucket, materialize: Callable[[nn.Parameter], None], joint: Iterable[tuple[Linear, ...]]) -> FlatWeights:
    """Allocate the weights of a bucket as views of a flat tensor, keep this rank's partition of it, and free the others.

    Args:
        bucket: of frozen weights.
        materialize: allocates and draws one.
        joint: layers that are computed as one: else each product would save a concatenated copy of their weights.
    """
    first = next(iter(bucket.pieces))
    flat = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
    for parameter in bucket.pieces:
        materialize(parameter)
        parameter.data = bucket.view(flat, parameter).copy_(parameter.data)
    for layers in joint:
        weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]
        if weights[0] in bucket.pieces:
            layers[0].joined = bucket.joint_view(flat, weights)
    partition = flat.narrow(0, bucket.group.rank() * bucket.partition_elements, bucket.partition_elements)
    freed = bucket.group.size() > 1
    partitioned = FlatWeights(bucket, flat, partition.clone() if freed else partition, freed=freed, trained=False)
    partitioned.free()
    return partitioned
