"""The engine of this program: ZeRO 0 to 3 on flat buckets of weights."""

from __future__ import annotations

import logging
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
from pipeline.training import gradient_clipping, noise_scale
from pipeline.training.buckets import Bucket, build_buckets, is_primary_copy, partition_fragments
from pipeline.training.elementwise_optimizers import Groups
from pipeline.training.engine import Engine, fixed_fragments
from pipeline.training.gradient_reduction import GradientReducer, Reduction
from pipeline.training.loss_scale import LossScale
from pipeline.training.matrix_layout import Space
from pipeline.training.matrix_rule import MatrixRule
from pipeline.training.muon import Muon
from pipeline.training.offloaded_update import OffloadedUpdate
from pipeline.training.weight_gathering import FlatWeights, WeightGatherer
from pipeline.training.weight_update import StepResult, WeightUpdate

log = logging.getLogger("pipeline")

#: ZeRO stage -> what remains of a gradient, and when it is reduced.
REDUCTIONS = {0: Reduction.ALL, 1: Reduction.PARTITION, 2: Reduction.PARTITION_EACH, 3: Reduction.PARTITION_EACH}


class NativeEngine(Engine):
    """ZeRO: the fp32 state of every bucket is divided over the ranks that hold the same weights, or over groups of them; not under ZeRO 0.

    Attributes:
        weights: the flat weights of every bucket.
    """

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
        self.model, self.stages = model, model.stages
        self._mesh = mesh
        self._stage = parallel.zero_stage
        self._offloads = parallel.offload == "optimizer"
        self.separate = OPTIMIZERS[optimizer.name].separate
        self.loss_scale = LossScale(precision, mesh.device)
        self._buckets = build_buckets(model, mesh, sequence_parallel=parallel.sequence_parallel, rule=rule, sharded=parallel.zero_stage > 0)
        joint = list(joint_layers(model.stages))
        self.weights: list[FlatWeights] = []
        masters: list[Tensor] = []
        for bucket in self._buckets:  # one after the other: under ZeRO 3, a rank could not hold all weights
            weights, master = self._partitioned(bucket, flatten(bucket, model.materialize, joint))
            self.weights.append(weights)
            masters.append(master)
        #: Partitions that are set from other tensors: (partition, master weights).
        self._rounded = [
            (w.partition, master) for w, master in zip(self.weights, masters, strict=True) if w.partition.data_ptr() != master.data_ptr()
        ]
        groups: Groups = [
            {"params": [master], "weight_decay": optimizer.weight_decay if b.decays else 0.0, "muon": b.muon, "rate": b.rate}
            for b, master in zip(self._buckets, masters, strict=True)
        ]
        update = OffloadedUpdate if self._offloads else WeightUpdate
        self.update = update(groups, optimizer, training, self.loss_scale, mesh.device)
        if isinstance(self.update.optimizer, Muon):
            spaces = (
                Space(master, tuple((piece, b.offsets[weight]) for weight, piece in b.pieces.items()), b.group, divided=b.sharded)
                for b, master in zip(self._buckets, masters, strict=True)
                if b.muon
            )
            self.update.optimizer.begin(spaces, rule, mesh.tensor, precision.dtype)
        self._frozen = shard_frozen(model, mesh, joint)
        self._gatherer = WeightGatherer([*self.weights, *self._frozen], model.stages)
        self._reducer = GradientReducer(
            *(self._buckets, mesh, REDUCTIONS[self._stage], DTYPES[precision.reduce_dtype]),
            *(self._gatherer.backward_finished, self._begin_offload()),
        )
        #: Index of a bucket and slice of its partition, for every weight that counts in the global norm.
        self._primary = [
            (index, where)
            for index, bucket in enumerate(self._buckets)
            for parameter, where in bucket.partition_slices().items()
            if bucket.replica == 0 and is_primary_copy(bucket.pieces[parameter], mesh, sharded=bucket.sharded)
        ]
        #: The ranks over which the norm is summed: all, or without ZeRO those of one replica of the model.
        self._norm_ranks = mesh.all_ranks if self._stage else (mesh.tensor, mesh.expert, mesh.pipeline)

    def _partitioned(self, bucket: Bucket, flat: Tensor) -> tuple[FlatWeights, Tensor]:
        """Return the weights of a bucket and the fp32 master weights of this rank's partition; free the matrices under ZeRO 3.

        The master weights of a partition of fp32 that is the whole are these weights themselves. Those of freed weights are their only
        copy on this rank, unless they are in host memory or the forward pass reads other values.
        """
        partition = bucket.partition(flat)
        freed = self._stage == 3 and bucket.decays and bucket.ranks > 1
        if self._offloads:
            whole = partition.float()
            master = torch.empty_like(whole, device="cpu", pin_memory=whole.is_cuda).copy_(whole)
        else:
            master = partition.to(torch.float32, copy=bucket.ranks > 1 or self.separate)
        if freed:
            partition = partition.clone() if self._offloads or self.separate else master
        weights = FlatWeights(bucket, flat, partition, freed=freed)
        weights.free()
        return weights, master

    def _begin_offload(self) -> Callable[[Bucket, Tensor], None]:
        """Return what is called with the final gradient of a bucket."""
        if not isinstance(self.update, OffloadedUpdate):
            return lambda _bucket, _gradient: None
        update, weights = self.update, self.weights
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

    def step(self, discarded: Tensor | None = None) -> StepResult:
        """See Engine."""
        gradients = [self._reducer.reduced(bucket) for bucket in self._buckets]
        primary = [gradients[index][where] for index, where in self._primary]
        norm = self.loss_scale.divide(gradient_clipping.global_norm(primary, self._norm_ranks, self._mesh.device))
        if discarded is not None:
            norm = norm.masked_fill(discarded > 0, torch.nan)
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
        if self.separate and not trained:  # one after the other: the values of all would double the memory
            for index, flat in enumerate(self.weights):
                flat.partition.copy_(self.gradient_point(self.update.state(index)))
        elif self._rounded:
            torch._foreach_copy_([partition for partition, _ in self._rounded], [master for _, master in self._rounded])
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

    def close(self) -> None:
        """See Engine."""
        self._reducer.close()

    def partitions(self) -> list[Tensor]:
        """See Engine."""
        return [flat.partition for flat in self.weights]

    def forward_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        """See Engine."""
        for flat in self.weights:
            flat.acquire()
            for parameter, piece in flat.bucket.pieces.items():
                yield piece, parameter.detach()
            flat.release()


@torch.no_grad()
def flatten(bucket: Bucket, materialize: Callable[[nn.Parameter], None], joint: Iterable[tuple[Linear, ...]]) -> Tensor:
    """Make the weights of a bucket views of one flat tensor, which is returned: (elements,), in their dtype.

    Args:
        materialize: allocates and draws a weight that has no storage.
        joint: layers that are computed as one. Those that are successive get a view of all their weights: else each product would save a
            concatenated copy of them.
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
    return flat


@torch.no_grad()
def shard_frozen(model: LocalModel, mesh: Mesh, joint: Iterable[tuple[Linear, ...]]) -> list[FlatWeights]:
    """Allocate LocalModel.sharded, one bucket after the other, and return the buckets with this rank's partitions."""
    sharded = []
    for bucket in build_buckets(model, mesh, sequence_parallel=False, pieces=model.sharded):
        flat, freed = flatten(bucket, model.materialize, joint), bucket.ranks > 1
        partition = bucket.partition(flat)
        sharded.append(FlatWeights(bucket, flat, partition.clone() if freed else partition, freed=freed, trained=False))
        sharded[-1].free()
    if sharded:
        mine, whole = sum(weights.partition.nbytes for weights in sharded), sum(weights.flat.nbytes for weights in sharded)
        log.info("zero 3: %d frozen weights, %.1f MB on this rank instead of %.1f MB", len(model.sharded), mine / 1e6, whole / 1e6)
    return sharded
