"""Router statistics of MoE layers after each step: metrics, and auxiliary-loss-free load balancing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.layers.moe import MoE, moe_layers
from pipeline.parallel.mesh import Mesh, reduce_over
from pipeline.parallel.parallelize import LocalModel
from pipeline.training.step_control import HostCopy


class RouterStatistics:
    """Aggregates the routing records of all MoE layers. Every rank makes the same calls in each step."""

    def __init__(self, config: RunConfig, model: LocalModel, mesh: Mesh) -> None:
        self._moe_layers: list[MoE] = list(moe_layers(model))
        self._updates = config.lora.rank == 0  # with adapters, the biases of the routers are not trained
        self._mesh, self._experts = mesh, getattr(config.model, "experts", 0)  # 0: a dense model
        self._load = torch.zeros(0)
        #: Assignments of the step beyond MoE.row_buffers, of all layers and ranks, 0-dim; None if none can be.
        self.beyond_buffers: Tensor | None = None
        self._has_buffers, self._beyond = config.buffers_experts, HostCopy(torch.zeros(1))
        self._metrics: dict[str, Tensor] = {}

    @torch.no_grad()
    def sum_records(self) -> None:
        """Sum the records of the step over the ranks, and reset them. Collective."""
        if not self._experts:
            return
        records = self._all_reduce_records()
        load, (entropy, dropped, loss, beyond, batches) = records[:, :-5], records[:, -5:].unbind(dim=1)
        batches = batches.clamp(min=1)
        layers = batches.new_full((), len(records))
        sums = torch.stack([*((values / batches).sum() for values in (entropy, dropped, loss)), layers, beyond.sum()])
        imbalance = load.new_zeros(len(records) + 1)
        imbalance[1:] = load.amax(dim=1) / load.mean(dim=1).clamp(min=1e-9)
        load_max = imbalance.amax()
        reduce_over((self._mesh.pipeline,), sums)
        reduce_over((self._mesh.pipeline,), load_max, dist.ReduceOp.MAX)
        means = {"router_entropy": sums[0] / sums[3], "router_load_max": load_max, "router_dropped": sums[1] / sums[3], "aux_loss": sums[2]}
        self._load, self._metrics = load, means
        if self._has_buffers:  # copied before the update is queued: the device computes it while the host waits for the number
            self.beyond_buffers, self._beyond = sums[4], HostCopy(sums[4:])

    def beyond_on_host(self) -> float:
        """`beyond_buffers` on the host, which waits until the device has computed the gradients of the step; 0 without buffers."""
        return self._beyond.values()[0] if self._has_buffers else 0

    @torch.no_grad()
    def after_update(self, skipped: Tensor) -> dict[str, Tensor]:
        """Update the routers' biases from the load of the step.

        Args:
            skipped: as in StepResult; a skipped step does not update the biases.

        Returns:
            0-dim tensors, the same on every rank: router_entropy (nats, mean over layers), router_load_max (largest load over the mean, of
            the worst layer), router_dropped (fraction of token-expert assignments), aux_loss (sum over layers). Empty for a dense model.
        """
        if self._experts:
            self._update_biases(self._load, 1 - skipped.to(self._load.device))
        return self._metrics

    def _all_reduce_records(self) -> Tensor:
        """MoE.record of each local layer, summed over all ranks that hold the layer: fp32 (layers, experts + 5)."""
        records = torch.zeros(len(self._moe_layers), self._experts + 5, device=self._mesh.device)
        for row, moe in zip(records, self._moe_layers, strict=True):
            row.copy_(moe.take_record())
        # Without folding, the tensor ranks have identical records.
        reduce_over((self._mesh.dense, self._mesh.tensor) if self._mesh.layout.folded else (self._mesh.dense,), records)
        return records

    def _update_biases(self, load: Tensor, enabled: Tensor) -> None:
        """Increase the bias of experts below the mean load, decrease it above (Wang et al. 2024, https://arxiv.org/abs/2408.15664)."""
        for row, moe in zip(load, self._moe_layers, strict=True):
            bias = moe.router.bias
            if bias is not None and self._updates:
                bias.add_(enabled * moe.router.bias_update_speed * (row.mean() - row).sign())
