"""DeepSpeed's ZeRO optimizer with one parameter group for each bucket, whose gradients are already reduced. Imports DeepSpeed.

DeepSpeed flattens the weights of a group, divides them into partitions, and keeps this rank's in fp32. training/weight_update.py updates
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from pipeline.layers.linear import Linear
from pipeline.training.buckets import Bucket
from pipeline.training.offloaded_update import in_host_memory
from pipeline.training.weight_gathering import FlatWeights


class BucketZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer of ZeRO 1 and 2, without its reductions, its step, and the gathering of weights (training/weight_gathering.py).

    Attributes:
        weights: the flat weights of every bucket.

    Args:
        optimizer: its parameter groups have the weights of the buckets, in order; then this rank's fp32 partitions of them.
        buckets: every group is partitioned over the ranks of its bucket.
        materialize: allocates a weight that has no storage; called for one bucket after the other.
        shard_weights: free the matrices after they have been partitioned (ZeRO 3). Vectors are few and remain.
        offload: keep the master weights in host memory.
        separate: keep rounded partitions of freed weights beside the master weights: the forward pass reads other values.
        joint_layers: layers that are computed as one, whose weights are joined if they are successive in a bucket.
    """

    bit16_groups_flat: list[Tensor]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: list[Bucket],
        materialize: Callable[[nn.Parameter], None],
        *,
        shard_weights: bool,
        offload: bool = False,
        separate: bool = False,
        joint_layers: Iterable[tuple[Linear, ...]] = (),
    ) -> None:
        self._buckets, self._shard_weights, self._offload = buckets, shard_weights, offload
        self._rounded = offload or separate
        self._joint_layers = list(joint_layers)
        self._materialize = materialize
        self.weights: list[FlatWeights] = []
        names = {parameter: piece.name for bucket in buckets for parameter, piece in bucket.pieces.items()}
        super().__init__(
            optimizer,
            names,
            NoopTimer(),
            optimizer_params={},
            contiguous_gradients=False,
            dp_process_group=buckets[0].group,
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            has_moe_layers=True,  # calls _configure_moe_settings
        )

    @property
    def masters(self) -> list[Tensor]:
        """This rank's fp32 partition of the weights of every bucket: (partition_elements,)."""
        partitions: list[Tensor] = self.single_partition_of_fp32_groups
        return partitions

    @torch.no_grad()
    def round_weights(self, values: Iterable[Tensor] | None = None) -> None:
        """Set this rank's partitions of the weights from the fp32 master weights, or with `separate` from other values of their shapes."""
        if values is not None:
            for flat, value in zip(self.weights, values, strict=True):
                flat.partition.copy_(value)
            return
        both = zip(self.weights, self.masters, strict=True)
        kept = [(flat.partition, master) for flat, master in both if self._rounded or not flat.freed]
        if kept:
            torch._foreach_copy_([partition for partition, _ in kept], [master for _, master in kept])

    def flatten_dense_tensors_aligned(self, tensors: list[nn.Parameter], _alignment: int, **options: Any) -> Tensor:
        """Called by DeepSpeed with the weights of a group, to copy them into its flat weights, which have the padding of the bucket."""
        for parameter in tensors:
            self._materialize(parameter)
        return super().flatten_dense_tensors_aligned(tensors, self._buckets[len(self.weights)].elements, **options)

    def get_partition_info(self, *args: Any) -> Any:
        """Called by DeepSpeed when it has partitioned a group: free its weights under ZeRO 3.

        The master weights then take the place of this rank's partition of them. In host memory, or if the forward pass reads other values,
        they cannot: a copy remains on the device.
        """
        index = len(self.weights)
        bucket, flat = self._buckets[index], self.bit16_groups_flat[index]
        assert bucket.elements == flat.numel(), f"{bucket.name}: DeepSpeed's partitions have another size"
        partitions, rank = self.parallel_partitioned_bit16_groups[index], bucket.group.rank()
        freed = self._shard_weights and bucket.decays and bucket.group.size() > 1
        if freed:
            partitions[rank] = partitions[rank].clone() if self._rounded else self.single_partition_of_fp32_groups[index].data
        if self._offload:
            master = in_host_memory(self.single_partition_of_fp32_groups[index].detach()).requires_grad_()
            self.single_partition_of_fp32_groups[index] = master
            self.optimizer.param_groups[index]["params"] = [master]
        self.weights.append(FlatWeights(bucket, flat, partitions[rank], freed=freed))
        for layers in self._joint_layers:
            weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]
            if weights[0] in bucket.pieces:
                layers[0].joined = bucket.joint_view(flat.data, weights)
        self.weights[-1].free()
        return super().get_partition_info(*args)

    def initialize_optimizer_states(self) -> None:
        """Create none: WeightUpdate.create_state does. DeepSpeed would allocate a gradient for every partition."""

    def _link_all_hp_params(self) -> None:
        """Create no links from weights to master weights, which DeepSpeed's checkpoints use: Engine.fragments finds them by arithmetic."""

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """See _link_all_hp_params."""

    def _create_param_mapping(self) -> list[Any]:
        """See _link_all_hp_params."""
        return []

    def _configure_moe_settings(self) -> None:
        """Partition each group over the ranks of its bucket. DeepSpeed would require its own expert layers."""
        self.real_dp_process_group = [bucket.group for bucket in self._buckets]
        self.partition_count = [bucket.group.size() for bucket in self._buckets]

    def create_gradient_handling_hooks(self) -> None:
        """Create none: training/gradient_reduction.py reduces the gradients."""
